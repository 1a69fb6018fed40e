"""The workers: table, health, load, active calls, service discovery."""
