"""Admission: concurrency limits, queue, latency forecasts, rate limits."""
