"""Memory of decode that a transfer peer may still write: pages and metadata rows without an owner until it cannot.

It must not know why a transfer was given up.
"""

from dataclasses import dataclass

from disagg.metadata import MetadataBuffers
from engine.core.scheduler import Scheduler
from transfer_backends.ports import KVReceiver


@dataclass(slots=True, eq=False)
class _Exposed:
    receiver: KVReceiver
    pages: list[int]
    metadata_row: int | None


class Quarantine:
    def __init__(self, *, scheduler: Scheduler, metadata: MetadataBuffers) -> None:
        self._scheduler = scheduler
        self._metadata = metadata
        self._exposed: list[_Exposed] = []

    def add(self, receiver: KVReceiver, *, pages: list[int], metadata_row: int | None) -> None:
        """`pages` are the allocator's quarantined ones already."""
        self._exposed.append(_Exposed(receiver, pages, metadata_row))

    def close(self, receiver: KVReceiver, metadata_row: int | None) -> None:
        """A transfer is over, and no peer writes any more."""
        if metadata_row is not None:
            self._metadata.free(metadata_row)
        receiver.close()

    def end_drained(self) -> None:
        drained = [e for e in self._exposed if e.receiver.drained()]
        if not drained:
            return
        self._exposed = [e for e in self._exposed if e not in drained]
        for e in drained:
            self._scheduler.held.end_quarantine(e.pages)
            self.close(e.receiver, e.metadata_row)

    def __len__(self) -> int:
        return len(self._exposed)

    @property
    def num_rows(self) -> int:
        return sum(e.metadata_row is not None for e in self._exposed)

    @property
    def num_pages(self) -> int:
        return sum(len(e.pages) for e in self._exposed)

    def check(self) -> None:
        counted = self._scheduler.memory.allocator.counts()["quarantined"]
        assert self.num_pages == counted, f"{self.num_pages} pages in quarantine, the allocator counts {counted}"
