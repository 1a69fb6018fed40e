"""The prefill role: a request waits for decode's page indices, is computed, and is handed over chunk by chunk.

    add -> BOOTSTRAP --indices here--> SCHEDULED --last chunk sent--> INFLIGHT --Success--> ENDING -> gone
               \\__________ Failed, abort, timeout: answered at once ___________/              (memory back)

Pages are handed over when their chunk is computed; or, *layer by layer*, when it is launched, with a gate: the manager posts
each group of layers when the stream has written it. The metadata row is handed over at the end either way, so nothing
can pass for complete before all of it is.

Decode may also ask for the KV of a request that it retracted (`RecomputeRequest`, disagg/recompute.py): the same way, with no request of
a client behind it, so nothing is answered here; its pages are known from the start.

An entry stays until its sender says that nobody reads its pages any more. It is told poll states and the time; sockets
and threads are the manager's.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from disagg.metadata import Checksum, FirstToken, MetadataBuffers
from disagg.recompute import Bounds, request_for, why_not
from disagg.subject import about_request
from disagg.transfer_gauges import TransferGauges
from engine.core.outputs import StepEffects, output_of, refusal, refused
from engine.core.plan import ItemResult, Plan, PlanItem
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.messages import FAKE_BOOTSTRAP_HOST, FinishReason, TokenOutput
from transfer_backends.contract import ABORTED_BY_DECODE, Gate, RecomputeRequest
from transfer_backends.kvpoll import KVPoll, RoomInUse
from transfer_backends.ports import KVSender

log = logging.getLogger(__name__)


class Stage(Enum):
    BOOTSTRAP = "bootstrap"
    SCHEDULED = "scheduled"
    INFLIGHT = "inflight"
    ENDING = "ending"


class Senders(Protocol):
    """The part of the prefill manager that the role uses."""

    @property
    def counters(self) -> dict[str, int]: ...

    def sender(self, room: int, *, room_attempt: int = 0, fake: bool = False) -> KVSender: ...

    def take_recompute_requests(self) -> list[RecomputeRequest]: ...

    def check(self) -> list[str]: ...

    def close(self) -> None: ...


class Directory(Protocol):
    """Where decode workers look up who has a room (the bootstrap server, by its registrar)."""

    def add_room(self, room: int) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Entry:
    """`answer`: the output to send once decode has everything. `sent_pages`: of the request's row.

    `last_pages` went with the last chunk, at `last_sent_s`. `moves_bytes`: not a fake transfer. `asked`: by decode, no client
    waits for an answer.
    """

    request: Request
    sender: KVSender
    room: int
    moves_bytes: bool
    stage: Stage = Stage.BOOTSTRAP
    sent_pages: int = 0
    row: int | None = None
    answer: TokenOutput | None = None
    last_pages: int = 0
    last_sent_s: float = 0.0
    asked: bool = False

    def heard(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Of what there is to say about it, what somebody wants to hear."""
        return [] if self.asked else outputs


