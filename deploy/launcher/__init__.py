"""A local cluster: processes, ports, health, shutdown."""
