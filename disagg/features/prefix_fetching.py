"""Prefixes fetched from another worker for waiting requests.

  begin -> a transfer --landed--> in the tree: the requests find them there
     +---- failed, late, no memory: the requests compute

A *carrier*, a request without client, reserves all full prompt pages, as the source may have more
than the router knows. Equal prefixes share a fetch. Prompts with images fetch the text before.
"""

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from disagg.features.recompute import NOTHING
from disagg.incoming import (
    Receivers,
    RequestTarget,
    RequestTransfer,
    TransferFailure,
    TransferStage,
)
from disagg.metadata import FirstToken, MetadataBuffers
from disagg.role import ReceivingPart
from engine.core.mem_cache.radix_cache import Branch
from engine.core.memory import Memory, match_limit
from engine.core.outputs import StepEffects
from engine.core.request import Request, Variant
from engine.core.scheduler import Scheduler
from engine.messages import FAKE_BOOTSTRAP_HOST, FinishReason, GenerateRequest, PrefixSource, TokenOutput
from transfer_backends.contract import Route, Tail, Work

ASSUMED_BYTES_A_S = 2e10  # before the first fetch; too slow a guess would try none, and so learn nothing
ASSUMED_LATENCY_S = 0.002
LARGE_BYTES = 4 << 20  # a smaller fetch is dominated by latency
MIN_MEASURED_TOKENS = 64  # shorter prompts measure only the time of a step
SLACK_S = 0.25  # extra wait for a handshake and a busy source
UNMEASURED_WAIT_S = 2.0  # before the first prompt
MEMORY_S = 60.0
KEPT = 32


class FetchPolicy:
    """Decision to fetch a prefix or compute it, and the maximum wait.

      fetch      latency of recent small fetches + bytes / bandwidth of recent large ones
      compute    tokens * time per token of recent prompts of about this length (a power of two)

    Fetches are forgotten after `MEMORY_S`: a slow link gets another try.
    """

    def __init__(self, *, token_bytes: float) -> None:
        self._token_bytes = token_bytes
        self._fetches = _Rate(memory_s=MEMORY_S)
        self._small_fetches = _Rate(memory_s=MEMORY_S)
        self._prompts: dict[int, _Rate] = {}  # by bits of the number of tokens

    def note_fetch(self, num_tokens: int, taken_s: float, now_s: float) -> None:
        """`taken_s`: a minimum if it timed out."""
        size_bytes = num_tokens * self._token_bytes
        if size_bytes < LARGE_BYTES:
            self._small_fetches.note(1, taken_s, now_s)
        else:
            self._fetches.note(size_bytes, max(taken_s - self._latency_s(now_s), taken_s / 2), now_s)

    def note_prompt(self, num_tokens: int, taken_s: float, now_s: float) -> None:
        if num_tokens >= MIN_MEASURED_TOKENS and taken_s > 0:
            rate = self._prompts.setdefault(num_tokens.bit_length(), _Rate(memory_s=math.inf))
            rate.note(num_tokens, taken_s, now_s)

    def wait_s(self, num_tokens: int, now_s: float) -> float | None:
        """The maximum wait, or None to compute the tokens here.

        At worst, wait and computation take twice the time.
        """
        compute_s = self.compute_s(num_tokens, now_s)
        if compute_s is None:
            return UNMEASURED_WAIT_S
        return compute_s + SLACK_S if self.fetch_s(num_tokens, now_s) < compute_s else None

    def fetch_s(self, num_tokens: int, now_s: float) -> float:
        bytes_a_s = self._fetches.a_second(now_s) or ASSUMED_BYTES_A_S
        return self._latency_s(now_s) + num_tokens * self._token_bytes / bytes_a_s

    def compute_s(self, num_tokens: int, now_s: float) -> float | None:
        bits = num_tokens.bit_length()
        nearest = min(self._prompts, key=lambda known: (abs(known - bits), known), default=None)
        tokens_a_s = None if nearest is None else self._prompts[nearest].a_second(now_s)
        return None if tokens_a_s is None else num_tokens / tokens_a_s

    def _latency_s(self, now_s: float) -> float:
        small_a_s = self._small_fetches.a_second(now_s)
        return ASSUMED_LATENCY_S if small_a_s is None else 1 / small_a_s

    def gauges(self, now_s: float) -> dict[str, float]:
        bytes_a_s = self._fetches.a_second(now_s)
        return {} if bytes_a_s is None else {"prefix_fetch_gb_s": bytes_a_s / 1e9}


