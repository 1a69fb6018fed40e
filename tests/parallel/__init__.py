"""Ranks of one model: what each holds, and what they sum."""
