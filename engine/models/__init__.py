"""Model families, the registry of them, and the reading of checkpoints."""
