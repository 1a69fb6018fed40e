"""A follower's part of a step: copies, page rows, forward, then hidden states for the next stage, or its columns of the logits."""

from typing import TYPE_CHECKING

from engine.core.plan import Plan
from engine.executor.logit_rows import logit_calls
from engine.executor.running_model import RunningModel

if TYPE_CHECKING:  # they import torch, which a simulated rank does without
    from engine.executor.copies import Copies
    from engine.executor.draft_pass import DraftPass
    from engine.executor.forward_pass import ForwardPass
    from engine.executor.future_map import FutureMap
    from engine.executor.states import States
    from engine.kv.arrival import Arrival
    from engine.models.decoder import DenseDecoder
    from engine.parallel.stage_link import HiddenStates


class RankRunner:
    """A follower's part of steps. `drafts`, `states`: as of ModelRunner.

    `after`: link to the next stage; None: this is the last, whose ranks compute logits together.
    """

    def __init__(
        self,
        *,
        model: "DenseDecoder",
        copies: "Copies",
        forward_pass: "ForwardPass",
        future_map: "FutureMap",
        after: "HiddenStates | None",
        drafts: "DraftPass | None" = None,
        states: "States | None" = None,
    ) -> None:
        self.running = RunningModel(model, forward_pass)
        self._copies = copies
        self._forward_pass = forward_pass
        self._future_map = future_map
        self._after = after
        self._drafts = drafts
        self._states = states

    def run(self, plan: Plan) -> None:
        """Return once no copy of the step touches the pages of this rank. On a CPU the rest is done, too.

        On a GPU it is in the stream, and the leader's result says when it is done.
        """
        if plan.rewinds:
            assert self._states is not None, "the model has no states"
            self._states.rewind(self.running.model, plan.rewinds)
        arrival = self._copies.begin(plan)
        for opened in plan.opens:
            self._forward_pass.open(opened)
        self._forward_pass.prepare(self.running.model, plan)
        if not plan.items:
            self._forward_pass.join(self.running.model, plan, arrival)
            self._copies.wait(plan.seq)
            return
        if plan.only_drafts:
            self._draft(plan, arrival)
            return
        forward = self._forward_pass.run(self.running.model, plan, arrival)
        if self._after is not None:
            self._after.send(forward.hidden)
        elif not forward.gave_logits:
            for rows in logit_calls(plan.items):
                self.running.model.logits(forward.hidden[rows])
        if self._drafts is not None and any(item.draft for item in plan.items):
            self._drafts.accept(plan.items, None)
        self._copies.wait(plan.seq)
        if any(item.sample for item in plan.items):
            self._future_map.on_sampled()

    def _draft(self, plan: Plan, arrival: "Arrival") -> None:
        assert self._drafts is not None, "a plan asks a drafter, and there is none"
        arrival.hold_all()
        self._forward_pass.place(plan)
        self._drafts.draft(self.running.model, plan.items)
        self._copies.wait(plan.seq)
