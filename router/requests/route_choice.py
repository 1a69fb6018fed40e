"""Choice of a request's route, a pair or a unified worker, by its SLO cost (--mixed). Pure.

    cost(route) = (TTFT / wanted TTFT)^4 + (ITL / wanted ITL)^4, predicted with the request
    TTFT          wait for room + time of queued tokens and of the prompt
    ITL           with one more request; at a unified worker plus the stall of answers by this
                  prompt, over the length of an answer

Prefill workers stall no answers, unified ones need no hand-over: long prompts go to pairs until
load outweighs that. By the power the tightest SLO decides. Ideas: mixed pools, Splitwise (ISCA'24);
predicted times, Mooncake (FAST'25); no kind always wins, TaiChi (arXiv 2508.01989).

Prompts of one length keep their route until another is clearly cheaper, so that noise does not
swing the load.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from router.attempts.request import Slo
from router.choice.policies import Placement, Policy, RoutingHints
from router.history.forecast import STALE_S, Forecast, LineFit
from router.pool.worker import LoadReport, Pool, Role, Worker

POWER = 4


class FittedLine(NamedTuple):
    base_s: float
    slope_s: float

    def at(self, x: float) -> float:
        return self.base_s + self.slope_s * x


class WorkerMetrics(NamedTuple):
    """Load and fitted times of a worker; 0 if unknown.

    `ttft` is by tokens, `step` (ITL) by requests. `company`: probability that answers run when a
    prompt arrives.
    """

    ttft: FittedLine
    step: FittedLine
    waiting_tokens: int = 0
    requests: int = 0
    held_tokens: float = 0.0
    capacity_tokens: int = 0
    most_requests: int = 0
    company: float = 1.0


class Ask(NamedTuple):
    """A request at one worker: uncached tokens, KV at its end, expected answer."""

    new_tokens: int
    kv_tokens: int
    answer_tokens: float


def pair_slo_cost(prefill: WorkerMetrics, compute: Ask, decode: WorkerMetrics, answer: Ask, wanted: Slo) -> float:
    ttft_s = prefill.ttft.at(prefill.waiting_tokens + compute.new_tokens) + wait_for_room_s(decode, answer)
    return _slo_cost(ttft_s, decode.step.at(decode.requests + 1), wanted)


def unified_slo_cost(worker: WorkerMetrics, ask: Ask, wanted: Slo) -> float:
    ttft_s = worker.ttft.at(worker.waiting_tokens + ask.new_tokens) + wait_for_room_s(worker, ask)
    held_up_s = worker.company * worker.ttft.slope_s * ask.new_tokens / max(1.0, ask.answer_tokens)
    return _slo_cost(ttft_s, worker.step.at(worker.requests + 1) + held_up_s, wanted)


def wait_for_room_s(worker: WorkerMetrics, ask: Ask) -> float:
    """The time until there is memory and a batch slot.

    A share of either frees up in that share of a request's stay.
    """
    over = 0.0
    if worker.capacity_tokens:
        over = (worker.held_tokens + ask.kv_tokens) / worker.capacity_tokens - 1
    if worker.most_requests:
        over = max(over, (worker.requests + 1) / worker.most_requests - 1)
    return max(0.0, over) * ask.answer_tokens * worker.step.at(worker.requests)


def _slo_cost(ttft_s: float, itl_s: float, wanted: Slo) -> float:
    return (ttft_s / wanted.ttft_s) ** POWER + (itl_s / wanted.itl_s) ** POWER


STAY = 0.03  # least relative saving for which prompts of one length change their route
COLOCATION_SHARE = 0.05  # weight of each choice
DEFAULT_TTFT, DEFAULT_STEP = FittedLine(0.0, 1e-4), FittedLine(0.02, 0.0005)  # before measurements
DEFAULT_ANSWER = 128.0  # tokens
_WITH_MEMORY = ("prealloc", "transfer", "retracted")  # further stages whose KV is in reports

Placements = tuple[Placement, ...]
Pools = Sequence[Pool]


class _Fits(NamedTuple):
    """Fitted lines of a route: TTFT by tokens, ITL by requests."""

    ttft: LineFit
    step: LineFit


@dataclass(slots=True, kw_only=True)
class RouteChooser:
    """`wanted`: the default SLO."""

    policies: Mapping[Role, Policy]
    forecast: Forecast
    wanted: Slo
    _last: dict[int, Role] = field(default_factory=dict)  # first role of the last route, by bits of the prompt's length
    _company: float = 0.0  # share of recent choices that found requests at the unified worker

    def choose(self, ways: Sequence[Pools], hints: RoutingHints, now_s: float, slo: Slo | None = None) -> Placements:
        """Choose a route of `ways` (non-empty pools by role) and its workers."""
        found = [tuple([self.policies[pool[0].role].look(pool, hints) for pool in pools]) for pools in ways]
        return self.take(ways, found, hints, now_s, slo)

    def take(
        self, ways: Sequence[Pools], found: Sequence[Placements], hints: RoutingHints, now_s: float, slo: Slo | None
    ) -> Placements:
        """Choose among the policies' choices `found`, and record it."""
        way = found[0]
        if len(found) > 1:
            wanted = self.wanted if slo is None else _objectives(slo, self.wanted)
            way = self._best(ways, found, hints, wanted, now_s)
        for choice in way:
            self.policies[choice.worker.role].note(choice, hints)
        return way

    def _best(
        self, ways: Sequence[Pools], found: Sequence[Placements], hints: RoutingHints, wanted: Slo, now_s: float
    ) -> Placements:
        fits = [self._fits(pools, way) for pools, way in zip(ways, found, strict=True)]
        strains = [
            0.0 if _wants_a_try(way, own, fits) else self._slo_cost(way, _lines_of(own, fits), hints, wanted)
            for way, own in zip(found, fits, strict=True)
        ]
        self._note_colocation(found)
        size = hints.prompt_tokens.bit_length()
        place = route_to_take(strains, [way[0].worker.role for way in found], self._last.get(size))
        self._last[size] = found[place][0].worker.role
        self.forecast.note_try(fits[place].ttft, now_s)  # one at a time
        return found[place]

    def _fits(self, pools: Pools, way: Placements) -> _Fits:
        return _Fits(self._fit(pools[0], way[0].worker, 0), self._fit(pools[-1], way[-1].worker, 1))

    def _fit(self, pool: Pool, worker: Worker, which: int) -> LineFit:
        own = self.forecast.fits(worker)[which]
        return own if own.is_known else self.forecast.first_known(pool, which) or own

    def _slo_cost(
        self, way: Placements, lines: tuple[FittedLine, FittedLine], hints: RoutingHints, wanted: Slo
    ) -> float:
        tokens = min(self.forecast.answer_events or DEFAULT_ANSWER, hints.output_tokens)
        asks = [Ask(hints.prompt_tokens - one.cached_tokens, hints.prompt_tokens + int(tokens), tokens) for one in way]
        figures = [self._figures(one.worker, *lines) for one in way]
        if len(way) == 1:
            return unified_slo_cost(figures[0], asks[0], wanted)
        return pair_slo_cost(figures[0], asks[0], figures[1], asks[1], wanted)

    def _figures(self, worker: Worker, ttft: FittedLine, step: FittedLine) -> WorkerMetrics:
        requests, report = worker.requests_everywhere, worker.report
        return WorkerMetrics(
            ttft=ttft,
            step=step,
            waiting_tokens=self.forecast.waiting_tokens(worker),
            requests=requests,
            held_tokens=0.0 if report is None else requests * _tokens_each(report),
            capacity_tokens=worker.capacity_tokens,
            most_requests=0 if report is None else report.max_running_reqs,
            company=1.0 if requests else self._company,
        )

    def _note_colocation(self, found: Sequence[Placements]) -> None:
        for way in found:
            if way[0].worker.role is Role.UNIFIED:
                self._company += COLOCATION_SHARE * ((way[0].worker.requests_everywhere > 0) - self._company)


