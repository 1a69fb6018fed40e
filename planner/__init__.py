"""The planner (`tandem plan`): clusters under virtual time, with the real scheduler and a cost
model.
"""
