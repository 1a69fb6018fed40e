"""What follows from the flags, and which of them contradict: pure, once, before anything is built. Never torch."""