def _objectives(slo: Slo, usual: Slo) -> Slo:
    return Slo(
        slo.ttft_s if slo.ttft_s < math.inf else usual.ttft_s, slo.itl_s if slo.itl_s < math.inf else usual.itl_s
    )


def _known(fits: Sequence[LineFit]) -> LineFit:
    return next((fit for fit in fits if fit.is_known), fits[0])


def _wants_a_try(way: Placements, own: _Fits, fits: Sequence[_Fits]) -> bool:
    """Return whether an idle route lacks fresh measurements, so may be faster now."""
    if any(one.worker.load_tokens or one.worker.requests_everywhere for one in way):
        return False
    newest_s = max(other.ttft.news_s for other in fits)
    return not own.ttft.is_known or own.ttft.news_s < newest_s - STALE_S


def _lines_of(own: _Fits, fits: Sequence[_Fits]) -> tuple[FittedLine, FittedLine]:
    """A route's lines, unknown ones from another route."""
    ttft = _known([own.ttft, *(other.ttft for other in fits)])
    step = _known([own.step, *(other.step for other in fits)])
    return (
        FittedLine(ttft.intercept, ttft.slope) if ttft.is_known else DEFAULT_TTFT,
        FittedLine(step.intercept, step.slope) if step.is_known else DEFAULT_STEP,
    )


def route_to_take(strains: Sequence[float], by: Sequence[Role], last: Role | None) -> int:
    """The cheapest route, or the last one if little dearer."""
    best = min(range(len(strains)), key=strains.__getitem__)
    if last not in by:
        return best
    old = by.index(last)
    return best if strains[best] < (1 - STAY) * strains[old] else old


def _tokens_each(report: LoadReport) -> float:
    requests = report.running_reqs + sum(report.stages.get(stage, 0) for stage in _WITH_MEMORY)
    return (report.used_tokens + report.pending_tokens) / requests if requests else 0.0
