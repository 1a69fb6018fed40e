"""The scheduler: which requests compute what in the next step, and what a finished step means.

    add ---> waiting --schedule()--> chunked / running ---> (ended) ---> draining ---> gone
                ^                          |                               |
                +------- retracted --------+         kept: the role decides when its memory goes (release)

It owns live requests and their stage, and is the only one who changes them. It is told events and returns plans and
effects; it never looks at a clock, a socket or a tensor. Depth is not its business: a second `schedule()` before the
first `collect()` plans on tokens that do not exist yet (placeholders, engine/core/plan.py). What it relies on is that
steps run in the order in which they were planned.

Memory rule: a request's pages are released only when no launched step touches them (`inflight == 0`), because a page
that leaves the engine may next be written by a transfer peer, who does not wait for our stream.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from engine.core.backups import Backups
from engine.core.finish import TailText, check_finish
from engine.core.growth import MeasuredGrowth
from engine.core.hidden import note_launch
from engine.core.hidden import take as take_hidden
from engine.core.limits import Limits
from engine.core.memory import Memory
from engine.core.new_token_ratio import NewTokenRatio
from engine.core.outputs import StepEffects, input_logprob_part, output_of, refusal, refused
from engine.core.plan import ItemResult, Plan, PlanItem, SlotOpen, StepResult
from engine.core.policy import Draw, Priorities, order
from engine.core.prefill_adder import AddResult, PrefillAdder
from engine.core.request import Request
from engine.core.request_table import RequestTable
from engine.messages import FinishReason, TokenOutput

ABORTED = FinishReason(kind="abort", message="aborted by the client")


@dataclass(slots=True)
class Counters:
    """Totals since start; they only grow."""

    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    retractions: int = 0
    preemptions: int = 0
    steps: int = 0
    wasted_draws: int = 0
    late_draws: int = 0


class Scheduler:
    """`batch_is_full`: the last waiting request that was judged found no room, and nothing has become free since; a full
    decode batch then never pays for another judgement.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        memory: Memory,
        tail_text: TailText,
        policy: str = "fcfs",
        priorities: Priorities | None = None,
        ratio: NewTokenRatio | None = None,
        draw: Draw = lambda: 0.0,
        backup_pages: int = 0,
        reserve_floor: int = 0,
        growth: MeasuredGrowth | None = None,
    ) -> None:
        self.limits = limits
        self.memory = memory
        self.ratio = ratio or NewTokenRatio()
        self.batch_is_full = False
        self._policy = policy
        self._priorities = priorities
        self._draw = draw
        self.table = RequestTable(limits.max_running_requests)
        self.counters = Counters()
        self.backups = Backups(max_pages=backup_pages, page_size=limits.page_size)
        self._reserve_floor = reserve_floor
        self.growth = growth
        self._tail_text = tail_text
        self._live: dict[str, Request] = {}
        self._waiting: dict[str, Request] = {}  # in order of arrival
        self._chunked: Request | None = None  # the one whose prompt is computed in parts
        self._running: list[Request] = []
        self._draining: list[Request] = []  # ended or retracted, a step in flight
        self._kept: list[Request] = []  # the role's: KV is being handed over, or comes from elsewhere
        self._closes: list[int] = []
        self._seq = 0
        self._last_was_extend = False

    # ---- events

    def add(self, request: Request) -> list[TokenOutput]:
        """Queue a request; a request that can never run is answered at once."""
        if error := self.refusal(request):
            return [refused(request, error)]
        self._register(request)
        self._waiting[request.rid] = request
        if self._priorities is not None:
            self.batch_is_full = False  # it may preempt
        return []

    def abort(self, rid: str, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        """End a request, wherever it is. A kept one is only marked: its role ends it (`end_kept`, `release`)."""
        request = self._live.get(rid)
        if request is None or request.finish is not None:
            return []
        request.abort = reason
        if request in self._kept:
            return []
        self._unstage(request)
        return [self._finish(request, reason)]

    # ---- requests whose memory the role answers for

    def adopt(self, request: Request) -> FinishReason | None:
        """Take a request whose KV will come from elsewhere (decode role): live, but not queued. Or refuse it."""
        if error := self.refusal(request):
            return error
        self._register(request)
        self._kept.append(request)
        return None

    def reserve(self, request: Request) -> bool:
        """Pages for an adopted request's prompt (`request.pages`), unless growth of the others needs the room."""
        coming = [*self._growing(), request]
        expected = self._expected_growth(coming)
        largest = max(r.max_new_tokens - len(r.output_ids) for r in coming)  # whoever it is must be able to finish
        return self.memory.reserve(request, reserved_pages=self.memory.allocator.pages_for(int(max(expected, largest))))

    def _expected_growth(self, coming: list[Request]) -> float:
        """Tokens: by what ended answers say, or by the ratio until some have; a floor for each that can use it."""
        if self.growth is not None and self.growth.known:
            return self.growth.peak_tokens(coming, floor=self._reserve_floor)
        floors = [min(r.max_new_tokens - len(r.output_ids), self._reserve_floor) for r in coming]
        return sum(max(self.ratio.growth_tokens(r), f) for r, f in zip(coming, floors, strict=True))

    def start_decoding(self, request: Request, first: ItemResult, *, cached_tokens: int) -> list[TokenOutput]:
        """An adopted request's KV has landed. A prebuilt batch of one: no forward, its first token is `first`."""
        self._kept.remove(request)
        self._running.append(request)
        request.computed_len = request.launched_len = request.hidden_launched = len(request.input_ids)
        request.cached_tokens, request.admitted = cached_tokens, True
        return [self._commit_draw(request, first)]

    def end_kept(self, request: Request, reason: FinishReason) -> TokenOutput:
        """A kept request fails or is aborted. Its memory stays until `release`."""
        assert request in self._kept
        request.finish = reason
        self.counters.aborted += 1
        return output_of(request, [])

    def keeps(self, request: Request) -> bool:
        return request in self._kept

    def release(self, request: Request) -> None:
        """The role is done with a kept request: nobody outside reads or writes its pages any more."""
        self._kept.remove(request)
        assert request.finish is not None, f"{request.rid} released before it ended"
        self._draining.append(request)
        self._settle()

    def release_to_quarantine(self, request: Request) -> list[int]:
        """As `release`, but a peer may still write its pages: they are returned, and belong to nobody for now."""
        pages = self.memory.quarantine(request)
        self.release(request)
        return pages

    def end_quarantine(self, pages: list[int]) -> None:
        """Nobody can write `pages` any more."""
        self.memory.allocator.end_quarantine(pages)
        self.batch_is_full = False

    # ---- memory of all at once

    def retract_all(self) -> int:
        """Every request that computes gives its memory back and waits again; how many. No step may be in flight.

        A prompt that is being handed over keeps its pages: a peer reads them. No copy is made or kept: what waits is
        computed again, perhaps with other weights.
        """
        self.backups.forget_all(self._live.values())
        victims, self._running = self._running, []
        if self._chunked is not None and not self._chunked.prefill_only:
            victims.append(self._chunked)
            self._chunked = None
        self._draining += victims
        self._settle(copy=False)
        return len(victims)

    @property
    def holds_no_kv(self) -> bool:
        """No request has pages of its own, or reads cached ones."""
        cache = self.memory.cache
        return self.memory.allocator.counts()["held"] == 0 and cache.num_evictable == cache.num_pages

    def forget_prefixes(self) -> None:
        """Only legal while `holds_no_kv`, with no step in flight. Copies of retracted KV go too."""
        self.backups.forget_all(self._live.values())
        self.memory.cache.flush()
        self.batch_is_full = False

    # ---- planning

    def schedule(self, now_s: float = 0.0) -> Plan | None:
        """The next step, or None when there is nothing to do before a collect (or at all)."""
        before = self.counters.retractions
        items, opens = self._draft(now_s)
        if not items and self.counters.retractions > before:  # their memory is free now
            items, opens = self._draft(now_s)
        if not items and not self.backups.asks_for_a_step:
            return None
        extend = any(item.extend for item in items)
        wait, self._last_was_extend = extend and self._last_was_extend and self.limits.wait_between_prefills, extend
        draw_late = any(self._awaits_token(item) for item in items)
        self._seq += 1
        self.counters.steps += 1
        self.counters.late_draws += draw_late
        closes, self._closes = self._closes, []
        plan = Plan(
            seq=self._seq, extend=extend, items=items, opens=opens, closes=closes, wait=wait, draw_late=draw_late
        )
        self.backups.attach(plan)
        return plan

    def _awaits_token(self, item: PlanItem) -> bool:
        """Whether what `item` may draw follows from a token that is still in flight."""
        request = self._live[item.rid]
        return item.sample and request.grammar is not None and request.pending > 1

    def fill_masks(self, plan: Plan) -> None:
        """What the items of `plan` may draw, from the tokens known now. Call it just before the draw is launched."""
        for i, item in enumerate(plan.items):
            request = self._live[item.rid]
            if item.sample and request.grammar is not None and request.finish is None:
                assert request.pending == 1, f"{request.rid}: a mask before the token it follows from"
                plan.masks[i] = request.grammar.bitmask()

    def _draft(self, now_s: float) -> tuple[list[PlanItem], list[SlotOpen]]:
        items, opens = self._plan_extend(now_s)
        if self.limits.mixed_chunk or not any(item.extend for item in items):
            decodes, opened = self._plan_decode({item.rid for item in items})
            items, opens = items + decodes, opens + opened
        return items, opens

    def _plan_extend(self, now_s: float) -> tuple[list[PlanItem], list[SlotOpen]]:
        """Prefill first: the chunked request goes on, then waiting ones in the policy's order while budgets last."""
        items: list[PlanItem] = []
        opens: list[SlotOpen] = []
        if self._chunked is None and (self.batch_is_full or not self._waiting):
            return items, opens
        adder = self._adder()
        if self._chunked is not None:
            items.append(self._extend(self._chunked, adder))
        for request in self._in_order(now_s):
            if self._chunked is not None or adder.exhausted:
                break
            result = AddResult.NO_TOKEN if self.table.num_free == 0 else adder.add(request)
            if result is AddResult.NO_TOKEN:
                self._note_full(request)
            if result is not AddResult.CONTINUE:
                break
            del self._waiting[request.rid]
            self._note_admitted(request)
            opens.append(self._open_slot(request))
            items.append(self._restore(request) if request.saved_len > 0 else self._extend(request, adder))
        return items, opens

    def _adder(self) -> PrefillAdder:
        riders = sum(r.draws_left > 0 for r in self._running) if self.limits.mixed_chunk else 0
        return PrefillAdder(
            limits=self.limits, memory=self.memory, ratio=self.ratio, growing=self._growing(), decode_tokens=riders
        )

    def _in_order(self, now_s: float) -> Iterable[Request]:
        if self._policy == "fcfs" and self._priorities is None:
            return list(islice(self._waiting.values(), self.limits.max_running_requests))
        return order(
            self._policy,
            self._waiting.values(),
            match_prefix=self.memory.match_prefix,
            draw=self._draw,
            priorities=self._priorities,
            now_s=now_s,
        )

    def _note_full(self, request: Request) -> None:
        """No room for `request`: somebody of much lower priority makes some, or the batch is full until one ends."""
        if self._retraction_pending:
            return
        if self._priorities is not None:
            victims = [r for r in self._running if self._priorities.may_preempt(request, r)]
            if victims:
                self._retract(min(victims, key=lambda r: (r.priority * self._priority_sign, -r.serial)), [])
                self.counters.preemptions += 1
                return
        self.batch_is_full = bool(self._running or self._draining or self._kept)

    @property
    def _priority_sign(self) -> int:
        return -1 if self._priorities is not None and self._priorities.low_first else 1

    def _extend(self, request: Request, adder: PrefillAdder) -> PlanItem:
        """Plan as much of `request`'s known tokens as the step allows; it stays `_chunked` while some are left."""
        start, total = request.launched_len, request.num_tokens
        end = adder.take(request)
        self._chunked = request if end < total else None
        if end == total:
            (self._kept if request.prefill_only else self._running).append(request)
        return self._item(request, start, end, sample=end == total, extend=True)

    def _restore(self, request: Request) -> PlanItem:
        """Its KV comes back from the host, and it draws in the same step: whoever is retracted next, it got on by one."""
        self.backups.restore(request)
        self._running.append(request)
        return self._item(request, request.launched_len, request.launched_len + 1, sample=True, extend=False)

    def _plan_decode(self, planned: set[str]) -> tuple[list[PlanItem], list[SlotOpen]]:
        """Every running request by one token, as far as rows and pages reach; `planned`: already part of this step."""
        ready = [r for r in self._running if r.draws_left > 0 and r.rid not in planned]
        unslotted = sum(r.slot is None for r in ready) - self.table.num_free
        while unslotted > 0:  # more adopted requests than rows: the latest wait
            unslotted -= ready.pop().slot is None
        self._grow(ready)
        opens = [self._open_slot(r) for r in ready if r.slot is None]
        items = [self._item(r, r.launched_len, r.launched_len + 1, sample=True, extend=False) for r in ready]
        return items, opens

    def _grow(self, ready: list[Request]) -> None:
        """A page for each request whose next token starts one. Where memory is short the last in order are retracted.

        A victim with a step in flight gives its memory back at the next collect: until then the needy sit out.
        """
        needy = sorted((r for r in ready if self.memory.needs_page(r)), key=_retraction_order)
        for i, request in enumerate(needy):
            while request in ready and not self.memory.grow(request):
                if self._retraction_pending:
                    ready[:] = [r for r in ready if r not in needy[i:]]
                    return
                victim = max(self._running, key=_retraction_order)
                self._retract(victim, ready)
                self.ratio.on_retraction(self._running)

    @property
    def _retraction_pending(self) -> bool:
        """Somebody's memory comes back at the next collect: nobody else need go for now."""
        return any(r.finish is None for r in self._draining)

    def _retract(self, victim: Request, ready: list[Request]) -> None:
        self._running.remove(victim)
        if victim in ready:
            ready.remove(victim)
        self._draining.append(victim)
        self._settle()

    def _requeue(self, request: Request) -> None:
        """Give memory back (what is computed stays findable) and wait again; generated tokens are known tokens now."""
        self._give_back(request)
        request.retractions += 1
        self.counters.retractions += 1
        self._waiting = {r.rid: r for r in sorted([request, *self._waiting.values()], key=lambda r: r.serial)}

    def _item(self, request: Request, start: int, end: int, *, sample: bool, extend: bool) -> PlanItem:
        assert request.slot is not None
        known = request.num_tokens
        hidden_from = note_launch(request, start, end)
        logprob_from, logprob_next = input_logprob_part(request, start, end)
        item = PlanItem(
            rid=request.rid,
            slot=request.slot,
            tokens=request.tokens(start, end) if start < known else [-(request.slot + 1)],
            start=start,
            page_start=request.told_pages,
            new_pages=request.pages[request.told_pages :],
            sample=sample,
            output_len=len(request.output_ids) + request.pending,
            extend=extend,
            logprobs=request.logprobs,
            logprob_from=logprob_from,
            logprob_next=logprob_next,
            hidden_from=hidden_from,
            pool=request.pooling,
        )
        request.told_pages = len(request.pages)
        request.launched_len = end
        request.inflight += 1
        request.pending += sample
        return item

    def _open_slot(self, request: Request) -> SlotOpen:
        return SlotOpen(
            slot=self.table.open(request),
            sampling=request.sampling,
            prompt_ids=list(request.input_ids),
            output_ids=list(request.output_ids),
            eos_ids=tuple(sorted(request.eos_ids)),
        )

    # ---- results

    def collect(self, plan: Plan, result: StepResult) -> StepEffects:
        """Take the results of the oldest launched step."""
        assert result.seq == plan.seq and len(result.items) == len(plan.items)
        effects = StepEffects()
        self.backups.on_collected(plan)
        for item, item_result in zip(plan.items, result.items, strict=True):
            request = self._live[item.rid]
            request.inflight -= 1
            request.pending -= item.sample
            request.computed_len = max(request.computed_len, item.kv_len)
            if request.finish is None:
                self._apply(request, item, item_result, effects)
            else:
                self.counters.wasted_draws += item.sample
        self._settle()
        if plan.items and not plan.extend:
            self.ratio.decay()
        if not self._live:
            self.ratio.reset()
        return effects

    def _apply(self, request: Request, item: PlanItem, result: ItemResult, effects: StepEffects) -> None:
        request.input_logprobs += result.input_logprobs
        take_hidden(request, item, result.hidden)
        if item.extend:
            self.memory.share(request)
            effects.progressed.append(request)
        if not item.sample:
            return
        output = self._commit_draw(request, result)
        if request.prefill_only:
            self._closes.append(self.table.close(request))  # its pages are still read, its row is not
            effects.prefilled.append((request, output, result))
        else:
            effects.outputs.append(output)

    def _commit_draw(self, request: Request, result: ItemResult) -> TokenOutput:
        """Append the drawn token, run the finish checks, say what is new."""
        new_ids = []
        if request.max_new_tokens > 0:  # 0: only the prompt's logprobs were asked for
            assert result.token is not None
            request.output_ids.append(result.token)
            new_ids = [result.token]
            self.counters.generation_tokens += 1
            if result.logprob is not None:
                request.output_logprobs.append(result.logprob)
            if request.grammar is not None and not result.bad and not request.grammar.accept(result.token):
                request.abort = refusal(f"grammar: {request.grammar.problem}", status=500)
        reason = check_finish(request, bad=result.bad, tail_text=self._tail_text)
        if reason is None:
            return output_of(request, new_ids)
        if not request.prefill_only:
            self._unstage(request)
        return self._finish(request, reason, new_ids)

    def _unstage(self, request: Request) -> None:
        """Out of whichever stage it is in, before it ends."""
        if request is self._chunked:
            self._chunked = None
            return
        if self._waiting.pop(request.rid, None) is not None:
            return
        for stage in (self._running, self._draining):
            if request in stage:
                stage.remove(request)
                return
        raise AssertionError(f"{request.rid} is in no stage")

    def _finish(self, request: Request, reason: FinishReason, new_ids: list[int] | None = None) -> TokenOutput:
        """Final state, said once. A prefill-only request is the role's from here; others go when nothing is in flight."""
        request.finish = reason
        self.counters.aborted += reason.kind == "abort"
        if self.growth is not None and reason.kind != "abort":
            self.growth.note_end(len(request.output_ids))
        output = output_of(request, new_ids or [])
        if not request.prefill_only:
            self._draining.append(request)
            self._settle()
        elif request not in self._kept:
            self._kept.append(request)
        return output

    def _settle(self, *, copy: bool = True) -> None:
        """Ended and retracted requests whose last step has been collected give their memory back."""
        settled = [r for r in self._draining if r.inflight == 0]
        self._draining = [r for r in self._draining if r.inflight > 0]
        for request in settled:
            if request.finish is None and copy and self.backups.begin(request):
                self._draining.append(request)  # until its copy is made
            elif request.finish is None:
                self._requeue(request)
            else:
                self.backups.drop(request)
                self._give_back(request)
                del self._live[request.rid]

    def _give_back(self, request: Request) -> None:
        self.batch_is_full = False
        self.memory.give_back(request)
        if request.slot is not None:
            self._closes.append(self.table.close(request))

    # ---- the rest

    def _register(self, request: Request) -> None:
        self._live[request.rid] = request
        self.counters.requests += 1
        request.serial = self.counters.requests
        self.counters.prompt_tokens += len(request.input_ids)

    def refusal(self, request: Request) -> FinishReason | None:
        """Why `request` cannot be taken at all; None when it can."""
        if request.rid in self._live:
            return refusal(f"rid: a request with id {request.rid!r} is running", status=400)
        if not request.input_ids:
            return refusal("input_ids: the prompt is empty", status=400)
        if len(self._live) >= self.limits.max_queued_requests + self.limits.max_running_requests:
            return refusal(f"the queue is full ({self.limits.max_queued_requests} requests)", status=503)
        if not self.memory.can_ever_hold(len(request.input_ids) + request.max_new_tokens):
            allocator = self.memory.allocator
            return refusal(
                f"max_new_tokens: prompt ({len(request.input_ids)} tokens) plus max_new_tokens "
                f"({request.max_new_tokens}) exceeds the KV capacity of {allocator.num_pages * allocator.page_size}",
                status=400,
            )
        return None

    def _note_admitted(self, request: Request) -> None:
        if not request.admitted:
            request.admitted = True
            request.cached_tokens = request.launched_len
            self.counters.cached_tokens += request.launched_len

    def _growing(self) -> list[Request]:
        """Requests that may need more pages than they have."""
        chunked = [self._chunked] if self._chunked is not None else []
        coming = [r for r in self._kept if not r.prefill_only and r.pages and r.finish is None]
        return self._running + chunked + coming

    @property
    def num_running(self) -> int:
        return len(self._running) + (self._chunked is not None)

    @property
    def num_retracted(self) -> int:
        """Requests that lost their memory and wait to resume."""
        waiting = sum(r.retractions > 0 for r in self._waiting.values())
        return waiting + sum(r.finish is None for r in self._draining)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return sum(r.num_tokens for r in self._waiting.values())

    @property
    def idle(self) -> bool:
        return not self._live

    def live_rids(self) -> list[str]:
        return list(self._live)

    def flush_cache(self) -> bool:
        """Forget all prefixes; False (and nothing changed) while requests live."""
        if not self.idle:
            return False
        self.memory.cache.flush()
        return True

    def check(self) -> None:
        """DESIGN.md section 5.1: every page has one owner, every live request one stage."""
        self.memory.check()
        self.table.check()
        self.backups.check(list(self._live.values()))
        stages = [*self._waiting.values(), *self._running, *self._draining, *self._kept]
        stages += [self._chunked] if self._chunked is not None else []
        assert sorted(r.rid for r in stages) == sorted(self._live), "a live request is in no stage, or in two"
        held = [p for r in stages for p in r.own_pages()]
        assert len(held) == len(set(held)) == self.memory.allocator.counts()["held"], "held pages and owners differ"
        page_size = self.memory.allocator.page_size
        for r in stages:
            assert 0 <= r.pending <= r.inflight
            assert r.computed_len <= r.launched_len <= len(r.pages) * page_size


def _retraction_order(request: Request) -> tuple[int, int, str]:
    """Victims come from the end: longest output first, then shortest input; rid breaks ties."""
    return (len(request.output_ids), -len(request.input_ids), request.rid)
