"""Ranks over several processes: the leader decides; followers hold device state and compute."""
