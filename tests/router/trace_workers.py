"""Prefill workers simple enough to replay a trace against a router policy: one number for each thing.

A worker computes one prompt after the other, `tokens_per_s` of what is not cached; it has an LRU cache of 512-token blocks.

The trace is that of Mooncake (FAST'25): JSON lines with `timestamp` (ms), `input_length`, `output_length` and
`hash_ids`, the names of prefix-chained blocks of 512 tokens. Its times are rounded to some seconds, so requests of one
time are spread evenly until the next.
"""

import gzip
import heapq
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from router.choice.policies import Policy, RoutingHints, cost_tokens
from router.choice.prefix_index import PrefixIndex
from router.pool.states import Check
from router.pool.worker import Lease, LoadReport, Role, Worker
from router.pool.workers import WorkerTable
from service.prefix_chain import BLOCK_TOKENS

TRACE_BLOCK_TOKENS = 512
REPORT_S = 1.0  # between a worker's reports to the router
KEYS_PER_BLOCK = TRACE_BLOCK_TOKENS // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`at_s`: when it comes; `blocks`: names of its prompt's blocks."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    def ask(self) -> RoutingHints:
        """As a router would see it. A conversation is told by its first block that is not the common system prompt."""
        return RoutingHints(
            prompt_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            keys=[key for block in self.blocks for key in keys_of(block)][: self.input_tokens // BLOCK_TOKENS],
            session=str(self.blocks[:2][-1]) if self.blocks else "",
        )


def keys_of(block: int) -> list[bytes]:
    """A block's keys: the router counts in smaller ones."""
    return [b"%d.%d" % (block, part) for part in range(KEYS_PER_BLOCK)]


def read_trace(path: Path, *, speed: float = 1.0) -> list[TraceRequest]:
    """`speed`: 2 replays it in half the time. ValueError names the line that is none of a trace."""
    rows = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                row = (row["timestamp"], int(row["input_length"]), int(row["output_length"]), tuple(row["hash_ids"]))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: no request of a trace ({error!r})") from None
            rows.append(row)
    times = list(_spread([row[0] / 1000 for row in rows]))
    return [TraceRequest(at_s / speed, *row[1:]) for at_s, row in zip(times, rows, strict=True)]


def _spread(times_s: list[float]) -> Iterator[float]:
    groups = [(at_s, len(list(group))) for at_s, group in itertools.groupby(times_s)]
    ends = [at_s for at_s, _ in groups[1:]] + [groups[-1][0] + 1.0] if groups else []
    for (at_s, count), end_s in zip(groups, ends, strict=True):
        yield from (at_s + (end_s - at_s) * i / count for i in range(count))


class BlockCache:
    """LRU; the last block of a prompt goes before its first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, blocks: tuple[int, ...]) -> tuple[int, list[int], list[int]]:
        """(how many leading ones were there, those stored now, those that had to go)."""
        hits = next((i for i, block in enumerate(blocks) if block not in self._blocks), len(blocks))
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        gone = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._capacity)]
        return hits, list(blocks[hits:]), gone


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillModel:
    """`events`: the workers tell the policy's index what they cache, as by KV events."""

    num_workers: int = 8
    tokens_per_s: float = 8000.0
    cache_tokens: int = 2_000_000
    overhead_s: float = 0.02
    events: bool = False


@dataclass(slots=True)
class PrefillResult:
    """`ttft_s`: waiting and computing, a value per request."""

    ttft_s: list[float]
    computed: list[int]
    prompt_tokens: int
    cached_tokens: int
    queue_tokens: list[int]  # of the longest queue, at each arrival

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def spread(self) -> float:
        """Work of the busiest worker, as a multiple of the mean."""
        return max(self.computed) * len(self.computed) / sum(self.computed)


class _Clock:
    """What happens later, in order of time."""

    def __init__(self) -> None:
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._later, (when_s, self._count, act))

    def run_until(self, now_s: float) -> None:
        while self._later and self._later[0][0] <= now_s:
            heapq.heappop(self._later)[2]()


def replay_prefill(
    trace: list[TraceRequest], policy: Policy, model: PrefillModel, *, index: PrefixIndex | None = None
) -> PrefillResult:
    """Every request through `policy`; `index` is told what workers cache if `model.events`."""
    table, clock = _table(model.num_workers), _Clock()
    workers = table.workers()
    caches = [BlockCache(model.cache_tokens // TRACE_BLOCK_TOKENS) for _ in workers]
    free_s, queued = [0.0] * len(workers), [0] * len(workers)
    result = PrefillResult([], [0] * len(workers), 0, 0, [])
    report_s = REPORT_S
    for request in trace:
        while report_s <= request.at_s:
            clock.run_until(report_s)
            _report(table, [LoadReport(waiting_tokens=tokens) for tokens in queued])
            report_s += REPORT_S
        clock.run_until(request.at_s)
        ask = request.ask()
        choice = policy.choose(workers, ask)
        at = choice.worker.worker_id
        lease = table.loads.charge(choice.worker, cost_tokens(choice, ask))
        hits, stored, gone = caches[at].use(request.blocks)
        cached = min(hits * TRACE_BLOCK_TOKENS, request.input_tokens - 1)
        todo = request.input_tokens - cached
        free_s[at] = max(free_s[at], request.at_s) + model.overhead_s + todo / model.tokens_per_s
        queued[at] += todo
        result.ttft_s.append(free_s[at] - request.at_s)
        result.computed[at] += todo
        result.prompt_tokens += request.input_tokens
        result.cached_tokens += cached
        result.queue_tokens.append(max(queued))
        clock.at(free_s[at], _finish(table, lease, queued, at, todo))
        if index is not None and model.events:
            clock.at(free_s[at], _tell(index, at, stored, gone))
    return result


def _finish(table: WorkerTable, lease: Lease, queued: list[int], at: int, todo: int) -> Callable[[], None]:
    def act() -> None:
        table.loads.release(lease)
        queued[at] -= todo

    return act


def _tell(index: PrefixIndex, worker_id: int, stored: list[int], gone: list[int]) -> Callable[[], None]:
    def act() -> None:
        for blocks, tell in ((stored, index.store), (gone, index.remove)):
            for block in blocks:
                for key in keys_of(block):
                    tell(worker_id, key)

    return act


def _table(count: int) -> WorkerTable:
    table = WorkerTable()
    for i in range(count):
        worker: Worker = table.add(f"http://prefill-{i}:1", role=Role.PREFILL)
        table.on_check(worker, Check.OK, now_s=0.0)
    return table


def _report(table: WorkerTable, reports: list[LoadReport]) -> None:
    for worker, report in zip(table.workers(), reports, strict=True):
        table.loads.on_report(worker, report)
