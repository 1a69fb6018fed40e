"""Which pages of a prompt leave when, and the metadata row behind them. Pure: senders move the bytes.

    whole pages    when their chunk is computed, if they are many; the rest with the last chunk
    layer by layer when their chunk is launched, with a gate: the manager posts each group of layers when it is written
    metadata row   at the end either way, so nothing can pass for complete before all of it is

It owns the prompts that are computed and wait for a metadata row, and the gauges of transfers.
"""

from collections import Counter
from collections.abc import Mapping

from disagg.handover import HandoverStage, PrefillHandover
from disagg.metadata import Checksum, FirstToken, MetadataBuffers
from disagg.transfer_gauges import TransferGauges
from engine.core.plan import ItemResult, Plan, PlanItem
from engine.messages import TokenOutput
from transfer_backends.contract import Gate


class PageSender:
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
        """`checksum`: of pages, sent along with them; None: none is sent. `layerwise`: pages leave layer by layer.

        `least_bytes`: fewer do not leave before the last chunk has been computed (not layer by layer).
        """
        self.metadata = metadata
        self.layerwise = layerwise
        self.gauges = TransferGauges()
        self.counters: Counter[str] = Counter()
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._checksum = checksum
        self._least_pages = max(1, least_bytes // page_bytes)
        self._computed: list[tuple[PrefillHandover, TokenOutput, ItemResult]] = []  # in order of completion

    def on_launch(self, plan: Plan, handovers: Mapping[str, PrefillHandover]) -> None:
        """Layer by layer: hand over what the step will have written."""
        if not self.layerwise:
            return
        for item in plan.items:
            handover = handovers.get(item.rid)
            if item.extend and handover is not None and handover.stage is HandoverStage.COMPUTING:
                self._send_launched(handover, item, plan.seq)

    def _send_launched(self, handover: PrefillHandover, item: PlanItem, step: int) -> None:
        """Pages that `item` completes leave while it computes, those before them (found cached) once it has begun.

        Not sooner: what is cached may be a copy from the host tier that is still on its way, in stream order.
        """
        size, request = self._page_size, handover.request
        end = len(request.pages) if item.kv_len >= len(request.input_ids) else item.kv_len // size
        for until, by_layer in ((min(item.start // size, end), False), (end, True)):
            if until > handover.sent_pages:
                pages, gate = request.pages[handover.sent_pages : until], Gate(step, by_layer)
                handover.sender.send(pages, start=handover.sent_pages, last=False, gate=gate)
                handover.sent_pages = until
                handover.last_pages = len(pages)

    def send_whole_pages(self, handover: PrefillHandover) -> None:
        """Hand over every whole page that is computed and will not change, if they are many."""
        request, sent = handover.request, handover.sent_pages
        whole = request.computed_len // self._page_size
        complete = request.computed_len >= len(request.input_ids)
        if handover.stage is HandoverStage.COMPUTING and not complete and whole - sent >= self._least_pages:
            handover.sender.send(request.pages[sent:whole], start=sent, last=False)
            handover.sent_pages = whole

    def add_computed(self, handover: PrefillHandover, output: TokenOutput, first: ItemResult) -> None:
        """All of a prompt is computed. `output` is its answer, `first` its first token."""
        self._computed.append((handover, output, first))

    def send_computed(self, now_s: float) -> None:
        """Hand over last chunks with their metadata rows, in order of completion; without a free row they wait."""
        while self._computed:
            handover, output, first = self._computed[0]
            if handover.stage is HandoverStage.COMPUTING:
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
        sent = request.pages[handover.sender.skip_pages :]
        content = FirstToken(
            ItemResult(token=None, bad=first.bad) if handover.recompute else first,  # decode samples the next one
            cached_tokens=handover.answer.cached_tokens,
            queue_s=request.times.queue_s,
            prefill_s=request.times.prefill_s,
            kv_checksum=None if self._checksum is None else self._checksum(sent),
        )
        self.metadata.write(row, room=handover.room, first=content)

    def _send_last(self, handover: PrefillHandover, now_s: float) -> None:
        rest = handover.request.pages[handover.sent_pages :]
        handover.sender.send(rest, start=handover.sent_pages, last=True, metadata_row=handover.metadata_row)
        handover.sent_pages += len(rest)
        handover.stage = HandoverStage.TRANSFER
        handover.last_pages, handover.last_sent_s = len(rest) or handover.last_pages, now_s

    def on_landed(self, handover: PrefillHandover, now_s: float) -> None:
        """Decode has everything: count what was computed for it, and what has moved."""
        if handover.recompute:
            self.counters["recomputed"] += 1
            self.counters["recomputed_tokens"] += len(handover.request.input_ids) - handover.request.cached_tokens
        if not handover.moves_bytes:
            return
        skip = handover.sender.skip_pages
        moved = handover.sent_pages - skip
        size_bytes = min(handover.last_pages, moved) * self._page_bytes
        self.gauges.landed(size_bytes=size_bytes, taken_s=now_s - handover.last_sent_s)
        self.counters["kv_transfers"] += 1
        self.counters["kv_sent_bytes"] += moved * self._page_bytes
        self.counters["kv_skipped_bytes"] += skip * self._page_bytes
