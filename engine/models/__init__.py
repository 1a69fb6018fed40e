"""The model of all families, and the reading of checkpoints."""
