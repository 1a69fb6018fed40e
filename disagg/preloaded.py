"""Imports of a computing process, for a fork server (service/process/fork_server.py)."""

# With torch and all that a worker of any role needs of ours. What only some flags need comes later.
MODULES = (
    "disagg.scheduler_process",
    "disagg.rank_process",
    "disagg.compose",
    "disagg.decode_role",
    "disagg.encoder_process",
    "disagg.fabric_pool",
    "disagg.prefill_role",
    "disagg.rank_group",
    "engine.build",
    "engine.device.machine",
    "engine.executor.profiler",
    "engine.loop_steps",
    "engine.ranks.build",
    "engine.ranks.group",
)
