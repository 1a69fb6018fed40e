"""Goodput: the highest rate with enough requests within the SLO. Pure.

After DistServe (Zhong et al., OSDI'24).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from deploy.bench.stats import RequestRecord, percentile, tpot_s

VERIFIED_FROM = 0.1  # earlier requests find an idle cluster and do not count
NEAR = 1.08  # precision of the search
MAX_STRIDE = 2.0
MOST_STEPS = 8  # doublings or halvings before the first bracket


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTargets:
    """Limits for a `share` of requests, and of a request's gaps (`itl_s`)."""

    ttft_s: float
    tpot_s: float
    itl_s: float | None
    share: float

    def is_met_by(self, record: RequestRecord) -> bool:
        if record.error is not None or record.ttft_s is None or record.ttft_s > self.ttft_s:
            return False
        if (tpot_s(record) or 0.0) > self.tpot_s:
            return False
        return self.itl_s is None or not record.itl_s or percentile(record.itl_s, 100 * self.share) <= self.itl_s

    def latest_s(self, *, sent_s: float, output_len: int) -> float:
        return sent_s + self.ttft_s + self.tpot_s * output_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run, with rates per second and GPU, latencies at the SLO's percentile, `busy` by role."""

    rate: float
    good_share: float
    ttft_s: float | None
    tpot_s: float | None
    ttft_p50_s: float | None
    tpot_p50_s: float | None
    cached_share: float
    busy: dict[str, float]
    errors: dict[str, int]
    step_tokens: float | None = None

    @property
    def goodput(self) -> float:
        return self.rate * self.good_share


def judged(records: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
    return records[first_verified(len(records)) :]


def first_verified(count: int) -> int:
    return int(count * VERIFIED_FROM)


def point_of(
    records: Sequence[RequestRecord],
    *,
    rate: float,
    slo: SloTargets,
    busy: dict[str, float],
    step_tokens: float | None = None,
) -> Point:
    seen = judged(records)
    ttft = [record.ttft_s for record in seen if record.ttft_s is not None]
    tpot = [found for record in seen if record.error is None and (found := tpot_s(record)) is not None]
    prompts = sum(record.prompt_tokens for record in seen if record.ttft_s is not None)
    return Point(
        rate=rate,
        good_share=sum(slo.is_met_by(record) for record in seen) / len(seen),
        ttft_s=percentile(ttft, 100 * slo.share) if ttft else None,
        tpot_s=percentile(tpot, 100 * slo.share) if tpot else None,
        ttft_p50_s=percentile(ttft, 50) if ttft else None,
        tpot_p50_s=percentile(tpot, 50) if tpot else None,
        cached_share=sum(record.cached_tokens for record in seen) / prompts if prompts else 0.0,
        busy=busy,
        errors=dict(sorted(Counter(record.error for record in seen if record.error is not None).items())),
        step_tokens=step_tokens,
    )


@dataclass(slots=True, kw_only=True)
class Search:
    """Brackets the highest good rate from a first estimate, then bisects geometrically: points in,
    rates out.

    `stride`: the first factor, up to `MAX_STRIDE`. `lowest`: bound as a share of the estimate.
    """

    guess: float
    share: float
    near: float = NEAR
    stride: float = MAX_STRIDE
    most_steps: int = MOST_STEPS
    lowest: float = 0.0
    points: list[Point] = field(default_factory=list)

    def next_rate(self) -> float | None:
        rate, lowest, bad = self._next_rate(), self.lowest * self.guess, self._worst_rate()
        if rate is None or rate >= lowest:
            return rate
        return lowest if bad is None or bad > lowest else None

    def _next_rate(self) -> float | None:
        if not self.points:
            return self.guess
        good, bad = self._best_rate(), self._worst_rate()
        if good is None or bad is None:
            if len(self.points) > self.most_steps:
                return None
            power = 1 << max(0, len(self.points) - 2)
            stride = min(MAX_STRIDE, math.pow(self.stride, power))
            return stride * (good or 0.0) if bad is None else bad / stride
        return None if bad / good <= self.near else (good * bad) ** 0.5

    @property
    def best(self) -> Point | None:
        return max(self._good(), key=lambda point: point.rate, default=None)

    def _good(self) -> list[Point]:
        """Points below every bad one; higher ones are chance."""
        bad = self._worst_rate()
        return [p for p in self.points if p.good_share >= self.share and (bad is None or p.rate < bad)]

    def _best_rate(self) -> float | None:
        best = self.best
        return None if best is None else best.rate

    def _worst_rate(self) -> float | None:
        return min((p.rate for p in self.points if p.good_share < self.share), default=None)


@dataclass(slots=True, kw_only=True)
class Grid:
    rates: list[float]
    share: float
    points: list[Point] = field(default_factory=list)

    def next_rate(self) -> float | None:
        return self.rates[len(self.points)] if len(self.points) < len(self.rates) else None

    @property
    def best(self) -> Point | None:
        return max((p for p in self.points if p.good_share >= self.share), key=lambda p: p.rate, default=None)
