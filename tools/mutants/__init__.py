"""Planted bugs: `make mutants` (in the core and the roles, and in the moves of experts) and `make sim-mutants` (in a whole cluster) must find each."""
