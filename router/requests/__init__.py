"""One request from body to answer: picking, retries, relay, merging."""
