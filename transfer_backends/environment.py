"""Manager's view of its machine: sockets, pools, memory, proof of death."""

import ctypes
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from transfer_backends.contract import Region
from transfer_backends.control_port import ConnectPort, ListenPort, Port
from transfer_backends.liveness import Liveness, ProcessMark, liveness, own_mark

# ---- Metadata rows in host memory, for engines whose rows cross the control plane.


def read_item(region: Region, index: int) -> bytes:
    return ctypes.string_at(_address(region, index), region.item_bytes)


def write_item(region: Region, index: int, data: bytes) -> None:
    assert len(data) == region.item_bytes, f"{len(data)} bytes for an item of {region.item_bytes}"
    ctypes.memmove(_address(region, index), data, len(data))


def _address(region: Region, index: int) -> int:
    assert region.device is None, "memory of a GPU"
    assert 0 <= index < region.num_items, f"item {index} of {region.num_items}"
    return region.base_ptr + index * region.item_bytes


# ---- environment


class Listening(Port, Protocol):
    """Interface of `ListenPort`."""

    address: str


class Connecting(Port, Protocol):
    """Interface of `ConnectPort`."""

    def connect(self, link: Any, address: str) -> bool: ...
    def disconnect(self, link: Any) -> None: ...


class Pool(Protocol):
    """Interface of `ThreadPoolExecutor`."""

    def submit(self, work: Callable[[Any], None], item: Any, /) -> object: ...
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Environment:
    incarnation: Callable[[], str] = lambda: uuid.uuid4().hex
    mark: Callable[[], ProcessMark] = own_mark
    listen: Callable[..., Listening] = ListenPort
    connect: Callable[..., Connecting] = ConnectPort
    pool: Callable[[int, str], Pool] = ThreadPoolExecutor
    liveness: Callable[[ProcessMark, str], Liveness] = liveness
    read_item: Callable[[Region, int], bytes] = read_item
    write_item: Callable[[Region, int, bytes], None] = write_item


THIS_MACHINE = Environment()
