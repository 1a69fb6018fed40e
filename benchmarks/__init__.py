"""Benchmarks: scripts that measure, each run by hand or by report.py. Not installed."""
