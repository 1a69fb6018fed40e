"""Bugs in speculation, which the stories with drafts must find."""

from dataclasses import replace

from engine.core import draft_rows, drafting, finish, results
from engine.core.drafting import DraftAsk, Drafting
from engine.core.drafts import Draft
from engine.core.memory import Memory
from engine.core.results import Results
from engine.core.scheduler import Scheduler
from engine.core.state_slots import StateSlots
from tools.mutants.planting import Bugs

DRAFTS = Bugs()


@DRAFTS.bug(
    "a wrong draft is accepted", results._was_right, "A row counts though the row before it sampled another token."
)
def _(original, request, item, number):
    return request.finish is None and request.num_tokens == item.kv_len


@DRAFTS.bug(
    "a row behind a wrong draft is accepted",
    results._was_right,
    "A row counts if its own draft is right, whatever stood before it.",
)
def _(original, request, item, number):
    return request.finish is None and request.output_ids[-1] == item.tokens[0]


@DRAFTS.bug("the KV of a wrong draft stays", results._take_back, "The next step goes on behind the rejected position.")
def _(original, request):
    original(request)
    request.launched_len = request.computed_len = min(request.computed_len + 1, len(request.pages))


DRAFTS.skip("a rejected row is not taken back", results._take_back, "The request goes on behind all rows of the step.")


@DRAFTS.bug(
    "a stop string inside the drafts is found late",
    finish._stop_text,
    "Only the text behind the last row of a step is searched.",
)
def _(original, request):
    return None if request.drafts.rows else original(request)


@DRAFTS.bug(
    "a row has the logprob of the one before it", Results.collect, "Each draft's row says what the first row said."
)
def _(original, results_, plan, result):
    for i, item in enumerate(plan.items):
        if item.draft and result.items[i].logprob is not None:
            result.items[i].logprob = result.items[i - 1].logprob
    return original(results_, plan, result)


@DRAFTS.bug(
    "another step goes out before the rows are judged",
    Drafting.able,
    "A request with drafts in flight is planned again.",
)
def _(original, one, requests):
    return [r for r in original(one, requests) if not r.drafts.rows]


@DRAFTS.bug("a draft leaves its grammar", drafting.fitting, "Drafts are not cut where the grammar refuses them.")
def _(original, grammar, tokens):
    return list(tokens)


@DRAFTS.bug("masks forget the drafts before them", Scheduler.fill_masks, "Each row has the mask of the first.")
def _(original, scheduler, plan):
    original(scheduler, plan)
    for i, item in enumerate(plan.items):
        if item.draft and i in plan.masks:
            plan.masks[i] = plan.masks[i - 1]


@DRAFTS.bug(
    "the walk is not undone", drafting.fitting, "The grammar stands behind the drafts, not behind what was sampled."
)
def _(original, grammar, tokens):
    fitting = original(grammar, tokens)
    for token in fitting:
        grammar.accept(token)
    return fitting


@DRAFTS.bug("drafts take pages that are not there", Memory.make_room, "A request drafts beyond its pages.")
def _(original, memory, request, count, *, left_free):
    return count


@DRAFTS.bug("more is drafted than may be sampled", Drafting.choose, "Drafts reach beyond the length.")
def _(original, one, requests, *, rows, overlaps):
    drafts = original(one, requests, rows=rows, overlaps=overlaps)
    return {rid: draft if draft.parents else Draft([*draft.tokens, 7, 7], draft.match) for rid, draft in drafts.items()}


# ---- trees


@DRAFTS.bug("a row counts beside the path", results._was_right, "Its token is right, behind one that is wrong.")
def _(original, request, item, number):
    return request.finish is None and request.num_tokens == item.kv_len and request.output_ids[-1] == item.tokens[0]


@DRAFTS.bug("rows of a tree share places", draft_rows._places, "Each lies where the first path would have it.")
def _(original, draft, depths):
    return depths


@DRAFTS.bug("passes write beyond their places", DraftAsk.places, "Room is taken for one path.")
def _(original, ask, passes):
    return passes


@DRAFTS.bug("a grammar's drafts are a tree", results._may_branch, "Masks follow one path.")
def _(original, request):
    return not request.sampling.penalized


# ---- recurrent states


DRAFTS.skip(
    "a state is not taken back", StateSlots.rewind, "The next step goes on from the state behind rejected drafts."
)


@DRAFTS.bug("a state is taken back too far", StateSlots._attach_rewinds, "The last row that counts is not in it.")
def _(original, states, plan):
    original(states, plan)
    plan.rewinds = [replace(rewind, length=rewind.length - 1) for rewind in plan.rewinds]


@DRAFTS.bug("a snapshot is taken within a request's rows", StateSlots.cut_answer, "Behind rows that follow it.")
def _(original, states, request, start, end):
    cut = original(states, request, start, end)
    if cut < end and states.num_available:
        states._copy(request, cut)
    return end


@DRAFTS.bug(
    "a snapshot behind rejected drafts is kept", StateSlots.reject, "Whoever finds it goes on from other tokens."
)
def _(original, states, request, at):
    lock = request.lock
    if at in request.snapshots and lock is not None and lock.parent is not None and not lock.state:
        states.keep_at(request.snapshots.pop(at), lock)
    original(states, request, at)


@DRAFTS.bug("a rejected request keeps its snapshot on its way", StateSlots.reject, "Its slot is lost.")
def _(original, states, request, at):
    slot = request.snapshots.pop(at, 0)
    original(states, request, at)
    if slot:
        request.snapshots[at] = slot


@DRAFTS.bug("more requests have drafts than shadows", StateSlots.most_drafted, "Two of them share a copy.")
def _(original, states):
    return None
