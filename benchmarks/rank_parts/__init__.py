"""Parts of benchmarks.ranks. Each has TITLE, TEXT, `measure` (its figures as JSON) and `render` (their table)."""
