"""Stored answers of /v1/responses, and the conversations that they form; for the server that clients talk to."""
