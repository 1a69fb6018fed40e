"""Prefixes sent by a prefill worker to another one, from its tree without computation.

  take --locked, settled--> Outgoing, as a computed prompt --> unlocked after the last read

Missing or excess prefixes are refused at once: the other worker computes them.
"""

from collections import Counter

from disagg.handover import PrefillHandover, Purpose, Senders
from disagg.outgoing import Outgoing
from disagg.page_sender import PageSender
from disagg.prefix_fetching import carrier_of
from engine.core.outputs import output_of
from engine.core.plan import ItemResult
from engine.core.scheduler import Scheduler
from engine.messages import FinishReason, TokenOutput
from transfer_backends.contract import RecomputeRequest

MOST_SERVED = 4  # at a time: they share memory bandwidth with steps


class PrefixServer:
    def __init__(self, *, scheduler: Scheduler, manager: Senders, pages: PageSender) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._pages = pages
        self._outgoing = Outgoing(scheduler=scheduler, pages=pages, begin=self._begin, name="prefix")
        self._unsettled: list[PrefillHandover] = []
        self.counters: Counter[str] = Counter()

    def take(self, wanted: RecomputeRequest, now_s: float, *, refused: str | None) -> None:
        """Open a requested prefix, or refuse it for `refused`, or if nothing new is cached."""
        sender = self._manager.sender(wanted.room, room_attempt=wanted.room_attempt)
        rid = f"prefix-{wanted.room}-{wanted.room_attempt}"
        carrier = carrier_of(list(wanted.work.tokens), wanted.work.namespace, rid=rid, now_s=now_s)
        handover = PrefillHandover(carrier, wanted.room, moves_bytes=True, sender=sender, purpose=Purpose.PREFIX)
        busy = len(self) >= MOST_SERVED
        if refused is None and busy:
            refused = f"{MOST_SERVED} prefixes are being sent already"
        if refused is None and (unfit := self._scheduler.held.lend(carrier)):
            refused = unfit.message
        self._outgoing.open(handover)
        if refused is None and len(carrier.pages) <= sender.skip_pages:
            refused = f"{len(carrier.pages)} pages of it are cached, the other worker has {sender.skip_pages}"
        if refused is not None:
            self.counters["prefixes_refused"] += 1
            self._outgoing.refuse(handover, refused)

    def poll(self, now_s: float) -> None:
        self._send_settled()
        self._outgoing.poll(now_s)

    def end_all(self, why: str) -> None:
        for handover in list(self._outgoing.handovers.values()):
            self._outgoing.abort(handover, FinishReason(kind="abort", message=why))

    def _begin(self, handover: PrefillHandover, now_s: float) -> list[TokenOutput]:
        self._unsettled.append(handover)
        self._send_settled()
        return []

    def _send_settled(self) -> None:
        """Pages still being filled from the host are empty."""
        for handover in list(self._unsettled):
            if self._scheduler.lower_tier.is_settled(handover.request.pages):
                self._unsettled.remove(handover)
                self._pages.add_computed(handover, output_of(handover.request, []), ItemResult(token=None))

    # ---- reports

    def __len__(self) -> int:
        return len(self._outgoing.handovers)

    @property
    def num_rows(self) -> int:
        return self._outgoing.num_rows

    def all_counters(self) -> dict[str, float]:
        failed, sent = sum(self._outgoing.counters.values()), self._pages.counters
        moved = {"prefixes_sent": sent["kv_transfers"], "prefix_sent_bytes": sent["kv_sent_bytes"]} if sent else {}
        return {**self.counters, **moved, **({"prefixes_unsent": failed} if failed else {})}
