"""Tests of transfer_backends/."""
