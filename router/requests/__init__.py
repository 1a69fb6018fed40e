"""One request from its body to its answer: picking, retries, relay, merging."""
