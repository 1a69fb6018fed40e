"""Incoming transfers: request KV, prefixes, image features.

  begin -> WAITING -> RESERVED -> RECEIVING --Success, good row--> LANDED -> DONE
     +--------+----------+--- failed, late, aborted --> FAILED -> (QUARANTINED) -> DONE

The mirror of disagg/outgoing.py. *Targets* reserve memory, take over landed data, and handle
failures.
"""

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar

from disagg.metadata import FirstToken, KVCorrupt, MetadataBuffers, MetadataCorrupt, PendingChecksum, verified
from engine.core.memory import Detached, Memory
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.messages import FinishReason, TokenOutput
from service.telemetry.context import about
from transfer_backends.contract import Route, Tail, TargetPages, Work
from transfer_backends.ports import KVReceiver
from transfer_backends.sides import KVPoll


class TransferStage(Enum):
    """Transfer state: description, and next states."""

    WAITING = "for its peer, and for memory here", ("RESERVED", "FAILED")
    RESERVED = "memory and a metadata row are taken", ("RECEIVING", "FAILED")
    RECEIVING = "the peer has the pages, and may write them", ("LANDED", "FAILED")
    LANDED = "everything is here, and is the target's", ("DONE",)
    FAILED = "at the peer, late, of no use here, or aborted", ("QUARANTINED", "DONE")
    QUARANTINED = "the peer may still write the memory", ("DONE",)
    DONE = "the room is closed, and the row free", ()

    def may_become(self, stage: "TransferStage") -> bool:
        return stage.name in self.value[1]


class TransferFailure(Enum):
    REFUSED = "refused"  # the peer failed, or its data is unusable here
    CORRUPT = "corrupt"
    LATE = "late"
    ABORTED = "aborted"

    @property
    def counted(self) -> str:
        return TransferFailure.REFUSED.value if self is TransferFailure.CORRUPT else self.value


@dataclass(slots=True, eq=False, kw_only=True)
class IncomingTransfer:
    """One transfer, by `key` in its target.

    `moves_bytes`: False for fakes, without metadata row. `reached`: peer found. `pages`, `tail`:
    writable by it. `num_tokens`: end within the last page. `checksum`: of landed pages and tail.
    `detached`: quarantined memory.
    """

    key: str
    room: int
    receiver: KVReceiver
    deadline_s: float = math.inf
    moves_bytes: bool = True
    stage: TransferStage = TransferStage.WAITING
    reached: bool = False
    metadata_row: int | None = None
    pages: Sequence[int] = ()
    tail: Tail = ()
    num_tokens: int | None = None
    checksum: PendingChecksum | None = None
    detached: Detached = field(default_factory=Detached)

    def landed_extra(self) -> Tail:
        return self.tail

    def move(self, stage: TransferStage) -> None:
        assert self.stage.may_become(stage), f"{self.key} (room {self.room}) cannot go from {self.stage} to {stage}"
        self.stage = stage


Transfer = TypeVar("Transfer", bound=IncomingTransfer)
AnyTransfer = TypeVar("AnyTransfer", bound=IncomingTransfer, contravariant=True)


class TransferTarget(Protocol[AnyTransfer]):
    """Owner of the destination memory."""

    def reserve(self, ready: Sequence[AnyTransfer]) -> None:
        """Allocate in order, by `Incoming.reserve` and `Incoming.provide`."""

    def landed(self, transfer: AnyTransfer, first: FirstToken) -> str:
        """Take over landed data, or return why it is unusable: the transfer fails."""

    def detach(self, transfer: AnyTransfer) -> Detached:
        """Take over memory that the peer may still write, until `free_detached`."""

    def free_detached(self, detached: Detached) -> None: ...

    def failed(self, transfer: AnyTransfer, failure: TransferFailure, reason: str) -> None:
        """Free its remaining memory; the peer was sent the reason."""


class Receivers(Protocol):
    """The decode manager's interface for targets."""

    @property
    def counters(self) -> dict[str, int]: ...

    def receiver(
        self, room: int, *, bootstrap: str, room_attempt: int = 0, fake: bool = False, route: Route | None = None
    ) -> KVReceiver: ...

    def check(self) -> None: ...

    def close(self) -> bool: ...


