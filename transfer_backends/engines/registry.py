"""Engines by name. A backend's library is imported only for an engine of that name."""

import importlib
from collections.abc import Callable
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


def _fake(options: EngineOptions) -> Engine:
    return FakeEngine(delay_s=options.fake_delay_s, failure_rate=options.fake_failure_rate, seed=options.seed)


def _nixl(options: EngineOptions) -> Engine:
    module = importlib.import_module("transfer_backends.engines.nixl")
    return module.NixlEngine(host=options.host)  # type: ignore[no-any-return]


def _mooncake(options: EngineOptions) -> Engine:
    module = importlib.import_module("transfer_backends.engines.mooncake")
    return module.MooncakeEngine(host=options.host)  # type: ignore[no-any-return]


_ENGINES: dict[str, Callable[[EngineOptions], Engine]] = {"nixl": _nixl, "mooncake": _mooncake, "fake": _fake}
BACKENDS = tuple(_ENGINES)


def make_engine(name: str, options: EngineOptions | None = None) -> Engine:
    """Raises `BackendUnavailable` (one line: what is missing, how to install it)."""
    if name not in _ENGINES:
        raise BackendUnavailable(f"transfer backend {name!r} is not one of {', '.join(BACKENDS)}")
    return _ENGINES[name](options or EngineOptions())
