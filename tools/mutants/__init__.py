"""Planted bugs: `make mutants` (in the core and the roles) and `make sim-mutants` (in a whole cluster) must find each."""
