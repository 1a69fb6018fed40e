"""The launched steps: which step is launched, sampled and collected when.

depth 1                    launch N -> collect N -> launch N+1
depth 2                    launch N -> launch N+1 -> collect N
deferred sampling          launch N -> forward N+1 -> collect N -> masks N+1 -> sample N+1
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from engine.core.outputs import StepEffects
from engine.core.plan import Plan, StepResult
from engine.core.scheduler import Scheduler
from engine.messages import TokenOutput


class Launched(Protocol):
    @property
    def plan(self) -> Plan: ...


L = TypeVar("L", bound=Launched)


class StepLauncher(Protocol[L]):
    """The executor's side (engine/executor/executor.py)."""

    def launch(self, plan: Plan) -> L: ...

    def launch_forward(self, plan: Plan) -> L: ...

    def launch_sampling(self, launched: L) -> None: ...

    def collect(self, launched: L) -> StepResult: ...


class Pipeline(Generic[L]):
    """`depth`: steps launched before the oldest is collected."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: StepLauncher[L],
        depth: int,
        on_step: Callable[[StepEffects], list[TokenOutput]],
    ) -> None:
        assert depth >= 1
        self._scheduler = scheduler
        self._executor = executor
        self._depth = depth
        self._on_step = on_step
        self._launched: deque[L] = deque()
        self.worked = False

    @property
    def num_launched(self) -> int:
        return len(self._launched)

    @property
    def last(self) -> Plan | None:
        """Return the plan launched last, if its step is not collected."""
        return self._launched[-1].plan if self._launched else None

    def next_plan(self, now_s: float, *, paused: bool) -> Plan | None:
        return None if paused else self._scheduler.schedule(now_s)

    def advance(self, plan: Plan | None) -> list[TokenOutput]:
        """Launch `plan`; collect the oldest step if the depth is reached or there is no plan. `worked`: any of it."""
        self.worked = plan is not None or bool(self._launched)
        outputs = [] if plan is None else self._launch(plan)
        if self._launched and (plan is None or len(self._launched) >= self._depth):
            outputs += self._collect()
        return outputs

    def _launch(self, plan: Plan) -> list[TokenOutput]:
        if plan.sample_deferred and not plan.wait:
            return self._launch_in_two(plan)
        outputs = self._collect_all_but(0) if plan.wait else []
        self._scheduler.fill_masks(plan)
        self._launched.append(self._executor.launch(plan))
        return outputs

    def _launch_in_two(self, plan: Plan) -> list[TokenOutput]:
        """Launch the forward, collect the tokens from which the masks follow, then launch sampling."""
        launched = self._executor.launch_forward(plan)
        self._launched.append(launched)
        outputs = self._collect_all_but(1)
        self._scheduler.fill_masks(plan)
        self._executor.launch_sampling(launched)
        return outputs

    def _collect_all_but(self, left: int) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        while len(self._launched) > left:
            outputs += self._collect()
        return outputs

    def _collect(self) -> list[TokenOutput]:
        launched = self._launched.popleft()
        return self._on_step(self._scheduler.collect(launched.plan, self._executor.collect(launched)))
