"""Telemetry of requests: logs, records, spans."""
