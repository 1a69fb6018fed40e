"""Layers that model families are made of: plain classes over tensors, no modules, no state that changes."""
