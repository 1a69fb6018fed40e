"""`make lint` and `make house`: the sizes of the repository, and rules that keep them from growing."""
