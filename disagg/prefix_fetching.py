"""Prefixes fetched by a prefill worker from another one for waiting requests.

  begin -> a transfer --landed--> in the tree: the requests find them there
     +---- failed, late, no memory: the requests compute

A *carrier*, a request without client, reserves all full prompt pages, as the source may have more
than the router knows. Equal prefixes share a fetch. Prompts with images fetch the text before.

The room is that of the request whose router named the source, with a unique attempt.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from disagg.fetch_policy import FetchPolicy
from disagg.incoming import (
    Receivers,
    RequestTarget,
    RequestTransfer,
    TransferFailure,
    TransferStage,
    check_quarantine,
)
from disagg.metadata import Checksum, FirstToken, MetadataBuffers
from disagg.recompute import NOTHING
from engine.core.memory import match_limit
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.messages import PrefixSource
from transfer_backends.contract import Route, Work
from transfer_backends.kvpoll import RoomInUse

log = logging.getLogger(__name__)

FETCH_ATTEMPT = 2**31 - 1  # decode's are retraction counts
MOST_FETCHES = 8  # at a time: more are better computed


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixFetch(RequestTransfer):
    """A fetch into its carrier `request` for `waiting` requests by rid.

    `num_known`: source tokens by the router. `given_s`: when it got pages.
    """

    waiting: dict[str, Request] = field(default_factory=dict)
    num_known: int
    given_s: float | None = None


class PrefixFetches(RequestTarget[PrefixFetch]):
    """Owns carriers until their memory is the tree's, free, or quarantined."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        manager: Receivers,
        metadata: MetadataBuffers,
        policy: FetchPolicy,
        checksum: Checksum | None = None,
    ) -> None:
        super().__init__(scheduler, metadata, checksum=checksum, late="it takes longer than to compute the prefix")
        self._manager = manager
        self.counters = self.incoming.counters
        self._policy = policy
        self._copies: dict[str, Request] = {}  # requested by routers, by rid
        self._page_size = scheduler.memory.allocator.page_size

    def begin(self, request: Request, source: PrefixSource | None, now_s: float) -> None:
        """Make `request` wait for its prefix at `source`, if worthwhile."""
        if request.adapter or not request.keep_kv:
            return
        if (fetch := self._same(request)) is not None:
            self._wait(request, fetch)
        elif source is not None and request.bootstrap is not None:
            self._open(request, request.bootstrap.room, source, now_s)

    def begin_copy(self, request: Request, now_s: float) -> bool:
        """Fetch the prefix of `request` for later ones; False: impossible or not worthwhile."""
        self.begin(request, request.prefix_source, now_s)
        if request.arriving:
            self._copies[request.rid] = request
        return request.arriving

    def end_copy(self, rid: str) -> Request | None:
        """Cancel a copy and return its request, if any."""
        request = self._copies.pop(rid, None)
        if request is not None:
            self.leave(request)
        return request

    def take_ended_copies(self) -> list[Request]:
        ended = [request for request in self._copies.values() if not request.arriving]
        self._copies = {rid: request for rid, request in self._copies.items() if request.arriving}
        return ended

    def leave(self, request: Request) -> None:
        """Remove a request without client; unneeded fetches end."""
        for fetch in list(self.incoming.transfers.values()):
            if fetch.waiting.pop(request.rid, None) is not None and not fetch.waiting:
                self.incoming.cancel(fetch, "the client has gone")

    # ---- the beginning

    def _same(self, request: Request) -> PrefixFetch | None:
        """Find a fetch in progress for the prefix of `request`."""
        for fetch in self.incoming.transfers.values():
            carrier = fetch.request
            known = carrier.input_ids[: fetch.num_known]
            text = _text_before_images(request)
            if request.branch == carrier.branch and len(known) <= text and request.tokens(0, len(known)) == known:
                return fetch
        return None

    def _open(self, request: Request, room: int, source: PrefixSource, now_s: float) -> None:
        num_pages = min(match_limit(request), _text_before_images(request)) // self._page_size
        if source.copy:
            num_pages = min(num_pages, source.num_tokens // self._page_size)
        tokens = request.tokens(0, num_pages * self._page_size)
        num_known = min(source.num_tokens, len(tokens))
        cached = self._scheduler.memory.cache.num_cached(tokens, branch=request.branch) * self._page_size
        if num_known <= cached:
            return
        find_wait_s = self._policy.copy_wait_s if source.copy else self._policy.wait_s
        wait_s, busy = find_wait_s(num_known - cached, now_s), len(self.incoming.transfers) >= MOST_FETCHES
        carrier = carrier_of(tokens, request.namespace, rid=f"fetch-{room}", now_s=now_s)
        if wait_s is None or busy or self._scheduler.refusal(carrier) is not None:
            self.counters["prefix_fetches_forgone"] += 1
            return
        route = Route(control=source.control, incarnation=source.incarnation, shared=True)
        try:
            receiver = self._manager.receiver(room, bootstrap="", room_attempt=FETCH_ATTEMPT, route=route)
        except (RoomInUse, ValueError):  # named by an incompatible router
            self.counters["prefix_fetches_forgone"] += 1
            return
        unfit = self._scheduler.held.carry(carrier)
        assert unfit is None, unfit  # `refusal` gave none above
        fetch = PrefixFetch(
            key=carrier.rid,
            room=room,
            receiver=receiver,
            request=carrier,
            num_known=num_known,
            deadline_s=now_s + wait_s,
        )
        self.incoming.begin(fetch)
        self.counters["prefix_fetches"] += 1
        self._wait(request, fetch)

    def _wait(self, request: Request, fetch: PrefixFetch) -> None:
        fetch.waiting[request.rid] = request
        request.arriving = True

    # ---- as the target of its transfers

    def reserve(self, ready: Sequence[PrefixFetch]) -> None:
        for fetch in ready:
            if self.incoming.now_s < fetch.deadline_s:
                self._reserve(fetch)

    def _reserve(self, fetch: PrefixFetch) -> None:
        """Reserve memory; send it to the source after pending copies of its last owner."""
        carrier, held = fetch.request, self._scheduler.held
        if fetch.stage is TransferStage.WAITING and not self.incoming.reserve(fetch, lambda: held.reserve(carrier)):
            return self.incoming.cancel(fetch, "there is no memory for it")
        own = carrier.pages[carrier.shared_pages :]
        if not own:
            return self.incoming.cancel(fetch, "it was computed here meanwhile")
        if self._scheduler.lower_tier.is_settled(own):
            fetch.given_s = self.incoming.now_s
            work = Work(tokens=carrier.input_ids, namespace=carrier.namespace, cached=True)
            self.incoming.provide(fetch, own, skip_pages=carrier.shared_pages, work=work)

    def landed(self, fetch: PrefixFetch, first: FirstToken) -> str:
        if not fits_weights(first):
            return "the source computes with other weights"
        num_new = fetch.receiver.written_pages()
        end = fetch.request.shared_pages + num_new
        self._note_fetch(fetch, num_new * self._page_size)
        self.counters["prefix_fetched"] += 1
        self.counters["prefix_fetched_tokens"] += num_new * self._page_size
        for request in fetch.waiting.values():
            request.cached_tokens = end * self._page_size  # of a copy: others count when admitted
            request.arriving = False
        self._scheduler.held.keep(fetch.request, num_pages=end)
        return ""

    def _note_fetch(self, fetch: PrefixFetch, num_tokens: int) -> None:
        if fetch.given_s is not None:
            self._policy.note_fetch(num_tokens, self.incoming.now_s - fetch.given_s, self.incoming.now_s)

    def failed(self, fetch: PrefixFetch, failure: TransferFailure, reason: str) -> None:
        """Let waiting requests compute the prefix."""
        if failure is TransferFailure.LATE:
            self._note_fetch(fetch, fetch.num_known)
        elif failure is TransferFailure.CORRUPT:
            log.error("prefix %s (room %d): %s", fetch.key, fetch.room, reason)
        self.counters[f"prefix_fetches_{failure.counted}"] += 1
        log.debug("prefix %s (room %d) is computed here: %s", fetch.key, fetch.room, reason)
        for request in fetch.waiting.values():
            request.arriving = False
        self._scheduler.held.drop(fetch.request)

    # ---- reports

    @property
    def copies(self) -> Mapping[str, Request]:
        return self._copies

    def check(self) -> None:
        check_quarantine(self._scheduler.memory, self.incoming.quarantined)
        for fetch in self.incoming.transfers.values():
            assert fetch.request in self._scheduler.held, f"{fetch.key} is not held"
            assert not any(r.finish is None and not r.arriving for r in fetch.waiting.values()), "one no longer waits"
        self.incoming.check()
        self._manager.check()

    def close(self) -> None:
        self._manager.close()


def _text_before_images(request: Request) -> int:
    return request.images[0].start if request.images else request.num_tokens


def carrier_of(tokens: list[int], namespace: tuple[str, ...], *, rid: str, now_s: float) -> Request:
    """Return a request without client for KV of `tokens` from or to another worker."""
    return Request(
        rid=rid,
        input_ids=tokens,
        sampling=NOTHING,
        eos_ids=frozenset(),
        arrived_s=now_s,
        prefill_only=True,
        namespace=namespace,
        admitted=True,
    )


def fits_weights(first: FirstToken) -> bool:
    """Check for equal weights at the source, and no NaN."""
    return not first.other_weights and not first.result.bad and first.result.token is None
