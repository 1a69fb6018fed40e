"""Retracted requests of the decode role whose KV a prefill worker computes again.

    retracted --> MEMORY --handshake done, pages--> TRANSFER --Success--> running: its next step is a usual one
                    \\__ Failed, a bad row, nobody there, almost all still cached: computed by this engine instead __/

Prefill is asked for the KV of every known token but the last, and draws nothing: the next token is drawn here, by a usual
step on the last known one, so seeds, penalties, grammar and logprobs go on as if nothing had happened. Pages that
are still cached here are neither computed for us nor sent.

The room is the request's own, the attempt its number of retractions: the router's rooms are attempt 0, so the key was never
used by it, and no two retractions share one. It owns requests from `take` until they run, wait for this engine, or
end. It must not know sockets: managers are the role's.
"""

import logging
import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from disagg.metadata import Checksum, KVCorrupt, MetadataBuffers, MetadataCorrupt, verify
from disagg.quarantine import Quarantine
from disagg.subject import about_request
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.messages import FAKE_BOOTSTRAP_HOST, FinishReason, TokenOutput
from transfer_backends.contract import Work
from transfer_backends.kvpoll import KVPoll, RoomInUse
from transfer_backends.ports import KVReceiver

log = logging.getLogger(__name__)


class Stage(Enum):
    MEMORY = "memory"
    TRANSFER = "transfer"


class Receivers(Protocol):
    def receiver(self, room: int, *, bootstrap: str, room_attempt: int = 0, fake: bool = False) -> KVReceiver: ...


@dataclass(slots=True, eq=False)
class Entry:
    request: Request
    receiver: KVReceiver
    room: int
    stage: Stage = Stage.MEMORY
    row: int | None = None


