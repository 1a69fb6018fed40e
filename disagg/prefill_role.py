"""The prefill role: a request waits for decode's page indices, is computed, and is handed over chunk by chunk.

    add -> WAITING --indices here--> COMPUTING --last chunk sent--> TRANSFER --Success--> ENDING -> gone
               \\________ Failed, abort, timeout: answered at once __________/             (memory back)

Decode may also request the KV of a request that it retracted (disagg/recompute.py): its pages are known from the start, and no
client waits for an answer.
"""

import logging
from collections import Counter
from typing import Protocol

from disagg.handover import HandoverStage, PrefillHandover, Senders
from disagg.page_sender import PageSender
from disagg.recompute import Bounds, request_for, why_not
from engine.core.outputs import StepEffects, output_of, refusal, refused
from engine.core.plan import Plan
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.messages import FAKE_BOOTSTRAP_HOST, FinishReason, TokenOutput, TransferPath
from transfer_backends.contract import ABORTED_BY_DECODE
from transfer_backends.kvpoll import KVPoll, RoomInUse

log = logging.getLogger(__name__)


class Directory(Protocol):
    """Where decode workers look up the worker of a room (the bootstrap server, by its registrar)."""

    def add_room(self, room: int) -> None: ...

    def close(self) -> None: ...


class PrefillRole:
    name = "prefill"

    def __init__(
        self, *, scheduler: Scheduler, manager: Senders, pages: PageSender, directory: Directory, bounds: Bounds
    ) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._pages = pages
        self._directory = directory
        self._bounds = bounds
        self._handovers: dict[str, PrefillHandover] = {}
        self._counters: Counter[str] = Counter()
        self._closed_to_peers: str | None = None

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        if request.alone:  # an embedding or a score ends here: no decode worker, no transfer
            return self._scheduler.add(request)
        if request.bootstrap is None:
            return [refused(request, refusal("bootstrap_room: a prefill worker needs one", status=400))]
        if error := self._scheduler.refusal(request):
            return [refused(request, error)]
        if request.rid in self._handovers:
            return [refused(request, refusal(f"rid: a request with id {request.rid!r} is running", status=400))]
        room, fake = request.bootstrap.room, request.bootstrap.host == FAKE_BOOTSTRAP_HOST
        try:
            sender = self._manager.sender(room, fake=fake)
        except (RoomInUse, ValueError) as error:
            return [refused(request, refusal(f"bootstrap_room: {error}", status=409))]
        if not fake:
            self._directory.add_room(room)
        request.times.bootstraps = True
        self._handovers[request.rid] = PrefillHandover(request, room, moves_bytes=not fake, sender=sender)
        self._scheduler.memory.prefetch(request)
        return []

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        handover = self._handovers.get(rid)
        if handover is None:
            return self._scheduler.abort(rid, reason)
        if handover.stage is HandoverStage.ENDING:
            return []
        handover.sender.abort(reason.message)
        return handover.for_client(self._end(handover, reason))

    def close_to_peers(self, why: str | None) -> None:
        self._closed_to_peers = why

    def end_peers_work(self, why: str) -> None:
        reason = FinishReason(kind="abort", message=why)
        for handover in list(self._handovers.values()):
            if handover.recompute and handover.stage is not HandoverStage.ENDING:
                self._counters["recompute_refused"] += 1
                handover.sender.abort(why)
                self._end(handover, reason)

    def poll(self, now_s: float) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        self._take_recompute_requests(now_s)
        for handover in list(self._handovers.values()):
            outputs += handover.for_client(self._move(handover, now_s))
        self._pages.send_computed(now_s)
        return outputs

    def on_launch(self, plan: Plan) -> None:
        self._pages.on_launch(plan, self._handovers)

    def on_step(self, effects: StepEffects, now_s: float) -> list[TokenOutput]:
        for request in effects.progressed:
            if not request.alone and not self._pages.layerwise:
                self._pages.send_whole_pages(self._handovers[request.rid])
        for request, output, first in effects.prefilled:
            request.times.computed_s = now_s
            handover = self._handovers[request.rid]
            handover.tail = self._scheduler.memory.tail(request, request.handed_tokens)
            self._pages.add_computed(handover, output, first)
        self._pages.send_computed(now_s)
        return effects.outputs

    # ---- moves

    def _take_recompute_requests(self, now_s: float) -> None:
        for wanted in self._manager.take_recompute_requests():
            request = request_for(wanted, now_s)
            assert request.rid not in self._handovers, f"{request.rid}: the manager gives each room attempt once"
            sender = self._manager.sender(wanted.room, room_attempt=wanted.room_attempt)
            handover = PrefillHandover(request, wanted.room, moves_bytes=True, sender=sender, recompute=True)
            self._handovers[request.rid] = handover
            unfit = self._scheduler.refusal(request)
            error = self._closed_to_peers or why_not(wanted.work, self._bounds) or (unfit and unfit.message)
            if error:
                self._counters["recompute_refused"] += 1
                sender.abort(error)
                handover.stage = HandoverStage.ENDING

    def _move(self, handover: PrefillHandover, now_s: float) -> list[TokenOutput]:
        state = handover.sender.poll()
        if handover.stage is HandoverStage.ENDING:
            self._forget_when_released(handover)
        elif state is KVPoll.Failed:
            return self._fail(handover)
        elif handover.stage is HandoverStage.WAITING and state is not KVPoll.Bootstrapping:
            return self._schedule(handover, now_s)
        elif handover.stage is HandoverStage.TRANSFER and state is KVPoll.Success:
            assert handover.answer is not None
            handover.stage = HandoverStage.ENDING
            self._pages.on_landed(handover, now_s)
            self._forget_when_released(handover)
            return [handover.answer]
        return []

    def _schedule(self, handover: PrefillHandover, now_s: float) -> list[TokenOutput]:
        """Decode's pages are known: the request may compute."""
        request, sender = handover.request, handover.sender
        skip = sender.skip_pages
        need = self._scheduler.memory.allocator.pages_for(request.handed_tokens) - skip
        if sender.num_pages not in (None, need):
            besides = f" besides {skip} that decode has" * bool(skip)
            sender.abort(f"decode gave {sender.num_pages} pages, the prompt needs {need}{besides}")
            return self._fail(handover)
        if not handover.recompute:
            self._pages.gauges.bootstrapped(now_s - request.arrived_s)
        handover.stage, request.times.queued_s = HandoverStage.COMPUTING, now_s
        outputs = self._scheduler.add(request)
        if outputs:  # the queue filled up meanwhile
            sender.abort(outputs[0].finish.message if outputs[0].finish else "refused")
            handover.stage = HandoverStage.ENDING
        return outputs

    def _fail(self, handover: PrefillHandover) -> list[TokenOutput]:
        waiting = handover.stage is HandoverStage.WAITING
        self._counters["bootstrap_failed" if waiting else "transfer_failed"] += 1
        reason = handover.sender.failure() or "the transfer failed"
        rid, room = handover.request.rid, handover.room
        log.warning("prefill %s (room %d) failed: %s", rid, room, reason, extra=handover.log_fields)
        # Decode answers with the real reason, which may be load or lateness: ours must not make a fault of it.
        status = 503 if reason.startswith(ABORTED_BY_DECODE) else 500
        return self._end(handover, FinishReason(kind="abort", message=f"KV transfer: {reason}", status=status))

    def _end(self, handover: PrefillHandover, reason: FinishReason) -> list[TokenOutput]:
        """Answer with `reason` now; memory goes when no peer reads it any more."""
        request, stage = handover.request, handover.stage
        handover.stage = HandoverStage.ENDING
        if stage is HandoverStage.WAITING:
            outputs = [refused(request, reason)]
        elif request.finish is None and (outputs := self._scheduler.abort(request.rid, reason)):
            pass
        elif request.finish is None:  # its last chunk is being computed
            outputs = [self._scheduler.held.end(request, reason)]
        else:  # computed: the answer was held back for this
            request.finish = reason
            outputs = [output_of(request, [])]
        self._forget_when_released(handover)
        return outputs

    def _forget_when_released(self, handover: PrefillHandover) -> None:
        if not handover.sender.released():
            return
        if handover.metadata_row is not None:
            self._pages.metadata.free(handover.metadata_row)
        if handover.request.finish is not None and handover.request in self._scheduler.held:
            self._scheduler.held.release(handover.request)
        handover.sender.close()
        del self._handovers[handover.request.rid]

    # ---- reports

    def waits_for_outside(self) -> bool:
        return bool(self._handovers)

    def queues(self) -> dict[str, int]:
        count = Counter(handover.stage for handover in self._handovers.values())
        return {
            "bootstrap": count[HandoverStage.WAITING],
            "waiting": self._scheduler.num_waiting,
            "inflight": count[HandoverStage.TRANSFER] + count[HandoverStage.ENDING],
        }

    def counters(self) -> dict[str, float]:
        return {**self._manager.counters, **self._counters, **self._pages.counters}

    def gauges(self) -> dict[str, float]:
        return self._pages.gauges.values()

    def transfer_paths(self) -> list[TransferPath]:
        return [
            TransferPath(
                peer=path.peer,
                address=path.address,
                same_machine=path.near,
                transport=path.transport,
                gb_per_s=round(path.bytes_a_s / 1e9, 3),
                measured_unix_s=round(path.at_unix_s, 3),
            )
            for path in self._manager.paths
        ]

    def check(self) -> None:
        metadata = self._pages.metadata
        owned, used = sum(h.metadata_row is not None for h in self._handovers.values()), metadata.num_used
        assert owned == used, f"{used} metadata rows used, {owned} owned"
        metadata.check()
        self._manager.check()

    def close(self) -> None:
        self._directory.close()
        self._manager.close()
