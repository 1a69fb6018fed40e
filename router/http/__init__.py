"""The router's HTTP: its server and guard, the client for the legs, streams, control routes."""
