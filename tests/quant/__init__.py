"""Quantized weights, a format each, beside what wrote them or beside their float values."""
