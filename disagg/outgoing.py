"""KV sent to another worker, from the peer's page indices until no operation reads the pages.

  open -> WAITING --indices here--> COMPUTING --last chunk sent--> TRANSFER
      --Success--> ENDING -> gone
  any --Failed, abort, timeout: `end`--> ENDING (memory back)

Both roles use it: prefill then computes the prompt, decode has the KV.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Set
from dataclasses import KW_ONLY, InitVar, dataclass
from enum import Enum
from typing import Protocol

from disagg.metadata import FirstToken, MetadataBuffers, PendingChecksum
from engine.core.outputs import output_of, refused
from engine.core.plan import ItemResult, Plan, PlanItem
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.messages import FinishReason, TokenOutput
from service.telemetry.context import about
from transfer_backends.contract import ABORTED_BY_DECODE, Gate, PeerPath, RecomputeRequest, SourcePages, Tail
from transfer_backends.ports import KVSender
from transfer_backends.sides import KVPoll

# ---- record of a hand-over


class HandoverStage(Enum):
    WAITING = "waiting"
    COMPUTING = "computing"
    TRANSFER = "transfer"
    ENDING = "ending"


class Purpose(Enum):
    """Reason to send KV.

    PROMPT: a client waits; RECOMPUTE: for decode; MOVE: decoding continues elsewhere; PREFIX,
    FEATURES: for another worker.
    """

    PROMPT = "prompt"
    RECOMPUTE = "recompute"
    MOVE = "move"
    PREFIX = "prefix"
    FEATURES = "features"


@dataclass(slots=True, eq=False)
class PrefillHandover:
    """Sender's record of one hand-over.

    - moves_bytes: False for a fake transfer, without metadata row
    - last_pages: sent with the last chunk, at `last_sent_s`
    - tail: extra state after the last page; checksum: of pages and tail
    """

    request: Request
    room: int
    _: KW_ONLY
    moves_bytes: bool
    sender: KVSender
    purpose: Purpose = Purpose.PROMPT
    stage: HandoverStage = HandoverStage.WAITING
    metadata_row: int | None = None
    tail: Tail = ()
    checksum: PendingChecksum | None = None
    sent_pages: int = 0
    last_pages: int = 0
    last_sent_s: float = 0.0
    answer: TokenOutput | None = None

    @property
    def log_fields(self) -> dict[str, dict[str, str | int | float]]:
        return about(request_id=self.request.message.request_id, rid=self.request.rid, room=self.room)

    @property
    def for_prompt(self) -> bool:
        return self.purpose is Purpose.PROMPT

    def fills(self, given: int | None, need: int) -> bool:
        """True if `need` pages fit those `given` by the peer."""
        return given is None or (need <= given if self.purpose is Purpose.PREFIX else need == given)

    def for_client(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        return outputs if self.for_prompt else []


class Senders(Protocol):
    @property
    def counters(self) -> dict[str, int]: ...

    @property
    def paths(self) -> list[PeerPath]: ...

    def sender(self, room: int, *, room_attempt: int = 0, fake: bool = False) -> KVSender: ...

    def take_recompute_requests(self) -> list[RecomputeRequest]: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


# ---- order of pages and metadata

KEPT = 64  # transfers that the gauges look back on


class TransferGauges:
    """Times from handing over the last chunk until all bytes landed.

    Polling makes speeds of small prompts lower bounds. Layer by layer they may exceed the wire's:
    most of the last chunk left before.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self.bootstraps_s: deque[float] = deque(maxlen=KEPT)

    def landed(self, *, size_bytes: int, taken_s: float) -> None:
        self._recent.append((size_bytes, max(taken_s, 1e-9)))

    def values(self) -> dict[str, float]:
        waits = self.bootstraps_s
        bootstrap = {"kv_transfer_bootstrap_ms": sum(waits) / len(waits) * 1e3} if waits else {}
        if not self._recent:
            return bootstrap
        size_bytes, taken_s = (sum(column) for column in zip(*self._recent, strict=True))
        return {
            **bootstrap,
            "kv_transfer_total_mb": size_bytes / len(self._recent) / 1e6,
            "kv_transfer_speed_gb_s": size_bytes / taken_s / 1e9,
            "kv_transfer_latency_ms": taken_s / len(self._recent) * 1e3,
        }


