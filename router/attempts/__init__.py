"""One client's request, its attempts at pairs of workers, the calls of each attempt, and the events that report them."""
