"""Moves, merges and renames of files and names, by a table."""
