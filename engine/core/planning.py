"""The next step: prefill first (PrefillPlanner), else every running request by one token (DecodePlanner), or both.

The planner does not know the depth: a second plan before the first result uses placeholders for tokens in flight
(engine/core/plan.py). It relies only on steps running in the order of their plans.
"""

from engine.core.decode_planning import DecodePlanner
from engine.core.departures import Departures
from engine.core.plan import Plan, PlanItem, SlotOpen
from engine.core.policy import Uniform
from engine.core.preemption import Preemption
from engine.core.prefill_planning import PrefillPlanner
from engine.core.state import SchedulerState
from engine.core.step_budget import StepBudget


class Planner:
    def __init__(
        self,
        state: SchedulerState,
        departures: Departures,
        preemption: Preemption,
        *,
        uniform: Uniform,
        budget: StepBudget | None,
    ) -> None:
        self._state = state
        self._prefill = PrefillPlanner(state, preemption, uniform=uniform, budget=budget)
        self._decode = DecodePlanner(state, departures, preemption)
        self._seq = 0
        self._last_was_extend = False

    def schedule(self, now_s: float = 0.0) -> Plan | None:
        state, counters, host = self._state, self._state.counters, self._state.memory.host
        retractions = counters.retractions
        items, opens = self._draft(now_s)
        if not items and counters.retractions > retractions:  # their memory is free now
            items, opens = self._draft(now_s)
        if not items and not state.backups.asks_for_a_step and (host is None or not host.asks_for_a_step):
            return None
        extend = any(item.extend for item in items)
        wait, self._last_was_extend = extend and self._last_was_extend and state.limits.wait_between_prefills, extend
        sample_deferred = any(self._awaits_token(item) for item in items)
        self._seq += 1
        counters.steps += 1
        counters.prefill_steps += extend
        counters.mixed_steps += extend and not all(item.extend for item in items)
        counters.deferred_samples += sample_deferred
        plan = Plan(
            seq=self._seq,
            extend=extend,
            items=items,
            opens=opens,
            closes=state.table.take_closed(),
            wait=wait,
            sample_deferred=sample_deferred,
        )
        state.backups.attach(plan)
        if host is not None:
            host.attach(plan)
        return plan

    def _draft(self, now_s: float) -> tuple[list[PlanItem], list[SlotOpen]]:
        items, opens = self._prefill.plan(now_s)
        if self._state.limits.mixed_chunk or not any(item.extend for item in items):
            decodes, opened = self._decode.plan({item.rid for item in items}, now_s)
            items, opens = items + decodes, opens + opened
        return items, opens

    def _awaits_token(self, item: PlanItem) -> bool:
        """Whether the tokens that `item` may sample depend on one that is still in flight."""
        request = self._state.stages.live[item.rid]
        return item.sample and request.grammar is not None and request.pending > 1

    def fill_masks(self, plan: Plan) -> None:
        """Fill in the tokens that the items of `plan` may sample, from the tokens known now."""
        live = self._state.stages.live
        for i, item in enumerate(plan.items):
            request = live[item.rid]
            if item.sample and request.grammar is not None and request.finish is None:
                assert request.pending == 1, f"{request.rid}: a mask before the token it follows from"
                plan.masks[i] = request.grammar.bitmask()
