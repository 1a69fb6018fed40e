"""Sockets of the loop, and listeners of its events.

Listeners keep deadlines, gate streams, measure steps and note times of requests.
"""

import heapq
import math
import os
import select
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from contextlib import suppress
from typing import Any

from engine.core.outputs import StepEffects, joined
from engine.core.plan import Phase, Plan
from engine.core.request import MAX_CHUNKS, Request, stages, time_line
from engine.core.scheduler import Scheduler
from engine.ipc import MAIN_FRONTEND, IpcPaths, PullSocket, PushSocket, row_of
from engine.messages import (
    FinishReason,
    GenerateRequest,
    SchedulerReady,
    ToFrontend,
    TokenBatch,
    TokenOutput,
    ToScheduler,
)

# ---- Events of the loop for the parts around it.


Refuse = Callable[[GenerateRequest], TokenOutput | None]  # the only output of a request that may not enter
OnStep = Callable[[StepEffects, float], None]


class LoopListener:
    """Listeners are called on the loop's thread, in order."""

    def refuse(self, message: GenerateRequest) -> TokenOutput | None:
        """Return the only output of a request that may not enter, or None."""
        return None

    def on_received(self, message: GenerateRequest, now_s: float) -> None:
        """A request has arrived from the frontend."""

    def on_added(self, request: Request, now_s: float) -> None:
        """A request is about to enter the role or grammar queue."""

    def on_turn(self, now_s: float) -> None:
        """The iteration is about to plan a step."""

    def on_planned(self, now_s: float) -> None:
        """The iteration has planned a step or found none."""

    def on_launch(self, plan: Plan, now_s: float) -> None:
        """A step is about to be launched."""

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        """A step has been collected."""

    def on_outputs(self, outputs: Sequence[TokenOutput], now_s: float) -> None:
        """Outputs are about to be sent."""

    def on_worked(self, taken_s: float) -> None:
        """An iteration with a step has ended; `taken_s` includes waiting for the device."""

    def on_rest(self, now_s: float) -> None:
        """Nothing is left to compute."""

    def waits_for_outside(self) -> bool:
        """True if a transfer, peer, file or timeout may go on soon, so that rests are brief."""
        return False

    def shorten(self, wait_s: float, now_s: float) -> float:
        """Return a shorter wait if the loop is needed earlier."""
        return wait_s


def methods_for(event: str, listeners: Iterable[LoopListener]) -> list[Callable[..., Any]]:
    """Return the listeners' own overrides of method `event`, in order."""
    default = getattr(LoopListener, event)
    return [getattr(listener, event) for listener in listeners if getattr(type(listener), event) is not default]


# ---- Deadlines of requests, in any stage.

SPARE = 64  # entries of ended requests that the heap may hold
SOON_S = 0.001


def too_late(timeout_s: float) -> FinishReason:
    message = f"the request was not done within its timeout of {timeout_s:g} s (x-request-timeout)"
    return FinishReason(kind="abort", message=message, status=504)


class Deadlines(LoopListener):
    def __init__(self) -> None:
        self._live: dict[str, tuple[float, float]] = {}  # rid: deadline and original timeout
        self._order: list[tuple[float, str]] = []  # heap, may have ended requests

    def __len__(self) -> int:
        return len(self._live)

    def on_received(self, message: GenerateRequest, now_s: float) -> None:
        if message.timeout_s is None or not message.timeout_s < math.inf:
            return
        at_s = now_s + message.timeout_s
        self._live[message.rid] = (at_s, message.timeout_s)
        heapq.heappush(self._order, (at_s, message.rid))
        if len(self._order) > 2 * len(self._live) + SPARE:
            self._order = sorted((at_s, rid) for rid, (at_s, _) in self._live.items())

    def on_outputs(self, outputs: Sequence[TokenOutput], now_s: float) -> None:
        for output in outputs:
            if output.finish is not None:
                self._live.pop(output.rid, None)

    def due(self, now_s: float) -> Iterator[tuple[str, FinishReason]]:
        while self._order and self._order[0][0] <= now_s:
            at_s, rid = heapq.heappop(self._order)
            if self._live.get(rid, (math.nan, 0.0))[0] == at_s:
                yield rid, too_late(self._live.pop(rid)[1])

    def shorten(self, wait_s: float, now_s: float) -> float:
        while self._order and self._order[0][1] not in self._live:
            heapq.heappop(self._order)
        return wait_s if not self._order else min(wait_s, max(SOON_S, self._order[0][0] - now_s))


# ---- Batching of output tokens by `stream_interval`, to spare the frontend messages.

FORCED_INTERVAL = 50  # requests without streaming: spreads their text work (SGLang's number)


