"""The decode role: a request gets pages, its KV lands in them, and it joins the running batch without a forward.

add -> WAITING --handshake done, memory--> TRANSFER --Success--> running (the scheduler's)
           \\________ Failed, abort, timeout: answered at once _______/
                                 |
                      pages a peer may still write: quarantined until the receiver is drained

running --memory short--> RETRACTED (the scheduler's, or Resumption's) --memory, before any new request--> running
running --the router moves it--> Moves: its KV goes to another decode worker, where it is added with its `source`
"""

import logging
import math
from collections import Counter

from disagg.handover import DecodeHandover, HandoverStage, Receivers
from disagg.metadata import Checksum, FirstToken, KVCorrupt, MetadataBuffers, MetadataCorrupt
from disagg.moving import HAS_MOVED, Moves
from disagg.quarantine import Quarantine
from disagg.resumption import Resumption
from engine.core.outputs import StepEffects, refusal, refused
from engine.core.plan import Plan
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.messages import FAKE_BOOTSTRAP_HOST, FinishReason, LogprobOptions, TokenOutput, TransferPath
from transfer_backends.contract import Route
from transfer_backends.kvpoll import KVPoll, RoomInUse

log = logging.getLogger(__name__)

PREALLOC_TIMEOUT_S = 300.0  # for memory: as long as prefill keeps the request
UNJOINED = 502  # the router must not try the same pair again: this worker has tried for long


