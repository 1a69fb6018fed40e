"""Retracted requests of the decode role whose KV a prefill worker computes again.

    retracted --> WAITING --handshake done, pages--> TRANSFER --Success--> running: its next step is a usual one
                    \\__ Failed, a bad row, no worker, almost all still cached: computed by this engine instead __/

Prefill computes the KV of every known token but the last and samples nothing: a usual step here samples the next token, so
seeds, penalties, grammar and logprobs go on. Pages that are still cached here are neither computed nor sent. Images go along with
their tokens; where a message has no room for them this engine computes.

The room is the request's own, the room attempt its number of retractions (the router's is 0).
"""

import logging
import math
from collections import Counter

from disagg.handover import DecodeHandover, HandoverStage, Receivers
from disagg.metadata import Checksum, KVCorrupt, MetadataBuffers, MetadataCorrupt
from disagg.quarantine import Quarantine
from disagg.recompute import fits, packed
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.messages import FAKE_BOOTSTRAP_HOST, FinishReason, TokenOutput
from transfer_backends.contract import Work
from transfer_backends.kvpoll import KVPoll, RoomInUse
from transfer_backends.ports import KVReceiver

log = logging.getLogger(__name__)


class Resumption:
    """Owns requests from `take` until they run, wait for this engine, or end."""

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
        self._handovers: dict[str, DecodeHandover] = {}  # in order of arrival of the requests
        self.counters: Counter[str] = Counter()

    def take(self) -> None:
        """Take over requests retracted since the last call."""
        for request in self._scheduler.held.take_retracted():
            receiver = self._open(request)
            if receiver is None:
                self._scheduler.held.resume_here(request)
            else:
                assert request.bootstrap is not None
                self._handovers[request.rid] = DecodeHandover(
                    request, request.bootstrap.room, moves_bytes=self._moves_bytes, receiver=receiver
                )
                in_order = sorted(self._handovers.values(), key=lambda h: h.request.serial)
                self._handovers = {h.request.rid: h for h in in_order}

    def _open(self, request: Request) -> KVReceiver | None:
        at = request.bootstrap
        if at is None or at.host == FAKE_BOOTSTRAP_HOST or not fits(request.images):
            return None
        try:
            return self._manager.receiver(at.room, bootstrap=f"{at.host}:{at.port}", room_attempt=request.retractions)
        except RoomInUse:  # a client that chose its rooms itself used this one twice
            self.counters["recompute_failed"] += 1
            return None

    def poll(self, now_s: float, *, may_preempt: bool) -> None:
        """Advance each request, most urgent first; of equally urgent ones those that this engine computes go first."""
        if not self._handovers:
            return
        urgency = self._scheduler.limits.priorities.urgency
        computed = max((urgency(r, now_s) for r in self._scheduler.stages.retracted()), default=-math.inf)
        may_reserve = True
        for handover in sorted(self._handovers.values(), key=lambda h: -urgency(h.request, now_s)):
            state = handover.receiver.poll()
            if state is KVPoll.Failed:
                self._fail(handover, handover.receiver.failure() or "the transfer failed")
            elif handover.stage is HandoverStage.TRANSFER and state is KVPoll.Success:
                self._land(handover)
            elif handover.stage is HandoverStage.WAITING and state is KVPoll.WaitingForInput:
                may_reserve = may_reserve and urgency(handover.request, now_s) > computed
                may_reserve = may_reserve and self._request(handover, may_preempt=may_preempt)

    def waiting(self) -> list[Request]:
        """Requests that wait for memory, before any new request that is not more urgent."""
        return [h.request for h in self._handovers.values() if h.stage is HandoverStage.WAITING]

    def _request(self, handover: DecodeHandover, *, may_preempt: bool) -> bool:
        """Reserve pages and a metadata row, and send them to prefill with the tokens; False when there is no room now."""
        row, request = self._metadata.allocate(), handover.request
        if row is None:
            return False
        handover.metadata_row = row
        if not self._scheduler.held.reserve(request, may_preempt=may_preempt):
            self._metadata.free(row)
            handover.metadata_row = None
            return False
        page_size = self._scheduler.memory.allocator.page_size
        if request.num_tokens - request.computed_len <= page_size:  # less than a page: one small step of our own
            self._here(handover, "almost all of it is still cached")
            return False
        handover.stage = HandoverStage.TRANSFER
        known = request.tokens(0, request.num_tokens - 1)
        given = self._requested_pages(request)
        work = Work(
            tokens=known,
            priority=request.priority,
            share=request.keep_kv,
            namespace=request.namespace,
            images=packed(request.images),
        )
        handover.tail = self._scheduler.memory.tail(request, len(known))
        handover.receiver.provide(given, row, skip_pages=request.shared_pages, work=work, tail=handover.tail)
        return True

    def _requested_pages(self, request: Request) -> list[int]:
        """Pages of every known token but the last, without what is cached here."""
        return request.pages[request.shared_pages : self._scheduler.memory.allocator.pages_for(request.num_tokens - 1)]

    def _land(self, handover: DecodeHandover) -> None:
        try:
            pages, end = self._requested_pages(handover.request), handover.request.num_tokens - 1
            first = handover.read_row(self._metadata, pages, handover.tail, self._checksum, num_tokens=end)
        except (MetadataCorrupt, KVCorrupt) as error:
            self.counters["kv_checksum_failed"] += isinstance(error, KVCorrupt)
            return self._fail(handover, str(error))
        if first is None:
            return
        self.counters["kv_checksum_verified"] += self._checksum is not None and self._moves_bytes
        if first.result.bad or (self._moves_bytes and first.result.token is not None):
            return self._fail(handover, "prefill computed NaN, or sampled a token, which was not requested")
        del self._handovers[handover.request.rid]
        handover.request.transfer_retries += handover.receiver.retries()
        self._quarantine.close(handover.receiver, handover.metadata_row)
        self.counters["resumed_through_prefill"] += 1
        self._scheduler.held.resume_decoding(handover.request)

    def _fail(self, handover: DecodeHandover, reason: str) -> None:
        """This engine computes the KV; the client does not notice."""
        self.counters["recompute_failed"] += 1
        log.warning(
            "decode %s (room %d): prefill did not compute it again: %s",
            handover.request.rid,
            handover.room,
            reason,
            extra=handover.log_fields,
        )
        self._here(handover, reason)

    def _here(self, handover: DecodeHandover, reason: str) -> None:
        self._leave(handover, reason)
        self._scheduler.held.resume_here(handover.request)

    def abort(self, rid: str, reason: FinishReason) -> list[TokenOutput] | None:
        """End a request; None: it is not here."""
        handover = self._handovers.get(rid)
        if handover is None:
            return None
        output = self._scheduler.held.end(handover.request, reason)
        self._leave(handover, reason.message)
        self._scheduler.held.release(handover.request)
        return [output]

    def _leave(self, handover: DecodeHandover, reason: str) -> None:
        del self._handovers[handover.request.rid]
        handover.receiver.abort(reason)
        self._quarantine.leave(handover)

    # ---- reports

    def __len__(self) -> int:
        return len(self._handovers)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting())

    @property
    def num_rows(self) -> int:
        return sum(h.metadata_row is not None for h in self._handovers.values())
