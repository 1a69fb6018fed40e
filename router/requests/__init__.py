"""One request from its body to its answer: rooms, legs, the race between them, retries, merging."""
