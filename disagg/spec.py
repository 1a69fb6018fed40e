"""What a worker tells its scheduler process when it starts it."""

import msgspec

from disagg.config import DisaggConfig
from engine.config import EngineConfig


class SchedulerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker tells its scheduler process.

    `bootstrap`: host:port of the bootstrap server to register at (prefill).
    """

    engine: EngineConfig
    disagg: DisaggConfig
    ipc_dir: str
    control_host: str
    bootstrap: str | None
    log_level: str = "info"
    log_format: str = "text"
    progress: bool = False
