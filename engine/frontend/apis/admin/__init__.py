"""Health, information, load, metrics, traces, cache, aborts, tokenization."""
