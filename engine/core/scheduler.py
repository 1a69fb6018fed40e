"""The scheduler: told events, it returns plans and effects. It never looks at a clock, a socket or a tensor.

    add, abort, adopt ...  --->  Stages       live requests, and the stage of each
    schedule               --->  Planner      the next step (`Plan`)
    collect                --->  Results      what a finished step means (`StepEffects`)
                                 Departures   how requests leave the batch, used by all three

It owns these parts and the order in which they are called; the other owners are Memory, RequestTable and Backups.
"""

from collections.abc import Callable, Sequence

from engine.core.backups import Backups
from engine.core.counters import Counters
from engine.core.departures import Departures
from engine.core.finish import TailTexts
from engine.core.growth import MeasuredGrowth
from engine.core.limits import Limits
from engine.core.memory import Memory
from engine.core.new_token_ratio import NewTokenRatio
from engine.core.outputs import StepEffects, output_of, refusal, refused
from engine.core.plan import ItemResult, Plan, StepResult
from engine.core.planning import Planner
from engine.core.policy import Draw, Priorities
from engine.core.preemption import Preemption
from engine.core.request import Request
from engine.core.request_table import RequestTable
from engine.core.reserve import DecodeReserve
from engine.core.results import Results
from engine.core.stages import Stages
from engine.core.step_budget import StepBudget
from engine.messages import FinishReason, TokenOutput

ABORTED = FinishReason(kind="abort", message="aborted by the client")


