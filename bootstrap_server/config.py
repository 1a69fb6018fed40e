"""Flags of the bootstrap server; `metadata["help"]` feeds the command line. Frozen, never read in a hot path."""

from dataclasses import dataclass, field
from typing import Any


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text, "choices": None})


@dataclass(frozen=True, kw_only=True)
class BootstrapConfig:
    host: str = _flag("127.0.0.1", "address to listen on")
    port: int = _flag(8998, "port to listen on; 0: a free one")
    lease: float = _flag(15.0, "seconds a prefill worker stays listed without renewing")
    room_ttl: float = _flag(120.0, "seconds the owner of a room is remembered")
    max_workers: int = _flag(1024, "prefill workers that may be registered")
    allow_insecure: bool = _flag(False, "listen off loopback without --cluster-secret-file: anybody may register")
    allowed_hosts: tuple[str, ...] = _flag(
        (), "names, besides addresses and localhost, by which a server on loopback without a secret is reached; *: any"
    )
    max_rooms: int = _flag(262144, "rooms remembered; the oldest are forgotten beyond it")
