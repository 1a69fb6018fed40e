"""Shared by several APIs: fields, constraints, models, streams."""
