"""Encoder workers, and images in bodies."""
