"""Prefixes that a prefill worker gets from another one, for requests that wait for them.

    begin -> WAITING --handshake, memory--> TRANSFER --Success--> the tree has them: the requests find them there
                 \\________ Failed, too late, no memory: the requests go on, and compute _______/
                                   |
                pages that the source may still write: quarantined until the receiver is drained

A *carrier*, a request without a client, has the pages meanwhile: of all whole pages of the prompt, as the source may have more than
the router knows. Requests with the same beginning wait for one fetch. The engine computes others meanwhile. Of a prompt with images the
text before the first comes.

The room is that of the request whose router named the source, under an attempt that no other transfer of the room has.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from disagg.fetch_policy import FetchPolicy
from disagg.handover import DecodeHandover, HandoverStage, Receivers
from disagg.metadata import Checksum, FirstToken, KVCorrupt, MetadataBuffers, MetadataCorrupt
from disagg.quarantine import Quarantine
from disagg.recompute import NOTHING
from engine.core.memory import match_limit
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.messages import PrefixSource
from transfer_backends.contract import Route, Work
from transfer_backends.kvpoll import KVPoll, RoomInUse

log = logging.getLogger(__name__)

FETCH_ATTEMPT = 2**31 - 1  # decode's are numbers of retractions
MOST_FETCHES = 8  # at a time: more prompts than that are better computed meanwhile


@dataclass(slots=True, eq=False, kw_only=True)
class Fetch(DecodeHandover):
    """`request` is the carrier. `waiting`: those that get the prefix, by rid. `num_known`: tokens that the source has, as the router knows.

    `until_s`: then it is too late. `given_s`: when the source was told of the pages; None: not yet.
    """

    waiting: dict[str, Request] = field(default_factory=dict)
    num_known: int
    until_s: float
    given_s: float | None = None

    @property
    def num_shared(self) -> int:
        """Pages at its front that were cached here."""
        return self.request.shared_pages


class PrefixFetches:
    """Owns carriers from `begin` until their memory is the tree's, free, or in quarantine."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        manager: Receivers,
        metadata: MetadataBuffers,
        policy: FetchPolicy,
        checksum: Checksum | None = None,
    ) -> None:
        """`checksum`: of what lands, compared with the source's."""
        self._scheduler = scheduler
        self._manager = manager
        self._metadata = metadata
        self._policy = policy
        self._checksum = checksum
        self._fetches: dict[str, Fetch] = {}  # by the carrier's rid, in order of arrival
        self._copies: dict[str, Request] = {}  # those that a router asked for, by rid
        self._quarantine = Quarantine(scheduler=scheduler, metadata=metadata)
        self._page_size = scheduler.memory.allocator.page_size
        self.counters: Counter[str] = Counter()

    def begin(self, request: Request, source: PrefixSource | None, now_s: float) -> None:
        """Have `request` wait for its prefix, if that is worth it. `source`: the worker that has it; None: none is known."""
        if request.adapter or not request.keep_kv:
            return
        if (fetch := self._same(request)) is not None:
            self._wait(request, fetch)
        elif source is not None and request.bootstrap is not None:
            self._open(request, request.bootstrap.room, source, now_s)

    def begin_copy(self, request: Request, now_s: float) -> bool:
        """Get the prefix of `request` for later ones, whose requests need not wait; False: it cannot be had, or is not worth it."""
        self.begin(request, request.prefix_source, now_s)
        if request.arriving:
            self._copies[request.rid] = request
        return request.arriving

    def end_copy(self, rid: str) -> Request | None:
        """Return the request of a copy that is given up; None: there is none of this name."""
        request = self._copies.pop(rid, None)
        if request is not None:
            self.leave(request)
        return request

    def take_ended_copies(self) -> list[Request]:
        ended = [request for request in self._copies.values() if not request.arriving]
        self._copies = {rid: request for rid, request in self._copies.items() if request.arriving}
        return ended

    def leave(self, request: Request) -> None:
        """The client of `request` is gone. A fetch for it alone ends."""
        for fetch in list(self._fetches.values()):
            if fetch.waiting.pop(request.rid, None) is not None and not fetch.waiting:
                self._end(fetch, "aborted", "the client has gone")

    def poll(self, now_s: float) -> None:
        self._quarantine.end_drained()
        for fetch in list(self._fetches.values()):
            self._move(fetch, now_s)

    def end_all(self, why: str) -> None:
        for fetch in list(self._fetches.values()):
            self._end(fetch, "aborted", why)

    # ---- the beginning

    def _same(self, request: Request) -> Fetch | None:
        """Return a fetch under way that brings the beginning of `request`."""
        for fetch in self._fetches.values():
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
        wait_s = find_wait_s(num_known - cached, now_s)
        if wait_s is None or len(self._fetches) >= MOST_FETCHES:
            self.counters["prefix_fetches_forgone"] += 1
            return
        carrier = carrier_of(tokens, request.namespace, rid=f"fetch-{room}", now_s=now_s)
        route = Route(control=source.control, incarnation=source.incarnation, shared=True)
        try:
            receiver = self._manager.receiver(room, bootstrap="", room_attempt=FETCH_ATTEMPT, route=route)
        except (RoomInUse, ValueError):  # a router of another make chose it
            self.counters["prefix_fetches_forgone"] += 1
            return
        if self._scheduler.held.carry(carrier) is not None:  # too many requests live
            receiver.abort("the worker is full")
            receiver.close()
            return
        fetch = Fetch(carrier, room, moves_bytes=True, receiver=receiver, num_known=num_known, until_s=now_s + wait_s)
        self._fetches[carrier.rid] = fetch
        self.counters["prefix_fetches"] += 1
        self._wait(request, fetch)

    def _wait(self, request: Request, fetch: Fetch) -> None:
        fetch.waiting[request.rid] = request
        request.arriving = True

    # ---- moves

    def _move(self, fetch: Fetch, now_s: float) -> None:
        state = fetch.receiver.poll()
        if state is KVPoll.Failed:
            self._end(fetch, "refused", fetch.receiver.failure() or "the transfer failed")
        elif fetch.stage is HandoverStage.TRANSFER and state is KVPoll.Success:
            self._land(fetch, now_s)
        elif now_s >= fetch.until_s:
            self._note_late(fetch, now_s)
            self._end(fetch, "late", "it takes longer than to compute the prefix")
        elif state is KVPoll.WaitingForInput and fetch.stage is HandoverStage.WAITING:
            self._give(fetch, now_s)

    def _give(self, fetch: Fetch, now_s: float) -> None:
        """Reserve memory, and name it to the source once no copy of its last owner is under way."""
        carrier, memory = fetch.request, self._scheduler.memory
        if not carrier.pages and not self._scheduler.held.reserve(carrier):
            self._end(fetch, "aborted", "there is no memory for it")
            return
        own = carrier.pages[carrier.shared_pages :]
        if not own:
            self._end(fetch, "aborted", "it was computed here meanwhile")
            return
        if not memory.is_settled(own) or (row := self._metadata.allocate()) is None:
            return
        fetch.metadata_row, fetch.stage, fetch.given_s = row, HandoverStage.TRANSFER, now_s
        work = Work(tokens=carrier.input_ids, namespace=carrier.namespace, cached=True)
        fetch.receiver.provide(own, row, skip_pages=fetch.num_shared, work=work)

    def _land(self, fetch: Fetch, now_s: float) -> None:
        carrier, num_new = fetch.request, fetch.receiver.written_pages()
        end = fetch.num_shared + num_new
        try:
            first = fetch.read_row(self._metadata, carrier.pages[fetch.num_shared : end], (), self._checksum)
        except (MetadataCorrupt, KVCorrupt) as error:
            log.error("prefix %s (room %d): %s", carrier.rid, fetch.room, error)
            self.counters["kv_checksum_failed"] += isinstance(error, KVCorrupt)
            self._end(fetch, "refused", str(error))
            return
        if first is None:
            return
        if not fits_weights(first):
            self._end(fetch, "refused", "the source computes with other weights")
            return
        assert fetch.given_s is not None
        self._policy.note_fetch(num_new * self._page_size, now_s - fetch.given_s, now_s)
        self.counters["kv_checksum_verified"] += self._checksum is not None
        self.counters["prefix_fetched"] += 1
        self.counters["prefix_fetched_tokens"] += num_new * self._page_size
        self._quarantine.close(fetch.receiver, fetch.metadata_row)
        for request in fetch.waiting.values():
            request.cached_tokens = end * self._page_size  # of a copy: others count it when they are admitted
        self._forget(fetch)
        self._scheduler.held.keep(carrier, num_pages=end)

    def _note_late(self, fetch: Fetch, now_s: float) -> None:
        if fetch.given_s is not None:
            self._policy.note_fetch(fetch.num_known, now_s - fetch.given_s, now_s)

    def _end(self, fetch: Fetch, how: str, reason: str) -> None:
        """Let those that wait compute it. Memory goes back at once, or through quarantine."""
        self.counters[f"prefix_fetches_{how}"] += 1
        log.debug("prefix %s (room %d) is computed here: %s", fetch.request.rid, fetch.room, reason)
        fetch.receiver.abort(reason)
        self._forget(fetch)
        self._quarantine.leave(fetch)
        self._scheduler.held.drop(fetch.request)

    def _forget(self, fetch: Fetch) -> None:
        del self._fetches[fetch.request.rid]
        for request in fetch.waiting.values():
            request.arriving = False

    # ---- reports

    @property
    def copies(self) -> Mapping[str, Request]:
        return self._copies

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantine)

    @property
    def num_rows(self) -> int:
        return sum(f.metadata_row is not None for f in self._fetches.values()) + self._quarantine.num_rows

    def check(self) -> None:
        self._quarantine.check()
        for fetch in self._fetches.values():
            assert fetch.request in self._scheduler.held, f"{fetch.request.rid} is not held"
            assert not any(r.finish is None and not r.arriving for r in fetch.waiting.values()), "one no longer waits"
        self._manager.check()

    def close(self) -> None:
        self._manager.close()


def _text_before_images(request: Request) -> int:
    """Count the tokens before its first image: workers name these alone to one another."""
    return request.images[0].start if request.images else request.num_tokens


def carrier_of(tokens: list[int], namespace: tuple[str, ...], *, rid: str, now_s: float) -> Request:
    """Return a request without a client, for the KV of `tokens` that another worker sends or gets."""
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
    """Whether the source computes with the weights of this worker, and without NaN."""
    return not first.other_weights and not first.result.bad and first.result.token is None
