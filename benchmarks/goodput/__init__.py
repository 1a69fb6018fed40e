"""Goodput of unified workers, pairs and mixed pools on equal cores: real processes here (`python -m benchmarks.goodput`), simulated
GPUs in benchmarks/goodput/virtual.py. One page has both: docs/reports/goodput.md."""
