"""A local cluster: processes, their ports, their health, their end."""
