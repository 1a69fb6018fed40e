"""Imports of a computing process, for a fork server (service/process/fork_server.py)."""

# With torch and all that a worker of any role needs of ours. What only some flags need comes later.
MODULES = (
    "disagg.processes.scheduler_process",
    "disagg.processes.rank_process",
    "disagg.compose",
    "disagg.decode_role",
    "disagg.processes.encoder_process",
    "disagg.processes.engine_process",
    "disagg.transfer_engine",
    "disagg.prefill_role",
    "disagg.processes.rank_group",
    "engine.assembly.follower",
    "engine.assembly.leader",
    "engine.device.machine",
    "engine.executor.profiler",
    "engine.ranks.group",
)
