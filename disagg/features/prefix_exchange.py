"""Both directions of --prefix-fetch at a prefill worker."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from disagg.features.prefix_fetching import FetchPolicy, PrefixFetch, PrefixFetches, carrier_of
from disagg.outgoing import Outgoing, PageSender, PrefillHandover, Purpose, Senders
from disagg.role import PeerPart
from engine.core.outputs import StepEffects, output_of, refusal, refused
from engine.core.plan import ItemResult
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.messages import FAKE_BOOTSTRAP_HOST, FinishReason, KVSource, TokenOutput
from transfer_backends.contract import RecomputeRequest

NO_COPY = refusal("the prefix is here already, or others are on their way", status=409)
NOT_COPIED = refusal("the prefix did not come: its worker has it no more, or was too slow", status=409)


# ---- sent prefixes


class PrefixServer:
    """Prefixes sent by a prefill worker to another one, from its tree without computation.

      take --locked, settled--> Outgoing, as a computed prompt --> unlocked after the last read

    Missing or excess prefixes are refused at once: the other worker computes them.
    """

    def __init__(self, *, scheduler: Scheduler, manager: Senders, pages: PageSender) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._pages = pages
        self._outgoing = Outgoing(scheduler=scheduler, pages=pages, begin=self._begin, name="prefix")
        self._unsettled: list[PrefillHandover] = []
        self._num_refused = 0

    def take(self, wanted: RecomputeRequest, now_s: float, *, refused: str | None) -> None:
        """Open a requested prefix, or refuse it for `refused`, or if nothing new is cached."""
        sender = self._manager.sender(wanted.room, room_attempt=wanted.room_attempt)
        rid = f"prefix-{wanted.room}-{wanted.room_attempt}"
        carrier = carrier_of(list(wanted.work.tokens), wanted.work.namespace, rid=rid, now_s=now_s)
        handover = PrefillHandover(carrier, wanted.room, moves_bytes=True, sender=sender, purpose=Purpose.PREFIX)
        busy = len(self) >= MAX_SERVED
        if refused is None and busy:
            refused = f"{MAX_SERVED} prefixes are being sent already"
        if refused is None and (unfit := self._scheduler.held.lend(carrier)):
            refused = unfit.message
        self._outgoing.open(handover)
        if refused is None and len(carrier.pages) <= sender.skip_pages:
            refused = f"{len(carrier.pages)} pages of it are cached, the other worker has {sender.skip_pages}"
        if refused is not None:
            self._num_refused += 1
            self._outgoing.refuse(handover, refused)

    def poll(self, now_s: float) -> None:
        self._send_settled()
        self._outgoing.poll(now_s)

    def end_all(self, why: str) -> None:
        self._outgoing.end_all(why)

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
        return {
            "prefixes_sent": sent["kv_transfers"],
            "prefix_sent_bytes": sent["kv_sent_bytes"],
            "prefixes_unsent": failed,
            "prefixes_refused": self._num_refused,
        }


class PrefixExchange(PeerPart):
    def __init__(
        self, *, fetches: PrefixFetches, server: PrefixServer, policy: FetchPolicy, source: KVSource, token_bytes: int
    ) -> None:
        """Give peers the address `source`; `token_bytes` are of KV."""
        self._source = source
        self._token_bytes = token_bytes
        self._fetches = fetches
        self._server = server
        self._policy = policy
        self._now_s = 0.0
        self._closed: str | None = None

    def answer(self, request: Request, now_s: float) -> list[TokenOutput] | None:
        """Fetch a prefix that no request needs yet, and answer at the end."""
        if request.message.prefix_source is None or not request.message.prefix_source.copy:
            return None
        if request.rid in self._fetches.copies:
            return [refused(request, refusal(f"rid: a request with id {request.rid!r} is running", status=400))]
        return [] if self._fetches.begin_copy(request, now_s) else [refused(request, NO_COPY)]

    def begin(self, request: Request, now_s: float) -> None:
        """Let a request for a decode worker wait for its prefix if fetching it pays."""
        at = request.message.bootstrap
        if not request.message.alone and at is not None and at.host != FAKE_BOOTSTRAP_HOST:
            self._fetches.begin(request, request.message.prefix_source, now_s)

    def take(self, wanted: RecomputeRequest, now_s: float) -> bool:
        """Send cached KV to another worker."""
        if wanted.work.cached:
            self._server.take(wanted, now_s, refused=self._closed)
        return wanted.work.cached

    def abort(self, rid: str, reason: FinishReason) -> list[TokenOutput] | None:
        request = self._fetches.end_copy(rid)
        self._fetches.leave(rid)
        return None if request is None else [refused(request, reason)]

    def close_to_peers(self, why: str | None) -> None:
        self._closed = why

    def end_peers_work(self, why: str) -> None:
        self._fetches.incoming.end_all(why)
        self._server.end_all(why)

    def poll(self, now_s: float) -> list[TokenOutput]:
        self._now_s = now_s
        self._fetches.incoming.poll(now_s)
        self._server.poll(now_s)
        return [_copied(request) for request in self._fetches.take_ended_copies()]

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        for request, _, _ in effects.prefilled:
            self._policy.note_prompt(request.num_tokens - request.stats.cached_tokens, request.times.prefill_s, now_s)

    # ---- reports

    @property
    def num_rows(self) -> int:
        return self._fetches.incoming.num_rows + self._server.num_rows

    @property
    def quarantined(self) -> Sequence[PrefixFetch]:
        return self._fetches.incoming.quarantined

    def waits_for_outside(self) -> bool:
        return bool(self._fetches.incoming.transfers or len(self._server))

    def queues(self) -> dict[str, int]:
        return {
            "fetching": len(self._fetches.incoming.transfers),
            "sending": len(self._server),
            "quarantined": len(self.quarantined),
        }

    def counters(self) -> Mapping[str, float]:
        return {**self._fetches.counters, **self._server.all_counters()}

    def gauges(self) -> dict[str, float]:
        return self._policy.gauges(self._now_s)

    def info(self) -> dict[str, Any]:
        named = {
            "control": self._source.control,
            "incarnation": self._source.incarnation,
            "token_bytes": self._token_bytes,
        }
        return {"prefix_source": msgspec.json.encode(named).decode()}

    def check(self) -> None:
        self._fetches.check()

    def close(self) -> None:
        self._fetches.close()


def _copied(request: Request) -> TokenOutput:
    if not request.stats.cached_tokens:
        return refused(request, NOT_COPIED)
    request.finish = FinishReason(kind="length")
    return output_of(request, [])


MAX_SERVED = 4  # at a time: they share memory bandwidth with steps
