"""Prefill side of transfers: room states, posts, their threads."""
