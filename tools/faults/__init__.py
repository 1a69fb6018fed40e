"""Faults put on real processes: the matrix (`make fault-matrix`) and the soak (`make churn-soak`)."""
