"""Prefill workers with a longer cached prefix than the chosen one (--prefix-fetch), and copies of
hot prefixes to a second one.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric

from router.attempts.pair_attempt import AttemptLauncher, PairAttempt
from router.attempts.request import PromptCall, RequestContext
from router.body import write_bodies
from router.choice.policies import Placement, RoutingHints, load_key
from router.choice.prefix_index import PrefixIndex
from router.client.upstream import HttpReply
from router.pool.reports import Info, PrefixHolder, parse_prefix_holder
from router.pool.worker import Role, Worker
from service.http.prefix_source import PREFIX_HEADER, PrefixSourceHeader, write_header
from service.kv_events import BLOCK_TOKENS


class Holder(NamedTuple):
    """A worker with the first `num_blocks` blocks of a prompt."""

    worker: Worker
    at: PrefixHolder
    num_blocks: int

    @property
    def size_bytes(self) -> int:
        return self.num_blocks * BLOCK_TOKENS * self.at.token_bytes

    def header(self, *, copy: bool = False) -> PrefixSourceHeader:
        num_tokens = self.num_blocks * BLOCK_TOKENS
        return PrefixSourceHeader(
            control=self.at.control, incarnation=self.at.incarnation, num_tokens=num_tokens, copy=copy
        )


class PrefixSources:
    """Prefill workers that exchange prefixes, by `index`."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._workers: dict[int, tuple[Worker, PrefixHolder]] = {}

    def on_info(self, worker: Worker, info: Info) -> None:
        at = parse_prefix_holder(info)
        if at is None:
            self._workers.pop(worker.worker_id, None)
        else:
            self._workers[worker.worker_id] = worker, at

    def on_gone(self, worker: Worker) -> None:
        self._workers.pop(worker.worker_id, None)

    def exchanges(self, worker: Worker) -> bool:
        return worker.worker_id in self._workers

    def better(self, chosen: Placement, hints: RoutingHints) -> Holder | None:
        """The longest match, if a block longer than the chosen worker's."""
        if not hints.keys or not self.exchanges(chosen.worker):
            return None
        found = self.holders(hints, like=chosen.worker)
        best = max(found, key=lambda one: (one.num_blocks, *(-part for part in load_key(one.worker))), default=None)
        more = best is not None and best.num_blocks * BLOCK_TOKENS >= chosen.cached_tokens + BLOCK_TOKENS
        return best if more else None

    def holders(self, hints: RoutingHints, *, like: Worker) -> Iterator[Holder]:
        """Yield other workers of the same models with part of the prompt."""
        for num_blocks, bits in (matched := self._index.match(hints.keys)).groups:
            for worker_id in matched.ids(bits):
                worker, at = self._workers.get(worker_id, (None, None))
                if worker is None or at is None or worker is like:
                    continue
                if worker.answers and not worker.leaving and worker.models == like.models:
                    yield Holder(worker, at, num_blocks)

    def holding(self, worker: Worker, num_blocks: int) -> Holder | None:
        found = self._workers.get(worker.worker_id)
        return None if found is None else Holder(*found, num_blocks)

    def others(self, like: Worker, *, but: Callable[[Worker], bool]) -> list[Worker]:
        alive = (worker for worker, _ in self._workers.values() if worker.answers and not worker.leaving)
        return sorted((w for w in alive if w.models == like.models and not but(w)), key=load_key)

    def note_copied(self, worker: Worker, hints: RoutingHints, *, num_blocks: int) -> None:
        self._index.touch(worker.worker_id, hints.keys[:num_blocks])


@dataclass(eq=False, kw_only=True)
class PrefixHeaders:
    """Names prefix sources in headers signed with `secret`. A `CallPart`."""

    sources: PrefixSources
    secret: bytes
    num_named: int = 0

    def prepare(self, call: PromptCall) -> None:
        if call.placement.worker.role is not Role.PREFILL:
            return
        holder = self.sources.better(call.placement, call.request.hints)
        if holder is not None:
            self.num_named += 1
            call.headers = self.naming(holder, call.headers)

    def naming(self, holder: Holder, headers: Mapping[str, str], *, copy: bool = False) -> Mapping[str, str]:
        return {**headers, PREFIX_HEADER: write_header(holder.header(copy=copy), self.secret)}

    def metrics(self, workers: Sequence[Worker]) -> Iterator[Metric]:
        text = "Requests whose prefill worker received the address of another with their prefix (--prefix-fetch)"
        yield CounterMetricFamily("tandem_router_prefix_sources", text, value=self.num_named)


# ---- copies of hot prefixes

HOT_HITS = 6.0
HALF_LIFE_S = 30.0
PAUSE_S = 30.0  # between two copies of the same prefix
MAX_AT_ONCE = 2
MAX_KEPT = 4096  # prefixes whose hits are counted


