"""Engines by name. A backend's library is imported only for an engine of that name."""

from dataclasses import dataclass

from transfer_backends.contract import BackendUnavailable
from transfer_backends.engines.fake import FakeEngine
from transfer_backends.ports import Engine


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """`host`: this worker's address for peers."""

    host: str = "127.0.0.1"
    fake_delay_s: float = 0.0
    fake_failure_rate: float = 0.0
    seed: int = 0


BACKENDS = ("nixl", "mooncake", "fake")


def make_engine(name: str, options: EngineOptions | None = None) -> Engine:
    """Raises `BackendUnavailable` (one line: what is missing, how to install it)."""
    options = options or EngineOptions()
    match name:
        case "nixl":
            from transfer_backends.engines.nixl import NixlEngine

            return NixlEngine(host=options.host)
        case "mooncake":
            from transfer_backends.engines.mooncake import MooncakeEngine

            return MooncakeEngine(host=options.host)
        case "fake":
            delay_s, failure_rate = options.fake_delay_s, options.fake_failure_rate
            return FakeEngine(delay_s=delay_s, failure_rate=failure_rate, seed=options.seed)
    raise BackendUnavailable(f"transfer backend {name!r} is not one of {', '.join(BACKENDS)}")
