"""The workers: table, health and load, calls that wait for them, service discovery."""
