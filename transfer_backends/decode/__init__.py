"""Decode's side of the transfers: look-ups, states of rooms, proof of death, and the thread that runs them."""
