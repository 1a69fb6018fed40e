"""Tests of bootstrap_server/."""
