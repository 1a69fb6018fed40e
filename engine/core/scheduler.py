"""The scheduler turns events into plans and effects. It reads no clock, socket or tensor.

    add, abort       --->  Stages        live requests, and the stage of each
    held.adopt ...   --->  HandoffRequests  handoff requests: KV of, or for, another worker
    schedule         --->  PrefillPlanner, DecodePlanner: the next step (`Plan`)
                           LoadAhead     host pages for waiting requests
    fill_masks       --->  GrammarMasks  allowed tokens, before sampling
    collect          --->  Results       a finished step's effects (`StepEffects`)
                           Departures    exits from the batch, for all of these

It owns the parts and their call order; they share `SchedulerState`.

Planning ignores the depth: a second plan before the first result uses placeholders for tokens in
flight (plan.py), or with pipeline stages decodes other requests (state.py). Steps must run
in plan order, those of a phase if plans have one.
"""

from collections.abc import Callable, Sequence

from engine.core.adapters import budget_of
from engine.core.decode_planning import DecodePlanner, GrammarMasks, Items
from engine.core.estimates import DecodeReserve, StepBudget
from engine.core.mem_cache.load_ahead import LoadAhead
from engine.core.mem_cache.memory_part import LowerTier
from engine.core.memory import Detached
from engine.core.outputs import StepEffects, output_of, refused
from engine.core.plan import ItemResult, Phase, Plan, StepResult
from engine.core.policy import Uniform
from engine.core.preemption import Preemption
from engine.core.prefill_planning import PrefillPlanner
from engine.core.request import Request
from engine.core.results import Departures, Results
from engine.core.state import SchedulerState
from engine.messages import FinishReason, TokenOutput

# ---- Handoff requests of the role: their KV comes from another worker, or goes there.
#
#   adopt --> (reserve) --> start_decoding           KV from elsewhere: decode role
#   take_retracted --> resume_decoding, resume_here  preempted: the role chooses the KV's source
#   (Departures: a computed prompt) --> release      KV goes elsewhere: prefill role
#   move --> (its last step) --> leave --> release   running request: decode role
#   carry --> (reserve) --> keep                     prefix from another prefill worker
#   lend --> release                                 prefix for another one
#
# They compute nothing. Memory stays until `release`, after `quarantine` if a peer may still write.

CARRIED = FinishReason(kind="stop")  # no client waits for it


