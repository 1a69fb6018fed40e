"""Pages and metadata rows of decode that a peer may still write: they have no owner until it cannot."""

from dataclasses import dataclass

from disagg.handover import DecodeHandover
from disagg.metadata import MetadataBuffers
from engine.core.memory import Detached
from engine.core.scheduler import Scheduler
from transfer_backends.ports import KVReceiver


@dataclass(slots=True, eq=False)
class _Exposed:
    receiver: KVReceiver
    memory: Detached
    metadata_row: int | None


class Quarantine:
    def __init__(self, *, scheduler: Scheduler, metadata: MetadataBuffers) -> None:
        self._scheduler = scheduler
        self._metadata = metadata
        self._exposed: list[_Exposed] = []

    def leave(self, handover: DecodeHandover) -> None:
        """Take over what a peer may still write of an aborted transfer; the rest stays the request's."""
        receiver, row = handover.receiver, handover.metadata_row
        if receiver.drained():
            self.close(receiver, row)
        else:
            self._exposed.append(_Exposed(receiver, self._scheduler.held.quarantine(handover.request), row))

    def close(self, receiver: KVReceiver, metadata_row: int | None) -> None:
        """End a transfer in which no peer writes any more."""
        if metadata_row is not None:
            self._metadata.free(metadata_row)
        receiver.close()

    def end_drained(self) -> None:
        drained = [e for e in self._exposed if e.receiver.drained()]
        if not drained:
            return
        self._exposed = [e for e in self._exposed if e not in drained]
        for e in drained:
            self._scheduler.held.end_quarantine(e.memory)
            self.close(e.receiver, e.metadata_row)

    def __len__(self) -> int:
        return len(self._exposed)

    @property
    def num_rows(self) -> int:
        return sum(e.metadata_row is not None for e in self._exposed)

    @property
    def num_states(self) -> int:
        return sum(len(e.memory.states) for e in self._exposed)

    @property
    def num_pages(self) -> int:
        return sum(len(e.memory.pages) for e in self._exposed)

    def check(self) -> None:
        memory = self._scheduler.memory
        counted = memory.allocator.counts()["quarantined"]
        assert self.num_pages == counted, f"{self.num_pages} pages in quarantine, the allocator counts {counted}"
        slots = 0 if memory.states is None else memory.states.allocator.counts()["quarantined"]
        counted = 0 if memory.windows is None else memory.windows.allocator.counts()["quarantined"]
        mine = sum(len(e.memory.windows) for e in self._exposed)
        assert mine == counted, f"{mine} window pages in quarantine, the allocator counts {counted}"
        assert self.num_states == slots, f"{self.num_states} states in quarantine, {slots} are counted"
