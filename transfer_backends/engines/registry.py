"""Engines by name; importing a backend's library only for its own engine."""

import logging

from transfer_backends.contract import BackendUnavailable
from transfer_backends.engines.fake import FakeEngine
from transfer_backends.gpudirect import rdma_facts
from transfer_backends.ports import Engine

log = logging.getLogger(__name__)

BACKENDS = ("nixl", "mooncake", "fake")


def make_engine(
    name: str,
    *,
    host: str = "127.0.0.1",
    device: int | None = None,
    mooncake_protocol: str = "auto",
    ib_device: str | None = None,
    fake_delay_s: float = 0.0,
    fake_failure_rate: float = 0.0,
    seed: int = 0,
) -> Engine:
    """Raises `BackendUnavailable`. `device`: the pages' GPU."""
    if device is not None and name != "fake" and (shortfall := rdma_facts().shortfall) is not None:
        log.warning("%s", shortfall)
    match name:
        case "nixl":
            from transfer_backends.engines.nixl import NixlEngine

            return NixlEngine(host=host, device=device, ib_device=ib_device)
        case "mooncake":
            from transfer_backends.engines.mooncake import MooncakeEngine

            return MooncakeEngine(host=host, device=device, protocol=mooncake_protocol, ib_device=ib_device)
        case "fake":
            return FakeEngine(delay_s=fake_delay_s, failure_rate=fake_failure_rate, seed=seed)
    raise BackendUnavailable(f"transfer backend {name!r} is not one of {', '.join(BACKENDS)}")
