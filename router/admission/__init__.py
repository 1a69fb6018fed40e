"""Which requests run, and when: limits, the queue, predicted latency, rate limits."""