SENT = ("kv_transfers", "kv_sent_bytes", "kv_skipped_bytes", "recomputed", "recomputed_tokens")  # counters


@dataclass(eq=False)
class PageSender:
    """Order in which pages and metadata of a prompt leave, and transfer gauges.

    Pure: senders move the bytes.

    whole pages    when their chunk is computed, from `min_bytes` on; the rest with the last chunk
    layer by layer when their chunk is launched, gated: the manager posts each written layer group
    tail           after the last chunk's pages: other memory (`Memory.tail`)
    metadata row   last, so that nothing is complete before
    """

    metadata: MetadataBuffers
    _: KW_ONLY
    page_size: int
    page_bytes: int
    layerwise: bool = False
    min_bytes: InitVar[int] = 0

    def __post_init__(self, min_bytes: int) -> None:
        self.gauges = TransferGauges()
        self.counters = dict.fromkeys(SENT, 0)
        self._min_pages = max(1, min_bytes // self.page_bytes)
        self._computed: list[tuple[PrefillHandover, TokenOutput, ItemResult]] = []  # in order of completion

    def send_launched(self, plan: Plan, handovers: Mapping[str, PrefillHandover]) -> None:
        """Layer by layer: send what the step will write."""
        if not self.layerwise:
            return
        loaded = {copy.page for copy in plan.from_host}
        for item in plan.items:
            handover = handovers.get(item.rid)
            if item.extend and handover is not None and handover.stage is HandoverStage.COMPUTING:
                self._send_launched(handover, item, plan.seq, loaded)

    def _send_launched(self, handover: PrefillHandover, item: PlanItem, step: int, loaded: Set[int]) -> None:
        """Send pages of `item`, and those `loaded` from the host in this step, while it computes.

        Other cached pages leave once the step begins, after loads of earlier steps.
        """
        size, request = self.page_size, handover.request
        end = len(request.pages) if item.kv_len >= request.handed_tokens else item.kv_len // size
        cached = min(item.start // size, end)
        there = next((i for i in range(handover.sent_pages, cached) if request.pages[i] in loaded), cached)
        for until, by_layer in ((there, False), (end, True)):
            if until > handover.sent_pages:
                pages, gate = request.pages[handover.sent_pages : until], Gate(step, by_layer)
                handover.sender.send(SourcePages(pages, handover.sent_pages, gate=gate))
                handover.sent_pages = until
                handover.last_pages = len(pages)

    def send_whole_pages(self, handover: PrefillHandover) -> None:
        request, sent = handover.request, handover.sent_pages
        whole = request.computed_len // self.page_size
        complete = request.computed_len >= request.handed_tokens
        if handover.stage is HandoverStage.COMPUTING and not complete and whole - sent >= self._min_pages:
            handover.sender.send(SourcePages(request.pages[sent:whole], sent))
            handover.sent_pages = whole

    def add_computed(self, handover: PrefillHandover, output: TokenOutput, first: ItemResult) -> None:
        checksum, request = self.metadata.checksum, handover.request
        if checksum is not None and handover.moves_bytes and handover.stage is HandoverStage.COMPUTING:
            pages = request.pages[handover.sender.skip_pages :]
            handover.checksum = checksum(pages, handover.tail, request.handed_tokens)
        self._computed.append((handover, output, first))

    def send_computed(self, now_s: float) -> None:
        """Send last chunks, then metadata rows, in order of completion.

        Rows wait for a free one and for the checksum.
        """
        while self._computed:
            handover, output, first = self._computed[0]
            if handover.stage is HandoverStage.COMPUTING:
                if handover.checksum is not None and handover.checksum() is None:
                    return self._send_waiting(now_s)
                handover.metadata_row = self.metadata.allocate()
                if handover.metadata_row is None:
                    return
                handover.answer = output
                self._write_row(handover, handover.metadata_row, first)
                self._send_rest(handover, now_s)
                handover.stage = HandoverStage.TRANSFER
            self._computed.pop(0)

    def _send_waiting(self, now_s: float) -> None:
        """Send pages whose checksum is in progress."""
        for handover, _, _ in self._computed:
            if handover.stage is HandoverStage.COMPUTING and handover.sent_pages < len(handover.request.pages):
                self._send_rest(handover, now_s)

    def _write_row(self, handover: PrefillHandover, row: int, first: ItemResult) -> None:
        request = handover.request
        assert handover.answer is not None
        content = FirstToken(
            first if handover.for_prompt else ItemResult(token=None, bad=first.bad),  # decode samples the next one
            cached_tokens=handover.answer.cached_tokens,
            queue_s=request.times.queue_s,
            prefill_s=request.times.prefill_s,
            kv_checksum=None if handover.checksum is None else handover.checksum(),
        )
        self.metadata.write(row, room=handover.room, first=content)

    def _send_rest(self, handover: PrefillHandover, now_s: float) -> None:
        rest, row = handover.request.pages[handover.sent_pages :], handover.metadata_row
        tail = () if row is None else handover.tail
        handover.sender.send(SourcePages(rest, handover.sent_pages, row, tail=tail))
        handover.sent_pages += len(rest)
        handover.last_pages = len(rest) or handover.last_pages
        handover.last_sent_s = handover.last_sent_s or now_s

    def on_landed(self, handover: PrefillHandover, now_s: float) -> None:
        """Count work for decode, and moves."""
        if handover.purpose is Purpose.RECOMPUTE:
            self.counters["recomputed"] += 1
            self.counters["recomputed_tokens"] += handover.request.handed_tokens - handover.request.stats.cached_tokens
        if not handover.moves_bytes:
            return
        skip = handover.sender.skip_pages
        moved = handover.sent_pages - skip
        size_bytes = min(handover.last_pages, moved) * self.page_bytes
        self.gauges.landed(size_bytes=size_bytes, taken_s=now_s - handover.last_sent_s)
        self.counters["kv_transfers"] += 1
        self.counters["kv_sent_bytes"] += moved * self.page_bytes
        self.counters["kv_skipped_bytes"] += skip * self.page_bytes


# ---- outgoing

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Outgoing:
    """`begin` gets requests with known peer pages, and may refuse them by outputs."""

    scheduler: Scheduler
    pages: PageSender
    begin: Callable[[PrefillHandover, float], list[TokenOutput]]
    name: str
    may_begin: Callable[[PrefillHandover], bool] = lambda handover: True

    def __post_init__(self) -> None:
        self.handovers: dict[str, PrefillHandover] = {}
        self.counters = {"bootstrap_failed": 0, "transfer_failed": 0}

    def open(self, handover: PrefillHandover) -> None:
        assert handover.request.rid not in self.handovers
        self.handovers[handover.request.rid] = handover

    def poll(self, now_s: float) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        for handover in list(self.handovers.values()):
            outputs += handover.for_client(self._move(handover, now_s))
        self.pages.send_computed(now_s)
        return outputs

    def abort(self, handover: PrefillHandover, reason: FinishReason) -> list[TokenOutput]:
        """End a hand-over here and at the peer."""
        if handover.stage is HandoverStage.ENDING:
            return []
        handover.sender.abort(reason.message)
        return handover.for_client(self._end(handover, reason))

    def end_all(self, why: str) -> None:
        for handover in list(self.handovers.values()):
            self.abort(handover, FinishReason(kind="abort", message=why))

    def refuse(self, handover: PrefillHandover, reason: str) -> None:
        handover.sender.abort(reason)
        handover.stage = HandoverStage.ENDING

    # ---- moves

    def _move(self, handover: PrefillHandover, now_s: float) -> list[TokenOutput]:
        state = handover.sender.poll()
        if handover.stage is HandoverStage.ENDING:
            self._forget_when_released(handover)
        elif state is KVPoll.Failed:
            return self._fail(handover)
        elif handover.stage is HandoverStage.WAITING and state is not KVPoll.Bootstrapping:
            return self._on_pages(handover, now_s) if self.may_begin(handover) else []
        elif handover.stage is HandoverStage.TRANSFER and state is KVPoll.Success:
            assert handover.answer is not None
            handover.stage = HandoverStage.ENDING
            self.pages.on_landed(handover, now_s)
            self._forget_when_released(handover)
            return [handover.answer]
        return []

    def _on_pages(self, handover: PrefillHandover, now_s: float) -> list[TokenOutput]:
        request, sender = handover.request, handover.sender
        skip = sender.skip_pages
        need = self.scheduler.memory.allocator.pages_for(request.handed_tokens) - skip
        if not handover.fills(sender.num_pages, need):
            besides = f" besides {skip} that decode has" * bool(skip)
            sender.abort(f"decode gave {sender.num_pages} pages, the prompt needs {need}{besides}")
            return self._fail(handover)
        if handover.for_prompt:
            self.pages.gauges.bootstraps_s.append(now_s - request.arrived_s)
        handover.stage = HandoverStage.COMPUTING
        outputs = self.begin(handover, now_s)
        if outputs:  # the queue filled up meanwhile
            self.refuse(handover, outputs[0].finish.message if outputs[0].finish else "refused")
        return outputs

    def _fail(self, handover: PrefillHandover) -> list[TokenOutput]:
        waiting = handover.stage is HandoverStage.WAITING
        self.counters["bootstrap_failed" if waiting else "transfer_failed"] += 1
        reason = handover.sender.failure() or "the transfer failed"
        rid, room = handover.request.rid, handover.room
        log.warning("%s %s (room %d) failed: %s", self.name, rid, room, reason, extra=handover.log_fields)
        # Decode answers with the real reason, perhaps load or lateness: ours must not make it a
        # fault.
        status = 503 if reason.startswith(ABORTED_BY_DECODE) else 500
        return self._end(handover, FinishReason(kind="abort", message=f"KV transfer: {reason}", status=status))

    def _end(self, handover: PrefillHandover, reason: FinishReason) -> list[TokenOutput]:
        """Memory is free once no peer reads it."""
        request, stage = handover.request, handover.stage
        handover.stage = HandoverStage.ENDING
        if stage is HandoverStage.WAITING:
            outputs = [refused(request, reason)]
        elif request.finish is None and (outputs := self.scheduler.abort(request.rid, reason)):
            pass
        elif request.finish is None:  # its last chunk is in a step
            outputs = [self.scheduler.held.end(request, reason)]
        else:  # computed: its answer waited for this
            request.finish = reason
            outputs = [output_of(request, [])]
        self._forget_when_released(handover)
        return outputs

    def _forget_when_released(self, handover: PrefillHandover) -> None:
        if not handover.sender.released():
            return
        if handover.metadata_row is not None:
            self.pages.metadata.free(handover.metadata_row)
        if handover.request.finish is not None and handover.request in self.scheduler.held:
            self.scheduler.held.release(handover.request)
        handover.sender.close()
        del self.handovers[handover.request.rid]

    # ---- reports

    def count(self) -> Counter[HandoverStage]:
        return Counter(handover.stage for handover in self.handovers.values())

    @property
    def num_rows(self) -> int:
        return sum(h.metadata_row is not None for h in self.handovers.values())


class PromptHandovers(Outgoing):
    """Hand-overs of prompts that this engine computes."""

    def __init__(self, scheduler: Scheduler, pages: PageSender) -> None:
        super().__init__(scheduler=scheduler, pages=pages, begin=self._compute, name="prefill")

    def _compute(self, handover: PrefillHandover, now_s: float) -> list[TokenOutput]:
        handover.request.times.queued_s = now_s
        return self.scheduler.add(handover.request)