class PrefillRole:
    name = "prefill"

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        manager: Senders,
        metadata: MetadataBuffers,
        directory: Directory,
        page_bytes: int,
        bounds: Bounds,
        checksum: Checksum | None = None,
        layerwise: bool = False,
        least_bytes: int = 0,
    ) -> None:
        """`checksum`: of pages, sent along with them; None: it is not asked for. `layerwise`: pages leave layer by layer.

        `least_bytes`: fewer do not leave before the last chunk has been computed (not layer by layer).
        """
        self._layerwise = layerwise
        self._directory = directory
        self._scheduler = scheduler
        self._manager = manager
        self._metadata = metadata
        self._entries: dict[str, Entry] = {}
        self._computed: list[tuple[Entry, TokenOutput, ItemResult]] = []  # waiting for a metadata row
        self._counters: Counter[str] = Counter()
        self._page_bytes = page_bytes
        self._least_pages = max(1, least_bytes // page_bytes)
        self._bounds = bounds
        self._closed_to_peers: str | None = None
        self._checksum = checksum
        self._transfers = TransferGauges()

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        if request.pooling:  # an embedding ends here: no decode worker, no transfer
            return self._scheduler.add(request)
        if request.bootstrap is None:
            return [refused(request, refusal("bootstrap_room: a prefill worker needs one", status=400))]
        if error := self._scheduler.refusal(request):
            return [refused(request, error)]
        if request.rid in self._entries:
            return [refused(request, refusal(f"rid: a request with id {request.rid!r} is running", status=400))]
        fake = request.bootstrap.host == FAKE_BOOTSTRAP_HOST
        try:
            sender = self._manager.sender(request.bootstrap.room, fake=fake)
        except (RoomInUse, ValueError) as error:
            return [refused(request, refusal(f"bootstrap_room: {error}", status=409))]
        if not fake:
            self._directory.add_room(request.bootstrap.room)
        request.times.bootstraps = True
        self._entries[request.rid] = Entry(request, sender, request.bootstrap.room, moves_bytes=not fake)
        self._scheduler.prefetch(request)
        return []

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        entry = self._entries.get(rid)
        if entry is None:
            return self._scheduler.abort(rid, reason)
        if entry.stage is Stage.ENDING:
            return []
        entry.sender.abort(reason.message)
        return entry.heard(self._end(entry, reason))

    def close_to_peers(self, why: str | None) -> None:
        self._closed_to_peers = why

    def end_peers_work(self, why: str) -> None:
        reason = FinishReason(kind="abort", message=why)
        for entry in list(self._entries.values()):
            if entry.asked and entry.stage is not Stage.ENDING:
                self._counters["recompute_refused"] += 1
                entry.sender.abort(why)
                self._end(entry, reason)

    def poll(self, now_s: float) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        self._take_recompute_requests(now_s)
        for entry in list(self._entries.values()):
            outputs += entry.heard(self._move(entry, now_s))
        self._hand_over_computed(now_s)
        return outputs

    def _move(self, entry: Entry, now_s: float) -> list[TokenOutput]:
        state = entry.sender.poll()
        if entry.stage is Stage.ENDING:
            self._forget_when_released(entry)
        elif state is KVPoll.Failed:
            return self._fail(entry)
        elif entry.stage is Stage.BOOTSTRAP and state is not KVPoll.Bootstrapping:
            return self._schedule(entry, now_s)
        elif entry.stage is Stage.INFLIGHT and state is KVPoll.Success:
            return self._succeed(entry, now_s)
        return []

    def on_launch(self, plan: Plan) -> None:
        if not self._layerwise:
            return
        for item in plan.items:
            entry = self._entries.get(item.rid)
            if item.extend and entry is not None and entry.stage is Stage.SCHEDULED:
                self._send_launched(entry, item, plan.seq)

    def on_step(self, effects: StepEffects, now_s: float) -> list[TokenOutput]:
        for request in effects.progressed:
            if not request.pooling and not self._layerwise:
                self._send_whole_pages(self._entries[request.rid])
        for request, output, first in effects.prefilled:
            request.times.computed_s = now_s
            self._computed.append((self._entries[request.rid], output, first))
        self._hand_over_computed(now_s)
        return effects.outputs

    # ---- moves

    def _take_recompute_requests(self, now_s: float) -> None:
        for asked in self._manager.take_recompute_requests():
            request, sender = (
                request_for(asked, now_s),
                self._manager.sender(asked.room, room_attempt=asked.room_attempt),
            )
            while request.rid in self._entries:  # a client may have chosen the same
                request.rid += "+"
            entry = Entry(request, sender, asked.room, moves_bytes=True, asked=True)
            self._entries[request.rid] = entry
            refused = self._scheduler.refusal(request)
            error = self._closed_to_peers or why_not(asked.work, self._bounds) or (refused and refused.message)
            if error:
                self._counters["recompute_refused"] += 1
                sender.abort(error)
                entry.stage = Stage.ENDING

    def _schedule(self, entry: Entry, now_s: float) -> list[TokenOutput]:
        """Decode has told its pages: the request may compute."""
        skip = entry.sender.skip_pages
        need = self._scheduler.memory.allocator.pages_for(len(entry.request.input_ids)) - skip
        if entry.sender.num_pages not in (None, need):
            besides = f" besides {skip} that decode has" * bool(skip)
            entry.sender.abort(f"decode gave {entry.sender.num_pages} pages, the prompt needs {need}{besides}")
            return self._fail(entry)
        if not entry.asked:
            self._transfers.bootstrapped(now_s - entry.request.arrived_s)
        entry.stage, entry.request.times.queued_s = Stage.SCHEDULED, now_s
        outputs = self._scheduler.add(entry.request)
        if outputs:  # the queue filled up meanwhile
            entry.sender.abort(outputs[0].finish.message if outputs[0].finish else "refused")
            entry.stage = Stage.ENDING
        return outputs

    def _send_whole_pages(self, entry: Entry) -> None:
        """What is computed and will not change: every whole page, if they are many. The rest goes with the last chunk."""
        whole = entry.request.computed_len // self._scheduler.memory.allocator.page_size
        complete = entry.request.computed_len >= len(entry.request.input_ids)
        if entry.stage is Stage.SCHEDULED and not complete and whole - entry.sent_pages >= self._least_pages:
            entry.sender.send(entry.request.pages[entry.sent_pages : whole], start=entry.sent_pages, last=False)
            entry.sent_pages = whole

    def _send_launched(self, entry: Entry, item: PlanItem, step: int) -> None:
        """Pages that `item` completes leave while it computes, those before them (found cached) once it has begun.

        Not sooner: what is cached may be a copy from the host tier that is still on its way, in stream order.
        """
        size, request = self._scheduler.memory.allocator.page_size, entry.request
        end = len(request.pages) if item.kv_len >= len(request.input_ids) else item.kv_len // size
        for until, by_layer in ((min(item.start // size, end), False), (end, True)):
            if until > entry.sent_pages:
                pages, gate = request.pages[entry.sent_pages : until], Gate(step, by_layer)
                entry.sender.send(pages, start=entry.sent_pages, last=False, gate=gate)
                entry.sent_pages = until
                entry.last_pages = len(pages)

    def _hand_over_computed(self, now_s: float) -> None:
        """Last chunk and metadata row, in order of completion; without a free row they wait."""
        while self._computed:
            entry, output, first = self._computed[0]
            if entry.stage is Stage.SCHEDULED:
                entry.row = self._metadata.allocate()
                if entry.row is None:
                    return
                self._send_last(entry, output, first, now_s)
            self._computed.pop(0)

    def _send_last(self, entry: Entry, output: TokenOutput, first: ItemResult, now_s: float) -> None:
        assert entry.row is not None
        entry.answer = output
        sent = entry.request.pages[entry.sender.skip_pages :]
        said = FirstToken(
            ItemResult(token=None, bad=first.bad) if entry.asked else first,  # decode draws the next one
            cached_tokens=output.cached_tokens,
            queue_s=entry.request.times.queue_s,
            prefill_s=entry.request.times.prefill_s,
            kv_checksum=None if self._checksum is None else self._checksum(sent),
        )
        self._metadata.write(entry.row, room=entry.room, first=said)
        rest = entry.request.pages[entry.sent_pages :]
        entry.sender.send(rest, start=entry.sent_pages, last=True, metadata_row=entry.row)
        entry.sent_pages += len(rest)
        entry.stage = Stage.INFLIGHT
        entry.last_pages, entry.last_sent_s = len(rest) or entry.last_pages, now_s

    def _succeed(self, entry: Entry, now_s: float) -> list[TokenOutput]:
        assert entry.answer is not None
        entry.stage = Stage.ENDING
        if entry.asked:
            self._counters["recomputed"] += 1
            self._counters["recomputed_tokens"] += len(entry.request.input_ids) - entry.request.cached_tokens
        if entry.moves_bytes:
            skip = entry.sender.skip_pages
            size_bytes = min(entry.last_pages, entry.sent_pages - skip) * self._page_bytes
            self._transfers.landed(size_bytes=size_bytes, taken_s=now_s - entry.last_sent_s)
            self._counters["kv_transfers"] += 1
            self._counters["kv_sent_bytes"] += (entry.sent_pages - skip) * self._page_bytes
            self._counters["kv_skipped_bytes"] += skip * self._page_bytes
        self._forget_when_released(entry)
        return [entry.answer]

    def _fail(self, entry: Entry) -> list[TokenOutput]:
        self._counters["bootstrap_failed" if entry.stage is Stage.BOOTSTRAP else "transfer_failed"] += 1
        reason = entry.sender.failure() or "the transfer failed"
        subject = about_request(entry.request, entry.room)
        log.warning("prefill %s (room %d) failed: %s", entry.request.rid, entry.room, reason, extra=subject)
        # Decode answers with the real reason, which may be load or lateness: ours must not make a fault of it.
        status = 503 if reason.startswith(ABORTED_BY_DECODE) else 500
        return self._end(entry, FinishReason(kind="abort", message=f"KV transfer: {reason}", status=status))

    def _end(self, entry: Entry, reason: FinishReason) -> list[TokenOutput]:
        """Answer with `reason` now; memory goes when nobody reads it any more."""
        request, stage = entry.request, entry.stage
        entry.stage = Stage.ENDING
        if stage is Stage.BOOTSTRAP:
            outputs = [refused(request, reason)]
        elif request.finish is None and (outputs := self._scheduler.abort(request.rid, reason)):
            pass
        elif request.finish is None:  # its last chunk is being computed
            outputs = [self._scheduler.held.end(request, reason)]
        else:  # computed: the answer was held back for this
            request.finish = reason
            outputs = [output_of(request, [])]
        self._forget_when_released(entry)
        return outputs

    def _forget_when_released(self, entry: Entry) -> None:
        if not entry.sender.released():
            return
        if entry.row is not None:
            self._metadata.free(entry.row)
        if entry.request.finish is not None and entry.request in self._scheduler.held:
            self._scheduler.held.release(entry.request)
        entry.sender.close()
        del self._entries[entry.request.rid]

    # ---- self-knowledge

    def waits_for_outside(self) -> bool:
        return bool(self._entries)

    def queues(self) -> dict[str, int]:
        count = Counter(entry.stage for entry in self._entries.values())
        return {
            "bootstrap": count[Stage.BOOTSTRAP],
            "waiting": self._scheduler.num_waiting,
            "inflight": count[Stage.INFLIGHT] + count[Stage.ENDING],
        }

    def counters(self) -> dict[str, float]:
        return {**self._manager.counters, **self._counters}

    def gauges(self) -> dict[str, float]:
        return self._transfers.gauges()

    def check(self) -> None:
        owned, used = sum(entry.row is not None for entry in self._entries.values()), self._metadata.num_used
        assert owned == used, f"{used} metadata rows used, {owned} owned"
        self._metadata.check()
        assert not (wrong := self._manager.check()), "; ".join(wrong)

    def close(self) -> None:
        self._directory.close()
        self._manager.close()
