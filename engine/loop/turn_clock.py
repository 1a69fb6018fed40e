"""Activity of the loop's thread and its start, for any thread.

    loading --loaded--> resting <--turning, resting--> turning        any --end--> ended

An iteration has at most one step. The loop takes no lock: a reader may miss a new iteration's step.
"""

from engine.core.plan import Plan
from engine.messages import StepInfo, StepReply
from engine.stamps import Stamp


class TurnClock:
    """`limit_s`: maximum iteration; 0 or less has no limit. Loading is unlimited."""

    def __init__(self, *, limit_s: float, now_s: float = 0.0) -> None:
        self.limit_s = limit_s
        self._loading_since_s: float | None = now_s
        self._turning_since_s: float | None = None
        self._plan: Plan | None = None
        self._ended = False
        self._num_steps = 0

    def loaded(self) -> None:
        self._loading_since_s = None

    def turning(self, now_s: float) -> None:
        self._plan = None
        self._turning_since_s = now_s

    def computing(self, plan: Plan | None) -> None:
        self._plan = plan
        self._num_steps += plan is not None

    def resting(self) -> None:
        self._turning_since_s = None

    def end(self) -> None:
        self._ended = True
        self._turning_since_s = None

    def stalled_s(self, now_s: float) -> float | None:
        """Duration of an iteration beyond the limit."""
        since_s = self._turning_since_s
        if since_s is None or self.limit_s <= 0 or now_s - since_s <= self.limit_s:
            return None
        return now_s - since_s

    def stamp(self, stamp: Stamp, now_s: float) -> None:
        if not self._ended:
            stamp.write(now_s, busy_since_s=self._turning_since_s, num_steps=self._num_steps)

    def answer(self, call_id: str, now_s: float) -> StepReply | None:
        if self._ended:
            return None
        if (loading_since_s := self._loading_since_s) is not None:
            return StepReply(call_id, now_s - loading_since_s, loading=True)
        since_s, plan = self._turning_since_s, self._plan
        if since_s is None:
            return StepReply(call_id, None)
        stalled = self.stalled_s(now_s) is not None
        return StepReply(call_id, now_s - since_s, stalled=stalled, step=None if plan is None else _info(plan))


def _info(plan: Plan) -> StepInfo:
    return StepInfo(
        seq=plan.seq, kind=_kind(plan), num_reqs=len(plan.items), num_tokens=sum(item.q_len for item in plan.items)
    )


def _kind(plan: Plan) -> str:
    if not plan.items:
        return "copy"  # pages between tiers
    if plan.only_drafts:
        return "draft"
    if not plan.extend:
        return "decode"
    return "prefill" if all(item.extend for item in plan.items) else "mixed"
