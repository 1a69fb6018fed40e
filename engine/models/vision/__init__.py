"""Vision towers: they turn images into rows that stand in for embeddings of a decoder."""
