"""Subcommands of `tandem`."""
