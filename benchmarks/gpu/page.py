"""The result of `make gpu-check` in words: lines for a terminal, and the page docs/reports/gpu.md."""

from typing import Any

from benchmarks.gpu.target import TABLE
from deploy.bench.stats import table

TABLES = TABLE["tables"]
WORDS = {True: "yes", False: "no", None: "-"}


def page(result: dict[str, Any]) -> str:
    """Return Markdown: what ran where, the aims, then rows of the parts that have some."""
    made_by = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in made_by["versions"].items())
    failed = [f"{name}: {part['error']}" for name, part in result["parts"].items() if "error" in part]
    return "\n\n".join(
        [
            "# One GPU",
            f"{made_by['gpu']}, {versions}; commit {made_by['commit']}, {made_by['time'][:10]}. Command: `{made_by['command']}`. "
            "What the figures mean: [gpu.md](../gpu.md); all of them: [gpu_check.json](gpu_check.json).",
            aim_table(result["aims"]),
            *(["Parts without all their figures: " + "; ".join(failed)] if failed else []),
            *(
                f"## {one['title']}\n\n{table(list(one['columns']), cells)}"
                for one in TABLES
                if (cells := _cells(one, result["parts"]))
            ),
            "",
        ]
    )


def aim_table(aims: list[dict[str, Any]]) -> str:
    rows = [
        [row["what"], "-" if row["found"] is None else f"{row['found']:.3f}", row["aim"], WORDS[row["met"]]]
        for row in aims
    ]
    return table(["", "found", "aim", "met"], rows)


def lines_of(parts: dict[str, Any]) -> list[str]:
    """A line for each table of the page: its columns, then its rows."""
    lines = []
    for one in TABLES:
        if not one.get("on_page") and (cells := _cells(one, parts)):
            lines.append(f"{one['title']} ({' '.join(one['columns'])}): {'; '.join(' '.join(row) for row in cells)}")
    return lines


def _cells(one: dict[str, Any], parts: dict[str, Any]) -> list[list[str]]:
    rows: Any = parts.get(one["part"], {})
    for key in one.get("at", "rows").split("."):
        rows = rows.get(key, []) if isinstance(rows, dict) else []
    return [[_cell(form, row) for form in one["columns"].values()] for row in rows]


def _cell(form: str, row: dict[str, Any]) -> str:
    """`form` with what the row has; "-" where it has no such figure."""
    try:
        return form.format(**row)
    except (KeyError, TypeError, ValueError):  # a figure that was not measured is None
        return "-"
