"""Prometheus metrics of a worker."""