class Scheduler:
    def __init__(
        self,
        *,
        limits: Limits,
        memory: Memory,
        tail_texts: TailTexts,
        policy: str = "fcfs",
        priorities: Priorities | None = None,
        ratio: NewTokenRatio | None = None,
        draw: Draw = lambda: 0.0,
        backup_pages: int = 0,
        reserve_floor: int = 0,
        growth: MeasuredGrowth | None = None,
        resume_elsewhere: bool = False,
        vocab_size: int | None = None,
        step_budget: StepBudget | None = None,
    ) -> None:
        """`resume_elsewhere`: the role decides where the KV of retracted requests comes from (`take_retracted`).

        `vocab_size`: token ids that have a meaning, of all that the model may draw; None: all. `step_budget`: bounds the prompt
        tokens of a step by their time; the loop tells it how long steps took.
        """
        self.limits = limits
        self.memory = memory
        self.ratio = ratio or NewTokenRatio()
        self.table = RequestTable(limits.max_running_requests)
        self.stages = Stages()
        self.counters = Counters()
        self.backups = Backups(max_pages=backup_pages, page_size=limits.page_size)
        self.growth = growth
        self._reserve = DecodeReserve(
            floor=reserve_floor, ratio=self.ratio, growth=growth, pages_for=memory.allocator.pages_for
        )
        self.step_budget = step_budget
        self._priorities = priorities
        self._departures = Departures(
            stages=self.stages,
            memory=memory,
            table=self.table,
            backups=self.backups,
            growth=growth,
            counters=self.counters,
            resume_elsewhere=resume_elsewhere,
        )
        self._preemption = Preemption(
            priorities=priorities,
            stages=self.stages,
            memory=memory,
            departures=self._departures,
            table=self.table,
            counters=self.counters,
        )
        self._planner = Planner(
            limits=limits,
            memory=memory,
            stages=self.stages,
            departures=self._departures,
            table=self.table,
            backups=self.backups,
            ratio=self.ratio,
            counters=self.counters,
            policy=policy,
            priorities=priorities,
            preemption=self._preemption,
            draw=draw,
            budget=step_budget,
        )
        self._results = Results(
            memory=memory,
            stages=self.stages,
            departures=self._departures,
            table=self.table,
            backups=self.backups,
            ratio=self.ratio,
            counters=self.counters,
            tail_texts=tail_texts,
            vocab_size=vocab_size,
        )

    # ---- steps

    def schedule(self, now_s: float = 0.0) -> Plan | None:
        """The next step, or None when there is nothing to do before a collect (or at all)."""
        return self._planner.schedule(now_s)

    def fill_masks(self, plan: Plan) -> None:
        """What the items of `plan` may draw, from the tokens known now. Call it just before the draw is launched."""
        self._planner.fill_masks(plan)

    def collect(self, plan: Plan, result: StepResult) -> StepEffects:
        """Take the results of the oldest launched step."""
        return self._results.collect(plan, result)

    # ---- events

    def add(self, request: Request) -> list[TokenOutput]:
        """Queue a request; a request that can never run is answered at once."""
        if error := self.refusal(request):
            return [refused(request, error)]
        self._register(request)
        self.memory.prefetch(request)
        self.stages.waiting[request.rid] = request
        if self._priorities is not None:
            self.stages.batch_is_full = False  # it may preempt
        return []

    def prefetch(self, request: Request) -> None:
        """A request that will be added soon: what of its prefix lies on disk is read meanwhile."""
        self.memory.prefetch(request)

    def abort(self, rid: str, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        """End a request, wherever it is. A kept one is only marked: its role ends it (`end_kept`, `release`)."""
        request = self.stages.live.get(rid)
        if request is None or request.finish is not None:
            return []
        request.abort = reason
        if request in self.stages.kept:
            return []
        self.stages.unstage(request)
        return [self._departures.finish(request, reason)]

    # ---- requests whose memory the role answers for

    def adopt(self, request: Request) -> FinishReason | None:
        """Take a request whose KV will come from elsewhere (decode role): live, but not queued. Or refuse it."""
        if error := self.refusal(request):
            return error
        self._register(request)
        self.stages.kept.append(request)
        return None

    def adapter_has_place(self, request: Request, now_s: float) -> bool:
        """Whether `request` may be given memory: its adapter fits beside those of who computes or is about to."""
        return not request.adapter or self.stages.adapter_budget(self.limits, now_s=now_s).has_place(request)

    def reserve(self, request: Request, *, may_preempt: bool = False) -> bool:
        """Pages for what a kept request knows (`request.pages`), unless growth of the others needs the room.

        `may_preempt`: running requests of much lower priority are retracted for it, if that suffices. Those with a step in
        flight give their memory back at a later collect: False until then.
        """
        if self.memory.reserve(request, reserved_pages=self._reserved_pages(request, [])):
            return True
        if not may_preempt or not self._preempt_for(request) or self.stages.retraction_pending:
            return False
        return self.memory.reserve(request, reserved_pages=self._reserved_pages(request, []))

    def _preempt_for(self, request: Request) -> list[Request]:
        return self._preemption.make_room(request, lambda gone: self._reserved_pages(request, gone), row=False)

    def _reserved_pages(self, request: Request, gone: Sequence[Request]) -> int:
        """What must stay free beside its pages, once `gone` have left."""
        return self._reserve.pages([*(r for r in self.stages.growing() if r not in gone), request])

    def urgency(self, request: Request, now_s: float) -> float:
        """The higher, the sooner; all alike where priorities are off."""
        return 0.0 if self._priorities is None else self._priorities.urgency(request, now_s)

    def retracted(self) -> list[Request]:
        """Requests that lost their memory and wait to resume, but for those that the role has taken."""
        return self.stages.retracted()

    def start_decoding(self, request: Request, first: ItemResult, *, cached_tokens: int) -> list[TokenOutput]:
        """An adopted request's KV has landed. A prebuilt batch of one: no forward, its first token is `first`."""
        self.stages.kept.remove(request)
        self.stages.running.append(request)
        request.computed_len = request.launched_len = request.hidden_launched = len(request.input_ids)
        request.cached_tokens, request.admitted = cached_tokens, True
        return [self._results.commit_draw(request, first)]

    def take_retracted(self) -> list[Request]:
        """Requests that lost their memory since the last call, the role's from now on (`resume_elsewhere`).

        Each goes on by `resume_decoding` or `resume_here`, or ends like any kept request.
        """
        taken, self.stages.untaken = self.stages.untaken, []
        return taken

    def resume_decoding(self, request: Request) -> None:
        """The KV of all its tokens but the last is in its pages. No forward: its next step is a usual one."""
        self.stages.kept.remove(request)
        self.stages.running.append(request)
        request.computed_len = request.launched_len = request.num_tokens - 1

    def resume_here(self, request: Request) -> None:
        """Nobody else computes its KV: it waits to be computed by this engine."""
        self.memory.give_back(request)
        self.stages.kept.remove(request)
        self.stages.requeue(request)
        self.stages.batch_is_full = False

    def quarantine(self, request: Request) -> list[int]:
        """A kept request's own pages, which a peer may still write: they belong to nobody until `end_quarantine`."""
        return self.memory.quarantine(request)

    def end_kept(self, request: Request, reason: FinishReason) -> TokenOutput:
        """A kept request fails or is aborted. Its memory stays until `release`."""
        assert request in self.stages.kept
        request.finish = reason
        self.counters.aborted += 1
        return output_of(request, [])

    def keeps(self, request: Request) -> bool:
        return request in self.stages.kept

    def release(self, request: Request) -> None:
        """The role is done with a kept request: nobody outside reads or writes its pages any more."""
        self.stages.kept.remove(request)
        assert request.finish is not None, f"{request.rid} released before it ended"
        self.stages.draining.append(request)
        self._departures.settle()

    def end_quarantine(self, pages: list[int]) -> None:
        """Nobody can write `pages` any more."""
        self.memory.allocator.end_quarantine(pages)
        self.stages.batch_is_full = False

    # ---- memory of all at once

    def retract_all(self) -> int:
        """Every request that computes gives its memory back and waits again; how many. No step may be in flight.

        A prompt that is being handed over keeps its pages: a peer reads them. No copy is made or kept: what waits is
        computed again, perhaps with other weights.
        """
        return self._departures.retract_all()

    @property
    def holds_no_kv(self) -> bool:
        """No request has pages of its own, or reads cached ones."""
        cache = self.memory.cache
        return self.memory.allocator.counts()["held"] == 0 and cache.num_evictable == cache.num_pages

    def forget_prefixes(self) -> None:
        """Only legal while `holds_no_kv`, with no step in flight. Copies of retracted KV go too."""
        self.backups.forget_all(self.stages.live.values())
        self.memory.forget_prefixes(files=False)
        self.stages.batch_is_full = False

    # ---- taking requests

    def _register(self, request: Request) -> None:
        self.counters.requests += 1
        self.stages.register(request, serial=self.counters.requests)
        self.counters.prompt_tokens += len(request.input_ids)

    def refusal(self, request: Request) -> FinishReason | None:
        """Why `request` cannot be taken at all; None when it can."""
        if request.rid in self.stages.live:
            return refusal(f"rid: a request with id {request.rid!r} is running", status=400)
        if not request.input_ids:
            return refusal("input_ids: the prompt is empty", status=400)
        if len(self.stages.live) >= self.limits.max_queued_requests + self.limits.max_running_requests:
            return refusal(f"the queue is full ({self.limits.max_queued_requests} requests)", status=503)
        if not self.memory.can_ever_hold(len(request.input_ids) + request.max_new_tokens):
            allocator = self.memory.allocator
            return refusal(
                f"max_new_tokens: prompt ({len(request.input_ids)} tokens) plus max_new_tokens "
                f"({request.max_new_tokens}) exceeds the KV capacity of {allocator.num_pages * allocator.page_size}",
                status=400,
            )
        return None

    # ---- what can be seen

    @property
    def num_running(self) -> int:
        return len(self.stages.running) + (self.stages.chunked is not None)

    @property
    def num_retracted(self) -> int:
        """Requests that lost their memory and wait to resume."""
        return len(self.stages.retracted())

    @property
    def num_waiting(self) -> int:
        return len(self.stages.waiting)

    @property
    def waiting_tokens(self) -> int:
        return sum(r.num_tokens for r in self.stages.waiting.values())

    @property
    def idle(self) -> bool:
        return not self.stages.live

    def live_rids(self) -> list[str]:
        return list(self.stages.live)

    def flush_cache(self) -> bool:
        """Forget all prefixes; False (and nothing changed) while requests live."""
        if not self.idle:
            return False
        self.memory.forget_prefixes(files=True)
        return True

    def check(self) -> None:
        """Every page has one owner, every live request one stage. Raises AssertionError."""
        for check in self.checks().values():
            check()

    def checks(self) -> dict[str, Callable[[], None]]:
        """The parts of `check`, each under the name of its owner."""
        return {
            **self.memory.checks(),
            "request table": self.table.check,
            "backups": lambda: self.backups.check(list(self.stages.live.values())),
            "stages": self.stages.check,
            "scheduler": self._check_owners,
        }

    def _check_owners(self) -> None:
        held = [p for r in self.stages.all() for p in r.own_pages()]
        assert len(held) == len(set(held)) == self.memory.allocator.counts()["held"], "held pages and owners differ"
        adapters = {r.adapter for r in self.stages.growing()} - {0}
        assert len(adapters) <= self.limits.max_loras_per_batch, "more adapters run than a batch may hold"
        page_size = self.memory.allocator.page_size
        for r in self.stages.all():
            assert r.launched_len <= len(r.pages) * page_size, f"{r.rid} has fewer pages than tokens in them"
