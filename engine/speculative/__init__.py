"""Speculative decoding: drafts, their choice, the executor's drafter, verification."""
