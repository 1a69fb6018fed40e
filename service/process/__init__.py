"""Signals, open files, garbage collection, and the end with the parent process."""
