"""Transfers into the memory of requests: what their targets (disagg/incoming.py) have in common."""

from collections.abc import Iterable
from dataclasses import dataclass

from disagg.incoming import IncomingTransfer
from disagg.metadata import FirstToken
from engine.core.memory import Detached, Memory
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from service.telemetry.logs import about


@dataclass(slots=True, eq=False, kw_only=True)
class RequestTransfer(IncomingTransfer):
    """The key is the rid of the request."""

    request: Request

    @property
    def log_fields(self) -> dict[str, dict[str, str | int | float]]:
        """Return the fields of its log lines, for `extra=`."""
        return about(request_id=self.request.request_id, rid=self.key, room=self.room)

    def take_over(self, first: FirstToken) -> None:
        """Note retries, and other weights than this worker's: such KV stays out of the cache."""
        self.request.keep_kv = self.request.keep_kv and not first.other_weights
        self.request.transfer_retries += self.receiver.retries()


class RequestTarget:
    """What those have in common that reserve memory for requests and get its KV from a peer."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def detach(self, transfer: RequestTransfer) -> Detached:
        return self._scheduler.held.quarantine(transfer.request)

    def free_detached(self, detached: Detached) -> None:
        self._scheduler.held.end_quarantine(detached)


def check_quarantine(memory: Memory, quarantined: Iterable[IncomingTransfer]) -> None:
    """Raise AssertionError unless the memory in quarantine is that of these transfers."""
    allocators = (memory.allocator, *(side and side.allocator for side in (memory.states, memory.windows)))
    counted = tuple(allocator.counts()["quarantined"] if allocator else 0 for allocator in allocators)
    all_detached = [transfer.detached for transfer in quarantined]
    owned = tuple(sum(len(getattr(one, kind)) for one in all_detached) for kind in ("pages", "states", "windows"))
    assert owned == counted, f"{owned} pages, states and pages of windows in quarantine, the allocators count {counted}"