class Resumption:
    """`moves_bytes`: rows are real (the fake engine writes none)."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        manager: Receivers,
        metadata: MetadataBuffers,
        quarantine: Quarantine,
        moves_bytes: bool,
        checksum: Checksum | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._metadata = metadata
        self._quarantine = quarantine
        self._moves_bytes = moves_bytes
        self._checksum = checksum
        self._entries: dict[str, Entry] = {}  # in order of arrival of the requests
        self.counters: Counter[str] = Counter()

    def take(self) -> None:
        """Whom the scheduler has retracted since the last call."""
        for request in self._scheduler.held.take_retracted():
            receiver = self._open(request)
            if receiver is None:
                self._scheduler.held.resume_here(request)
            else:
                assert request.bootstrap is not None
                self._entries[request.rid] = Entry(request, receiver, request.bootstrap.room)
                in_order = sorted(self._entries.values(), key=lambda e: e.request.serial)
                self._entries = {e.request.rid: e for e in in_order}

    def _open(self, request: Request) -> KVReceiver | None:
        at = request.bootstrap
        if at is None or at.host == FAKE_BOOTSTRAP_HOST:
            return None
        try:
            return self._manager.receiver(at.room, bootstrap=f"{at.host}:{at.port}", room_attempt=request.retractions)
        except RoomInUse:  # a client that chose its rooms itself used this one twice
            self.counters["recompute_failed"] += 1
            return None

    def poll(self, now_s: float, *, may_preempt: bool) -> None:
        """Once a turn. Most urgent first; those that this engine computes are the older ones of equals."""
        if not self._entries:
            return
        urgency = self._scheduler.held.urgency
        computed = max((urgency(r, now_s) for r in self._scheduler.held.retracted()), default=-math.inf)
        may_reserve = True
        for entry in sorted(self._entries.values(), key=lambda e: -urgency(e.request, now_s)):
            state = entry.receiver.poll()
            if state is KVPoll.Failed:
                self._fail(entry, entry.receiver.failure() or "the transfer failed")
            elif entry.stage is Stage.TRANSFER and state is KVPoll.Success:
                self._land(entry)
            elif entry.stage is Stage.MEMORY and state is KVPoll.WaitingForInput:
                may_reserve = may_reserve and urgency(entry.request, now_s) > computed
                may_reserve = may_reserve and self._ask(entry, may_preempt=may_preempt)

    def waiting(self) -> list[Request]:
        """Those that wait for memory: no new request that is not more urgent may have any before."""
        return [e.request for e in self._entries.values() if e.stage is Stage.MEMORY]

    def _ask(self, entry: Entry, *, may_preempt: bool) -> bool:
        """Pages and a metadata row, told to prefill with the tokens; False when there is no room now."""
        row, request = self._metadata.allocate(), entry.request
        if row is None:
            return False
        entry.row = row
        if not self._scheduler.held.reserve(request, may_preempt=may_preempt):
            self._drop_row(entry)
            return False
        page_size = self._scheduler.memory.allocator.page_size
        if request.num_tokens - request.computed_len <= page_size:  # less than a page: one small step of our own
            self._here(entry, "almost all of it is still cached")
            return False
        entry.stage = Stage.TRANSFER
        known = request.tokens(0, request.num_tokens - 1)
        given = self._asked_pages(request)
        work = Work(tokens=known, skip_pages=request.shared_pages, priority=request.priority, share=request.keep_kv)
        entry.receiver.recompute(given, row, work)
        return True

    def _asked_pages(self, request: Request) -> list[int]:
        """Those of every known token but the last, without what is cached here."""
        return request.pages[request.shared_pages : self._scheduler.memory.allocator.pages_for(request.num_tokens - 1)]

    def _land(self, entry: Entry) -> None:
        assert entry.row is not None
        try:
            said = self._metadata.read(entry.row, room=entry.room if self._moves_bytes else None)
            if self._checksum is not None and self._moves_bytes:
                verify(said, self._asked_pages(entry.request), self._checksum)
                self.counters["kv_checksum_verified"] += 1
        except (MetadataCorrupt, KVCorrupt) as error:
            self.counters["kv_checksum_failed"] += isinstance(error, KVCorrupt)
            return self._fail(entry, str(error))
        if said.result.bad or (self._moves_bytes and said.result.token is not None):
            return self._fail(entry, "prefill computed NaN, or drew a token, which was not asked for")
        del self._entries[entry.request.rid]
        entry.request.transfer_retries += entry.receiver.retries()
        self._quarantine.close(entry.receiver, entry.row)
        self.counters["resumed_through_prefill"] += 1
        self._scheduler.held.resume_decoding(entry.request)

    def _fail(self, entry: Entry, reason: str) -> None:
        """The client hears nothing of it: this engine computes the KV."""
        self.counters["recompute_failed"] += 1
        log.warning(
            "decode %s (room %d): prefill did not compute it again: %s",
            entry.request.rid,
            entry.room,
            reason,
            extra=about_request(entry.request, entry.room),
        )
        self._here(entry, reason)

    def _here(self, entry: Entry, reason: str) -> None:
        self._leave(entry, reason)
        self._scheduler.held.resume_here(entry.request)

    def abort(self, rid: str, reason: FinishReason) -> list[TokenOutput] | None:
        """None: it is not here."""
        entry = self._entries.get(rid)
        if entry is None:
            return None
        output = self._scheduler.held.end(entry.request, reason)
        self._leave(entry, reason.message)
        self._scheduler.held.release(entry.request)
        return [output]

    def _leave(self, entry: Entry, reason: str) -> None:
        """Out of here, and its transfer over: what a peer may still write goes into quarantine, the rest stays its own."""
        del self._entries[entry.request.rid]
        entry.receiver.abort(reason)
        if entry.receiver.drained():
            self._quarantine.close(entry.receiver, entry.row)
        else:
            pages = self._scheduler.held.quarantine(entry.request)
            self._quarantine.add(entry.receiver, pages=pages, row=entry.row)

    def _drop_row(self, entry: Entry) -> None:
        assert entry.row is not None
        self._metadata.free(entry.row)
        entry.row = None

    # ---- self-knowledge

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_waiting(self) -> int:
        """For memory."""
        return len(self.waiting())

    @property
    def num_rows(self) -> int:
        return sum(e.row is not None for e in self._entries.values())
