"""The launched steps of two lanes (engine/core/lanes.py). It waits for none: a turn plans for one lane, and collects what has ended.

A decode step goes first where it is due (engine/core/lane_share.py). Each lane is a pipeline of its own depth; a step that ends calls for
attention, and the loop rests until then, or until a decode step is due.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from engine.core.lane_share import LaneShare
from engine.core.lanes import Lane
from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.core.scheduler import Scheduler
from engine.loop.pipeline import L, StepLauncher
from engine.loop.rank_pipeline import RankPipeline, WatchedSteps
from engine.messages import TokenOutput

POLL_S = 0.001  # the loop's rest ends at whole milliseconds: the next one, or it would turn in vain

L_contra = TypeVar("L_contra", contravariant=True)


class LaneSteps(WatchedSteps[L_contra], Protocol[L_contra]):
    def give(self, decode_parts: int) -> None:
        """Set the parts of the device that decode steps have beside prompts."""


class LanePipeline(Generic[L]):
    """`depth`: of each lane. `share`: of decodes."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: StepLauncher[L],
        watched: LaneSteps[L],
        depth: int,
        share: LaneShare,
        on_step: Callable[[StepEffects], list[TokenOutput]],
    ) -> None:
        self._watched = watched
        self._share = share
        self._lanes = {
            lane: RankPipeline(
                scheduler=scheduler, executor=executor, watched=watched, depth=depth, on_step=on_step, lane=lane
            )
            for lane in (Lane.DECODE, Lane.PREFILL)
        }
        self._now_s = 0.0  # of the turn
        self._moved_s = dict.fromkeys(self._lanes, 0.0)  # when a step of the lane was launched or collected last
        self._launched_s = float("-inf")  # the last decode step
        self._joined_s: float | None = None  # since then, the first request came from the prefill lane
        self._waits_until_s = float("inf")
        self.worked = False
        watched.give(share.decode_parts)

    @property
    def num_launched(self) -> int:
        return sum(lane.num_launched for lane in self._lanes.values())

    @property
    def last(self) -> Plan | None:
        """Return the plan made last of those whose steps are not collected."""
        return max((p for lane in self._lanes.values() if (p := lane.last)), key=lambda plan: plan.seq, default=None)

    @property
    def beside_prompts(self) -> bool:
        return self._lanes[Lane.PREFILL].num_launched > 0

    def next_plan(self, now_s: float, *, paused: bool) -> Plan | None:
        """Plan a step for a lane that has room for one: decodes if they are due, else prompts."""
        self._now_s, self._waits_until_s = now_s, float("inf")
        due_s = self._share.due_s(self._launched_s, self._joined_s) if self.beside_prompts else now_s
        if now_s >= due_s:
            plan = self._lanes[Lane.DECODE].next_plan(now_s, paused=paused)
            if plan is not None:
                self._launched_s, self._joined_s = now_s, None
                return plan
        else:
            self._waits_until_s = due_s
        return self._lanes[Lane.PREFILL].next_plan(now_s, paused=paused)

    def advance(self, plan: Plan | None) -> list[TokenOutput]:
        """Launch `plan`, and collect what has ended. `worked`: any of it."""
        outputs: list[TokenOutput] = []
        for lane, pipeline in self._lanes.items():
            new = pipeline.advance(plan if plan is not None and plan.lane is lane else None)
            outputs += new
            if pipeline.worked:
                self._moved_s[lane] = self._now_s
            if lane is Lane.PREFILL and self._joined_s is None and any(output.finish is None for output in new):
                self._joined_s = self._now_s
        self.worked = any(pipeline.worked for pipeline in self._lanes.values())
        return outputs

    def since_s(self, now_s: float) -> float:
        """Return since when a lane with steps in flight stands still, for the watchdog; now: none does."""
        return min((self._moved_s[lane] for lane, own in self._lanes.items() if own.num_launched), default=now_s)

    def shorten(self, wait_s: float, now_s: float) -> float:
        """Shorten a rest of `wait_s` so that a decode step is planned when it is due."""
        return min(wait_s, max(0.0, self._waits_until_s - now_s) + POLL_S)

    def note(self, plan: Plan, taken_s: float) -> None:
        """Learn from a decode step."""
        if not self.beside_prompts:
            return
        before = self._share.decode_parts
        self._share.note(taken_s)
        if self._share.decode_parts != before:
            self._watched.give(self._share.decode_parts)
