"""The planner: clusters under virtual time."""
