"""Signals, files, garbage collection, child processes."""
