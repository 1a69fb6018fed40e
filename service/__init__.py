"""What makes a process a server: HTTP, security, signals, telemetry. A leaf: it imports nothing else of ours."""
