"""detokenizer."""
