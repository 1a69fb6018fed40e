"""Ranks of one model: which part each holds, and how they sum what they compute."""