class Incoming(Generic[Transfer]):
    """Owns rooms and metadata rows until no peer can write.

    `now_s`: time of the last `poll`.
    """

    def __init__(self, rows: MetadataBuffers, target: TransferTarget[Transfer], *, late: str = "") -> None:
        """`late`: the failure reason of late transfers."""
        self.now_s = 0.0
        self.counters = dict.fromkeys(("kv_checksum_failed", "kv_checksum_verified", "metadata_corrupt"), 0)
        self._rows = rows
        self._target = target
        self._late = late
        self.transfers: dict[str, Transfer] = {}
        self.quarantined: list[Transfer] = []

    def begin(self, transfer: Transfer) -> None:
        assert transfer.key not in self.transfers
        self.transfers[transfer.key] = transfer

    def reserve(self, transfer: Transfer, take_memory: Callable[[], bool]) -> bool:
        """Take a metadata row and memory; False: unavailable now."""
        row = self._rows.allocate()
        if row is None:
            return False
        if not take_memory():
            self._rows.free(row)
            return False
        transfer.metadata_row = row
        transfer.move(TransferStage.RESERVED)
        return True

    def provide(
        self, transfer: Transfer, pages: Sequence[int], *, skip_pages: int = 0, work: Work | None = None
    ) -> None:
        """Send the peer its writable pages, as `KVReceiver.provide`."""
        assert transfer.metadata_row is not None
        transfer.pages = pages
        transfer.move(TransferStage.RECEIVING)
        given = TargetPages(pages, transfer.metadata_row, skip_pages, work, transfer.tail)
        transfer.receiver.provide(given)

    def cancel(self, transfer: Transfer, reason: str) -> None:
        self._fail(transfer, TransferFailure.ABORTED, reason)

    def end_all(self, why: str) -> None:
        for transfer in list(self.transfers.values()):
            self.cancel(transfer, why)

    def poll(self, now_s: float) -> None:
        """Ready ones get memory before expiry."""
        self.now_s = now_s
        self.end_quarantine()
        ready: list[Transfer] = []
        for transfer in list(self.transfers.values()):
            state, receives = transfer.receiver.poll(), transfer.stage is TransferStage.RECEIVING
            transfer.reached = transfer.reached or state is KVPoll.WaitingForInput
            if state is KVPoll.Failed:
                self._fail(transfer, TransferFailure.REFUSED, transfer.receiver.failure() or "the transfer failed")
            elif receives and state is KVPoll.Success:
                self._land(transfer)
            elif state is KVPoll.WaitingForInput and not receives:
                ready.append(transfer)
            else:
                self._expire(transfer)
        if ready:
            self._target.reserve(ready)
        for transfer in ready:
            if transfer.stage in (TransferStage.WAITING, TransferStage.RESERVED):
                self._expire(transfer)

    def end_quarantine(self) -> None:
        for transfer in [t for t in self.quarantined if t.receiver.drained()]:
            self.quarantined.remove(transfer)
            self._target.free_detached(transfer.detached)
            self._close(transfer)

    # ---- moves

    def _land(self, transfer: Transfer) -> None:
        try:
            first = self._read(transfer)
        except (MetadataCorrupt, KVCorrupt) as error:
            is_kv = isinstance(error, KVCorrupt)
            self.counters["kv_checksum_failed" if is_kv else "metadata_corrupt"] += 1
            return self._fail(transfer, TransferFailure.CORRUPT, str(error))
        if first is None:
            return
        if transfer.checksum is not None:
            self.counters["kv_checksum_verified"] += 1
        if why := self._target.landed(transfer, first):
            return self._fail(transfer, TransferFailure.REFUSED, why)
        transfer.move(TransferStage.LANDED)
        del self.transfers[transfer.key]
        self._close(transfer)

    def _read(self, transfer: Transfer) -> FirstToken | None:
        """Read the row; None: checksum in progress.

        Raises MetadataCorrupt and KVCorrupt.
        """
        assert transfer.metadata_row is not None
        first = self._rows.read(transfer.metadata_row, room=transfer.room if transfer.moves_bytes else None)
        if self._rows.checksum is None or not transfer.moves_bytes:
            return first
        pages = transfer.pages[: transfer.receiver.written_pages()]
        tail = transfer.landed_extra()
        transfer.checksum = transfer.checksum or self._rows.checksum(pages, tail, transfer.num_tokens)
        return verified(first, transfer.checksum, num_pages=len(pages))

    def _expire(self, transfer: Transfer) -> None:
        if self.now_s >= transfer.deadline_s:
            self._fail(transfer, TransferFailure.LATE, self._late)

    def _fail(self, transfer: Transfer, failure: TransferFailure, reason: str) -> None:
        """Memory is free at once, or after the peer's last write."""
        transfer.move(TransferStage.FAILED)
        transfer.receiver.abort(reason)
        del self.transfers[transfer.key]
        if transfer.receiver.drained():
            self._close(transfer)
        else:
            transfer.detached = self._target.detach(transfer)
            transfer.move(TransferStage.QUARANTINED)
            self.quarantined.append(transfer)
        self._target.failed(transfer, failure, reason)

    def _close(self, transfer: Transfer) -> None:
        transfer.move(TransferStage.DONE)
        if transfer.metadata_row is not None:
            self._rows.free(transfer.metadata_row)
        transfer.receiver.close()

    # ---- reports

    @property
    def num_rows(self) -> int:
        return sum(t.metadata_row is not None for t in (*self.transfers.values(), *self.quarantined))

    def count(self) -> Counter[TransferStage]:
        return Counter(transfer.stage for transfer in self.transfers.values())

    def check(self) -> None:
        for transfer in self.transfers.values():
            assert transfer.stage.may_become(TransferStage.FAILED), f"{transfer.key} has ended: {transfer.stage}"
            has_row, row = transfer.stage is not TransferStage.WAITING, transfer.metadata_row
            assert has_row is (row is not None), f"{transfer.key}: {transfer.stage} with row {row}"
        assert all(t.stage is TransferStage.QUARANTINED for t in self.quarantined)


