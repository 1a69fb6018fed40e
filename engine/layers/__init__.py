"""Layers of model families: plain classes over tensors."""
