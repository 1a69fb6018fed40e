"""The planner behind `tandem plan`: whole clusters under virtual time, with the real scheduler and a cost model."""
