"""Ranks of one model: shards and collectives."""
