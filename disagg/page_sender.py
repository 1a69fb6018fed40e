"""Order in which pages and metadata of a prompt leave. Pure: senders move the bytes.

whole pages    when their chunk is computed, if they are many; the rest with the last chunk
layer by layer when their chunk is launched, gated: the manager posts each written layer group
tail           after the last chunk's pages: other memory (`Memory.tail`)
metadata row   last, so that nothing is complete before
"""

from collections import Counter, deque
from collections.abc import Mapping, Set

from disagg.handover import HandoverStage, PrefillHandover, Purpose
from disagg.metadata import Checksum, FirstToken, MetadataBuffers
from engine.core.plan import ItemResult, Plan, PlanItem
from engine.loop.listener import LoopListener
from engine.messages import TokenOutput
from transfer_backends.contract import Gate

KEPT = 64  # transfers that the gauges look back on


class TransferGauges:
    """Times from handing over the last chunk until all bytes landed.

    Polling makes speeds of small prompts lower bounds. Layer by layer they may exceed the wire's:
    most of the last chunk left before.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._bootstraps: deque[float] = deque(maxlen=KEPT)

    def bootstrapped(self, taken_s: float) -> None:
        """Record that decode's pages were known `taken_s` after arrival."""
        self._bootstraps.append(taken_s)

    def landed(self, *, size_bytes: int, taken_s: float) -> None:
        self._recent.append((size_bytes, max(taken_s, 1e-9)))

    def values(self) -> dict[str, float]:
        waits = self._bootstraps
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


class PageSender:
    """Computed prompts without a metadata row, and transfer gauges."""

    def __init__(
        self,
        metadata: MetadataBuffers,
        *,
        page_size: int,
        page_bytes: int,
        checksum: Checksum | None = None,
        layerwise: bool = False,
        least_bytes: int = 0,
    ) -> None:
        """Send `checksum` of pages. Less than `least_bytes` waits, unless `layerwise`."""
        self.metadata = metadata
        self.layerwise = layerwise
        self.gauges = TransferGauges()
        self.counters: Counter[str] = Counter()
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._checksum = checksum
        self._least_pages = max(1, least_bytes // page_bytes)
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
        size, request = self._page_size, handover.request
        end = len(request.pages) if item.kv_len >= request.handed_tokens else item.kv_len // size
        cached = min(item.start // size, end)
        there = next((i for i in range(handover.sent_pages, cached) if request.pages[i] in loaded), cached)
        for until, by_layer in ((there, False), (end, True)):
            if until > handover.sent_pages:
                pages, gate = request.pages[handover.sent_pages : until], Gate(step, by_layer)
                handover.sender.send(pages, start=handover.sent_pages, gate=gate)
                handover.sent_pages = until
                handover.last_pages = len(pages)

    def send_whole_pages(self, handover: PrefillHandover) -> None:
        request, sent = handover.request, handover.sent_pages
        whole = request.computed_len // self._page_size
        complete = request.computed_len >= request.handed_tokens
        if handover.stage is HandoverStage.COMPUTING and not complete and whole - sent >= self._least_pages:
            handover.sender.send(request.pages[sent:whole], start=sent)
            handover.sent_pages = whole

    def add_computed(self, handover: PrefillHandover, output: TokenOutput, first: ItemResult) -> None:
        if self._checksum is not None and handover.stage is HandoverStage.COMPUTING:
            pages, num_tokens = handover.request.pages[handover.sender.skip_pages :], handover.request.handed_tokens
            handover.checksum = self._checksum(pages, handover.tail, num_tokens)
        self._computed.append((handover, output, first))

    def send_computed(self, now_s: float) -> None:
        """Send last chunks with metadata rows, in order of completion.

        They wait for a free row and for the device's checksum.
        """
        while self._computed:
            handover, output, first = self._computed[0]
            if handover.stage is HandoverStage.COMPUTING:
                if handover.checksum is not None and handover.checksum() is None:
                    return
                handover.metadata_row = self.metadata.allocate()
                if handover.metadata_row is None:
                    return
                handover.answer = output
                self._write_row(handover, handover.metadata_row, first)
                self._send_last(handover, now_s)
            self._computed.pop(0)

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

    def _send_last(self, handover: PrefillHandover, now_s: float) -> None:
        rest = handover.request.pages[handover.sent_pages :]
        handover.sender.send(rest, start=handover.sent_pages, metadata_row=handover.metadata_row, tail=handover.tail)
        handover.sent_pages += len(rest)
        handover.stage = HandoverStage.TRANSFER
        handover.last_pages, handover.last_sent_s = len(rest) or handover.last_pages, now_s

    def on_landed(self, handover: PrefillHandover, now_s: float) -> None:
        """Count work for decode, and moves."""
        if handover.purpose is Purpose.RECOMPUTE:
            self.counters["recomputed"] += 1
            self.counters["recomputed_tokens"] += handover.request.handed_tokens - handover.request.cached_tokens
        if not handover.moves_bytes:
            return
        skip = handover.sender.skip_pages
        moved = handover.sent_pages - skip
        size_bytes = min(handover.last_pages, moved) * self._page_bytes
        self.gauges.landed(size_bytes=size_bytes, taken_s=now_s - handover.last_sent_s)
        self.counters["kv_transfers"] += 1
        self.counters["kv_sent_bytes"] += moved * self._page_bytes
        self.counters["kv_skipped_bytes"] += skip * self._page_bytes


class LaunchedPages(LoopListener):
    """Sends pages of `handovers` at the launch of their step."""

    def __init__(self, pages: PageSender, handovers: Mapping[str, PrefillHandover]) -> None:
        self._pages = pages
        self._handovers = handovers

    def on_launch(self, plan: Plan, now_s: float) -> None:
        self._pages.send_launched(plan, self._handovers)
