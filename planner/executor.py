"""An executor in virtual time, one step at a time.

Lengths end answers. All tokens are TOKEN, except OTHER at the planned rate of wrong drafts.
"""

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import NamedTuple

from engine.config import SpeculativeFlags
from engine.core.plan import Guess, ItemResult, Plan, PlanItem, StepResult
from engine.core.request import Request
from engine.core.scheduler import MakeDecodeStrategy
from engine.flags.speculation import drafts_by_model, rows_of_request
from engine.speculative.decode_planning import SpeculativeDecode
from engine.speculative.drafting import Drafting
from engine.speculative.drafts import NO_DRAFT, Draft
from planner.memory import DrafterTime, plan_seconds
from planner.step_time import Beside, StepTime

# ---- a shared machine

KEPT_S = 60.0  # older work overlaps no new work, as clocks differ by less than a step


class Threads(NamedTuple):
    """`home`: the worker to whose cores they are bound. `beside`: slowdown while all other cores
    compute, by shared memory and caches.
    """

    num: int = 1
    home: Hashable = None
    beside: float = 0.0


ONE = Threads()


@dataclass(frozen=True, slots=True)
class _Occupancy:
    owner: Hashable
    begin_s: float
    end_s: float
    threads: Threads


class Host:
    """A machine whose cores steps, transfers (copies) and HTTP share. `cores`: None if workers have
    own machines. `home_cores`: bound to each. Max-min fair. The end of work is fixed at its start:
    later work cannot delay it, but the owner's next work pays the lost time.
    """

    def __init__(self, cores: float | None, *, home_cores: float | None = None) -> None:
        self._cores = cores
        self._home_cores = home_cores
        self._occupancies: list[_Occupancy] = []
        self._owed_s: dict[Hashable, float] = {}
        self._latest_s = 0.0

    def home(self, worker: Hashable) -> Hashable:
        return None if self._home_cores is None else worker

    def finish(self, owner: Hashable, *, at_s: float, work_s: float, threads: Threads = ONE) -> float:
        """The end of `work_s` on each thread, not slowed by its owner."""
        if self._cores is None or work_s <= 0:
            return at_s + work_s
        if at_s > self._latest_s + 1.0:
            self._latest_s = at_s
            self._occupancies = [one for one in self._occupancies if one.end_s > at_s - KEPT_S]
        others = [one for one in self._occupancies if one.end_s > at_s and one.owner != owner]
        end_s = self._share(others, at_s, work_s + self._owed_s.pop(owner, 0.0), threads)
        self._occupancies.append(_Occupancy(owner, at_s, end_s, threads))
        return end_s

    def _share(self, others: list[_Occupancy], now_s: float, left_s: float, threads: Threads) -> float:
        """End of work, in spans between changes of other work."""
        for change_s in [*sorted({t for s in others for t in (s.begin_s, s.end_s) if t > now_s}), float("inf")]:
            there = [one for one in others if one.begin_s <= now_s < one.end_s]
            before = self._speeds([one.threads for one in there])
            *after, rate = self._speeds([*(one.threads for one in there), threads])
            span_s = min(change_s - now_s, left_s / rate)
            for one, was, now in zip(there, before, after, strict=True):
                self._owed_s[one.owner] = self._owed_s.get(one.owner, 0.0) + span_s * (was - now)
            now_s, left_s = now_s + span_s, left_s - span_s * rate
            if left_s <= 1e-12:
                break
        return now_s

    def _speeds(self, running: list[Threads]) -> list[float]:
        assert self._cores is not None
        shares = core_shares(self._cores, self._home_cores, running)
        used = sum(one.num * share for one, share in zip(running, shares, strict=True))
        return [
            share / (1 + one.beside * (used - one.num * share) / max(1.0, self._cores - one.num))
            for one, share in zip(running, shares, strict=True)
        ]


def core_shares(cores: float, home_cores: float | None, running: Iterable[Threads]) -> list[float]:
    """Max-min fair, per thread."""
    running = list(running)
    bound = Counter[Hashable]()
    for one in running:
        if one.home is not None:
            bound[one.home] += one.num
    level, crowded = _water_level(cores, home_cores, bound, sum(one.num for one in running))
    return [crowded.get(one.home, level) if one.home is not None else level for one in running]


