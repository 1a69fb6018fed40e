"""The launched steps of a worker with pipeline stages or DP attention. It waits for nothing: a turn does what can be done.

    plan --DP attention: offered, until all ranks have posted their row--> launched --ended--> collected
                              next_plan            |   collect the oldest
    one stage, DP attention   ======== offered ====|==== step ====|
    stages                    launch 1 .. launch n, then a plan for each step that ends

A step that ends, a row of another rank and a message call for attention; meanwhile the loop rests, and a request that
arrives gets the stage that is free. A worker of one rank waits in `collect` instead (engine/loop/pipeline.py): its device
computes as long.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from engine.core.dp_agreement import Agreement
from engine.core.lanes import Lane
from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.core.scheduler import Scheduler
from engine.loop.pipeline import L, StepLauncher
from engine.messages import TokenOutput

L_contra = TypeVar("L_contra", contravariant=True)


class WatchedSteps(Protocol[L_contra]):
    """An executor whose steps can be watched. Each end of one calls for the loop's attention, from any thread."""

    def ended(self, launched: L_contra) -> bool:
        """Whether `collect` returns at once."""


class RankPipeline(Generic[L]):
    """`depth`: steps offered and launched before the oldest is collected. `agreement`: of DP attention. `lane`: of PD multiplexing."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: StepLauncher[L],
        watched: WatchedSteps[L],
        depth: int,
        on_step: Callable[[StepEffects], list[TokenOutput]],
        agreement: Agreement | None = None,
        lane: Lane | None = None,
    ) -> None:
        assert depth >= 1 and (agreement is None or scheduler.limits.pp_size == 1)
        self._scheduler = scheduler
        self._executor = executor
        self._watched = watched
        self._depth = depth
        self._without_overlap = scheduler.limits.micro_batches
        self._on_step = on_step
        self._agreement = agreement
        self._lane = lane
        self._offered: deque[tuple[Plan, int | None]] = deque()  # with the number of the step to agree on
        self._launched: deque[L] = deque()
        self._unsampled: L | None = None  # the last one launched, where its masks follow from tokens in flight
        self._joined: set[int] = set()  # plans in flight that only other ranks have something for
        self._prefillable = self._delays = False  # when the last plan was made: prompts waited, and may not enter yet
        self.worked = False

    @property
    def num_launched(self) -> int:
        """Count the steps offered or launched, without those that only other ranks have something for."""
        return len(self._offered) + len(self._launched) - len(self._joined)

    @property
    def last(self) -> Plan | None:
        """Return the plan made last, if its step is not collected."""
        if self._offered:
            return self._offered[-1][0]
        return self._launched[-1].plan if self._launched else None

    def next_plan(self, now_s: float, *, paused: bool) -> Plan | None:
        """Plan a step if there is room for one; where other ranks ask for it, at least one without items."""
        scheduler, agreement = self._scheduler, self._agreement
        if len(self._offered) + len(self._launched) >= self._depth:
            return None
        if agreement is None:
            return None if paused else scheduler.schedule(now_s, lane=self._lane)
        self._prefillable = not paused and scheduler.prefillable
        admits = agreement.admits
        self._delays = self._prefillable and not admits
        plan = None if paused else scheduler.schedule(now_s, admits=admits)
        if plan is None and (self._delays or agreement.asked):
            plan = scheduler.join()
            self._joined.add(plan.seq)
        scheduler.counters.delayed_steps += self._delays
        return plan

    def advance(self, plan: Plan | None) -> list[TokenOutput]:
        """Offer `plan`, launch what all ranks agree on, and collect what has ended. `worked`: any of it."""
        self.worked = plan is not None
        if plan is not None:
            self._offered.append((plan, self._post(plan)))
        self._launch_agreed()
        outputs = self._collect_ended()
        self._launch_agreed()  # what waited for the end of another
        return outputs

    def _post(self, plan: Plan) -> int | None:
        """Post the row of `plan`. None: it has copies alone, and no other rank asks for the step."""
        agreement = self._agreement
        if agreement is None or not (plan.items or self._delays or agreement.asked):
            return None
        row = agreement.row_of(plan, self._scheduler, prefillable=self._prefillable, delays=self._delays)
        return agreement.post(row)

    def _launch_agreed(self) -> None:
        while self._offered and self._unsampled is None and self._may_launch(*self._offered[0]):
            self._launch(self._offered.popleft()[0])
            self.worked = True

    def _may_launch(self, plan: Plan, step: int | None) -> bool:
        if plan.wait and len(self._launched) >= self._without_overlap:
            return False
        if step is not None:
            assert self._agreement is not None
            plan.agreed = self._agreement.agreed(step)
        return step is None or plan.agreed is not None

    def _launch(self, plan: Plan) -> None:
        if plan.sample_deferred and self._launched:
            self._unsampled = self._executor.launch_forward(plan)
            self._launched.append(self._unsampled)
            return
        self._scheduler.fill_masks(plan)
        self._launched.append(self._executor.launch(plan))

    def _collect_ended(self) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        while self._launched and self._launched[0] is not self._unsampled and self._watched.ended(self._launched[0]):
            launched = self._launched.popleft()
            self._joined.discard(launched.plan.seq)
            outputs += self._on_step(self._scheduler.collect(launched.plan, self._executor.collect(launched)))
            self.worked = True
        if self._unsampled is not None and self._launched[0] is self._unsampled:
            self._scheduler.fill_masks(self._unsampled.plan)
            self._executor.launch_sampling(self._unsampled)
            self._unsampled = None
        return outputs
