"""Engines by name. A backend's library is imported only for an engine of that name."""

from transfer_backends.contract import BackendUnavailable
from transfer_backends.engines.fake import FakeEngine
from transfer_backends.ports import Engine

BACKENDS = ("nixl", "mooncake", "fake")


def make_engine(
    name: str,
    *,
    host: str = "127.0.0.1",
    device: int | None = None,
    fake_delay_s: float = 0.0,
    fake_failure_rate: float = 0.0,
    seed: int = 0,
) -> Engine:
    """`host`: this worker's address for peers. `device`: the GPU of its pages, None: the host.

    Raises `BackendUnavailable` (one line: what is missing, how to install it).
    """
    match name:
        case "nixl":
            from transfer_backends.engines.nixl import NixlEngine

            return NixlEngine(host=host, device=device)
        case "mooncake":
            from transfer_backends.engines.mooncake import MooncakeEngine

            return MooncakeEngine(host=host)
        case "fake":
            return FakeEngine(delay_s=fake_delay_s, failure_rate=fake_failure_rate, seed=seed)
    raise BackendUnavailable(f"transfer backend {name!r} is not one of {', '.join(BACKENDS)}")
