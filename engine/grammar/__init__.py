"""Constrained output: schemas, regexes and grammars to token masks. Never imports torch."""
