"""Goodput of unified workers, pairs and mixed pools on equal cores, by real processes; its page is docs/reports/goodput.md."""
