"""Ranks of one model: their parts and collectives."""
