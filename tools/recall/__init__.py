"""The model that ships with Tandem: an induction head written down, not trained. See build.py and oracle.py."""
