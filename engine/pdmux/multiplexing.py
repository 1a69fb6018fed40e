"""PD multiplexing (engine/pdmux/phases.py): an iteration plans for one phase, due decodes first.

Each phase is a pipeline stream that is never waited for: the loop rests until a step ends or a
decode step is due.
"""

from collections.abc import Callable, Sequence

from engine.core.outputs import StepEffects
from engine.core.plan import STREAMS, Phase, Plan, StepResult
from engine.core.scheduler import Scheduler
from engine.loop.listeners import LoopListener
from engine.loop.pipeline import StepStrategy
from engine.pdmux.phases import LaneShare

POLL_S = 0.001  # the loop's rest ends at whole milliseconds: the next one, or it would turn in vain


class Multiplexing(StepStrategy, LoopListener):
    """Strategy of both lanes; `give` receives changes of `share.parts_of`, in device parts."""

    def __init__(self, scheduler: Scheduler, *, share: LaneShare, give: Callable[[int], None]) -> None:
        super().__init__(scheduler)
        self._share = share
        self._give = give
        self._given: int | None = None
        self._now_s = 0.0  # of the turn
        self._in_flight = dict.fromkeys(STREAMS, 0)  # launched steps
        self._moved_s = dict.fromkeys(STREAMS, 0.0)  # when a step of the phase was launched or collected last
        self._launched_s = float("-inf")  # the last decode step
        self._joined_s: float | None = None  # since then, the first request came from the prefill phase
        self._waits_until_s = float("inf")
        self._give_parts(concurrent=False)

    @property
    def beside_prompts(self) -> bool:
        return self._in_flight[Phase.PREFILL] > 0

    def next_plan(self, now_s: float, full: Sequence[bool], *, paused: bool) -> Plan | None:
        self._now_s, self._waits_until_s = now_s, float("inf")
        due_s = self._share.due_s(self._launched_s, self._joined_s) if self.beside_prompts else now_s
        if now_s < due_s:
            self._waits_until_s = due_s
        elif plan := self._plan(Phase.DECODE, full, paused=paused):
            self._launched_s, self._joined_s = now_s, None
            return plan
        return self._plan(Phase.PREFILL, full, paused=paused)

    def _plan(self, phase: Phase, full: Sequence[bool], *, paused: bool) -> Plan | None:
        if paused or full[STREAMS[phase]]:
            return None
        concurrent = self.beside_prompts if phase is Phase.DECODE else bool(self.scheduler.stages.running)
        plan = self.scheduler.schedule(self._now_s, phase=phase)
        if plan is not None:
            self._moved_s[phase] = self._now_s
            self._give_parts(concurrent=concurrent)
        return plan

    def _give_parts(self, *, concurrent: bool) -> None:
        if (parts := self._share.parts_of(concurrent=concurrent)) != self._given:
            self._given = parts
            self._give(parts)

    def may_launch(self, plan: Plan) -> bool:
        self._count(plan, 1)
        return True

    def collect(self, plan: Plan, result: StepResult) -> StepEffects:
        effects = super().collect(plan, result)
        self._count(plan, -1)
        goes_on = any(output.finish is None for output in effects.outputs)
        if plan.phase is Phase.PREFILL and self._joined_s is None and goes_on:
            self._joined_s = self._now_s
        return effects

    def _count(self, plan: Plan, change: int) -> None:
        assert plan.phase is not None, "with PD multiplexing each plan has a phase"
        self._in_flight[plan.phase] += change
        self._moved_s[plan.phase] = self._now_s

    def since_s(self, now_s: float) -> float:
        return min((self._moved_s[phase] for phase, num in self._in_flight.items() if num), default=now_s)

    def shorten(self, wait_s: float, now_s: float) -> float:
        return min(wait_s, max(0.0, self._waits_until_s - now_s) + POLL_S)

    def note(self, plan: Plan, taken_s: float) -> None:
        if not self.beside_prompts:
            return
        self._share.note(taken_s)
        self._give_parts(concurrent=True)
