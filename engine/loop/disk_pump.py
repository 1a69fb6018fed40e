"""Carries work and results between the host tier and its disk threads, once a turn."""

from collections.abc import Iterable
from typing import Protocol

from engine.core.disk_index import DiskDone, DiskWork
from engine.core.disk_tier import DiskTier


class DiskPort(Protocol):
    def submit(self, work: DiskWork) -> None: ...

    def poll(self) -> Iterable[DiskDone]: ...

    def close(self) -> None: ...


class DiskPump:
    def __init__(self, tier: DiskTier | None = None, disk: DiskPort | None = None) -> None:
        self._tier = tier
        self._disk = disk

    def turn(self) -> None:
        if self._tier is None or self._disk is None:
            return
        for done in self._disk.poll():
            self._tier.on_done(done)
        for work in self._tier.take_work():
            self._disk.submit(work)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

    @property
    def busy(self) -> bool:
        """Whether requests may wait for files."""
        return self._tier is not None and self._tier.busy
