"""The ranks of one model over several processes: the leader decides, its followers hold device state and compute."""
