r"""Retracted decode requests whose KV a prefill worker recomputes.

    retracted --> a transfer --landed--> running: its next step is a usual one
                    \__ failed, no worker, almost all still cached: this engine computes it

Prefill computes all known tokens but the last, without sampling, so that a normal step continues
seeds, penalties, grammar and logprobs. Cached pages are neither computed nor sent. The room is the
request's, the attempt its number of retractions (the router's is 0).
"""

import logging
import math
from collections.abc import Mapping, Sequence

from disagg.features.recompute import fits, packed
from disagg.incoming import Receivers, RequestTarget, RequestTransfer, TransferFailure, TransferStage
from disagg.metadata import FirstToken, MetadataBuffers
from disagg.role import ReceivingPart
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.messages import FAKE_BOOTSTRAP_HOST, FinishReason, TokenOutput
from transfer_backends.contract import Work
from transfer_backends.sides import RoomInUse

log = logging.getLogger(__name__)


class Resumption(RequestTarget[RequestTransfer], ReceivingPart):
    """Owner of requests until they run, wait for this engine, or end."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        manager: Receivers,
        metadata: MetadataBuffers,
        moves_bytes: bool,
    ) -> None:
        super().__init__(scheduler, metadata)
        self._manager = manager
        self._counters = self.incoming.counters
        self._counters |= {"recompute_failed": 0, "resumed_through_prefill": 0}
        self._moves_bytes = moves_bytes
        self._may_preempt = True

    def _take_retracted(self) -> None:
        for request in self._scheduler.held.take_retracted():
            if not self._begin(request):
                self._scheduler.held.resume_here(request)

    def _begin(self, request: Request) -> bool:
        at = request.message.bootstrap
        if at is None or at.host == FAKE_BOOTSTRAP_HOST or not fits(request.images):
            return False
        try:
            receiver = self._manager.receiver(
                at.room, bootstrap=f"{at.host}:{at.port}", room_attempt=request.stats.retractions
            )
        except RoomInUse:  # a client reused the room
            self._counters["recompute_failed"] += 1
            return False
        self.incoming.begin(
            RequestTransfer(
                key=request.rid, room=at.room, receiver=receiver, request=request, moves_bytes=self._moves_bytes
            )
        )
        return True

    def abort(self, rid: str, reason: FinishReason) -> list[TokenOutput] | None:
        self._take_retracted()
        return self._end(rid, reason)

    def close_to_peers(self, why: str | None) -> None:
        """Stop preemption; peers send no work here."""
        self._may_preempt = why is None

    def poll(self, now_s: float) -> list[TokenOutput]:
        self._take_retracted()
        self.incoming.poll(now_s)
        return []

    # ---- as the target of its transfers

    def reserve(self, ready: Sequence[RequestTransfer]) -> None:
        """By urgency, after equally urgent requests computed here."""
        now_s, urgency = self.incoming.now_s, self._scheduler.limits.priorities.urgency
        others = [r for r in self._scheduler.stages.retracted() if r.rid not in self.incoming.transfers]
        computed = max((urgency(r, now_s) for r in others), default=-math.inf)
        for transfer in sorted(self.waiting(ready), key=lambda t: (-urgency(t.request, now_s), t.request.serial)):
            if urgency(transfer.request, now_s) <= computed or not self._request(transfer):
                return

    def _request(self, transfer: RequestTransfer) -> bool:
        request, memory, held = transfer.request, self._scheduler.memory, self._scheduler.held
        if not self.incoming.reserve(transfer, lambda: held.reserve(request, may_preempt=self._may_preempt)):
            return False
        if request.num_tokens - request.computed_len <= memory.allocator.page_size:  # one small step of our own
            self.incoming.cancel(transfer, "almost all of it is still cached")
            return False
        self.go_on(transfer)
        return True

    def go_on(self, transfer: RequestTransfer) -> None:
        request = transfer.request
        known = request.tokens(0, request.num_tokens - 1)
        work = Work(
            tokens=known,
            priority=request.message.priority,
            share=request.keep_kv,
            namespace=request.message.namespace,
            images=packed(request.images),
        )
        self.provide_tokens(transfer, len(known), work=work)

    def landed(self, transfer: RequestTransfer, first: FirstToken) -> str:
        if first.result.bad or (self._moves_bytes and first.result.token is not None):
            return "prefill computed NaN, or sampled a token, which was not requested"
        transfer.take_over(first)
        self._counters["resumed_through_prefill"] += 1
        self._scheduler.held.resume_decoding(transfer.request)
        return ""

    def failed(self, transfer: RequestTransfer, failure: TransferFailure, reason: str) -> None:
        request = transfer.request
        if request.finish is not None:
            return self._scheduler.held.release(request)
        if failure is not TransferFailure.ABORTED:
            self._counters["recompute_failed"] += 1
            message = "decode %s (room %d): prefill did not compute it again: %s"
            log.warning(message, transfer.key, transfer.room, reason, extra=transfer.log_fields)
        self._scheduler.held.resume_here(request)

    # ---- reports

    def queues(self) -> dict[str, int]:
        """Without those that wait for memory: they count as retracted."""
        return {"resuming": len(self.incoming.transfers) - self.incoming.count()[TransferStage.WAITING]}

    def counters(self) -> Mapping[str, float]:
        backups = self._scheduler.backups
        kept = {"backup_saved_tokens": backups.saved_tokens, "backup_restored_tokens": backups.restored_tokens}
        return {**self._counters, **kept}

    def check(self) -> None:
        self.incoming.check()
