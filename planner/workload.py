"""A plan's requests, from a trace or distributions. Pure.

A block is one repeated token id, so equal prefixes match with little memory. Arrivals have a mean
gap of 1, stretched by rate.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deploy.bench.workload import TRACE_BLOCK_TOKENS, TraceEntry, read_trace
from planner.config import LoadFlags

FIRST_BLOCK = 2  # first free token id, as the executor samples 1
FIRST_OWN = 1 << 40  # blocks of single requests


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """`at`: arrival in mean gaps. `blocks`: (token id, count)."""

    at: float
    blocks: tuple[tuple[int, int], ...]
    output_len: int

    @property
    def input_len(self) -> int:
        return sum(count for _, count in self.blocks)

    def tokens(self) -> list[int]:
        ids: list[int] = []
        for token, count in self.blocks:
            ids += [token] * count
        return ids


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
    """Requests before (history) and after a trace's middle. Arrivals of one tick are
    spread.
    """
    ordered = sorted(entries, key=lambda entry: entry.timestamp_ms)
    begin = max(0, len(ordered) - count) // 2
    first = max(0, begin - count)
    chosen = ordered[first : begin + count]
    times = _spread([entry.timestamp_ms for entry in chosen])
    times = times[: begin - first] + _without_gaps(times[begin - first :])
    requests = [
        PlannedRequest(at=at, blocks=_trace_blocks(entry, number), output_len=max(1, entry.output_length))
        for number, (at, entry) in enumerate(zip(times, chosen, strict=True))
    ]
    return requests[: begin - first], requests[begin - first :]


def from_lengths(lengths: Lengths, *, count: int, seed: int) -> list[PlannedRequest]:
    rng, at, found = random.Random(seed), 0.0, list[PlannedRequest]()
    for number in range(count):
        found.append(lengths.draw(rng, number=number, at=at))
        at += rng.expovariate(1.0)
    return found


def _draw(rng: random.Random, longest: int, ratio: float) -> int:
    return max(1, rng.randint(round(longest * ratio), longest))


def _trace_blocks(entry: TraceEntry, number: int) -> tuple[tuple[int, int], ...]:
    """Uncovered tokens (rare) are the request's own."""
    left, blocks = max(1, entry.input_length), list[tuple[int, int]]()
    for block in entry.hash_ids:
        if left <= 0:
            break
        blocks.append((FIRST_BLOCK + block, min(left, TRACE_BLOCK_TOKENS)))
        left -= TRACE_BLOCK_TOKENS
    if left > 0:
        blocks.append((FIRST_OWN + number, left))
    return tuple(blocks)


def _spread(times: Sequence[float]) -> list[float]:
    ticks = sorted(set(times))
    mean = (ticks[-1] - ticks[0]) / (len(ticks) - 1) if len(ticks) > 1 else 1.0
    following = dict(zip(ticks, [*ticks[1:], ticks[-1] + mean], strict=True))
    found: list[float] = []
    for tick in ticks:
        together = times.count(tick)
        found += [tick + (following[tick] - tick) * i / together for i in range(together)]
    return found


def _without_gaps(times: Iterable[float]) -> list[float]:
    ordered = list(times)
    mean = (ordered[-1] - ordered[0]) / max(1, len(ordered) - 1) or 1.0
    return [(time - ordered[0]) / mean for time in ordered]
