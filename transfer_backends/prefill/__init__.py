"""Prefill's side of the transfers: states of rooms, what is posted next, and the threads that run them."""
