"""Rules of the code as a whole (`make lint`): each finds what it is there for, and budgets only fall."""
