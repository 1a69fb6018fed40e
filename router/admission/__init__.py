"""Who may enter, and when: limits, the waiting line, foretold latency, rate limits."""
