"""A worker's APIs: one room each for its handlers, bodies and views; what they share is in shared/."""
