"""The event loop of an engine, for any role, device and depth, and its sockets.

receive -> role.poll -> schedule -> launch ------> collect the oldest -> on_step -> send
                                       |                  ^
                       depth 2: the next step is launched before this one's results are read

Listeners keep times, logs, deadlines and the stream gate (engine/loop/listeners.py).
"""

import logging
import os
import select
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from engine.core.outputs import StepEffects, refusal
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.ipc import MAIN_FRONTEND, IpcPaths, PullSocket, PushSocket, row_of
from engine.loop.controls import Controls
from engine.loop.heartbeat import IterationClock
from engine.loop.listeners import (
    Deadlines,
    IntervalLog,
    LoopListener,
    OnStep,
    OpenRequests,
    Refuse,
    StreamGate,
    Timekeeper,
    durations_of,
    methods_for,
)
from engine.loop.pipeline import MakePipeline
from engine.loop.reporter import Reporter, RetractionLog
from engine.loop.role import EngineRole
from engine.loop.services import LoopServices, LoopSettings, Ports
from engine.messages import (
    AbortRequest,
    ControlReply,
    Drain,
    FinishReason,
    FlushCache,
    GenerateBatch,
    GenerateRequest,
    GetState,
    MoveOut,
    Note,
    SchedulerReady,
    Shutdown,
    ToFrontend,
    TokenBatch,
    TokenOutput,
    ToScheduler,
    requests_of,
)

log = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
OUTSIDE_WAIT_S = 0.02
ABORTED_ALL = "all requests were aborted"
NO_DEVICE_MEMORY = refusal(
    "the device has no memory for a step of this request; try again, or lower --mem-fraction-static, "
    "--max-running-requests or --chunked-prefill-size of the worker",
    status=503,
)


class EngineLoop:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pipeline: MakePipeline,
        role: EngineRole,
        ports: Ports,
        services: LoopServices,
        turns: IterationClock,
        settings: LoopSettings,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._pipeline = pipeline(self._on_step)
        self._role = role
        self._ports = ports
        self._turns = turns
        self._eos_ids = settings.eos_ids
        self._clock = clock
        self._grammars = services.grammars
        self._make_stops = services.stops
        self._gate = StreamGate(interval=settings.stream_interval)
        self._deadlines = Deadlines()
        self._requests = OpenRequests()
        self._refusals: list[Refuse] = []
        self._on_collected: list[OnStep] = []
        self._draining = False
        self._awaits_step = False  # the last turn found steps in flight, and nothing to do
        self._controls = Controls(
            scheduler=scheduler,
            services=services,
            ports=ports,
            requests=self._requests,
            abort_all=self._abort_all,
            refusals=self._refusals,
            on_step=self._on_collected,
        )
        self._control = self._controls.engine
        intervals = IntervalLog(scheduler, steps=settings.log_interval, write=partial(log.info, "%s"))
        self._reporter = Reporter(
            scheduler=scheduler,
            role=role,
            requests=self._requests,
            controls=self._controls,
            intervals=intervals,
            services=services,
        )
        self._listeners: tuple[LoopListener, ...] = (
            *durations_of(scheduler),
            *services.listeners,
            Timekeeper(self._requests),
            self._deadlines,
            self._gate,
            intervals,
            RetractionLog(scheduler, role=role.name, write=partial(log.warning, "%s")),
            self._requests,
            role,
        )
        self._call_listeners()
        self.stopped = False

    def _call_listeners(self) -> None:
        self._refusals += methods_for("refuse", self._listeners)
        self._on_collected += methods_for("on_step", self._listeners)
        self._on_turn, self._on_note = (methods_for(name, self._listeners) for name in ("on_turn", "on_note"))
        self._controls.enter_when_used(self._on_turn)
        requests, turns = ("on_received", "on_added", "on_outputs"), ("on_planned", "on_launch", "on_worked")
        self._on_received, self._on_added, self._on_outputs = (methods_for(name, self._listeners) for name in requests)
        self._on_planned, self._on_launch, self._on_worked = (methods_for(name, self._listeners) for name in turns)

    def run(self) -> None:
        """Iterate until a `Shutdown`, or until a signal handler sets `stopped`."""
        try:
            while not self.stopped:
                if not self._awaits_step:
                    self._turns.turning(self._pipeline.since_s(self._clock()))
                if not self.turn():
                    self._rest()
        finally:
            self._turns.end()

    def turn(self) -> bool:
        """Run one iteration; return False if there was nothing to compute."""
        now_s = self._clock()
        outputs: list[TokenOutput] = []
        for message in self._ports.receive():
            outputs += self._handle(message, now_s)
        for rid, reason in self._deadlines.due(now_s):
            outputs += self._end(rid, now_s, reason)
        outputs += self._control.on_turn(num_launched=self._pipeline.num_launched)
        for request in self._control.release():
            outputs += self._add(request, now_s)
        outputs += self._admit_with_grammar(now_s)
        self._role.close_to_peers("the worker is draining" if self._draining else self._controls.why_closed())
        holds = self._control.awaits_ranks
        if not holds:
            outputs += self._role.poll(now_s)
        for on_turn in self._on_turn:
            on_turn(now_s)
        plan = self._pipeline.next_plan(now_s, paused=self._control.paused or holds)
        for on_planned in self._on_planned:
            on_planned(now_s)
        if plan is not None:
            for on_launch in self._on_launch:
                on_launch(plan, now_s)
        self._send(outputs)  # now: a first token that prefill sampled must not wait for a step of others
        self._turns.computing(plan or self._pipeline.last)
        self._send(self._pipeline.advance(plan))
        self._awaits_step = not self._pipeline.worked and self._pipeline.num_launched > 0
        if self._pipeline.worked:
            self._note_work(now_s)
        return self._pipeline.worked

    def _note_work(self, since_s: float) -> None:
        taken_s = self._clock() - since_s
        for on_worked in self._on_worked:
            on_worked(taken_s)

    def _send(self, outputs: list[TokenOutput]) -> None:
        if not outputs:
            return
        now_s = self._clock()
        for on_outputs in self._on_outputs:
            on_outputs(outputs, now_s)
        if passed := self._gate.pass_on(outputs):
            self._ports.to_frontend(TokenBatch(passed))

    def _on_step(self, effects: StepEffects) -> list[TokenOutput]:
        now_s = self._clock()
        for on_collected in self._on_collected:
            on_collected(effects, now_s)
        if effects.failure:
            log.error(
                "a step of %d requests found no device memory, and they were aborted: %s",
                len(effects.lost),
                effects.failure,
            )
        return effects.outputs + [
            output for rid in effects.lost for output in self._abort(rid, now_s, NO_DEVICE_MEMORY)
        ]

    def _rest(self) -> None:
        waiting = bool(self._grammars.rids()) or any(listener.waits_for_outside() for listener in self._listeners)
        now_s = self._clock()
        timeout_s = OUTSIDE_WAIT_S if waiting else IDLE_WAIT_S
        for listener in self._listeners:
            timeout_s = listener.shorten(timeout_s, now_s)
        if self._awaits_step:  # its end, or a row of another rank, calls for attention
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
                return self._role.move_out(rid, room, now_s)
            case Note():
                for on_note in self._on_note:
                    on_note(message)
            case FlushCache(call_id=call_id):
                ok = self._scheduler.flush_cache()
                text = "Cache flushed." if ok else "Requests are running; nothing was flushed."
                self._ports.to_frontend(ControlReply(call_id, ok, text))
            case GetState(call_id=call_id, check=check):
                self._ports.to_frontend(self._reporter.state(call_id, check=check))
            case Drain():
                self._draining = True
            case Shutdown():
                self.stopped = True
            case _:
                return self._controls.on_message(message)
        return []

    def _abort_all(self) -> list[TokenOutput]:
        now_s = self._clock()
        self._role.end_peers_work(ABORTED_ALL)
        return [output for rid in list(self._requests.rids()) for output in self._abort(rid, now_s, ABORTED)]

    def _enter(self, message: GenerateRequest, now_s: float) -> list[TokenOutput]:
        for on_received in self._on_received:
            on_received(message, now_s)
        return self._add(message, now_s)

    def _add(self, message: GenerateRequest, now_s: float) -> list[TokenOutput]:
        for refuse in self._refusals:
            if (output := refuse(message)) is not None:
                return [output]
        if self._control.blocks_input:
            self._control.hold(message)
            return []
        sampling = message.sampling
        request = Request(
            message=message,
            eos_ids=self._eos_ids,
            arrived_s=now_s,
            prefill_only=self._role.name == "prefill" and bool(message.bootstrap),
            keep_kv=not message.skip_cache_insert,
            stops=self._make_stops(message.input_ids, sampling),
        )
        for on_added in self._on_added:
            on_added(request, now_s)
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


