"""The planner (`tandem plan`): clusters under virtual time, with the real scheduler."""
