r"""The decode role: a request gets pages and their KV, and joins the running batch.

The scheduler serves those without a room. Stages of a transfer: disagg/incoming.py.

add -> a transfer --landed--> running (the scheduler's)
           \____ failed, aborted, late: answered at once
running --memory short--> RETRACTED (the scheduler's, or a part's)
RETRACTED --memory, before any new request--> running
running --`move_out`--> ended, or a part's: its KV goes to the worker that continues (`source`)
"""

import logging
import math
from collections.abc import Mapping, Sequence

from disagg.incoming import (
    IncomingTransfer,
    Receivers,
    RequestTarget,
    RequestTransfer,
    TransferFailure,
    TransferStage,
)
from disagg.metadata import FirstToken, MetadataBuffers
from disagg.role import HAS_MOVED, PeerPart, PeerRole
from engine.core.outputs import refusal, refused
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.messages import FAKE_BOOTSTRAP_HOST, FinishReason, LogprobOptions, TokenOutput
from engine.metric_names import sums
from transfer_backends.contract import Route
from transfer_backends.sides import RoomInUse

log = logging.getLogger(__name__)

PREALLOC_TIMEOUT_S = 300.0  # for memory: as long as prefill keeps the request
UNJOINED = 502  # the router must not try the same pair again: this worker has tried for long


