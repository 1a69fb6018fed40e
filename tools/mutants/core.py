"""Bugs in the core and the roles, which the stories of tests/core/proof must find."""

from dataclasses import replace
from typing import Any

import msgspec

from disagg.incoming import Incoming
from disagg.outgoing import Outgoing
from disagg.page_sender import PageSender
from engine.core import finish, hidden
from engine.core.adapter_budget import AdapterBudget
from engine.core.backups import Backups
from engine.core.decode_planning import DecodePlanner
from engine.core.departures import Departures
from engine.core.dp_agreement import Agreement
from engine.core.dp_step import Row, agree
from engine.core.dp_update import UpdateAgreement
from engine.core.held import HeldRequests
from engine.core.match_rules import ByState
from engine.core.memory import Memory, growth_pages, match_limit
from engine.core.micro_batches import MicroBatches
from engine.core.page_allocator import PageAllocator
from engine.core.plan import PageLoad
from engine.core.preemption import Preemption
from engine.core.prefill_adder import PrefillAdder
from engine.core.prefill_planning import PrefillPlanner
from engine.core.radix_cache import RadixCache
from engine.core.radix_node import Branch
from engine.core.request import Request
from engine.core.request_table import RequestTable
from engine.core.results import Results
from engine.core.scheduler import Scheduler
from engine.core.stages import Stages
from engine.core.state_slots import StateSlots
from engine.core.usable_prefixes import UsablePrefixes
from engine.core.window_pages import WindowPages
from engine.loop.joint_strategy import JointStrategy
from tools.mutants.planting import Bugs

CORE = Bugs()


