"""Flags of `tandem up` that are about the cluster; everything else goes on to the workers and the router."""

from dataclasses import dataclass

from engine.config import flag
from service.flags import ConfigError

MAX_WORKERS_PER_ROLE = 64


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster on one machine: a router and workers, all on loopback but for the router's `host`."""

    prefill: int = flag(1, "prefill workers")
    decode: int = flag(1, "decode workers")
    transfer_backend: str = flag("nixl", "engine that moves the KV cache", choices=("nixl", "mooncake", "fake"))
    unified: bool = flag(False, "one plain worker instead: no router, no transfer")
    host: str = flag("127.0.0.1", "address the router listens on (with --unified: the worker)")
    port: int = flag(8000, "port the router listens on (with --unified: the worker); 0: a free one")
    ready_file: str | None = flag(None, "write JSON here once all are healthy: router, workers (role, url, pid)")
    run_dir: str | None = flag(None, "directory for the log files; default: a new one under the temp directory")
    start_timeout: float = flag(600.0, "seconds all processes may take to become healthy")


def check_cluster(config: ClusterConfig) -> None:
    """Raise `ConfigError` for the first flag that cannot be honoured."""
    for name, count in (("--prefill", config.prefill), ("--decode", config.decode)):
        if not 1 <= count <= MAX_WORKERS_PER_ROLE:
            raise ConfigError(f"{name}: must be 1 to {MAX_WORKERS_PER_ROLE}, got {count}")
    if not 0 <= config.port < 65536:
        raise ConfigError(f"--port: must be 0 to 65535, got {config.port}")
    if config.start_timeout <= 0:
        raise ConfigError(f"--start-timeout: must be greater than 0, got {config.start_timeout:g}")
