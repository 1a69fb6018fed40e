"""Ranks of one model: who holds what, and what they sum."""
