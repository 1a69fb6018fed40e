"""Routes beside generation: health, workers, calls to every worker; who may call what."""
