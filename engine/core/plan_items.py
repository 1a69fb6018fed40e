"""Plan items of requests, their slots, and their allowed tokens."""

from engine.core.mem_cache.image_cache import with_images
from engine.core.outputs import input_logprob_part, note_launch
from engine.core.plan import Plan, PlanItem, SlotOpen
from engine.core.request import Grammar, Request
from engine.core.stages import RequestTable, Stages, check_reads


def plan_item(request: Request, start: int, end: int, *, sample: bool, extend: bool) -> PlanItem:
    assert request.slot is not None
    known, windows = request.num_tokens, request.windows
    check_reads(request, start, end)
    hidden_from = note_launch(request, start, end)
    logprob_from, logprob_next = input_logprob_part(request, start, end)
    item = PlanItem(
        rid=request.rid,
        slot=request.slot,
        tokens=request.tokens(start, end) if start < known else [-(request.slot + 1)],
        start=start,
        page_start=request.num_synced_pages,
        new_pages=request.pages[request.num_synced_pages :],
        sample=sample,
        output_len=len(request.output_ids) + request.pending,
        extend=extend,
        logprobs=request.logprobs,
        logprob_from=logprob_from,
        logprob_next=logprob_next,
        hidden_from=hidden_from,
        pool=request.message.pooling,
        window_start=windows.num_synced,
        new_window=windows.pages[windows.num_synced :],
    )
    windows.num_synced = len(windows.pages)
    request.num_synced_pages = len(request.pages)
    request.launched_len = end
    request.inflight += 1
    request.pending += sample
    return with_images(item, request) if request.images else item


def open_slot(request: Request, table: RequestTable) -> SlotOpen:
    return SlotOpen(
        slot=table.open(request) if request.slot is None else table.reopen(request),
        sampling=request.sampling,
        prompt_ids=list(request.input_ids),
        output_ids=list(request.output_ids),
        eos_ids=tuple(sorted(request.eos_ids)),
        adapter=request.adapter,
        state=request.recurrent.slot,
    )


class GrammarMasks:
    """Allowed tokens of a step's rows, from the grammars of requests."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def awaits_token(self, items: list[PlanItem]) -> bool:
        """Check if the mask of an item depends on a token in flight."""
        live = self._stages.live
        for item in items:
            request = live[item.rid]
            follows_known = item.behind or item.output_len == len(request.output_ids)
            if item.sample and request.grammar is not None and not follows_known:
                return True
        return False

    def fill(self, plan: Plan) -> None:
        """Set the allowed tokens of `plan`, just before its sampling is launched."""
        live = self._stages.live
        grammar: Grammar | None = None
        for i, item in enumerate(plan.items):
            request = live[item.rid]
            if not item.sample or request.grammar is None or request.finish is not None:
                continue
            if item.behind:
                grammar = (grammar or request.grammar).fork()
                grammar.accept(item.tokens[0])
                plan.masks[i] = grammar.bitmask()
                continue
            grammar, known = None, len(request.output_ids)
            assert item.output_len == known, f"{request.rid}: a mask before the token it follows from"
            plan.masks[i] = request.grammar.bitmask()
