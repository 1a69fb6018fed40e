"""Verification of drafts: which rows of a step count, and what the drafter gave for the next one.

A row counts if the row before it counts and sampled exactly its draft. Only steps with drafts, or
of the drafter, come here.
"""

from engine.core.drafting import fitting
from engine.core.drafts import draft_of
from engine.core.plan import ItemResult, PlanItem
from engine.core.request import Request
from engine.core.state import SchedulerState


class Verification:
    def __init__(self, state: SchedulerState) -> None:
        self._counters = state.counters
        self._step_ends = state.step_ends

    def accepts(self, request: Request, item: PlanItem, number: int) -> bool:
        """Judge the draft of item `number` of a step; a rejected row has no effect."""
        self._counters.drafts += 1
        if not _was_right(request, item, number):
            self._counters.wrong_drafts += request.finish is None and request.num_tokens == item.kv_len
            take_back(request)
            self._step_ends.reject(request, item.kv_len)
            return False
        request.drafts.accepted += 1
        self._counters.accepted_drafts += 1
        return True


def take_drafts(request: Request, item: PlanItem, result: ItemResult) -> None:
    """Take the drafter's draft; after a failed step decode without one."""
    request.drafts.is_asked = False
    if request.finish is not None or request.num_tokens != item.kv_len:
        return
    draft, grammar = draft_of(result.drafted), request.grammar
    if not _may_branch(request):
        draft = draft.path()
    request.drafts.draft = draft if grammar is None else draft.first(len(fitting(grammar, draft.tokens)))


def take_back(request: Request) -> None:
    """Compute again from the newest token, with the sampled one."""
    request.launched_len = request.unsent.hidden_launched = request.computed_len


def _may_branch(request: Request) -> bool:
    """Check that tree rows equal chain rows: masks, counts and hidden states follow one path."""
    return request.grammar is None and not request.sampling.penalized and not request.message.return_hidden_states


def _was_right(request: Request, item: PlanItem, number: int) -> bool:
    """Check that the draft path up to item `number` was sampled."""
    follows = request.finish is None and request.drafts.last == number - item.behind
    return follows and request.num_tokens == item.kv_len and request.output_ids[-1] == item.tokens[0]