class HandoffRequests:
    def __init__(self, state: SchedulerState, departures: Departures, results: Results, preemption: Preemption) -> None:
        self._state = state
        self._memory = state.memory
        self._stages = state.stages
        self._departures = departures
        self._results = results
        self._preemption = preemption
        self._reserve = DecodeReserve(
            floor=state.limits.reserve_floor,
            ratio=state.ratio,
            growth=state.growth,
            pages_for=state.memory.allocator.pages_for,
        )

    def __contains__(self, request: Request) -> bool:
        return request in self._stages.held

    # ---- KV from elsewhere

    def adopt(self, request: Request) -> FinishReason | None:
        """Register a request with KV from elsewhere; return why it can never run, or None."""
        if error := self._state.refusal(request):
            return error
        self._state.register(request)
        self._stages.held.append(request)
        return None

    def adapter_has_place(self, request: Request, now_s: float) -> bool:
        if not request.variant.number:
            return True
        return budget_of(self._stages, self._state.limits, now_s).has_place(request)

    def reserve(self, request: Request, *, may_preempt: bool = False) -> bool:
        """Take pages for known tokens, unless others will need them.

        `may_preempt`: retract requests of much lower priority if that suffices; False until their
        last steps are collected.
        """
        fits = self._admit(request)
        if not fits and may_preempt and self._preempt_for(request) and not self._stages.retraction_pending:
            fits = self._admit(request)
        short = self._stages.short
        if fits and request in short:
            short.remove(request)
            self._stages.batch_is_full = False  # prompts behind it may fit
        elif not fits and request not in short and not request.prefill_only:
            short.append(request)
        return fits

    def _admit(self, request: Request) -> bool:
        return self._memory.admit(request, reserved_pages=self._reserved_pages(request, []), lands=True)

    def _preempt_for(self, request: Request) -> list[Request]:
        return self._preemption.make_room(request, lambda gone: self._reserved_pages(request, gone), row=False)

    def _reserved_pages(self, request: Request, gone: Sequence[Request]) -> int:
        growing = [r for r in self._stages.growing() if r not in gone]
        before = self._state.pages_before(request, self._stages.waiting.values()) if growing else 0
        return self._reserve.pages([*growing, request]) + before

    def start_decoding(self, request: Request, first: ItemResult, *, cached_tokens: int) -> list[TokenOutput]:
        """Run an adopted request after its KV landed."""
        self.go_on_decoding(request, cached_tokens=cached_tokens)
        return [self._results.commit_sample(request, first)]

    def go_on_decoding(self, request: Request, *, cached_tokens: int) -> None:
        """Run an adopted request moved from another decode worker."""
        request.unsent.hidden_launched = request.handed_tokens
        self._run(request, num_landed=request.handed_tokens)
        request.stats.cached_tokens, request.admitted = cached_tokens, True

    def _run(self, request: Request, *, num_landed: int) -> None:
        request.computed_len = request.launched_len = num_landed
        self._memory.retire(request)
        self._unhold(request)
        self._stages.running.append(request)

    # ---- retracted requests

    def take_retracted(self) -> list[Request]:
        taken, self._stages.newly_retracted = self._stages.newly_retracted, []
        return taken

    def resume_decoding(self, request: Request) -> None:
        """Run a request with KV of all tokens but the last."""
        self._run(request, num_landed=request.num_tokens - 1)

    def resume_here(self, request: Request) -> None:
        self._memory.give_back(request)
        self._unhold(request)
        self._stages.requeue(request)
        self._stages.batch_is_full = False

    # ---- requests for other workers

    def move(self, request: Request) -> None:
        self._departures.move(request)

    def leave(self, request: Request, reason: FinishReason) -> TokenOutput:
        assert request in self._stages.held and request.moves
        request.finish = reason
        return output_of(request, [])

    # ---- prefixes without a client

    def carry(self, carrier: Request) -> FinishReason | None:
        """Register a placeholder for arriving prefixes; return why that is impossible, or None."""
        if error := self._state.refusal(carrier):
            return error
        self._stages.register(carrier, serial=self._state.counters.requests)
        self._stages.held.append(carrier)
        return None

    def keep(self, carrier: Request, *, num_pages: int) -> None:
        """Cache the first `num_pages`, which landed; free the rest."""
        num_tokens = num_pages * self._state.limits.page_size
        carrier.input_ids = carrier.input_ids[:num_tokens]
        carrier.launched_len = carrier.computed_len = num_tokens
        self._memory.keep_landed(carrier)
        self.drop(carrier)

    def lend(self, carrier: Request) -> FinishReason | None:
        """Pin the placeholder's cached prefix until `release`."""
        if error := self.carry(carrier):
            return error
        num_tokens = self._memory.lend(carrier) * self._state.limits.page_size
        carrier.input_ids = carrier.input_ids[:num_tokens]
        carrier.finish = CARRIED
        return None

    def drop(self, carrier: Request) -> None:
        carrier.finish = CARRIED
        self.release(carrier)

    # ---- ends

    def end(self, request: Request, reason: FinishReason) -> TokenOutput:
        """End a failed or aborted request; `release` frees memory."""
        assert request in self._stages.held
        request.finish = reason
        self._state.counters.aborted += 1
        return output_of(request, [])

    def release(self, request: Request) -> None:
        """Free an ended request; no peer may use its pages."""
        self._unhold(request)
        assert request.finish is not None, f"{request.rid} released before it ended"
        self._stages.draining.append(request)
        self._departures.settle()

    def _unhold(self, request: Request) -> None:
        self._stages.held.remove(request)
        if request in self._stages.short:
            self._stages.short.remove(request)

    def quarantine(self, request: Request) -> Detached:
        return self._memory.quarantine(request)

    def end_quarantine(self, detached: Detached) -> None:
        self._memory.end_quarantine(detached)
        self._stages.batch_is_full = False


ABORTED = FinishReason(kind="abort", message="aborted by the client")

# The strategy of decode steps for a scheduler, from what it shares with it.
MakeDecodeStrategy = Callable[[SchedulerState, Departures, Preemption], DecodePlanner]


class OneStream:
    """Choice between prompts and decodes for the next step, or both."""

    def __init__(self, prefill: PrefillPlanner, decode: DecodePlanner, state: SchedulerState) -> None:
        self._prefill, self._decode, self._stages = prefill, decode, state.stages
        self._mixes = state.limits.mixed_chunk

    def plan(self, now_s: float, *, admits: bool, phase: Phase | None) -> Items:
        """Plan what goes first for decodes, else prefill, else decode, or both of these."""
        assert phase is None, "each plan has a phase in two streams, else none"
        items, opens = self._decode.plan_first()
        if items:
            return items, opens
        items, opens = self._prefill.plan(now_s, admits=admits)
        if self._mixes or not any(item.extend for item in items):
            decodes, opened = self._decode.plan({item.rid for item in items}, now_s)
            items, opens = items + decodes, opens + opened
        return items, opens

    def enter(self, plan: Plan) -> None:
        """Note a plan that will be launched."""


