"""Environment of engine libraries: settings, silence at their start, and RDMA devices."""

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from transfer_backends.contract import BackendUnavailable


def set_defaults(settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def defaults_inside(settings: Mapping[str, str]) -> Iterator[None]:
    """For a library that reads them once; one thread after another."""
    with _changing:
        added = [name for name in settings if name not in os.environ]
        set_defaults(settings)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


@contextlib.contextmanager
def quiet(*fds: int) -> Iterator[None]:
    """C output goes to /dev/null, also in several threads."""
    with _lock:
        for fd in fds:
            _silence(fd)
    try:
        yield
    finally:
        with _lock:
            for fd in fds:
                _unsilence(fd)


_lock, _changing = threading.Lock(), threading.Lock()
_blocks: dict[int, tuple[int, int]] = {}  # by file descriptor: (copy of the original, number of silencing blocks)


def _silence(fd: int) -> None:
    if fd not in _blocks:
        _blocks[fd] = os.dup(fd), 0
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, fd)
        os.close(null)
    copy, count = _blocks[fd]
    _blocks[fd] = copy, count + 1


def _unsilence(fd: int) -> None:
    """Restore after the last block; a second block's copy would be of /dev/null."""
    copy, count = _blocks[fd]
    if count > 1:
        _blocks[fd] = copy, count - 1
        return
    del _blocks[fd]
    os.dup2(copy, fd)
    os.close(copy)


# ---- RDMA devices. Pure, except for `devices_here`. Never run with RDMA.

IB_FLAG = "--disaggregation-ib-device"
UCX_VARIABLE = "UCX_NET_DEVICES"
PORT = 1  # of a device: UCX names ports, Mooncake takes the first active one


def devices_here() -> list[str]:
    return sorted(found.name for found in Path("/sys/class/infiniband").glob("*"))


def named_devices(text: str | None, *, here: Collection[str]) -> tuple[str, ...]:
    """() lets the engine choose. Raises BackendUnavailable."""
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in here:
            what = f"there is no {name!r}" if name else f"{text!r} holds an empty name"
            there = f"has {', '.join(here)}" if here else "is empty or absent"
            raise BackendUnavailable(f"{IB_FLAG}: {what}; /sys/class/infiniband {there}")
    return names


def ucx_settings(devices: Collection[str], env: Mapping[str, str]) -> dict[str, str]:
    """Raises BackendUnavailable if `env` names other devices."""
    if not devices:
        return {}
    wanted = ",".join(f"{name}:{PORT}" for name in devices)
    if env.get(UCX_VARIABLE, wanted) != wanted:
        raise BackendUnavailable(
            f"{IB_FLAG}: {','.join(devices)} contradicts {UCX_VARIABLE}={env[UCX_VARIABLE]}; unset one"
        )
    return {UCX_VARIABLE: wanted}
