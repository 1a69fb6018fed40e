"""The engine's client: sends samples, receives text."""
