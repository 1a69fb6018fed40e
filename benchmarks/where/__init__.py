"""Goodput and TTFT by route: fixed ones, and the decision per request; its page is docs/reports/where.md."""
