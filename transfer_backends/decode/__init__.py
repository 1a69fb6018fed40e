"""Decode side of transfers: look-ups, room states, proof of death, their thread."""