def _water_level(
    cores: float, home_cores: float | None, bound: Mapping[Hashable, int], threads: int
) -> tuple[float, dict[Hashable, float]]:
    """The share outside of crowded homes, and in each."""
    crowded = dict[Hashable, float]()
    for home, count in sorted(bound.items(), key=lambda item: -item[1]):
        assert home_cores is not None, "nothing is bound"
        if home_cores / count >= min(1.0, cores / max(1, threads)):
            break
        crowded[home] = home_cores / count
        cores, threads = cores - home_cores, threads - count
    return min(1.0, cores / max(1, threads)) if threads else 1.0, crowded


# ---- executor

TOKEN, OTHER = 1, 0
CONFIDENCE = 0.7  # of a drafting model; the engine learns its accept rate
_DRAWN, _OTHER, _SILENT = ItemResult(token=TOKEN), ItemResult(token=OTHER), ItemResult(token=None)


@dataclass(slots=True)
class WorkerClock:
    """A worker's time, ahead of the timeline while it waits for the device."""

    now_s: float = 0.0


@dataclass(slots=True, frozen=True)
class TimedLaunch:
    plan: Plan
    end_s: float


@dataclass(eq=False)
class TimedExecutor:
    """A step starts at its launch, after the one before; `collect` waits for its end."""

    step_time: StepTime
    clock: WorkerClock
    _: KW_ONLY
    host: Host
    threads: InitVar[Threads]
    beside: InitVar[Beside]
    drafter: DrafterTime | None
    is_right: Callable[[], bool]

    def __post_init__(self, threads: Threads, beside: Beside) -> None:
        self._with_prompts = threads._replace(beside=beside.prefill)
        self._without_prompts = threads._replace(beside=beside.decode)
        self._free_s = 0.0
        self.busy_s = 0.0

    def launch(self, plan: Plan) -> TimedLaunch:
        begin_s = max(self.clock.now_s, self._free_s)
        work_s = plan_seconds(plan, self.step_time, self.drafter)
        threads = self._with_prompts if any(item.extend for item in plan.items) else self._without_prompts
        self._free_s = self.host.finish(self, at_s=begin_s, work_s=work_s, threads=threads)
        self.busy_s += self._free_s - begin_s
        return TimedLaunch(plan, self._free_s)

    launch_forward = launch

    def launch_sampling(self, launched: TimedLaunch) -> None:
        """It is part of a step's time."""

    def collect(self, launched: TimedLaunch) -> StepResult:
        self.clock.now_s = max(self.clock.now_s, launched.end_s)
        plan = launched.plan
        return StepResult(plan.seq, [self._result(item) for item in plan.items])

    def _result(self, item: PlanItem) -> ItemResult:
        if item.to_draft:
            return ItemResult(token=None, drafted=[Guess(TOKEN, n - 1, CONFIDENCE) for n in range(item.to_draft)])
        if not item.sample:
            return _SILENT
        return _DRAWN if self.is_right() else _OTHER


# ---- Speculation: real rows and passes (engine/speculative/drafting.py), right at the planned rate.

SEED = 3
MATCH = 1  # match class of n-grams with the lowest initial chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """At most `most` drafts per request and step, each right with `accept_rate` after right ones.

    `time`: of a drafting model; n-grams draft in `match_rate` of the steps.
    """

    most: int
    accept_rate: float
    time: DrafterTime | None
    match_rate: float = 1.0

    def decode(self, *, overlaps: bool) -> MakeDecodeStrategy:
        drafting = Drafting(None, most=self.most, passes=self.most)
        if self.time is None:
            drafting = Drafting(Guesses(self.most, self.match_rate), most=self.most)
        return partial(SpeculativeDecode, drafting=drafting, overlaps=overlaps and self.time is not None)

    def draws(self) -> Callable[[], bool]:
        uniform = random.Random(SEED).random
        return lambda: uniform() < self.accept_rate


class Guesses:
    """A random match now and then, with `most` tokens."""

    def __init__(self, most: int, match_rate: float) -> None:
        self._draft = Draft([TOKEN] * most, MATCH)
        self._match_rate = match_rate
        self._uniform = random.Random(SEED).random

    def draft(self, request: Request) -> Draft:
        return self._draft if self._uniform() < self._match_rate else NO_DRAFT


def speculation_of(
    engine: SpeculativeFlags, *, accept_rate: float | None, match_rate: float, time: DrafterTime | None
) -> Speculation | None:
    """None without drafts. `engine` is resolved."""
    if engine.speculative_algorithm is None:
        return None
    by_model = drafts_by_model(engine)
    assert accept_rate is not None and by_model == (time is not None)
    return Speculation(most=rows_of_request(engine) - 1, accept_rate=accept_rate, match_rate=match_rate, time=time)