class DecodeRole(RequestTarget[RequestTransfer], PeerRole):
    name = "decode"

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        manager: Receivers,
        metadata: MetadataBuffers,
        moves_bytes: bool,
        prealloc_timeout_s: float,
        parts: Sequence[PeerPart] = (),
        layout: str = "",
    ) -> None:
        late = f"no KV memory within {prealloc_timeout_s:g} s"
        RequestTarget.__init__(self, scheduler, metadata, late=late)
        PeerRole.__init__(self, scheduler, manager, metadata, parts, layout=layout)
        self._manager = manager
        self._moves_bytes = moves_bytes
        self._prealloc_timeout_s = prealloc_timeout_s
        self._outputs: list[TokenOutput] = []  # of the poll under way
        self._counters = self.incoming.counters
        self._counters |= dict.fromkeys(("moved_in", "prealloc_timeouts", "bootstrap_failed", "transfer_failed"), 0)
        self._closed = False

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        bootstrap = request.message.bootstrap
        if bootstrap is None:  # served whole
            return super().add(request, now_s)
        if error := self._scheduler.refusal(request):
            return [refused(request, error)]
        fake = bootstrap.host == FAKE_BOOTSTRAP_HOST
        try:
            receiver = self._manager.receiver(
                bootstrap.room, bootstrap=f"{bootstrap.host}:{bootstrap.port}", fake=fake, route=_route_of(request)
            )
        except (RoomInUse, ValueError) as error:
            return [refused(request, refusal(f"bootstrap_room: {error}", status=409))]
        if request.logprobs is not None:  # the prompt's are known to prefill alone; the router merges
            wanted = request.logprobs
            request.logprobs = LogprobOptions(start_len=-1, top_num=wanted.top_num, token_ids=wanted.token_ids)
        unfit = self._scheduler.held.adopt(request)
        assert unfit is None, unfit  # `refusal` gave none above
        request.times.bootstraps = request.times.remote = True
        transfer = RequestTransfer(
            key=request.rid,
            room=bootstrap.room,
            receiver=receiver,
            request=request,
            deadline_s=request.arrived_s + self._prealloc_timeout_s,
            moves_bytes=self._moves_bytes and not fake,
        )
        self.incoming.begin(transfer)
        return []

    def move_out(self, rid: str, room: int, now_s: float) -> list[TokenOutput]:
        for part in self.parts:
            if (outputs := part.move_out(rid, room)) is not None:
                return outputs
        return self.abort(rid, now_s, HAS_MOVED)

    def close_to_peers(self, why: str | None) -> None:
        """Requests still leave for other workers."""
        self._closed = why is not None
        super().close_to_peers(why)

    def poll(self, now_s: float) -> list[TokenOutput]:
        self.incoming.end_quarantine()
        moved = super().poll(now_s)
        self.incoming.poll(now_s)
        ended, self._outputs = self._outputs, []
        return moved + ended

    # ---- as the target of its transfers

    def reserve(self, ready: Sequence[RequestTransfer]) -> None:
        """By urgency; none passes one without room, or an equal retracted one."""
        now_s, urgency = self.incoming.now_s, self._scheduler.limits.priorities.urgency
        before = max((urgency(r, now_s) for r in self._scheduler.stages.retracted()), default=-math.inf)
        for transfer in sorted(self.waiting(ready), key=lambda t: -urgency(t.request, now_s)):
            request = transfer.request
            if urgency(request, now_s) <= before:
                return
            if self._scheduler.held.adapter_has_place(request, now_s) and not self._preallocate(transfer):
                return

    def _preallocate(self, transfer: RequestTransfer) -> bool:
        request, held = transfer.request, self._scheduler.held
        if not self.incoming.reserve(transfer, lambda: held.reserve(request, may_preempt=not self._closed)):
            return False
        transfer.deadline_s = math.inf
        request.times.queued_s = self.incoming.now_s
        self.go_on(transfer)
        return True

    def go_on(self, transfer: RequestTransfer) -> None:
        self.provide_tokens(transfer, transfer.request.handed_tokens)

    def landed(self, transfer: RequestTransfer, first: FirstToken) -> str:
        request, held, cached_tokens = transfer.request, self._scheduler.held, first.cached_tokens
        request.times.landed_s = self.incoming.now_s
        request.times.remote_queue_s, request.times.remote_prefill_s = first.queue_s, first.prefill_s
        transfer.take_over(first)
        if request.message.source is None:
            self._outputs += held.start_decoding(request, first.result, cached_tokens=cached_tokens)
        else:
            self._counters["moved_in"] += 1
            held.go_on_decoding(request, cached_tokens=cached_tokens)
        return ""

    def failed(self, transfer: RequestTransfer, failure: TransferFailure, reason: str) -> None:
        """Answer now, unless `abort` has."""
        if failure is not TransferFailure.ABORTED:
            finish = self._finish_of(transfer, failure, reason)
            self._outputs.append(self._scheduler.held.end(transfer.request, finish))
        self._scheduler.held.release(transfer.request)

    def _finish_of(self, transfer: RequestTransfer, failure: TransferFailure, reason: str) -> FinishReason:
        if failure is TransferFailure.LATE:
            self._counters["prealloc_timeouts"] += 1
            return FinishReason(kind="abort", message=reason, status=503)
        about, fields = (transfer.key, transfer.room, reason), transfer.log_fields
        if failure is TransferFailure.CORRUPT:
            log.error("decode %s (room %d): %s", *about, extra=fields)
        else:
            log.warning("decode %s (room %d) failed: %s", *about, extra=fields)
            self._counters["bootstrap_failed" if transfer.metadata_row is None else "transfer_failed"] += 1
        status = 500 if transfer.reached else UNJOINED
        return FinishReason(kind="abort", message=f"KV transfer: {reason}", status=status)

    # ---- reports

    @property
    def num_rows(self) -> int:
        return self.incoming.num_rows + super().num_rows

    @property
    def quarantined(self) -> Sequence[IncomingTransfer]:
        return [*self.incoming.quarantined, *super().quarantined]

    def waits_for_outside(self) -> bool:
        return bool(self.incoming.transfers or self._scheduler.stages.retracted()) or super().waits_for_outside()

    def queues(self) -> dict[str, int]:
        count, waiting = self.incoming.count(), self._scheduler.stages.waiting.values()
        return {
            **super().queues(),
            "prealloc": count[TransferStage.WAITING],
            "transfer": count[TransferStage.RECEIVING],
            "quarantined": len(self.quarantined),
            "retracted": len(self._scheduler.stages.retracted()),
            "waiting": sum(r.stats.retractions == 0 for r in waiting),
        }

    def counters(self) -> Mapping[str, float]:
        return sums(self._counters, super().counters())

    def gauges(self) -> Mapping[str, float]:
        waiting = [t for t in self.incoming.transfers.values() if t.stage is TransferStage.WAITING]
        wanted = sum(transfer.request.handed_tokens for transfer in waiting)
        allocator = self._scheduler.memory.allocator
        usage = wanted / (allocator.num_pages * allocator.page_size)
        return {"pending_prealloc_token_usage": usage, **super().gauges()}


def _route_of(request: Request) -> Route | None:
    """The source of a moved request's KV; otherwise the bootstrap server knows."""
    if request.message.source is None:
        return None
    return Route(control=request.message.source.control, incarnation=request.message.source.incarnation, shared=True)
