"""A plan's requests, from a trace or distributions. Pure.

A block is one repeated token id, to save memory. Arrivals have a mean gap of 1, stretched by rate.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

from deploy.bench.workload import TRACE_BLOCK_TOKENS, TraceEntry, read_trace
from planner.config import LoadFlags
from planner.executor import TOKEN

FIRST_BLOCK = 2  # first free token id, as the executor samples 1
FIRST_OWN = 1 << 40  # blocks of single requests
Blocks = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """`at`: arrival in mean gaps. `blocks`: (token id, count). `after`: the request of the run with
    the turn before, which ends first.
    """

    at: float
    blocks: Blocks
    output_len: int
    after: int | None = None

    @property
    def input_len(self) -> int:
        return sum(count for _, count in self.blocks)

    @property
    def answered(self) -> Blocks:
        return (*self.blocks, (TOKEN, self.output_len))

    def tokens(self) -> list[int]:
        return tokens_of(self.blocks)


def tokens_of(blocks: Blocks) -> list[int]:
    return list(chain.from_iterable(repeat(token, count) for token, count in blocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Uniform in [ratio x longest, longest], with common prefixes."""

    input_len: int
    output_len: int
    range_ratio: float = 1.0
    prefix_len: int = 0
    prefix_groups: int = 1

    def draw(self, rng: random.Random, *, number: int, at: float) -> PlannedRequest:
        size = _draw(rng, self.input_len, self.range_ratio)
        prefix = min(self.prefix_len, size)
        blocks = ((FIRST_BLOCK + number % self.prefix_groups, prefix), (FIRST_OWN + number, size - prefix))
        output_len = _draw(rng, self.output_len, self.range_ratio)
        return PlannedRequest(at=at, blocks=tuple(b for b in blocks if b[1]), output_len=output_len)


def workload_of(config: LoadFlags, *, count: int) -> tuple[list[PlannedRequest], list[PlannedRequest]]:
    """History and `count` requests. Raises ConfigError."""
    if config.trace is not None:
        return from_trace(read_trace(config.trace), count=count)
    lengths = Lengths(
        input_len=config.input_len,
        output_len=config.output_len,
        range_ratio=config.random_range_ratio,
        prefix_len=config.shared_prefix_len,
        prefix_groups=config.shared_prefix_groups,
    )
    return [], from_lengths(lengths, count=count, seed=config.seed)


def from_trace(entries: Sequence[TraceEntry], *, count: int) -> tuple[list[PlannedRequest], list[PlannedRequest]]:
    """Requests before (history) and after a trace's middle. Arrivals of one tick are spread."""
    ordered = sorted(entries, key=lambda entry: entry.timestamp_ms)
    begin = max(0, len(ordered) - count) // 2
    first = max(0, begin - count)
    chosen = ordered[first : begin + count]
    times = _spread([entry.timestamp_ms for entry in chosen])
    times = times[: begin - first] + _without_gaps(times[begin - first :])
    turns = Turns()
    requests = [turns.add(entry, at=at) for at, entry in zip(times, chosen, strict=True)]
    return split(requests, begin - first)


def split(requests: Sequence[PlannedRequest], begin: int) -> tuple[list[PlannedRequest], list[PlannedRequest]]:
    """Divide into history and a run, whose turns wait for those of the run."""
    run = [
        replace(one, after=one.after - begin if one.after is not None and one.after >= begin else None)
        for one in requests[begin:]
    ]
    return list(requests[:begin]), run


def from_lengths(lengths: Lengths, *, count: int, seed: int) -> list[PlannedRequest]:
    rng, at, found = random.Random(seed), 0.0, list[PlannedRequest]()
    for number in range(count):
        found.append(lengths.draw(rng, number=number, at=at))
        at += rng.expovariate(1.0)
    return found


def _draw(rng: random.Random, longest: int, ratio: float) -> int:
    return max(1, rng.randint(round(longest * ratio), longest))


class Turns:
    """Requests of a trace, whose blocks name the answers in prompts.

    A prompt continues the request that ends with its longest known prefix, if its answer fits, too.
    """

    def __init__(self) -> None:
        self._requests: list[PlannedRequest] = []
        self._owners: dict[int, int] = {}  # the first request with a block

    def add(self, entry: TraceEntry, *, at: float) -> PlannedRequest:
        number, size, ids = len(self._requests), max(1, entry.input_length), entry.hash_ids
        known = next((n for n, block in enumerate(ids) if block not in self._owners), len(ids))
        blocks, after = self._known(ids[:known], size)
        left = size - sum(count for _, count in blocks)
        self._owners |= dict.fromkeys(ids[known:], number)
        own = ((FIRST_OWN + number, left),) if left else ()
        request = PlannedRequest(at=at, blocks=blocks + own, output_len=max(1, entry.output_length), after=after)
        self._requests.append(request)
        return request

    def _known(self, ids: Sequence[int], size: int) -> tuple[Blocks, int | None]:
        if not ids:
            return (), None
        owner = self._owners[ids[-1]]
        one, whole = self._requests[owner], len(ids) * TRACE_BLOCK_TOKENS
        if one.input_len < whole + TRACE_BLOCK_TOKENS and one.input_len + one.output_len <= size:
            return one.answered, owner
        return cut(one.blocks, min(size, whole)), None


def cut(blocks: Blocks, size: int) -> Blocks:
    found = list[tuple[int, int]]()
    for token, count in blocks:
        if size > 0:
            found.append((token, min(count, size)))
        size -= count
    return tuple(found)


def _spread(times: Sequence[float]) -> list[float]:
    ticks = sorted(set(times))
    mean = (ticks[-1] - ticks[0]) / (len(ticks) - 1) if len(ticks) > 1 else 1.0
    following = dict(zip(ticks, [*ticks[1:], ticks[-1] + mean], strict=True))
    found: list[float] = []
    for tick in ticks:
        together = times.count(tick)
        found += [tick + (following[tick] - tick) * i / together for i in range(together)]
    return found


def _without_gaps(ordered: Sequence[float]) -> list[float]:
    mean = (ordered[-1] - ordered[0]) / max(1, len(ordered) - 1) or 1.0
    return [(time - ordered[0]) / mean for time in ordered]
