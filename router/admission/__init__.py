"""Admission control: concurrency limits, the queue, predicted latency, rate limits."""
