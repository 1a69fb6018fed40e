"""Routes beside generation: health, workers, calls to every worker; the key that each route needs."""