def rooms_of(incarnation: str) -> Iterator[int]:
    """Numbers 1..2**63 - 1, unique to this incarnation."""
    for number in itertools.count():
        digest = hashlib.sha256(f"{incarnation}/{number}".encode()).digest()
        yield int.from_bytes(digest[:8], "little") >> 1 | 1


# ---- transfers into the memory of requests


@dataclass(slots=True, eq=False, kw_only=True)
class RequestTransfer(IncomingTransfer):
    request: Request

    @property
    def log_fields(self) -> dict[str, dict[str, str | int | float]]:
        return about(request_id=self.request.message.request_id, rid=self.key, room=self.room)

    def take_over(self, first: FirstToken) -> None:
        """Note retries, and other weights: such KV is not cached."""
        self.request.keep_kv = self.request.keep_kv and not first.other_weights
        self.request.stats.transfer_retries += self.receiver.retries()


AnyRequestTransfer = TypeVar("AnyRequestTransfer", bound=RequestTransfer)


class RequestTarget(TransferTarget[AnyRequestTransfer]):
    def __init__(self, scheduler: Scheduler, rows: MetadataBuffers, *, late: str = "") -> None:
        self._scheduler = scheduler
        self.incoming = Incoming[AnyRequestTransfer](rows, self, late=late)

    def provide_tokens(self, transfer: AnyRequestTransfer, end: int, *, work: Work | None = None) -> None:
        """Send uncached pages of the first `end` tokens, and the tail, after pending copies."""
        request, memory = transfer.request, self._scheduler.memory
        if not self._scheduler.lower_tier.is_settled(request.own_pages(), state=request.recurrent.slot):
            return
        skip = request.shared_pages
        transfer.num_tokens, transfer.tail = end, memory.tail(request, end)
        pages = request.pages[skip : memory.allocator.pages_for(end)]
        self.incoming.provide(transfer, pages, skip_pages=skip, work=work)

    def waiting(self, ready: Sequence[AnyRequestTransfer]) -> list[AnyRequestTransfer]:
        """Go on with those that have memory; return the others."""
        for transfer in ready:
            if transfer.stage is TransferStage.RESERVED:
                self.go_on(transfer)
        return [transfer for transfer in ready if transfer.stage is TransferStage.WAITING]

    def go_on(self, transfer: AnyRequestTransfer) -> None:
        """Call `provide_tokens` for a reserved one."""

    def _end(self, rid: str, reason: FinishReason) -> list[TokenOutput] | None:
        transfer = self.incoming.transfers.get(rid)
        if transfer is None:
            return None
        output = self._scheduler.held.end(transfer.request, reason)
        self.incoming.cancel(transfer, reason.message)
        return [output]

    def detach(self, transfer: AnyRequestTransfer) -> Detached:
        return self._scheduler.held.quarantine(transfer.request)

    def free_detached(self, detached: Detached) -> None:
        self._scheduler.held.end_quarantine(detached)


def check_quarantine(memory: Memory, quarantined: Iterable[IncomingTransfer]) -> None:
    """Raise AssertionError unless quarantined memory is that of these transfers."""
    counted = [allocator.counts()["quarantined"] for allocator in memory.allocators]
    all_detached = [transfer.detached for transfer in quarantined]
    pieces = [piece for one in all_detached for piece in [(memory.allocator, one.pages), *one.beside]]
    owned = [sum(len(numbers) for owner, numbers in pieces if owner is allocator) for allocator in memory.allocators]
    assert owned == counted, f"{owned} pages and numbers of parts in quarantine, the allocators count {counted}"
