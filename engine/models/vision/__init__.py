"""Vision towers: encode images to features for decoder embeddings."""
