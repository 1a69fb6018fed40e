"""Flags of the bootstrap server."""

from dataclasses import dataclass

from service.flags import FlagSet, flag
from service.telemetry.logs import FORMATS


@dataclass(frozen=True, kw_only=True)
class BootstrapConfig(FlagSet):
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8998, "port to listen on", least=0, most=65535, special={0: "a free one"})
    lease_s: float = flag(
        15.0, "time for which a prefill worker stays listed without renewing its lease", unit="s", above=0
    )
    room_ttl_s: float = flag(120.0, "time for which the owner of a room is remembered", unit="s", above=0)
    max_workers: int = flag(16384, "most prefill workers that may be registered", least=1)
    allow_insecure: bool = flag(
        False, "listen beyond loopback without --cluster-secret-file: anyone may register a worker"
    )
    allowed_hosts: tuple[str, ...] = flag(
        (),
        "host names, besides addresses and localhost, that requests may name if the server listens on loopback without "
        "a secret; *: any",
    )
    max_rooms: int = flag(262144, "most rooms remembered; beyond it the oldest are forgotten", least=1)
    cluster_secret_file: str | None = flag(None, "file with the secret that all of the cluster's workers share")
    log_level: str = flag("info", "lowest level of the log", choices=("debug", "info", "warning", "error"))
    log_format: str = flag("text", "log as text or as one JSON object per line", choices=FORMATS)
