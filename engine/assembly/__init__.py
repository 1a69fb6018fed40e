"""Assembly of engines: of a leader or single rank, of its followers, of an encoder worker."""
