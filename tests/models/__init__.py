"""Models: checkpoints, families, the shipped model."""