class _Rate:
    def __init__(self, *, memory_s: float) -> None:
        self._memory_s = memory_s
        self._last: deque[tuple[float, float, float]] = deque(maxlen=KEPT)  # amount, seconds, when

    def note(self, amount: float, taken_s: float, now_s: float) -> None:
        self._last.append((amount, max(taken_s, 1e-6), now_s))

    def a_second(self, now_s: float) -> float | None:
        while self._last and self._last[0][2] < now_s - self._memory_s:
            self._last.popleft()
        if not self._last:
            return None
        return sum(amount for amount, _, _ in self._last) / sum(taken_s for _, taken_s, _ in self._last)


# ---- prefix fetching

log = logging.getLogger(__name__)

FETCH_ATTEMPT = 2**31 - 1  # decode's are retraction counts
MAX_FETCHES = 8  # at a time: more are better computed
COUNTED = (
    *("prefix_fetches", "prefix_fetched", "prefix_fetched_tokens"),
    *(f"prefix_fetches_{end}" for end in ("forgone", "refused", "late", "aborted")),
)


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixFetch(RequestTransfer):
    """A fetch into its carrier `request` for `waiting` requests by rid.

    `num_known`: the router's view. `given_s`: when it got pages.
    """

    waiting: dict[str, Request] = field(default_factory=dict)
    num_known: int
    memory: Memory
    given_s: float | None = None

    @property
    def end(self) -> int:
        return self.request.shared_pages + self.receiver.written_pages()

    def landed_extra(self) -> Tail:
        return self.memory.landed_extra(self.request, self.end * self.memory.allocator.page_size)


