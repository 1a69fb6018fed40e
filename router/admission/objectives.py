"""The policy's choice among workers predicted to meet a request's SLO. Pure.

First from the whole pool, else among those of `Policy.some` that meet it, else a worker with a
stale measurement, else the request is refused. Early refusal: Mooncake (FAST'25). SLO per pool:
DistServe (OSDI'24).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from router.attempts.request import RequestRefused, Slo
from router.choice.policies import Placement, Policy, RoutingHints
from router.history.forecast import STALE_S, Forecast, LineFit
from router.pool.worker import Pool, Role, Worker

_NAMES = {"ttft": "the first token", "itl": "the time between tokens"}


@dataclass(frozen=True, slots=True)
class Objective:
    """One SLO. `what`: "ttft" or "itl". `size`: the request's tokens, or 1."""

    what: str
    wanted_s: float
    size: float
    forecast: Forecast

    def fit(self, worker: Worker) -> LineFit:
        return self.forecast.fits(worker)[self.what == "itl"]

    def predicted_s(self, choice: Placement) -> float | None:
        worker, size = choice.worker, self.size
        if self.what == "ttft":
            size += self.forecast.waiting_tokens(worker) - choice.cached_tokens
        else:
            size += worker.requests_everywhere
        return self.fit(worker).at(size)

    def keeps(self, choice: Placement) -> bool:
        at_s = self.predicted_s(choice)
        return at_s is None or at_s <= self.wanted_s

    def is_stale(self, worker: Worker, now_s: float) -> bool:
        return now_s - self.fit(worker).news_s >= STALE_S

    def refusal(self, predicted_s: float) -> RequestRefused:
        what, wanted_s = self.what, self.wanted_s
        message = (
            f"{_NAMES[what]} would take about {predicted_s * 1000:.0f} ms, more than the {wanted_s * 1000:.0f} ms asked for "
            f"(--slo-{what}-ms, X-SLO-{what.upper()}-ms); try again later"
        )
        retry_after_s = max(1, math.ceil(min(60.0, predicted_s - wanted_s)))
        return RequestRefused(message, why=f"slo_{what}", retry_after_s=retry_after_s)


def objectives_of(slo: Slo, role: Role, hints: RoutingHints, forecast: Forecast) -> list[Objective]:
    found = []
    if role is not Role.DECODE and slo.ttft_s < math.inf:
        found.append(Objective("ttft", slo.ttft_s, hints.prompt_tokens, forecast))
    if role is not Role.PREFILL and slo.itl_s < math.inf:
        found.append(Objective("itl", slo.itl_s, 1, forecast))
    return found


def look_in_time(
    policy: Policy, pool: Pool, hints: RoutingHints, objectives: Sequence[Objective], *, now_s: float
) -> Placement:
    """Return the policy's choice within all SLOs. Raises RequestRefused."""
    choice = policy.look(pool, hints)
    if all([objective.keeps(choice) for objective in objectives]):
        return choice
    seen = policy.some(pool, hints)
    kept = [one.worker for one in seen if all([objective.keeps(one) for objective in objectives])]
    return policy.look(kept, hints) if kept else _one_to_try(seen, objectives, now_s)


def _one_to_try(seen: Sequence[Placement], objectives: Sequence[Objective], now_s: float) -> Placement:
    """Return the worker measured longest ago, once, if its line is stale."""
    for objective in objectives:
        for choice in sorted(seen, key=lambda one: objective.fit(one.worker).news_s):
            if not objective.is_stale(choice.worker, now_s):
                break
            missed = [one for one in objectives if not one.keeps(choice)]
            if all([one.is_stale(choice.worker, now_s) for one in missed]):
                for one in missed:
                    one.forecast.note_try(one.fit(choice.worker), now_s)
                return choice
    raise _refusal(seen, objectives)


def _refusal(seen: Sequence[Placement], objectives: Sequence[Objective]) -> RequestRefused:
    for objective in objectives:
        late_s = [objective.predicted_s(one) or 0.0 for one in seen if not objective.keeps(one)]
        if len(late_s) == len(seen):
            break
    return objective.refusal(min(late_s))
