"""Whether this machine has what the tests need."""
