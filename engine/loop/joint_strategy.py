"""DP attention: a step is offered to the other DP ranks, and launched once all have posted a row.

    plan --offered, until all ranks have posted their row--> launched --ended--> collected

The pipeline never waits for a step: other ranks' rows and ends of steps wake the loop.
"""

from collections.abc import Sequence

from engine.core.dp_agreement import Agreement
from engine.core.plan import Plan
from engine.core.scheduler import Scheduler
from engine.loop.pipeline import StepStrategy


class JointStrategy(StepStrategy):
    """Plans and offers the steps of one DP rank."""

    def __init__(self, scheduler: Scheduler, agreement: Agreement) -> None:
        super().__init__(scheduler)
        assert scheduler.limits.pp_size == 1, "DP attention has one stage"
        self._agreement = agreement
        self._offered: dict[int, int] = {}  # by plan, the number of the step to agree on

    def next_plan(self, now_s: float, full: Sequence[bool], *, paused: bool) -> Plan | None:
        """Plan a step if there is room; if other ranks request it, at least an empty one.

        Posts its row before the loop sends outputs, since other devices may wait for it.
        """
        if full[0]:
            return None
        scheduler, agreement = self.scheduler, self._agreement
        prefillable = not paused and scheduler.prefillable
        admits = agreement.admits
        delays = prefillable and not admits
        plan = None if paused else scheduler.schedule(now_s, admits=admits)
        if plan is None and (delays or agreement.asked):
            plan = scheduler.join()
        scheduler.counters.delayed_steps += delays
        if plan is not None and plan.skips_model:
            return plan  # its drafter has all its layers here; a request for a step is met behind it
        if plan is not None and (plan.items or delays or agreement.asked):  # else it has copies alone
            row = agreement.row_of(plan, scheduler, prefillable=prefillable, delays=delays)
            self._offered[plan.seq] = agreement.post(row)
        return plan

    def may_launch(self, plan: Plan) -> bool:
        """Check that all ranks agree on the step, and set `plan.agreed`."""
        if (step := self._offered.get(plan.seq)) is None:
            return True
        plan.agreed = self._agreement.agreed(step)
        if plan.agreed is None:
            return False
        del self._offered[plan.seq]
        return True
