"""Engines of the other ranks of a worker: one that stands for all of them, and how it reaches those in other processes."""
