"""Disk tier of the hierarchical cache: file format, directory, threads."""
