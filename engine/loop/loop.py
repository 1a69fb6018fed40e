"""The event loop of an engine, the same for every role, device and depth.

One turn:   receive -> role.poll -> schedule -> launch ------> collect the oldest -> role.on_step -> send
                                                  |                  ^
                                  depth 2: the next step is launched before this one's results are read

Times, logs, deadlines and the stream gate listen (engine/loop/listener.py).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from engine.batches import requests_of
from engine.core.dp_agreement import Agreement
from engine.core.dp_update import UpdateAgreement
from engine.core.lane_share import LaneShare
from engine.core.lanes import Lane
from engine.core.outputs import StepEffects, refusal, refused
from engine.core.plan import Plan
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.grammar.queue import GrammarQueue
from engine.hicache.disk import Disk
from engine.loop.adapter_control import AdapterControl
from engine.loop.control import EngineControl, Weights
from engine.loop.deadlines import Deadlines
from engine.loop.expert_record import ExpertRecord, Loads
from engine.loop.interval_log import IntervalLog
from engine.loop.kv_events import ZmqPublisher
from engine.loop.lane_pipeline import LanePipeline, LaneSteps
from engine.loop.listener import LoopListener
from engine.loop.occupation import FixedKV, KVMemory, OccupationControl
from engine.loop.pipeline import Pipeline, StepLauncher
from engine.loop.profile_control import ProfileControl, Profiler
from engine.loop.rank_pipeline import RankPipeline, WatchedSteps
from engine.loop.reporter import Reporter
from engine.loop.retraction_log import RetractionLog
from engine.loop.role import EngineRole, Peered
from engine.loop.step_durations import StepDurations
from engine.loop.stream_gate import StreamGate
from engine.loop.timekeeper import OpenRequests, Timekeeper
from engine.loop.turn_clock import TurnClock
from engine.messages import (
    AbortRequest,
    ControlReply,
    Drain,
    FinishReason,
    FlushCache,
    GenerateBatch,
    GenerateRequest,
    GetState,
    LoadAdapter,
    MoveOut,
    RecordExperts,
    ReleaseMemory,
    ResumeMemory,
    Shutdown,
    StartProfile,
    StopProfile,
    ToFrontend,
    TokenBatch,
    TokenOutput,
    ToScheduler,
    UnloadAdapter,
)
from engine.text.stop_search import MakeStops, no_stops

log = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
OUTSIDE_WAIT_S = 0.02
ABORTED_ALL = "all requests were aborted"
NO_DEVICE_MEMORY = refusal(
    "the device has no memory for a step of this request; try again, or lower --mem-fraction-static, "
    "--max-running-requests or --chunked-prefill-size of the worker",
    status=503,
)


class Ports(Protocol):
    """Where messages come from and go to."""

    def receive(self) -> list[ToScheduler]: ...

    def wait(self, timeout_s: float) -> None:
        """Wait for a message, for `call_attention`, or for the time to pass."""

    def to_frontend(self, message: ToFrontend) -> None: ...

    def call_attention(self) -> None:
        """From any thread: end the current or next `wait`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Flags of the same names; `depth`: steps launched before the oldest is collected."""

    depth: int
    eos_ids: frozenset[int]
    stream_interval: int = 1
    log_interval: int = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopServices:
    """What the loop serves besides requests and steps. `late_compiles`: kernels that were compiled while serving. `memory`: bytes by what takes them. `experts`: gauges of a mixture,

    `expert_loads`: its counts. `name`: of the worker, in files.

    `watched`: the executor of a worker with pipeline stages or DP attention, `agreement`, `updates`: of the latter. `lanes`: that of PD
    multiplexing, with `share`.
    """

    weights: Weights
    profiler: Profiler
    kv: KVMemory = field(default_factory=FixedKV)
    grammars: GrammarQueue = field(default_factory=lambda: GrammarQueue(None))
    stops: MakeStops = no_stops
    adapters: AdapterControl = field(default_factory=AdapterControl)
    disk: Disk | None = None
    events: ZmqPublisher | None = None
    late_compiles: Callable[[], int] = int
    memory: Mapping[str, int] = field(default_factory=dict)
    experts: Callable[[], Mapping[str, float]] = dict
    expert_loads: Callable[[], Loads] = list
    name: str = "worker"
    watched: WatchedSteps[Any] | None = None
    agreement: Agreement | None = None
    updates: UpdateAgreement | None = None
    lanes: LaneSteps[Any] | None = None
    share: LaneShare | None = None


class EngineLoop:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: StepLauncher[Any],
        role: EngineRole,
        ports: Ports,
        services: LoopServices,
        turns: TurnClock,
        settings: LoopSettings,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._role = role
        self._peered = role if isinstance(role, Peered) else None
        self._ports = ports
        self._turns = turns
        self._settings = settings
        self._clock = clock
        self._grammars = services.grammars
        self._make_stops = services.stops
        self._disk = services.disk
        self._events = services.events
        self._adapters = services.adapters
        self._pipeline: Pipeline[Any] | RankPipeline[Any] | LanePipeline[Any]
        self._lanes: LanePipeline[Any] | None = None
        if services.lanes is not None:
            assert services.share is not None and services.watched is None, "lanes of one rank"
            self._pipeline = self._lanes = LanePipeline(
                scheduler=scheduler,
                executor=executor,
                watched=services.lanes,
                depth=settings.depth,
                share=services.share,
                on_step=self._on_step,
            )
        elif services.watched is None:
            assert services.agreement is None and scheduler.limits.pp_size == 1, "their steps are watched"
            self._pipeline = Pipeline(
                scheduler=scheduler, executor=executor, depth=settings.depth, on_step=self._on_step
            )
        else:
            self._pipeline = RankPipeline(
                scheduler=scheduler,
                executor=executor,
                watched=services.watched,
                depth=settings.depth,
                on_step=self._on_step,
                agreement=services.agreement,
            )
        self._gate = StreamGate(interval=settings.stream_interval)
        self._deadlines = Deadlines()
        self._requests = OpenRequests()
        self._profiles = ProfileControl(services.profiler, reply=ports.to_frontend)
        self._expert_record = ExpertRecord(services.expert_loads, name=services.name, reply=ports.to_frontend)
        self._draining = False
        self._awaits_step = False  # the last turn found steps in flight, and nothing to do
        intervals = IntervalLog(scheduler, steps=settings.log_interval, write=partial(log.info, "%s"))
        self._control = EngineControl(
            scheduler=scheduler,
            weights=services.weights,
            abort_all=self._abort_all,
            reply=ports.to_frontend,
            wakeup=ports.call_attention,
            together=services.updates,
            also=lambda: self._occupation.values,
        )
        self._occupation = OccupationControl(
            kv=services.kv,
            weights=services.weights,
            why_busy=self._why_memory_is_used,
            flush=scheduler.flush_cache,
            update=self._control.on_message,
            reply=ports.to_frontend,
        )
        self._reporter = Reporter(
            scheduler=scheduler,
            role=role,
            requests=self._requests,
            control=self._control,
            grammars=self._grammars,
            adapters=self._adapters,
            intervals=intervals,
            late_compiles=services.late_compiles,
            memory=services.memory,
            experts=services.experts,
            share=dict if services.share is None else services.share.gauges,
        )
        budget, drafting = scheduler.step_budget, scheduler.drafting
        prompts = None if self._lanes is None else Lane.PREFILL
        self._listeners: tuple[LoopListener, ...] = (
            self._profiles,
            *([] if budget is None else [StepDurations(budget.note, stages=scheduler.limits.pp_size, lane=prompts)]),
            *([] if self._lanes is None else [StepDurations(self._lanes.note, stages=1, lane=Lane.DECODE)]),
            *([] if drafting is None else [StepDurations(drafting.note, stages=1)]),
            Timekeeper(self._requests),
            self._adapters,
            self._deadlines,
            self._gate,
            intervals,
            RetractionLog(scheduler, role=role.name, write=partial(log.warning, "%s")),
            self._requests,
        )
        self.stopped = False

    def run(self) -> None:
        """Turn until a `Shutdown` arrives, or a signal handler sets `stopped`."""
        try:
            while not self.stopped:
                if not self._awaits_step:
                    now_s = self._clock()
                    self._turns.turning(now_s if self._lanes is None else self._lanes.since_s(now_s))
                if not self.turn():
                    self._rest()
        finally:
            self._turns.end()

    def turn(self) -> bool:
        """Make one turn; return False when there was nothing to compute."""
        now_s = self._clock()
        outputs: list[TokenOutput] = []
        for message in self._ports.receive():
            outputs += self._handle(message, now_s)
        for rid, reason in self._deadlines.due(now_s):
            outputs += self._end(rid, now_s, reason)
        outputs += self._control.on_turn(num_launched=self._pipeline.num_launched)
        self._adapters.on_turn()
        for request in self._control.release():
            outputs += self._add(request, now_s)
        outputs += self._admit_with_grammar(now_s)
        if self._peered is not None:
            self._peered.close_to_peers(self._why_no_peers())
        holds = self._control.awaits_ranks
        if not holds:
            outputs += self._role.poll(now_s)
        if self._disk is not None:
            self._disk.turn()
        plan = self._pipeline.next_plan(now_s, paused=self._control.paused or holds)
        for listener in self._listeners:
            listener.on_planned(now_s)
        if plan is not None:
            self._on_launch(plan, now_s)
        self._send(outputs)  # now: a first token that prefill sampled must not wait for a step of others
        self._turns.computing(plan or self._pipeline.last)
        self._send(self._pipeline.advance(plan))
        if self._events is not None:
            self._events.turn()
        self._awaits_step = not self._pipeline.worked and self._pipeline.num_launched > 0
        if self._pipeline.worked:
            self._note_work(now_s)
        return self._pipeline.worked

    def _note_work(self, since_s: float) -> None:
        taken_s = self._clock() - since_s
        for listener in self._listeners:
            listener.on_worked(taken_s)

    def _on_launch(self, plan: Plan, now_s: float) -> None:
        for listener in self._listeners:
            listener.on_launch(plan, now_s)
        if self._peered is not None:
            self._peered.on_launch(plan)

    def _send(self, outputs: list[TokenOutput]) -> None:
        if not outputs:
            return
        now_s = self._clock()
        for listener in self._listeners:
            listener.on_outputs(outputs, now_s)
        if passed := self._gate.pass_on(outputs):
            self._ports.to_frontend(TokenBatch(passed))

    def _on_step(self, effects: StepEffects) -> list[TokenOutput]:
        now_s = self._clock()
        for listener in self._listeners:
            listener.on_step(effects, now_s)
        outputs = self._role.on_step(effects, now_s)
        if effects.failure:
            log.error(
                "a step of %d requests found no device memory, and they were aborted: %s",
                len(effects.lost),
                effects.failure,
            )
        return outputs + [output for rid in effects.lost for output in self._abort(rid, now_s, NO_DEVICE_MEMORY)]

    def _rest(self) -> None:
        waits_for_outside = self._peered is not None and self._peered.waits_for_outside()
        waiting = waits_for_outside or bool(self._grammars.rids()) or (self._disk is not None and self._disk.busy)
        now_s = self._clock()
        timeout_s = self._deadlines.shorten(OUTSIDE_WAIT_S if waiting else IDLE_WAIT_S, now_s)
        if self._awaits_step:  # its end, or a row of another rank, calls for attention
            if self._lanes is not None:
                timeout_s = self._lanes.shorten(timeout_s, now_s)
            self._ports.wait(timeout_s)
            self._note_work(now_s)
            return
        for listener in self._listeners:
            listener.on_rest(now_s)
        if not waiting:
            self._reporter.check_when_due(now_s)
        self._turns.resting()
        self._ports.wait(timeout_s)

    def _handle(self, message: ToScheduler, now_s: float) -> list[TokenOutput]:
        match message:
            case GenerateRequest():
                return self._enter(message, now_s)
            case GenerateBatch():
                return [output for request in requests_of(message) for output in self._enter(request, now_s)]
            case AbortRequest(all=True):
                return self._abort_all() + self._control.drop_all()
            case AbortRequest(rid=rid):
                return self._end(rid, now_s, ABORTED)
            case MoveOut(rid=rid, room=room):
                return [] if self._peered is None else self._peered.move_out(rid, room, now_s)
            case FlushCache(call_id=call_id):
                ok = self._scheduler.flush_cache()
                text = "Cache flushed." if ok else "Requests are running; nothing was flushed."
                self._ports.to_frontend(ControlReply(call_id, ok, text))
            case GetState(call_id=call_id, check=check):
                self._ports.to_frontend(self._reporter.state(call_id, check=check))
            case LoadAdapter() | UnloadAdapter():
                self._adapters.on_message(message)
            case ReleaseMemory() | ResumeMemory():
                self._occupation.on_message(message)
            case StartProfile() | StopProfile():
                self._profiles.on_message(message)
            case RecordExperts():
                self._expert_record.on_message(message)
            case Drain():
                self._draining = True
            case Shutdown():
                self.stopped = True
            case _:
                return self._control.on_message(message)
        return []

    def _abort_all(self) -> list[TokenOutput]:
        now_s = self._clock()
        if self._peered is not None:
            self._peered.end_peers_work(ABORTED_ALL)
        return [output for rid in list(self._requests.rids()) for output in self._abort(rid, now_s, ABORTED)]

    def _why_no_peers(self) -> str | None:
        if self._draining:
            return "the worker is draining"
        if self._occupation.released:
            return "the worker has released its memory"
        return "generation is paused" if self._control.blocks_input else None

    def _why_memory_is_used(self) -> str:
        """What keeps it from being released."""
        live = len(list(self._requests.rids())) + self._control.num_held
        if live or not self._scheduler.idle or not self._scheduler.holds_no_kv:
            return f"{live} requests live (POST /abort_request ends them)"
        return "other weights are being read" if self._control.updates else ""

    def _enter(self, message: GenerateRequest, now_s: float) -> list[TokenOutput]:
        for listener in self._listeners:
            listener.on_received(message, now_s)
        return self._add(message, now_s)

    def _add(self, message: GenerateRequest, now_s: float) -> list[TokenOutput]:
        if (refusal := self._occupation.refusal) is not None:
            return [refused(message, refusal)]
        adapter = self._adapters.acquire(message)
        if isinstance(adapter, TokenOutput):
            return [adapter]
        if self._control.blocks_input:
            self._control.hold(message)
            return []
        sampling = message.sampling
        request = Request(
            rid=message.rid,
            input_ids=message.input_ids,
            output_ids=list(message.output_ids),
            num_resumed=len(message.output_ids),
            source=message.source,
            prefix_source=message.prefix_source,
            sampling=sampling,
            eos_ids=self._settings.eos_ids,
            arrived_s=now_s,
            logprobs=message.logprobs,
            bootstrap=message.bootstrap,
            prefill_only=self._role.name == "prefill" and not message.alone,
            priority=message.priority,
            keep_kv=not message.skip_cache_insert,
            return_hidden_states=message.return_hidden_states,
            alone=message.alone,
            pooling=message.pooling,
            unit=message.unit,
            adapter=adapter,
            namespace=message.namespace,
            request_id=message.request_id,
            stops=self._make_stops(message.input_ids, sampling),
            input_logprobs_sent=bool(message.output_ids),
            images=tuple(message.images),
            encoders=tuple(message.encoders),
        )
        for listener in self._listeners:
            listener.on_added(request, now_s)
        if sampling.grammar is not None:
            return self._grammars.add(request, field=message.grammar_field, now_s=now_s)
        if sampling.reasoning is not None or sampling.has_token_rules:
            request.grammar = self._grammars.state_of(request, None)
        return self._role.add(request, now_s)

    def _admit_with_grammar(self, now_s: float) -> list[TokenOutput]:
        if self._control.blocks_input:
            return []
        ready, outputs = self._grammars.poll(now_s)
        return outputs + [output for request in ready for output in self._role.add(request, now_s)]

    def _end(self, rid: str, now_s: float, reason: FinishReason) -> list[TokenOutput]:
        return self._control.drop(rid, reason) or self._abort(rid, now_s, reason)

    def _abort(self, rid: str, now_s: float, reason: FinishReason) -> list[TokenOutput]:
        return self._grammars.abort(rid, reason) or self._role.abort(rid, now_s, reason)