class StreamGate(LoopListener):
    """Gate with the engine's `interval`, or a request's own.

    With interval n, tokens 1, n+1, 2n+1... leave with all earlier ones; the first is never late.
    """

    def __init__(self, *, interval: int) -> None:
        self._interval = interval
        self._interval_of: dict[str, int] = {}
        self._held: dict[str, TokenOutput] = {}

    def on_received(self, message: GenerateRequest, now_s: float) -> None:
        self._interval_of[message.rid] = self._interval_for(message)

    def pass_on(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        return [passed for output in outputs if (passed := self._judge(output)) is not None]

    def _interval_for(self, request: GenerateRequest) -> int:
        if not request.stream:
            return FORCED_INTERVAL
        return request.stream_interval or self._interval

    def _judge(self, output: TokenOutput) -> TokenOutput | None:
        rid, new = output.rid, len(output.new_ids)
        interval = self._interval_of.get(rid, 1)
        if (held := self._held.pop(rid, None)) is not None:
            output = joined(held, output)
        if output.finish is not None:
            self._interval_of.pop(rid, None)
        elif (output.completion_tokens - 1) // interval == (output.completion_tokens - new - 1) // interval:
            self._held[rid] = output
            return None
        return output


# ---- Recorder of stage times (engine/core/request.py) for last outputs.


class OpenRequests(LoopListener):
    """Requests without a sent last output.

    Must be the last listener: others look up ending requests.
    """

    def __init__(self) -> None:
        self._open: dict[str, Request] = {}

    def get(self, rid: str) -> Request | None:
        return self._open.get(rid)

    def rids(self) -> KeysView[str]:
        return self._open.keys()

    def on_added(self, request: Request, now_s: float) -> None:
        self._open[request.rid] = request

    def on_outputs(self, outputs: Sequence[TokenOutput], now_s: float) -> None:
        for output in outputs:
            if output.finish is not None:
                self._open.pop(output.rid, None)


class Timekeeper(LoopListener):
    def __init__(self, requests: OpenRequests) -> None:
        self._requests = requests

    def on_added(self, request: Request, now_s: float) -> None:
        request.times.arrived_s = now_s

    def on_launch(self, plan: Plan, now_s: float) -> None:
        """Record first times; a retracted request keeps them."""
        if not plan.extend:
            return
        for item in plan.items:
            request = self._requests.get(item.rid) if item.extend else None
            if request is None or request.times.first_token_s is not None:
                continue
            if request.times.started_s is None:
                request.times.started_s = now_s
            if len(request.times.chunks) < MAX_CHUNKS:
                request.times.chunks.append((now_s, item.q_len))

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        for request in effects.progressed:
            if len(request.times.chunk_ends_s) < len(request.times.chunks):
                request.times.chunk_ends_s.append(now_s)

    def on_outputs(self, outputs: Sequence[TokenOutput], now_s: float) -> None:
        for output in outputs:
            request = self._requests.get(output.rid)
            if request is None:
                continue
            if output.new_ids and request.times.first_token_s is None:
                request.times.first_token_s = now_s
            if output.finish is not None:
                output.times = time_line(request.times, ended_s=now_s, completion_tokens=output.completion_tokens)
                output.stages = stages(request.times, ended_s=now_s)


# ---- durations of steps


class StepDurations(LoopListener):
    """Reports plan and seconds per collected step, except failed steps and those that waited.

    `stages`: of the pipeline. `phase`: of the steps, if plans have one.

    With pipeline stages it is one stage's time: at most the interval between two ends, and an even
    part of launch to end. Either is exact for full, or empty, stages.
    """

    def __init__(self, report: Callable[[Plan, float], None], *, stages: int, phase: Phase | None = None) -> None:
        self._report = report
        self._stages = stages
        self._phase = phase
        self._launched: deque[tuple[Plan, float]] = deque()
        self._ended_s = float("-inf")

    def on_launch(self, plan: Plan, now_s: float) -> None:
        if plan.phase is self._phase:
            self._launched.append((plan, now_s))

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        if effects.phase is not self._phase:
            return
        plan, launched_s = self._launched.popleft()
        taken_s = min((now_s - launched_s) / self._stages, now_s - self._ended_s)
        self._ended_s = now_s
        if not effects.failure and _is_own(plan):
            self._report(plan, taken_s)


def durations_of(scheduler: Scheduler) -> list[StepDurations]:
    """Return listeners for the scheduler's parts that learn from step times."""
    budget, limits = scheduler.step_budget, scheduler.limits
    prompts = Phase.PREFILL if limits.multiplexed else None
    durations = [] if budget is None else [StepDurations(budget.note, stages=limits.pp_size, phase=prompts)]
    return [*durations, StepDurations(scheduler.decode.note, stages=1)] if scheduler.decode.verifies else durations


def _is_own(plan: Plan) -> bool:
    """False if another DP attention rank has more tokens, and so determines the time."""
    return plan.agreed is None or sum(item.q_len for item in plan.items) >= max(plan.agreed.tokens)


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
        """End the current or next `wait`; safe in threads and signal handlers, even when closed."""
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
