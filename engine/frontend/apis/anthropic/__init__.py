"""Anthropic's API: messages, and their tokens counted."""