class Scheduler:
    def __init__(
        self,
        state: SchedulerState,
        *,
        uniform: Uniform = lambda: 0.0,
        step_budget: StepBudget | None = None,
        decode: MakeDecodeStrategy = DecodePlanner,
        prefill: type[PrefillPlanner] = PrefillPlanner,
        streams: type[OneStream] = OneStream,
    ) -> None:
        """Random numbers `uniform` are for policy "random"; no `step_budget` is no time limit."""
        self.limits = state.limits
        self.memory = state.memory
        self.stages = state.stages
        self.table = state.table
        self.backups = state.backups
        self.lower_tier = state.memory.of(LowerTier)
        self.counters = state.counters
        self.ratio = state.ratio
        self.step_budget = step_budget
        self._state = state
        self._departures = Departures(state)
        preemption = Preemption(state, self._departures)
        self._prefill = prefill(state, preemption, uniform=uniform, budget=step_budget)
        self.decode = decode(state, self._departures, preemption)
        self._streams = streams(self._prefill, self.decode, state)
        self._masks = GrammarMasks(state.stages)
        self._ahead = LoadAhead(state, in_order=self._prefill.in_order)
        self._results = Results(state, self._departures, self.decode)
        self.held = HandoffRequests(state, self._departures, self._results, preemption)
        self._seq = 0

    # ---- steps

    def schedule(self, now_s: float = 0.0, *, admits: bool = True, phase: Phase | None = None) -> Plan | None:
        """Plan the next step, or return None if nothing can run before a collect.

        `admits`: waiting prompts may enter. `phase`: of the step, with two streams.
        """
        counters = self.counters
        retractions = counters.retractions
        items, opens = self._streams.plan(now_s, admits=admits, phase=phase)
        if not items and counters.retractions > retractions:  # their memory is free now
            items, opens = self._streams.plan(now_s, admits=admits, phase=phase)
        self._ahead.plan(now_s)
        if not items and not self.memory.asks_for_a_step(phase):
            return None
        extend = any(item.extend for item in items)
        sample_deferred = self._masks.awaits_token(items)
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
            closes=self.table.take_closed(phase),
            sample_deferred=sample_deferred,
            phase=phase,
        )
        self._streams.enter(plan)
        self._state.micro_batches.on_planned(plan)
        self.memory.attach(plan)
        return plan

    def join(self) -> Plan:
        """A plan without items, for a step of other DP ranks."""
        self._seq += 1
        self.counters.joined_steps += 1
        return Plan(seq=self._seq, extend=False, items=[], joins=True)

    def fill_masks(self, plan: Plan) -> None:
        """Set the allowed tokens of `plan`, just before its sampling is launched."""
        self._masks.fill(plan)

    def collect(self, plan: Plan, result: StepResult) -> StepEffects:
        """Apply the results of the oldest launched step."""
        return self._results.collect(plan, result)

    # ---- requests

    def refusal(self, request: Request) -> FinishReason | None:
        return self._state.refusal(request)

    def add(self, request: Request) -> list[TokenOutput]:
        """Queue a request, or refuse one that can never run."""
        if error := self.refusal(request):
            return [refused(request, error)]
        self._state.register(request)
        self.prefetch(request)
        self.stages.waiting[request.rid] = request
        if self.limits.priorities.enabled:
            self.stages.batch_is_full = False  # it may preempt
        return []

    def prefetch(self, request: Request) -> None:
        for tier in self._state.lower_tiers:
            tier.prefetch(request, self.memory)

    def abort(self, rid: str, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        """End a request in any stage; a handoff request is marked, for its role to end."""
        if rid not in self.stages.live:
            return []
        request = self.stages.live[rid]
        if request.ended:
            return []
        request.abort = reason
        if request in self.held:
            return []
        self.stages.unstage(request)
        return [self._departures.finish(request, reason)]

    # ---- memory of all requests

    def retract_all(self) -> int:
        """Retract all computing requests; return their number. No step may be in flight.

        Prompts in handover keep their pages, which a peer reads. Nothing is copied: weights may
        change.
        """
        return self._departures.retract_all()

    @property
    def holds_no_kv(self) -> bool:
        """True if requests own no pages and read none."""
        cache = self.memory.cache
        return self.memory.allocator.counts()["held"] == 0 and cache.num_evictable == cache.num_pages

    def forget_prefixes(self) -> None:
        """Forget all prefixes and copies of retracted KV; needs `holds_no_kv`, no running step."""
        self.backups.forget_copies()
        self.memory.forget_prefixes(files=False)
        self.stages.batch_is_full = False

    def flush_cache(self) -> bool:
        """Forget all prefixes; False, without effect, while requests live."""
        if not self.idle:
            return False
        self.memory.forget_prefixes(files=True)
        return True

    # ---- load

    @property
    def idle(self) -> bool:
        return not self.stages.live

    @property
    def num_running(self) -> int:
        return self.stages.num_running

    @property
    def num_waiting(self) -> int:
        return len(self.stages.waiting)

    @property
    def prefillable(self) -> bool:
        """True if the next step may compute part of a prompt."""
        return self._prefill.prefillable

    @property
    def waiting_tokens(self) -> int:
        return sum(r.num_tokens for r in self.stages.waiting.values())

    # ---- checks

    def check(self) -> None:
        """Raise AssertionError unless pages have one owner and live requests one stage each."""
        for check in self.checks().values():
            check()

    def checks(self) -> dict[str, Callable[[], None]]:
        return {
            **self.memory.checks(self.stages.all),
            "request table": self._state.table.check,
            "stages": self.stages.check,
            "scheduler": self._state.check,
        }
