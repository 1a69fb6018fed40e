"""Prefixes sent to another worker (--prefix-fetch)."""

from typing import Any

import msgspec

from disagg.features.prefix_fetching import carrier_of
from disagg.outgoing import Outgoing, PageSender, PrefillHandover, Purpose, Senders
from disagg.role import PeerPart, SendingPart
from engine.core.mem_cache.radix_cache import Branch
from engine.core.outputs import output_of
from engine.core.plan import ItemResult
from engine.core.scheduler import Scheduler
from engine.messages import KVSource, TokenOutput
from transfer_backends.contract import RecomputeRequest

MAX_SERVED = 4  # at a time: they share memory bandwidth with steps


class PrefixRequests(PeerPart):
    """Takes peers' requests for `server`, on a worker that has no others."""

    def __init__(self, manager: Senders, server: "PrefixServer") -> None:
        self._manager = manager
        self._server = server

    def poll(self, now_s: float) -> list[TokenOutput]:
        for wanted in self._manager.take_recompute_requests():
            taken = self._server.take(wanted, now_s)
            assert taken, f"room {wanted.room}: the manager accepts prefixes alone"
        return []


class PrefixServer(SendingPart):
    """Sends prefixes from its tree, without computation.

      take --locked, settled--> Outgoing, as a computed prompt --> unlocked after the last read

    Missing or excess prefixes are refused at once.
    """

    def __init__(
        self, *, scheduler: Scheduler, manager: Senders, pages: PageSender, source: KVSource, token_bytes: int
    ) -> None:
        """`token_bytes`: of KV."""
        super().__init__(Outgoing(scheduler=scheduler, pages=pages, begin=self._begin, name="prefix"))
        self._scheduler = scheduler
        self._manager = manager
        self._pages = pages
        self._unsettled: list[PrefillHandover] = []
        named = {"control": source.control, "incarnation": source.incarnation, "token_bytes": token_bytes}
        self._named = msgspec.json.encode(named).decode()

    def take(self, wanted: RecomputeRequest, now_s: float) -> bool:
        """Refuse it if nothing new is cached."""
        if not wanted.work.cached:
            return False
        sender = self._manager.sender(wanted.room, room_attempt=wanted.room_attempt)
        rid = f"prefix-{wanted.room}-{wanted.room_attempt}"
        branch = Branch(wanted.work.variant, wanted.work.namespace)
        carrier = carrier_of(list(wanted.work.tokens), branch, rid=rid, now_s=now_s)
        handover = PrefillHandover(carrier, wanted.room, moves_bytes=True, sender=sender, purpose=Purpose.PREFIX)
        refused = self._closed
        if refused is None and len(self) >= MAX_SERVED:
            refused = f"{MAX_SERVED} prefixes are being sent already"
        if refused is None and (unfit := self._scheduler.held.lend(carrier)):
            refused = unfit.message
        self._outgoing.open(handover)
        if refused is None and len(carrier.pages) <= sender.skip_pages:
            refused = f"{len(carrier.pages)} pages of it are cached, the other worker has {sender.skip_pages}"
        if refused is not None:
            self._num_refused += 1
            self._outgoing.refuse(handover, refused)
        return True

    def poll(self, now_s: float) -> list[TokenOutput]:
        self._send_settled()
        return super().poll(now_s)

    def _begin(self, handover: PrefillHandover, now_s: float) -> list[TokenOutput]:
        self._unsettled.append(handover)
        self._send_settled()
        return []

    def _send_settled(self) -> None:
        """Pages still being filled from the host are empty."""
        for handover in list(self._unsettled):
            if self._scheduler.lower_tier.is_settled(handover.request.pages):
                self._unsettled.remove(handover)
                handover.tail = self._scheduler.memory.tail(handover.request, handover.request.handed_tokens)
                self._pages.add_computed(handover, output_of(handover.request, []), ItemResult(token=None))

    # ---- reports

    def __len__(self) -> int:
        return len(self._outgoing.handovers)

    def queues(self) -> dict[str, int]:
        return {"sending": len(self)}

    def info(self) -> dict[str, Any]:
        return {"prefix_source": self._named}

    def counters(self) -> dict[str, float]:
        failed, sent = sum(self._outgoing.counters.values()), self._pages.counters
        return {
            "prefixes_sent": sent["kv_transfers"],
            "prefix_sent_bytes": sent["kv_sent_bytes"],
            "prefixes_unsent": failed,
            "prefixes_refused": self._num_refused,
        }
