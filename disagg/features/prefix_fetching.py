"""Prefixes fetched by a prefill worker from another one for waiting requests.

  begin -> a transfer --landed--> in the tree: the requests find them there
     +---- failed, late, no memory: the requests compute

A *carrier*, a request without client, reserves all full prompt pages, as the source may have more
than the router knows. Equal prefixes share a fetch. Prompts with images fetch the text before.

The room is that of the request whose router named the source, with a unique attempt.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
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
from engine.core.memory import match_limit
from engine.core.outputs import StepEffects, output_of, refusal, refused
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.messages import FAKE_BOOTSTRAP_HOST, FinishReason, GenerateRequest, PrefixSource, TokenOutput
from transfer_backends.contract import Route, Work
from transfer_backends.sides import RoomInUse

ASSUMED_BYTES_A_S = 1e9  # before the first fetch: TCP on a good network, or a copy inside a small machine
ASSUMED_LATENCY_S = 0.01
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

    def copy_wait_s(self, num_tokens: int, now_s: float) -> float:
        """Maximum time of a copy, which no request waits for."""
        return UNMEASURED_WAIT_S + self.fetch_s(num_tokens, now_s)

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
    """Rate over the last `KEPT` samples in `memory_s`."""

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

NO_COPY = refusal("the prefix is here already, or others are on their way", status=409)
NOT_COPIED = refusal("the prefix did not come: its worker has it no more, or was too slow", status=409)
FETCH_ATTEMPT = 2**31 - 1  # decode's are retraction counts
MAX_FETCHES = 8  # at a time: more are better computed
COUNTED = (
    *("prefix_fetches", "prefix_fetched", "prefix_fetched_tokens"),
    *(f"prefix_fetches_{end}" for end in ("forgone", "refused", "late", "aborted")),
)


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixFetch(RequestTransfer):
    """A fetch into its carrier `request` for `waiting` requests by rid.

    `num_known`: source tokens by the router. `given_s`: when it got pages.
    """

    waiting: dict[str, Request] = field(default_factory=dict)
    num_known: int
    given_s: float | None = None


class PrefixFetches(RequestTarget[PrefixFetch], ReceivingPart):
    """Owns carriers until their memory is the tree's, free, or quarantined."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        manager: Receivers,
        metadata: MetadataBuffers,
        policy: FetchPolicy,
    ) -> None:
        super().__init__(scheduler, metadata, late="it takes longer than to compute the prefix")
        self._manager = manager
        self._counters = self.incoming.counters
        self._counters |= dict.fromkeys(COUNTED, 0)
        self._policy = policy
        self._copies: dict[str, Request] = {}  # requested by routers, by rid
        self._page_size = scheduler.memory.allocator.page_size

    def answer(self, request: Request, now_s: float) -> list[TokenOutput]:
        """Fetch a prefix that no request needs yet, and answer at the end."""
        if request.rid in self._copies:
            return [refused(request, refusal(f"rid: a request with id {request.rid!r} is running", status=400))]
        self._fetch(request, now_s)
        if not request.arriving:
            return [refused(request, NO_COPY)]
        self._copies[request.rid] = request
        return []

    def begin(self, request: Request, now_s: float) -> None:
        """Let a request for a decode worker wait for its prefix if fetching it pays."""
        at = request.message.bootstrap
        if not request.message.alone and at is not None and at.host != FAKE_BOOTSTRAP_HOST:
            self._fetch(request, now_s)

    def abort(self, rid: str, reason: FinishReason) -> list[TokenOutput] | None:
        request = self._copies.pop(rid, None)
        self.leave(rid)
        return None if request is None else [refused(request, reason)]

    def end_peers_work(self, why: str) -> None:
        self.incoming.end_all(why)

    def poll(self, now_s: float) -> list[TokenOutput]:
        self.incoming.poll(now_s)
        ended = [request for request in self._copies.values() if not request.arriving]
        for request in ended:
            del self._copies[request.rid]
        return [_copied(request) for request in ended]

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        for request, _, _ in effects.prefilled:
            self._policy.note_prompt(request.num_tokens - request.stats.cached_tokens, request.times.prefill_s, now_s)

    def _fetch(self, request: Request, now_s: float) -> None:
        source = request.message.prefix_source
        if request.adapter or not request.keep_kv:
            return
        if (fetch := self._same(request)) is not None:
            self._wait(request, fetch)
        elif source is not None and request.message.bootstrap is not None:
            self._open(request, request.message.bootstrap.room, source, now_s)

    def leave(self, rid: str) -> None:
        """Remove a request without client; unneeded fetches end."""
        for fetch in list(self.incoming.transfers.values()):
            if fetch.waiting.pop(rid, None) is not None and not fetch.waiting:
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
        wait_s, busy = find_wait_s(num_known - cached, now_s), len(self.incoming.transfers) >= MAX_FETCHES
        carrier = carrier_of(tokens, request.message.namespace, rid=f"fetch-{room}", now_s=now_s)
        if wait_s is None or busy or self._scheduler.refusal(carrier) is not None:
            self._counters["prefix_fetches_forgone"] += 1
            return
        route = Route(control=source.control, incarnation=source.incarnation, shared=True)
        try:
            receiver = self._manager.receiver(room, bootstrap="", room_attempt=FETCH_ATTEMPT, route=route)
        except (RoomInUse, ValueError):  # named by an incompatible router
            self._counters["prefix_fetches_forgone"] += 1
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
        """Reserve memory; send it to the source after pending copies of its last owner."""
        carrier, held = fetch.request, self._scheduler.held
        if fetch.stage is TransferStage.WAITING and not self.incoming.reserve(fetch, lambda: held.reserve(carrier)):
            return self.incoming.cancel(fetch, "there is no memory for it")
        own = carrier.pages[carrier.shared_pages :]
        if not own:
            return self.incoming.cancel(fetch, "it was computed here meanwhile")
        if self._scheduler.lower_tier.is_settled(own):
            fetch.given_s = self.incoming.now_s
            work = Work(tokens=carrier.input_ids, namespace=carrier.message.namespace, cached=True)
            self.incoming.provide(fetch, own, skip_pages=carrier.shared_pages, work=work)

    def landed(self, fetch: PrefixFetch, first: FirstToken) -> str:
        if not fits_weights(first):
            return "the source computes with other weights"
        num_new = fetch.receiver.written_pages()
        end = fetch.request.shared_pages + num_new
        self._note_fetch(fetch, num_new * self._page_size)
        self._counters["prefix_fetched"] += 1
        self._counters["prefix_fetched_tokens"] += num_new * self._page_size
        for request in fetch.waiting.values():
            request.stats.cached_tokens = end * self._page_size  # of a copy: others count when admitted
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
        return {**self._manager.counters, **self._counters}

    def gauges(self) -> dict[str, float]:
        return self._policy.gauges(self.incoming.now_s)

    def check(self) -> None:
        for fetch in self.incoming.transfers.values():
            assert fetch.request in self._scheduler.held, f"{fetch.key} is not held"
            assert not any(r.finish is None and not r.arriving for r in fetch.waiting.values()), "one no longer waits"
        self.incoming.check()
        self._manager.check()

    def close(self) -> None:
        self._manager.close()


def _copied(request: Request) -> TokenOutput:
    if not request.stats.cached_tokens:
        return refused(request, NOT_COPIED)
    request.finish = FinishReason(kind="length")
    return output_of(request, [])


def _text_before_images(request: Request) -> int:
    return request.images[0].start if request.images else request.num_tokens


def carrier_of(tokens: list[int], namespace: tuple[str, ...], *, rid: str, now_s: float) -> Request:
    """A request without client for KV of `tokens`."""
    return Request(
        message=GenerateRequest(rid, tokens, NOTHING, namespace=namespace),
        arrived_s=now_s,
        prefill_only=True,
        admitted=True,
    )


def fits_weights(first: FirstToken) -> bool:
    """Weights are equal, and there is no NaN."""
    return not first.other_weights and not first.result.bad and first.result.token is None