class DecodeRole:
    name = "decode"

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        manager: Receivers,
        metadata: MetadataBuffers,
        moves_bytes: bool,
        prealloc_timeout_s: float,
        checksum: Checksum | None = None,
        moves: Moves | None = None,
    ) -> None:
        """`checksum`: of what lands, compared with the sender's before decode starts. `moves`: None: what leaves takes no KV along."""
        self._scheduler = scheduler
        self._manager = manager
        self._metadata = metadata
        self._moves_bytes = moves_bytes
        self._prealloc_timeout_s = prealloc_timeout_s
        self._checksum = checksum
        self._handovers: dict[str, DecodeHandover] = {}
        self._quarantine = Quarantine(scheduler=scheduler, metadata=metadata)
        self._resumption = Resumption(
            scheduler=scheduler,
            manager=manager,
            metadata=metadata,
            quarantine=self._quarantine,
            moves_bytes=moves_bytes,
            checksum=checksum,
        )
        self._moves = moves
        self._counters: Counter[str] = Counter()
        self._closed = False

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        bootstrap = request.bootstrap
        if request.alone:
            return [refused(request, refusal("input: a decode worker computes no prompts", status=400))]
        if bootstrap is None:
            return [refused(request, refusal("bootstrap_room: a decode worker needs one", status=400))]
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
        self._handovers[request.rid] = DecodeHandover(
            request, bootstrap.room, moves_bytes=self._moves_bytes and not fake, receiver=receiver
        )
        return []

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        self._resumption.take()
        handover = self._handovers.get(rid)
        if handover is not None:
            return self._end(handover, reason)
        held = self._resumption.abort(rid, reason)
        if held is None and self._moves is not None:
            held = self._moves.abort(rid, reason)
        return self._scheduler.abort(rid, reason) if held is None else held

    def move_out(self, rid: str, room: int, now_s: float) -> list[TokenOutput]:
        """End a request here, as another worker goes on with it; by its KV if it is running, which then waits in `room`."""
        request = self._scheduler.stages.live.get(rid)
        if self._moves is None or request is None:
            return self.abort(rid, now_s, HAS_MOVED)
        if request in self._scheduler.stages.running:
            return self._moves.begin(request, room)
        return [] if request.moves else self.abort(rid, now_s, HAS_MOVED)

    def close_to_peers(self, why: str | None) -> None:
        """No peer sends a decode worker work, and what leaves it leaves. While it is closed, it preempts no request."""
        self._closed = why is not None

    def end_peers_work(self, why: str) -> None:
        if self._moves is not None:
            self._moves.end_all(why)

    def poll(self, now_s: float) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        self._quarantine.end_drained()
        self._resumption.take()
        self._resumption.poll(now_s, may_preempt=not self._closed)
        if self._moves is not None:
            outputs += self._moves.poll(now_s)
        ready: list[DecodeHandover] = []
        for handover in list(self._handovers.values()):
            state = handover.receiver.poll()
            handover.joined = handover.joined or state is KVPoll.WaitingForInput
            if state is KVPoll.Failed:
                outputs += self._fail(handover)
            elif handover.stage is HandoverStage.TRANSFER and state is KVPoll.Success:
                outputs += self._start(handover, now_s)
            elif handover.stage is HandoverStage.WAITING and state is KVPoll.WaitingForInput:
                ready.append(handover)
        self._give_memory(ready, now_s)
        for handover in [h for h in self._handovers.values() if h.stage is HandoverStage.WAITING]:
            outputs += self._expire(handover, now_s)
        return outputs

    def on_launch(self, plan: Plan) -> None:
        """No peer waits for what it computes."""

    def on_step(self, effects: StepEffects, now_s: float) -> list[TokenOutput]:
        return effects.outputs

    # ---- moves

    def _give_memory(self, ready: list[DecodeHandover], now_s: float) -> None:
        """Reserve memory, most urgent first. None overtakes one that finds no room, or a retracted one as urgent."""
        if not ready:
            return
        urgency = self._scheduler.limits.priorities.urgency
        retracted = [*self._scheduler.stages.retracted(), *self._resumption.waiting()]
        before = max((urgency(r, now_s) for r in retracted), default=-math.inf)
        for handover in sorted(ready, key=lambda h: -urgency(h.request, now_s)):
            if urgency(handover.request, now_s) <= before:
                return
            if self._scheduler.held.adapter_has_place(handover.request, now_s) and not self._preallocate(
                handover, now_s
            ):
                return

    def _preallocate(self, handover: DecodeHandover, now_s: float) -> bool:
        """Offer prefill a metadata row and the prompt's pages that are not cached here; False when there is no room now."""
        row = self._metadata.allocate()
        if row is None:
            return False
        if not self._scheduler.held.reserve(handover.request, may_preempt=not self._closed):
            self._metadata.free(row)
            return False
        handover.metadata_row, handover.stage = row, HandoverStage.TRANSFER
        handover.request.times.queued_s = now_s
        skip = handover.request.shared_pages  # cached here: neither written nor exposed
        handover.tail = self._scheduler.memory.tail(handover.request, handover.request.handed_tokens)
        handover.receiver.provide(self._landing(handover.request), row, skip_pages=skip, tail=handover.tail)
        return True

    def _landing(self, request: Request) -> list[int]:
        """Pages of the tokens that are handed over, without what is cached here."""
        return request.pages[request.shared_pages : self._scheduler.memory.allocator.pages_for(request.handed_tokens)]

    def _expire(self, handover: DecodeHandover, now_s: float) -> list[TokenOutput]:
        if now_s - handover.request.arrived_s <= self._prealloc_timeout_s:
            return []
        self._counters["prealloc_timeouts"] += 1
        waited = f"no KV memory within {self._prealloc_timeout_s:g} s"
        return self._end(handover, FinishReason(kind="abort", message=waited, status=503))

    def _start(self, handover: DecodeHandover, now_s: float) -> list[TokenOutput]:
        try:
            pages, end = self._landing(handover.request), handover.request.handed_tokens
            first = handover.read_row(self._metadata, pages, handover.tail, self._checksum, num_tokens=end)
        except (MetadataCorrupt, KVCorrupt) as error:
            rid, room = handover.request.rid, handover.room
            log.error("decode %s (room %d): %s", rid, room, error, extra=handover.log_fields)
            self._counters["metadata_corrupt" if isinstance(error, MetadataCorrupt) else "kv_checksum_failed"] += 1
            return self._end(handover, FinishReason(kind="abort", message=f"KV transfer: {error}", status=500))
        if first is None:
            return []
        self._counters["kv_checksum_verified"] += self._checksum is not None and handover.moves_bytes
        times = handover.request.times
        times.landed_s, times.remote_queue_s, times.remote_prefill_s = now_s, first.queue_s, first.prefill_s
        handover.request.transfer_retries += handover.receiver.retries()
        self._quarantine.close(handover.receiver, handover.metadata_row)
        del self._handovers[handover.request.rid]
        return self._run(handover.request, first)

    def _run(self, request: Request, first: FirstToken) -> list[TokenOutput]:
        if request.source is None:
            return self._scheduler.held.start_decoding(request, first.result, cached_tokens=first.cached_tokens)
        self._counters["moved_in"] += 1
        self._scheduler.held.go_on_decoding(request, cached_tokens=first.cached_tokens)
        return []

    def _fail(self, handover: DecodeHandover) -> list[TokenOutput]:
        self._counters["bootstrap_failed" if handover.stage is HandoverStage.WAITING else "transfer_failed"] += 1
        reason = handover.receiver.failure() or "the transfer failed"
        rid, room = handover.request.rid, handover.room
        log.warning("decode %s (room %d) failed: %s", rid, room, reason, extra=handover.log_fields)
        status = 500 if handover.joined else UNJOINED
        return self._end(handover, FinishReason(kind="abort", message=f"KV transfer: {reason}", status=status))

    def _end(self, handover: DecodeHandover, reason: FinishReason) -> list[TokenOutput]:
        """Answer with `reason` now; memory goes back at once, or through quarantine."""
        handover.receiver.abort(reason.message)
        output = self._scheduler.held.end(handover.request, reason)
        del self._handovers[handover.request.rid]
        self._quarantine.leave(handover)
        self._scheduler.held.release(handover.request)
        return [output]

    # ---- reports

    def waits_for_outside(self) -> bool:
        return bool(
            self._handovers
            or len(self._resumption)
            or len(self._quarantine)
            or self._num_moving
            or len(self._scheduler.stages.retracted())
        )

    def queues(self) -> dict[str, int]:
        count = Counter(handover.stage for handover in self._handovers.values())
        return {
            "prealloc": count[HandoverStage.WAITING],
            "transfer": count[HandoverStage.TRANSFER],
            "resuming": len(self._resumption) - self._resumption.num_waiting,
            "quarantined": len(self._quarantine),
            "moving": self._num_moving,
            "retracted": len(self._scheduler.stages.retracted()) + self._resumption.num_waiting,
            "waiting": 0,  # all that the scheduler's waiting queue holds are retracted ones
        }

    def counters(self) -> dict[str, float]:
        backups = self._scheduler.backups
        own = {"backup_saved_tokens": backups.saved_tokens, "backup_restored_tokens": backups.restored_tokens}
        moved = {} if self._moves is None else self._moves.all_counters()
        return {**self._manager.counters, **(self._counters + self._resumption.counters), **own, **moved}

    def gauges(self) -> dict[str, float]:
        wanted = sum(h.request.handed_tokens for h in self._handovers.values() if h.stage is HandoverStage.WAITING)
        allocator = self._scheduler.memory.allocator
        return {"pending_prealloc_token_usage": wanted / (allocator.num_pages * allocator.page_size)}

    @property
    def _num_moving(self) -> int:
        return 0 if self._moves is None else len(self._moves)

    def avoided_encoders(self) -> list[str]:
        return []

    def transfer_paths(self) -> list[TransferPath]:
        """Prefill measures them."""
        return []

    def check(self) -> None:
        owned = sum(h.metadata_row is not None for h in self._handovers.values())
        owned += self._resumption.num_rows + self._quarantine.num_rows
        owned += 0 if self._moves is None else self._moves.num_rows
        used = self._metadata.num_used
        assert owned == used, f"{used} metadata rows used, {owned} owned"
        self._quarantine.check()
        self._metadata.check()
        self._manager.check()
        if self._moves is not None:
            self._moves.check()

    def close(self) -> None:
        if self._moves is not None:
            self._moves.close()
        self._manager.close()


def _route_of(request: Request) -> Route | None:
    """Return where the KV of a request that has moved waits; None: the bootstrap server knows."""
    if request.source is None:
        return None
    return Route(control=request.source.control, incarnation=request.source.incarnation, shared=True)