class PrefixFetches(RequestTarget[PrefixFetch], ReceivingPart):
    """Owns carriers until their memory is cached, free, or quarantined."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        manager: Receivers,
        metadata: MetadataBuffers,
        policy: FetchPolicy,
        rooms: Iterator[int],
    ) -> None:
        """`rooms`: globally unique."""
        super().__init__(scheduler, metadata, late="it takes longer than to compute the prefix")
        self._manager = manager
        self._rooms = rooms
        self._counters = self.incoming.counters
        self._counters |= dict.fromkeys(COUNTED, 0)
        self._policy = policy
        self._page_size = scheduler.memory.allocator.page_size

    def begin(self, request: Request, now_s: float) -> None:
        """Let a request with an answer wait for its prefix if fetching it pays."""
        at = request.message.bootstrap
        if not request.message.alone and (at is None or at.host != FAKE_BOOTSTRAP_HOST):
            self._fetch(request, now_s)

    def end_peers_work(self, why: str) -> None:
        self.incoming.end_all(why)

    def poll(self, now_s: float) -> list[TokenOutput]:
        self.incoming.poll(now_s)
        return []

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        for request in effects.progressed:
            if len(request.output_ids) == 1 and (started_s := request.times.started_s) is not None:
                self._policy.note_prompt(len(request.input_ids) - request.stats.cached_tokens, now_s - started_s, now_s)

    def _fetch(self, request: Request, now_s: float) -> None:
        source = request.message.prefix_source
        if not request.keep_kv:
            return
        if (fetch := self._same(request)) is not None:
            self._wait(request, fetch)
        elif source is not None:
            self._open(request, source, now_s)

    def abort(self, rid: str, reason: FinishReason) -> None:
        """Remove a request; unneeded fetches end."""
        for fetch in list(self.incoming.transfers.values()):
            if fetch.waiting.pop(rid, None) is not None and not fetch.waiting:
                self.incoming.cancel(fetch, "the client has gone")

    # ---- the beginning

    def _same(self, request: Request) -> PrefixFetch | None:
        for fetch in self.incoming.transfers.values():
            carrier = fetch.request
            known = carrier.input_ids[: fetch.num_known]
            text = _text_before_images(request)
            if request.branch == carrier.branch and len(known) <= text and request.tokens(0, len(known)) == known:
                return fetch
        return None

    def _open(self, request: Request, source: PrefixSource, now_s: float) -> None:
        num_pages = min(match_limit(request), _text_before_images(request)) // self._page_size
        tokens = request.tokens(0, num_pages * self._page_size)
        num_known = min(source.num_tokens, len(tokens))
        cached = len(self._scheduler.memory.cache.match_usable(tokens, branch=request.branch).pages) * self._page_size
        if num_known <= cached:
            return
        wait_s, busy = self._policy.wait_s(num_known - cached, now_s), len(self.incoming.transfers) >= MAX_FETCHES
        room = next(self._rooms)
        carrier = carrier_of(tokens, request.branch, rid=f"fetch-{room}", now_s=now_s)
        if wait_s is None or busy or self._scheduler.refusal(carrier) is not None:
            self._counters["prefix_fetches_forgone"] += 1
            return
        route = Route(control=source.control, incarnation=source.incarnation, shared=True)
        receiver = self._manager.receiver(room, bootstrap="", room_attempt=FETCH_ATTEMPT, route=route)
        unfit = self._scheduler.held.carry(carrier)
        assert unfit is None, unfit  # `refusal` gave none above
        fetch = PrefixFetch(
            key=carrier.rid,
            room=room,
            receiver=receiver,
            request=carrier,
            num_known=num_known,
            memory=self._scheduler.memory,
            deadline_s=now_s + wait_s,
        )
        self.incoming.begin(fetch)
        self._counters["prefix_fetches"] += 1
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
        """Reserve memory; send it after its pending copies."""
        carrier, held = fetch.request, self._scheduler.held
        if fetch.stage is TransferStage.WAITING and not self.incoming.reserve(fetch, lambda: held.reserve(carrier)):
            return self.incoming.cancel(fetch, "there is no memory for it")
        own = carrier.pages[carrier.shared_pages :]
        if not own:
            return self.incoming.cancel(fetch, "it was computed here meanwhile")
        if self._scheduler.lower_tier.is_settled(own, state=carrier.recurrent.slot):
            fetch.given_s = self.incoming.now_s
            fetch.tail = self._scheduler.memory.tail(carrier, carrier.num_tokens)
            work = Work(tokens=carrier.input_ids, cached=True, **carrier.branch._asdict())
            self.incoming.provide(fetch, own, skip_pages=carrier.shared_pages, work=work)

    def landed(self, fetch: PrefixFetch, first: FirstToken) -> str:
        if not fits_weights(first):
            return "the source computes with other weights"
        end = fetch.end
        num_new = end - fetch.request.shared_pages
        self._note_fetch(fetch, num_new * self._page_size)
        self._counters["prefix_fetched"] += 1
        self._counters["prefix_fetched_tokens"] += num_new * self._page_size
        for request in fetch.waiting.values():
            request.arriving = False
        self._scheduler.held.keep(fetch.request, num_pages=end)
        return ""

    def _note_fetch(self, fetch: PrefixFetch, num_tokens: int) -> None:
        if fetch.given_s is not None:
            self._policy.note_fetch(num_tokens, self.incoming.now_s - fetch.given_s, self.incoming.now_s)

    def failed(self, fetch: PrefixFetch, failure: TransferFailure, reason: str) -> None:
        if failure is TransferFailure.LATE:
            self._note_fetch(fetch, fetch.num_known)
        elif failure is TransferFailure.CORRUPT:
            log.error("prefix %s (room %d): %s", fetch.key, fetch.room, reason)
        self._counters[f"prefix_fetches_{failure.counted}"] += 1
        log.debug("prefix %s (room %d) is computed here: %s", fetch.key, fetch.room, reason)
        for request in fetch.waiting.values():
            request.arriving = False
        self._scheduler.held.drop(fetch.request)

    # ---- reports

    def queues(self) -> dict[str, int]:
        return {"fetching": len(self.incoming.transfers), "quarantined": len(self.quarantined)}

    def counters(self) -> Mapping[str, float]:
        return self._counters

    def gauges(self) -> dict[str, float]:
        return self._policy.gauges(self.incoming.now_s)

    def check(self) -> None:
        for fetch in self.incoming.transfers.values():
            assert fetch.request in self._scheduler.held, f"{fetch.key} is not held"
            assert not any(r.finish is None and not r.arriving for r in fetch.waiting.values()), "one no longer waits"
        self.incoming.check()


def _text_before_images(request: Request) -> int:
    return request.images[0].start if request.images else request.num_tokens


def carrier_of(tokens: list[int], branch: Branch, *, rid: str, now_s: float) -> Request:
    return Request(
        message=GenerateRequest(rid, tokens, NOTHING, namespace=branch.namespace),
        variant=Variant(digest=branch.variant),
        arrived_s=now_s,
        prefill_only=True,
        admitted=True,
    )


def fits_weights(first: FirstToken) -> bool:
    """Weights are equal, and there is no NaN."""
    return not first.other_weights and not first.result.bad and first.result.token is None
