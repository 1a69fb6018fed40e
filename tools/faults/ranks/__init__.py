"""Faults of single ranks, pairs of prefill and decode workers of every shape, and a soak of ranks: real processes, one report."""
