"""Routes other than generation, and the key that each route needs."""