# ---- Loop's sockets to other processes, and wake-ups from threads.
#
# Each frontend gets its requests' outputs, and the main one all replies.

EVENTFD_ONE = 1
CLOSED = -1


class SocketPorts:
    def __init__(self, ipc: IpcPaths, *, num_frontends: int = 1, attention: int | None = None) -> None:
        """`attention`: an eventfd that other processes also write; closed here."""
        self._inbox: PullSocket[ToScheduler] = PullSocket(ipc.to_scheduler, ToScheduler)
        self._frontends = [PushSocket(ipc.to_frontend_of(row)) for row in range(num_frontends)]
        self._main = self._frontends[MAIN_FRONTEND]
        self._attention = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if attention is None else attention
        self._poll = select.poll()
        self._poll.register(self._inbox.fd, select.POLLIN)
        self._poll.register(self._attention, select.POLLIN)

    def receive(self) -> list[ToScheduler]:
        return self._inbox.recv_all_nowait()

    def wait(self, timeout_s: float) -> None:
        for source, _ in self._poll.poll(int(timeout_s * 1000)):
            if source == self._attention:
                os.eventfd_read(self._attention)

    def call_attention(self) -> None:
        """Safe in threads and signal handlers, even when closed."""
        if (attention := self._attention) != CLOSED:
            with suppress(OSError):  # closed by the loop's thread since the line above
                os.eventfd_write(attention, EVENTFD_ONE)

    def to_frontend(self, message: ToFrontend) -> None:
        if len(self._frontends) > 1 and isinstance(message, TokenBatch):
            self._send_each_its_own(message)
        elif isinstance(message, SchedulerReady):
            for frontend in self._frontends:
                frontend.send(message)
        else:
            self._main.send(message)

    def _send_each_its_own(self, batch: TokenBatch) -> None:
        parts: defaultdict[int, list[TokenOutput]] = defaultdict(list)
        for output in batch.outputs:
            parts[row_of(output.rid)].append(output)
        for row, outputs in parts.items():
            self._frontends[row].send(TokenBatch(outputs))

    def close(self) -> None:
        self._inbox.close()
        for frontend in self._frontends:
            frontend.close()
        attention, self._attention = self._attention, CLOSED
        os.close(attention)
