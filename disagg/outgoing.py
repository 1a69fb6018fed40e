"""KV sent to another worker, from the peer's page indices until no operation reads the pages.

  open -> WAITING --indices here--> COMPUTING --last chunk sent--> TRANSFER
      --Success--> ENDING -> gone
  any --Failed, abort, timeout: `end`--> ENDING (memory back)

Both roles use it: prefill then computes the prompt, decode has the KV.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from disagg.handover import HandoverStage, PrefillHandover
from disagg.page_sender import PageSender
from engine.core.outputs import output_of, refused
from engine.core.scheduler import Scheduler
from engine.messages import FinishReason, TokenOutput
from transfer_backends.contract import ABORTED_BY_DECODE
from transfer_backends.kvpoll import KVPoll

log = logging.getLogger(__name__)


class Outgoing:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pages: PageSender,
        begin: Callable[[PrefillHandover, float], list[TokenOutput]],
        name: str,
        may_begin: Callable[[PrefillHandover], bool] = lambda handover: True,
    ) -> None:
        """`begin` gets requests with known peer pages, and may refuse them by outputs."""
        self._scheduler = scheduler
        self._pages = pages
        self._begin = begin
        self._may_begin = may_begin
        self._name = name
        self._handovers: dict[str, PrefillHandover] = {}
        self.counters: Counter[str] = Counter()

    @property
    def handovers(self) -> Mapping[str, PrefillHandover]:
        return self._handovers

    def open(self, handover: PrefillHandover) -> None:
        assert handover.request.rid not in self._handovers
        self._handovers[handover.request.rid] = handover

    def poll(self, now_s: float) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        for handover in list(self._handovers.values()):
            outputs += handover.for_client(self._move(handover, now_s))
        self._pages.send_computed(now_s)
        return outputs

    def abort(self, handover: PrefillHandover, reason: FinishReason) -> list[TokenOutput]:
        """End a hand-over here and at the peer."""
        if handover.stage is HandoverStage.ENDING:
            return []
        handover.sender.abort(reason.message)
        return handover.for_client(self._end(handover, reason))

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
            return self._on_pages(handover, now_s) if self._may_begin(handover) else []
        elif handover.stage is HandoverStage.TRANSFER and state is KVPoll.Success:
            assert handover.answer is not None
            handover.stage = HandoverStage.ENDING
            self._pages.on_landed(handover, now_s)
            self._forget_when_released(handover)
            return [handover.answer]
        return []

    def _on_pages(self, handover: PrefillHandover, now_s: float) -> list[TokenOutput]:
        request, sender = handover.request, handover.sender
        skip = sender.skip_pages
        need = self._scheduler.memory.allocator.pages_for(request.handed_tokens) - skip
        if not handover.fills(sender.num_pages, need):
            besides = f" besides {skip} that decode has" * bool(skip)
            sender.abort(f"decode gave {sender.num_pages} pages, the prompt needs {need}{besides}")
            return self._fail(handover)
        if handover.for_prompt:
            self._pages.gauges.bootstrapped(now_s - request.arrived_s)
        handover.stage = HandoverStage.COMPUTING
        outputs = self._begin(handover, now_s)
        if outputs:  # the queue filled up meanwhile
            sender.abort(outputs[0].finish.message if outputs[0].finish else "refused")
            handover.stage = HandoverStage.ENDING
        return outputs

    def _fail(self, handover: PrefillHandover) -> list[TokenOutput]:
        waiting = handover.stage is HandoverStage.WAITING
        self.counters["bootstrap_failed" if waiting else "transfer_failed"] += 1
        reason = handover.sender.failure() or "the transfer failed"
        rid, room = handover.request.rid, handover.room
        log.warning("%s %s (room %d) failed: %s", self._name, rid, room, reason, extra=handover.log_fields)
        # Decode answers with the real reason, perhaps load or lateness: ours must not make it a
        # fault.
        status = 503 if reason.startswith(ABORTED_BY_DECODE) else 500
        return self._end(handover, FinishReason(kind="abort", message=f"KV transfer: {reason}", status=status))

    def _end(self, handover: PrefillHandover, reason: FinishReason) -> list[TokenOutput]:
        """Answer with `reason` now; free memory once no peer reads it."""
        request, stage = handover.request, handover.stage
        handover.stage = HandoverStage.ENDING
        if stage is HandoverStage.WAITING:
            outputs = [refused(request, reason)]
        elif request.finish is None and (outputs := self._scheduler.abort(request.rid, reason)):
            pass
        elif request.finish is None:  # its last chunk is in a step
            outputs = [self._scheduler.held.end(request, reason)]
        else:  # computed: its answer waited for this
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

    def count(self) -> Counter[HandoverStage]:
        return Counter(handover.stage for handover in self._handovers.values())

    @property
    def num_rows(self) -> int:
        return sum(h.metadata_row is not None for h in self._handovers.values())
