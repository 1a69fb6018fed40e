"""Prefill and decode roles, KV hand-over, assembly of engine and transfer."""