class Agreeing:
    """A sender that says "released", or a receiver that says "drained", whatever the one behind it says."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)

    def released(self) -> bool:
        return True

    def drained(self) -> bool:
        return True


# ---- steps in flight


@CORE.bug(
    "memory goes back while a step may write it",
    Stages.take_settled,
    "Ended requests give their memory back although a launched step still writes it.",
)
def _(original, stages):
    settled, stages.draining = stages.draining, []
    return settled


@CORE.bug("the wasted step's token is sent", Results.collect, "An ended request gets the token of one more step.")
def _(original, results, plan, result):
    ended = [
        (request, item, item_result)
        for item, item_result in zip(plan.items, result.items, strict=True)
        if (request := results._state.stages.live[item.rid]).finish is not None and not request.prefill_only
    ]
    effects = original(results, plan, result)
    for request, item, item_result in ended:
        results._apply(request, item, item_result, effects)
    return effects


@CORE.bug("a sample in flight is not counted", Request.samples_left, "A request launches a step beyond its last token.")
def _(original, request):
    return request.max_new_tokens - len(request.output_ids)


@CORE.bug(
    "a mask is made one token too early", Scheduler._awaits_token, "A mask does not wait for the token before it."
)
def _(original, scheduler, item):
    return original(scheduler, item) and scheduler.stages.live[item.rid].pending > 2


# ---- pipeline stages


@CORE.bug("a request is planned twice in flight", MicroBatches.ready, "A stage decodes what another one samples.")
def _(original, batches, running):
    return [r for r in running if r.samples_left > 0]


@CORE.bug("one stage gets all decodes", MicroBatches.share, "A plan decodes every request that is ready.")
def _(original, batches, num_ready, *, num_running):
    return num_ready


@CORE.bug("a plan too many takes decodes", MicroBatches.on_planned, "Plans in flight are not counted.")
def _(original, batches, plan):
    before = batches._in_flight
    original(batches, plan)
    batches._in_flight = before


CORE.skip("a stage's place is never free again", MicroBatches.on_collected, "A collected plan counts as in flight.")


@CORE.bug("a chunk waits for the one before it", PrefillPlanner.plan, "One stage at a time computes a long prompt.")
def _(original, planner, now_s, *, admits):
    chunked = planner._stages.chunked
    return ([], []) if chunked is not None and chunked.inflight else original(planner, now_s, admits=admits)


@CORE.bug(
    "a chunk overtakes the one in flight",
    PrefillPlanner._extend,
    "A chunk begins a page behind the end of the last one.",
)
def _(original, planner, request, adder):
    page_size = planner._limits.page_size
    if request.inflight and request.launched_len + page_size < request.num_tokens:
        request.launched_len += page_size
    return original(planner, request, adder)


# ---- ranks of DP attention


@CORE.bug("a rank without work leaves out a step", Agreement.asked, "It posts no row, and the others wait for it.")
def _(original, agreement):
    return False


@CORE.bug("a step begins before the last row is there", Agreement.agreed, "A rank without a row counts as idle.")
def _(original, agreement, step):
    board = agreement._board
    return agree([board.row(rank, step) or Row(step=step, idle=True) for rank in range(board.num_ranks)])


@CORE.bug("a paused rank takes part in no step", JointStrategy.next_plan, "The other ranks wait until it goes on.")
def _(original, strategy, now_s, full, *, paused):
    return None if paused else original(strategy, now_s, full, paused=paused)


@CORE.bug(
    "a prompt that is delayed asks for no step", Agreement.row_of, "Where nothing else runs its delay never ends."
)
def _(original, agreement, plan, scheduler, *, prefillable, delays):
    return original(agreement, plan, scheduler, prefillable=prefillable, delays=False)


@CORE.bug(
    "a row is posted twice", Agreement.post, "Now and then a rank posts a row for the step behind the next one, too."
)
def _(original, agreement, row):
    step = original(agreement, row)
    if step % 7 == 3:
        original(agreement, replace(row, step=step + 1))
    return step


@CORE.bug("a rank takes weights alone", UpdateAgreement.all_ready, "It does not wait until all have read them.")
def _(original, updates):
    original(updates)
    return True


@CORE.bug(
    "a refusal of weights is not seen", UpdateAgreement.refused_by, "The other ranks wait for one that has refused."
)
def _(original, updates):
    return None


# ---- the radix tree

CORE.skip(
    "an evicted leaf's parent is never evicted",
    RadixCache._note_leaf,
    "The parent that becomes a leaf is not entered into the eviction heap.",
    called_by=RadixCache._remove,
)
CORE.skip(
    "the prefix is not locked while others may evict",
    RadixCache.lock,
    "Admission takes pages while the prefix that it matched is unlocked.",
    called_by=Memory.admit,
)


@CORE.bug("a split node forgets its lock", RadixCache._split, "The upper half of a locked node can be evicted.")
def _(original, cache, node, num_pages):
    upper = original(cache, node, num_pages)
    upper.locks = 0
    return upper


@CORE.bug(
    "a match looks at the first page of an edge alone",
    RadixCache._shared_pages,
    "The pages behind the first one of an edge match unseen.",
)
def _(original, cache, key, tokens, at):
    return len(tokens[at : at + len(key)]) // cache.page_size


@CORE.bug("all of the prompt may come from the cache", match_limit, "No token is left to compute.")
def _(original, request):
    return min(request.num_tokens, original(request) + 1)


# ---- memory


@CORE.bug("a duplicate page is forgotten", Memory.share, "A page that the cache had already belongs to no request.")
def _(original, memory, request):
    before = list(request.dup_pages)
    original(memory, request)
    request.dup_pages = before


@CORE.bug(
    "a page is shared before its last token is computed",
    Memory.share,
    "A page that is computed in part can be found.",
)
def _(original, memory, request):
    computed = request.computed_len
    request.computed_len = memory.allocator.pages_for(computed) * memory.allocator.page_size
    original(memory, request)
    request.computed_len = computed


@CORE.bug("an evicted page is free twice", PageAllocator.evict, "Two requests receive the same page.")
def _(original, allocator, pages):
    original(allocator, pages)
    allocator._give_back(pages[:1])


@CORE.bug("quarantined pages are free at once", PageAllocator.quarantine, "Pages that a peer may write are reused.")
def _(original, allocator, pages):
    allocator.free(pages)


@CORE.bug(
    "the largest request is counted with a page too many",
    growth_pages,
    "The room in a request's last page does not count.",
)
def _(original, allocator, request, num_tokens):
    return allocator.pages_for(num_tokens)


@CORE.bug(
    "a shared page counts as freed although another request reads it",
    Memory.pages_left,
    "A preemption counts on pages that it does not free.",
)
def _(original, memory, request, *, without):
    left = original(memory, request, without=without)
    return left + sum(len(r.pages) - len(r.own_pages()) for r in without)


CORE.skip(
    "other weights find old prefixes",
    Memory.forget_prefixes,
    "An update of the weights leaves the radix tree as it is.",
    called_by=Scheduler.forget_prefixes,
)

# ---- what a step takes


@CORE.bug("the chunk is cut inside a page", PrefillAdder._whole, "A chunk ends in the middle of a page.")
def _(original, adder, tokens):
    return tokens - 1 if adder._limits.page_size > 1 else tokens


@CORE.bug("a step takes one prompt too many", PrefillAdder.exhausted, "The limit of prompts a step is off by one.")
def _(original, adder):
    adder.num_requests -= 1
    exhausted = original(adder)
    adder.num_requests += 1
    return exhausted


@CORE.bug(
    "one more gets a row than there are",
    RequestTable.num_free,
    "The planner counts a row that the table does not have.",
    called_by=DecodePlanner._with_rows,
)
def _(original, table):
    return original(table) + 1


# ---- retraction


@CORE.bug(
    "the batch stays full when memory comes back",
    Departures._give_back,
    "Waiting requests are not judged again after another one has ended.",
)
def _(original, departures, request):
    full = departures._stages.batch_is_full
    original(departures, request)
    departures._stages.batch_is_full = full


@CORE.bug("a retracted request forgets a token", Departures._requeue, "It resumes without the last token it sampled.")
def _(original, departures, request, *, elsewhere):
    original(departures, request, elsewhere=elsewhere)
    del request.output_ids[-1:]


@CORE.bug(
    "prompt logprobs are sent twice after a retraction",
    Departures._requeue,
    "Logprobs of the part that is computed again are kept.",
)
def _(original, departures, request, *, elsewhere):
    unsent = list(request.unsent.input_logprobs)
    original(departures, request, elsewhere=elsewhere)
    request.unsent.input_logprobs = unsent


@CORE.bug(
    "a preempted request's row is not closed",
    RequestTable.close,
    "Only a request that has ended closes its row.",
    called_by=Departures._give_back,
)
def _(original, table, request):
    if request.finish is not None:
        original(table, request)


@CORE.bug(
    "a hidden state is sent twice after a retraction",
    hidden.note_launch,
    "Hidden states of positions that are computed again are sent again.",
)
def _(original, request, start, end):
    launched, request.hidden_launched = request.hidden_launched, 0
    first = original(request, start, end)
    request.hidden_launched = max(launched, request.hidden_launched)
    return first


@CORE.bug("a copy comes back one page short", Backups.restore, "The last page of a copy is not loaded.")
def _(original, backups, request):
    original(backups, request)
    load = backups._loads[-1]
    backups._loads[-1] = PageLoad(load.key, load.start, load.pages[:-1])


@CORE.bug(
    "pages leave before their copy is made", Backups.begin, "A copy to the host does not count as a step in flight."
)
def _(original, backups, request):
    begun = original(backups, request)
    request.inflight -= begun
    return begun


@CORE.bug(
    "a preemption does not ask whether it frees enough",
    Preemption._suffice,
    "The first victim is retracted even if the request still does not fit.",
)
def _(original, preemption, request, victims, reserve, *, row):
    return bool(victims) or original(preemption, request, victims, reserve, row=row)


@CORE.bug(
    "decode preempts for a request and gives the memory to none",
    HeldRequests.reserve,
    "The pages that a preemption frees are not reserved.",
)
def _(original, held, request, *, may_preempt=False):
    if original(held, request):
        return True
    if may_preempt:
        held._preempt_for(request)
    return False


# ---- recurrent states


@CORE.bug(
    "a new request finds the state of another one", StateSlots.begin, "A slot is not zeroed for its next request."
)
def _(original, states, request, *, source):
    original(states, request, source=source)
    states._begins = [copy for copy in states._begins if copy.src is not None]


@CORE.bug(
    "a state that has landed is cleared", StateSlots.adopt, "The slot of a handed-over request is zeroed as a new one."
)
def _(original, states, request):
    states.begin(request, source=0)


@CORE.bug(
    "a state goes to the upper part of a split node",
    RadixCache._split,
    "A state is found behind fewer tokens than it has.",
)
def _(original, cache, node, num_pages):
    upper = original(cache, node, num_pages)
    if node.state:
        upper.state, node.state = node.state, 0
        states = next(part for part in cache._parts if isinstance(part, StateSlots))
        states._nodes[upper.state] = upper
    return upper


@CORE.bug("a hit goes by pages alone", ByState.__call__, "A prefix is used beyond the state that is kept for it.")
def _(original, rule, cache, tokens, branch):
    found = original(rule, cache, tokens, branch)
    return replace(cache.match(tokens, branch=branch), state=found.state)


@CORE.bug("the live state is given out", StateSlots.snapshot, "A snapshot is the slot of the running request itself.")
def _(original, states, request, at):
    original(states, request, at)
    if at in request.snapshots:
        states.drop(request.snapshots[at])
        states._snapshots.pop()
        request.snapshots[at], request.state = request.state, 0


@CORE.bug("a snapshot is taken before its step", StateSlots.attach, "It holds the state at the step's begin.")
def _(original, states, plan):
    original(states, plan)
    plan.states, plan.snapshots = plan.states + plan.snapshots, []


@CORE.bug("slots in quarantine are free at once", StateSlots.quarantine, "A peer writes into another request's state.")
def _(original, states, request):
    slots = [request.state] if request.state else []
    states.free(request)
    return slots


@CORE.bug(
    "a request without a slot is admitted",
    StateSlots.num_available,
    "Admission looks at pages alone.",
    called_by=StateSlots.fits,
)
def _(original, states):
    return 1


@CORE.bug("a snapshot is kept wherever its request is", StateSlots.keep, "A state is found behind other tokens.")
def _(original, states, request, at, memory):
    slot = request.snapshots.pop(at, 0)
    if slot and request.lock is not None and request.lock.parent is not None:
        states.keep_at(slot, request.lock)
    elif slot:
        states.drop(slot)


@CORE.bug("an aborted hand-over leaves its state behind", StateSlots.free, "A slot of an adopted request stays taken.")
def _(original, states, request):
    if request.bootstrap is not None and request.finish is not None and request.finish.kind == "abort":
        request.state = 0
    original(states, request)


# ---- pages of a window


@CORE.bug("the window is a token short", WindowPages.first_page, "The oldest key of a window counts as gone.")
def _(original, windows, num_tokens):
    return original(windows, num_tokens + 1)


@CORE.bug("a hit goes by full pages alone", WindowPages.usable, "A prefix is used whose last window has a hole.")
def _(original, windows, cached):
    return len(cached)


@CORE.bug(
    "a split leaves all window pages below", WindowPages.on_split, "The upper part of a node has the lower one's."
)
def _(original, windows, upper, lower):
    lower.window = lower.window[: len(lower.pages)]


@CORE.bug(
    "a full page leaves its window page behind", WindowPages.on_removed, "A page of a node that is gone stays taken."
)
def _(original, windows, node, **evicted):
    original(windows, node, **evicted) if not any(node.window) else None


@CORE.bug("a window page is freed while another request reads it", WindowPages._release, "Readers are not counted.")
def _(original, windows, page):
    if page in windows._readers:
        windows._readers[page] = 1
    original(windows, page)


@CORE.bug("admission forgets the windows of others", WindowPages.fits, "More is admitted than the pool holds.")
def _(original, windows, request, **kwargs):
    return True


@CORE.bug(
    "the first page of a window is rounded up", WindowPages.first_page, "The page that it begins in counts as gone."
)
def _(original, windows, num_tokens):
    return -(-max(0, num_tokens - windows.window + 1) // windows.allocator.page_size)


@CORE.bug("a hand-over leaves the oldest page of the window out", WindowPages.window_of, "The tail begins a page late.")
def _(original, windows, request, num_tokens):
    return original(windows, request, num_tokens)[1:]


@CORE.bug(
    "a window page goes while a step in flight reads it",
    WindowPages.retire,
    "Pages retire by what is planned: what a plan reads of the window has another owner when its step runs (SGLang #31501).",
)
def _(original, windows, request):
    computed, request.computed_len = request.computed_len, max(request.computed_len, request.launched_len)
    original(windows, request)
    request.computed_len = computed


@CORE.bug(
    "decode reserves the window's tail a page late",
    WindowPages.adopt,
    "The oldest page of the window has no place in which it could land (SGLang #24857).",
)
def _(original, windows, request):
    original(windows, request)
    if len(request.window) > request.window_first + 1:
        windows.allocator.free([request.window[request.window_first]])
        request.window[request.window_first] = 0
        request.window_first += 1


@CORE.bug(
    "decode reserves the window's tail as if it were the whole prompt",
    WindowPages.adopt,
    "A hand-over takes pages for all tokens, of which admission has counted one window (SGLang #24857).",
)
def _(original, windows, request):
    original(windows, request)
    request.window[: request.window_first] = windows._take(request.window_first)
    request.window_first = 0


@CORE.bug("window pages in quarantine are free at once", WindowPages.quarantine, "A peer writes into another's window.")
def _(original, windows, request):
    windows.free(request)
    return []


@CORE.bug(
    "a state is used where its window is gone", WindowPages.is_whole, "A prefix counts by pages and states alone."
)
def _(original, windows, cached):
    return True


CORE.skip(
    "others find pages of a window in which nothing landed",
    Memory.retire,
    "Decode shares a page that it reserved behind the last window.",
    called_by=HeldRequests._run,
)


# ---- KV events

CORE.skip(
    "a page is announced whose window is gone",
    UsablePrefixes._on_window,
    "Routers count on prefixes that no request can use.",
    called_by=WindowPages._evict,
)
CORE.skip(
    "a prefix is announced whose state is gone",
    UsablePrefixes._on_state,
    "Routers count on prefixes that no request can use.",
    called_by=StateSlots._evict,
)
CORE.skip(
    "what ends behind a hole stays announced",
    UsablePrefixes._settle_below,
    "A window reaches back over several nodes; only that with the hole is looked at again.",
)


@CORE.bug("a child that goes takes its parent's announcement along", UsablePrefixes._count, "Children are not counted.")
def _(original, prefixes, node, by):
    parent = original(prefixes, node, by)
    if parent is not None and by < 0:
        prefixes._below[parent] = 0
    return parent


# ---- adapters and namespaces


@CORE.bug("adapters share prefixes", Request.branch, "A request finds KV that another adapter has computed.")
def _(original, request):
    return Branch(0, request.namespace)


@CORE.bug("namespaces share prefixes", Request.branch, "A request finds KV of another namespace.")
def _(original, request):
    return Branch(request.adapter)


@CORE.bug("any number of adapters in a step", AdapterBudget.has_place, "Adapters are not counted.")
def _(original, budget, request):
    return True


# ---- the end of a request


@CORE.bug(
    "the length is checked behind the stop token",
    finish.check_finish,
    "A stop token at the last position ends the request as a stop.",
)
def _(original, request, **kwargs):
    reason = original(request, **kwargs)
    if reason is not None and reason.kind == "length":
        return finish._stop_token(request) or reason
    return reason


@CORE.bug(
    "a stop counts before the least length", finish._stop_token, "A stop token ends a request before min_new_tokens."
)
def _(original, request):
    sampling = request.sampling
    request.sampling = msgspec.structs.replace(sampling, min_new_tokens=0)
    reason = original(request)
    request.sampling = sampling
    return reason


# ---- the roles


@CORE.bug(
    "prefill frees what a peer still reads",
    Outgoing._forget_when_released,
    "Pages are free although a write still reads them.",
)
def _(original, role, entry):
    entry.sender = Agreeing(entry.sender)
    original(role, entry)
    entry.sender = entry.sender._behind


@CORE.bug(
    "decode reuses what a peer may still write",
    Incoming._fail,
    "Pages of an aborted request skip the quarantine.",
)
def _(original, incoming, transfer, failure, reason):
    transfer.receiver = Agreeing(transfer.receiver)
    original(incoming, transfer, failure, reason)


@CORE.bug(
    "the last chunk goes without the pages before it",
    PageSender.send_whole_pages,
    "A page between two chunks is not sent.",
)
def _(original, pages, handover):
    before = handover.sent_pages
    original(pages, handover)
    handover.sent_pages += handover.sent_pages > before
