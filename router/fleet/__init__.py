"""Several processes that are one router: the processes, what they share, what they send each other."""
