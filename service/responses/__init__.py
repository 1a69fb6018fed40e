"""Stored answers of /v1/responses and their conversations."""
