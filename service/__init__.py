"""Common parts of servers: HTTP, security, signals, telemetry. Imports no other package."""
