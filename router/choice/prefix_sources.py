"""Prefill workers with a longer cached prefix than the chosen one (--prefix-fetch). Pure."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from router.choice.policies import Placement, RoutingHints, load_key
from router.choice.prefix_index import PrefixIndex
from router.pool.reports import PrefixHolder, parse_prefix_holder
from router.pool.worker import Worker
from service.http.prefix_source import PREFIX_HEADER, PrefixSourceHeader, write_header
from service.kv_events import BLOCK_TOKENS

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


# ---- prefix sources


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

    def on_info(self, worker: Worker, info: object) -> None:
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
        """Return the longest match, if a block longer than the chosen worker's."""
        if not hints.keys or not self.exchanges(chosen.worker):
            return None
        found = self.holders(hints, like=chosen.worker)
        best = max(found, key=_most, default=None)
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


def _most(holder: Holder) -> tuple[float, ...]:
    return (holder.num_blocks, *(-part for part in load_key(holder.worker)))


@dataclass(eq=False, kw_only=True)
class PrefixHeaders:
    """Names prefix sources in headers signed with `secret`."""

    sources: PrefixSources
    secret: bytes
    replication: Replication | None = None
    num_named: int = 0

    def added_to(self, headers: Mapping[str, str], chosen: Placement, hints: RoutingHints) -> Mapping[str, str]:
        holder = self.sources.better(chosen, hints)
        if holder is None:
            return headers
        self.num_named += 1
        return self.naming(holder, headers)

    def naming(self, holder: Holder, headers: Mapping[str, str], *, copy: bool = False) -> Mapping[str, str]:
        return {**headers, PREFIX_HEADER: write_header(holder.header(copy=copy), self.secret)}
