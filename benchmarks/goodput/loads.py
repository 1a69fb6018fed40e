"""The requests that clusters are compared on, and the objectives of each load. Pure.

Lengths are those of a trace (Mooncake, FAST'25), scaled so that a model of a CPU serves some requests a second, or are drawn from the
quantiles of its conversation trace. Objectives are multiples of what one request takes alone on one worker's cores, as in DistServe
(OSDI'24): the same loads are as hard on a fast machine as on a slow one.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from deploy.bench.workload import BenchRequest, TraceEntry
from planner.goodput import SloTargets
from planner.workload import FIRST_OWN, PlannedRequest, from_trace

SHARE = 0.95
LONGEST = 1536  # tokens of a scaled prompt
LOWEST_ID, HIGHEST_ID = 16, 500  # tokens of prompts
SEED = 11
RUN_S, LEAST = 14.0, 36  # of a run: the requests that come within RUN_S, LEAST at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """Latencies of one request alone on one worker's cores, in seconds: of a prompt token, and of a step with four answers."""

    prompt_token_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Factors on a trace's lengths, and objectives: TTFT over that of the mean prompt alone, ITL over a step alone.

    `burst`: prompts that come at once.
    """

    name: str
    prompts: float
    answers: float
    ttft: float
    itl: float
    burst: int = 1

    def requests(self, source: Sequence[PlannedRequest]) -> list[PlannedRequest]:
        return in_bursts([scaled(one, prompts=self.prompts, answers=self.answers) for one in source], self.burst)

    def objectives(self, requests: Sequence[PlannedRequest], alone: Alone) -> SloTargets:
        """Round to two digits, as an operator would."""
        mean = sum(one.input_len for one in requests) / len(requests)
        itl_s = two_digits(self.itl * alone.step_s)
        return SloTargets(
            ttft_s=two_digits(self.ttft * mean * alone.prompt_token_s), tpot_s=itl_s, itl_s=itl_s, share=SHARE
        )


class Table(msgspec.Struct, frozen=True):
    loads: tuple[Load, ...]
    prompts: list[int]
    answers: list[int]
    calibrating: list[dict[str, Any]]


_TABLE = msgspec.toml.decode(Path(__file__).with_name("loads.toml").read_bytes(), type=Table)
LOADS, PROMPTS, ANSWERS, CALIBRATING = _TABLE.loads, _TABLE.prompts, _TABLE.answers, _TABLE.calibrating


def from_entries(entries: Sequence[TraceEntry], count: int) -> list[PlannedRequest]:
    """The `count` requests in the middle of a trace, a mean gap of 1 apart."""
    _, found = from_trace(entries, count=count)
    return found


def like_conversations(count: int) -> list[PlannedRequest]:
    """Lengths as in Mooncake's conversation trace, drawn independently; Poisson arrivals; no two prompts share a prefix."""
    rng, at, found = random.Random(SEED), 0.0, list[PlannedRequest]()
    for number in range(count):
        blocks = ((FIRST_OWN + number, _drawn(PROMPTS, rng)),)
        found.append(PlannedRequest(at=at, blocks=blocks, output_len=_drawn(ANSWERS, rng)))
        at += rng.expovariate(1.0)
    return found


def scaled(request: PlannedRequest, *, prompts: float, answers: float) -> PlannedRequest:
    """Shrink a request; a prompt has 1 to `LONGEST` tokens. Prompts with an equal prefix still have one."""
    blocks, before, after = list[tuple[int, int]](), 0, 0
    for token, count in request.blocks:
        before += count
        end = min(LONGEST, round(before * prompts))
        if end > after:
            blocks.append((token, end - after))
        after = max(after, end)
    output_len = max(1, round(request.output_len * answers))
    return replace(request, blocks=tuple(blocks) or ((request.blocks[0][0], 1),), output_len=output_len)


def in_bursts(requests: Sequence[PlannedRequest], size: int) -> list[PlannedRequest]:
    """Each `size` requests come together, when the first of them did."""
    return [replace(one, at=requests[i - i % size].at) for i, one in enumerate(requests)]


def of_a_run(requests: Sequence[PlannedRequest], rate: float) -> Sequence[PlannedRequest]:
    """Those of a run at `rate` a second: the first ones, so that a run at a low rate ends."""
    return requests[: max(LEAST, round(RUN_S * rate))]


def to_send(requests: Sequence[PlannedRequest], *, rate: float, salt: int) -> list[BenchRequest]:
    """The requests as token ids, at `rate` a second. Another `salt`, other ids: no run finds the prompts of another in a cache."""
    found = []
    for idx, one in enumerate(requests):
        ids = [
            token
            for block, count in one.blocks
            for token in random.Random(f"{salt} {block}").choices(range(LOWEST_ID, HIGHEST_ID), k=count)
        ]
        at_s = one.at / rate
        found.append(
            BenchRequest(idx=idx, prompt=tuple(ids), prompt_len=len(ids), output_len=one.output_len, at_s=at_s)
        )
    return found


def two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _drawn(quantiles: Sequence[int], rng: random.Random) -> int:
    place = rng.random() * (len(quantiles) - 1)
    low = int(place)
    return round(quantiles[low] + (place - low) * (quantiles[low + 1] - quantiles[low]))