class Replication:
    """Choice of hot prefixes to copy to a second worker, within a budget.

    Hot: `HOT_HITS` requests (half-life `HALF_LIFE_S`) while one worker has it. A copy may overdraw
    the budget; the next waits until it is paid back.
    """

    def __init__(self, *, bytes_a_s: float) -> None:
        self._bytes_a_s = bytes_a_s
        self._hits: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # (hits, time), least recent first
        self._last_s: dict[Hashable, float] = {}  # start of running and recent copies
        self._account = 0.0
        self._paid_s = 0.0
        self.num_running = 0
        self.num_copied = self.num_failed = 0

    def note(self, key: Hashable, now_s: float) -> bool:
        """Count a request; return whether its prefix is hot."""
        hits, at_s = self._hits.pop(key, (0.0, now_s))
        hits = hits * 0.5 ** ((now_s - at_s) / HALF_LIFE_S) + 1.0
        self._hits[key] = hits, now_s
        if len(self._hits) > MAX_KEPT:
            self._hits.popitem(last=False)
        return bool(hits >= HOT_HITS)

    def begin(self, key: Hashable, size_bytes: int, now_s: float) -> bool:
        """Charge a copy, if allowed now; then `end` must follow."""
        self._account = min(0.0, self._account + (now_s - self._paid_s) * self._bytes_a_s)
        self._paid_s = now_s
        self._last_s = {other: at_s for other, at_s in self._last_s.items() if now_s - at_s < PAUSE_S}
        if self.num_running >= MAX_AT_ONCE or self._account < 0.0 or key in self._last_s:
            return False
        self._last_s[key] = now_s
        self._account -= size_bytes
        self.num_running += 1
        return True

    def end(self, *, good: bool) -> None:
        assert self.num_running > 0
        self.num_running -= 1
        self.num_copied += good
        self.num_failed += not good


@dataclass(eq=False, kw_only=True)
class PrefixCopies:
    """Copies hot prefixes: repeats the hot request at a second worker, which only fetches the KV.

    So no router needs a tokenizer.
    """

    launcher: AttemptLauncher
    prefixes: PrefixHeaders
    replication: Replication
    _running: set[HttpReply] = field(default_factory=set)

    def on_sent(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        """Count the prompt's longest known prefix, and copy it if hot and at one worker only."""
        chosen, hints, sources = attempt.placements[0], request.hints, self.prefixes.sources
        if chosen.worker.role is not Role.PREFILL or not sources.exchanges(chosen.worker):
            return
        others = list(sources.holders(hints, like=chosen.worker))
        num_blocks = max([chosen.cached_tokens // BLOCK_TOKENS, *(holder.num_blocks for holder in others)])
        if num_blocks == 0 or not self.replication.note(hints.keys[num_blocks - 1], now_s):
            return
        has_it = {holder.worker for holder in others if holder.num_blocks >= num_blocks} | {chosen.worker}
        targets = sources.others(chosen.worker, but=has_it.__contains__)
        source = sources.holding(chosen.worker, num_blocks)
        if len(has_it) == 1 and targets and source is not None:
            self._copy(request, source, targets[0], now_s)

    def _copy(self, request: RequestContext, source: Holder, target: Worker, now_s: float) -> None:
        launcher, hints = self.launcher, request.hints
        if not launcher.rooms.has_room_for(request.parsed.num_samples):
            return
        if not self.replication.begin(hints.keys[source.num_blocks - 1], source.size_bytes, now_s):
            return
        rooms = launcher.rooms.mint(request.parsed.num_samples)
        body, _ = write_bodies(request.parsed, host=target.bootstrap.host, port=target.bootstrap.port, rooms=rooms)
        headers = self.prefixes.naming(source, launcher.headers_at(request, now_s), copy=True)
        reply = launcher.upstream.post(target.url, request.path, headers=headers, body=body)
        self._running.add(reply)
        reply.on_end = partial(self._on_end, reply, rooms, target, hints, source.num_blocks)
        if reply.complete or reply.error is not None:
            reply.on_end()

    def _on_end(
        self, reply: HttpReply, rooms: tuple[int, ...], target: Worker, hints: RoutingHints, num_blocks: int
    ) -> None:
        if reply not in self._running:
            return
        self._running.discard(reply)
        self.launcher.rooms.release(rooms)
        good = reply.complete and reply.status == 200
        self.replication.end(good=good)
        if good:
            self.prefixes.sources.note_copied(target, hints, num_blocks=num_blocks)

    def close(self) -> None:
        for reply in tuple(self._running):
            reply.close()

    def metrics(self, workers: Sequence[Worker]) -> Iterator[Metric]:
        text = "Hot prefixes that were to be copied to a second prefill worker"
        copies = CounterMetricFamily("tandem_router_prefix_copies", text, labels=["result"])
        copies.add_metric(["copied"], self.replication.num_copied)
        copies.add_metric(["failed"], self.replication.num_failed)
        yield copies
