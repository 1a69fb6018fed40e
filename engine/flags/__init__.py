"""Flags to decisions, and their contradictions, before anything is built. Without torch."""
