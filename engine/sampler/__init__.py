"""Sampling: filters, penalties, grammar masks, noise, logprobs."""
