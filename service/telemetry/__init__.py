"""Telemetry of requests: logs, records of stages, spans."""
