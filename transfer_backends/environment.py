"""What a manager takes from its machine: names, sockets, thread pools, proof of death.

Production uses the defaults. The simulation replaces them and so runs the production managers.
"""

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from transfer_backends.control_port import ConnectPort, Event, ListenPort
from transfer_backends.liveness import Liveness, ProcessMark, liveness, own_mark


class Listening(Protocol):
    """A `ListenPort`, which mints the links."""

    address: str
    wake: Callable[[], None]

    def poll(self, timeout_s: float) -> list[Event]: ...
    def send(self, link: Any, data: bytes) -> bool: ...
    def close(self) -> None: ...


class Connecting(Protocol):
    """A `ConnectPort`, whose caller numbers the links."""

    wake: Callable[[], None]

    def connect(self, link: Any, address: str) -> bool: ...
    def disconnect(self, link: Any) -> None: ...
    def poll(self, timeout_s: float) -> list[Event]: ...
    def send(self, link: Any, data: bytes) -> bool: ...
    def close(self) -> None: ...


class Pool(Protocol):
    """A `ThreadPoolExecutor`."""

    def submit(self, work: Callable[[Any], None], item: Any, /) -> object: ...
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None: ...


def _new_incarnation() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True)
class Environment:
    """`pool(num_threads, name)`; `listen(host, port, secret=)`, port 0: any free port; `connect(secret=)`."""

    incarnation: Callable[[], str] = _new_incarnation
    mark: Callable[[], ProcessMark] = own_mark
    listen: Callable[..., Listening] = ListenPort
    connect: Callable[..., Connecting] = ConnectPort
    pool: Callable[[int, str], Pool] = ThreadPoolExecutor
    liveness: Callable[[ProcessMark, str], Liveness] = liveness


THIS_MACHINE = Environment()
