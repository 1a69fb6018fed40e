"""Engines of a worker's ranks: one that stands for all, and proxies for other processes."""
