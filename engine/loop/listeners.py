"""Listeners of the loop's events: deadlines, streams, times of requests and steps, a log."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.outputs import StepEffects, joined
from engine.core.plan import Phase, Plan
from engine.core.request import MAX_CHUNKS, Request, stages, time_line
from engine.core.scheduler import Scheduler
from engine.messages import (
    FinishReason,
    GenerateRequest,
    Note,
    TokenOutput,
)

# ---- Events of the loop for the parts around it.


Refuse = Callable[[GenerateRequest], TokenOutput | None]  # the only output of a request that may not enter
OnStep = Callable[[StepEffects, float], None]


class LoopListener:
    """Listeners are called on the loop's thread, in order."""

    def refuse(self, message: GenerateRequest) -> TokenOutput | None:
        """The only output of a request that may not enter, or None."""
        return None

    def on_received(self, message: GenerateRequest, now_s: float) -> None: ...

    def on_added(self, request: Request, now_s: float) -> None:
        """A request is about to enter the role or grammar queue."""

    def on_note(self, message: Note) -> None: ...

    def on_turn(self, now_s: float) -> None: ...

    def on_planned(self, now_s: float) -> None:
        """The iteration has planned a step or found none."""

    def on_launch(self, plan: Plan, now_s: float) -> None: ...

    def on_step(self, effects: StepEffects, now_s: float) -> None: ...

    def on_outputs(self, outputs: Sequence[TokenOutput], now_s: float) -> None: ...

    def on_worked(self, taken_s: float) -> None:
        """An iteration with a step has ended; `taken_s` includes waiting for the device."""

    def on_rest(self, now_s: float) -> None:
        """Nothing is left to compute."""

    def waits_for_outside(self) -> bool:
        """True if a transfer, peer, file or timeout may go on soon, so that rests are brief."""
        return False

    def shorten(self, wait_s: float, now_s: float) -> float:
        return wait_s


def methods_for(event: str, listeners: Iterable[LoopListener]) -> list[Callable[..., Any]]:
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
    """With interval n, tokens 1, n+1, 2n+1... leave with all earlier ones."""

    def __init__(self, *, interval: int) -> None:
        self._interval = interval
        self._interval_of: dict[str, int] = {}
        self._held: dict[str, TokenOutput] = {}

    def on_received(self, message: GenerateRequest, now_s: float) -> None:
        interval = message.stream_interval or self._interval
        self._interval_of[message.rid] = interval if message.stream else FORCED_INTERVAL

    def pass_on(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        return [passed for output in outputs if (passed := self._judge(output)) is not None]

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
    """Must be the last listener: others look up ending requests."""

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
        """A retracted request keeps its first times."""
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
    budget, limits = scheduler.step_budget, scheduler.limits
    prompts = Phase.PREFILL if limits.multiplexed else None
    durations = [] if budget is None else [StepDurations(budget.note, stages=limits.pp_size, phase=prompts)]
    return [*durations, StepDurations(scheduler.decode.note, stages=1)] if scheduler.decode.verifies else durations


def _is_own(plan: Plan) -> bool:
    """False if another DP attention rank has more tokens, and so determines the time."""
    return plan.agreed is None or sum(item.q_len for item in plan.items) >= max(plan.agreed.tokens)


# ---- Recent engine activity: a log line per interval, and metrics.


@dataclass(slots=True)
class _Sums:
    start_s: float
    prefill_steps: int = 0
    decode_steps: int = 0
    new_tokens: int = 0
    new_requests: int = 0
    known_rows: int = 0  # rows of decode steps without drafts


class IntervalLog(LoopListener):
    """Log every `steps`, and when idle, then at most once in `QUIET_S`."""

    QUIET_S = 1.0

    def __init__(self, scheduler: Scheduler, *, steps: int, write: Callable[[str], None]) -> None:
        self._scheduler = scheduler
        self._write = write
        self._steps = steps
        self._sums: _Sums | None = None
        self._last_line_s = float("-inf")
        self._cached_before = self._generated_before = 0  # counters at the end of the last interval
        self._drafts_before = self._accepted_before = 0
        self.busy_s = 0.0  # since start, in iterations with work
        self.gen_throughput = 0.0  # tokens per second in the last interval; 0 when idle
        self.cache_hit_rate: float | None = None  # of the last interval with prefill
        self.accepted: dict[str, float] = {}  # of the last interval with decodes; the rate of the last one with drafts
        if scheduler.decode.verifies:
            self.accepted = {"spec_accept_length": 1.0, "spec_accept_rate": 0.0}

    def on_launch(self, plan: Plan, now_s: float) -> None:
        if plan.skips_model:  # part of the decode step after it
            return
        sums = self._sums = self._sums or _Sums(now_s)
        sums.prefill_steps += plan.extend
        sums.decode_steps += not plan.extend
        sums.new_tokens += sum(item.q_len for item in plan.items if item.extend)
        sums.new_requests += len(plan.opens) if plan.extend else 0
        if self._scheduler.decode.verifies:
            sums.known_rows += sum(not item.draft and not item.extend for item in plan.items)
        if sums.prefill_steps + sums.decode_steps >= self._steps:
            self._end(now_s)

    def on_worked(self, taken_s: float) -> None:
        self.busy_s += taken_s

    def on_rest(self, now_s: float) -> None:
        if self._sums is not None and now_s - self._last_line_s >= self.QUIET_S:
            self._end(now_s)
        self.gen_throughput = 0.0

    def counters(self) -> dict[str, float]:
        return {"busy_s": self.busy_s}

    def gauges(self) -> dict[str, float]:
        hit = {} if self.cache_hit_rate is None else {"cache_hit_rate": self.cache_hit_rate}
        return {"gen_throughput": self.gen_throughput, **hit, **self.accepted}

    def _end(self, now_s: float) -> None:
        assert self._sums is not None
        sums, self._sums = self._sums, None
        self._last_line_s = now_s
        counters = self._scheduler.counters
        elapsed_s = max(now_s - sums.start_s, 1e-9)
        self.gen_throughput = (counters.generation_tokens - self._generated_before) / elapsed_s
        if sums.prefill_steps:
            self._write(self._prefill_line(sums, counters.cached_tokens - self._cached_before))
        self._cached_before, self._generated_before = counters.cached_tokens, counters.generation_tokens
        drafts, accepted = counters.drafts - self._drafts_before, counters.accepted_drafts - self._accepted_before
        self._drafts_before, self._accepted_before = counters.drafts, counters.accepted_drafts
        if sums.known_rows:
            self.accepted["spec_accept_length"] = 1 + accepted / sums.known_rows
        if drafts:
            self.accepted["spec_accept_rate"] = accepted / drafts
        if sums.decode_steps:
            self._write(self._decode_line(sums))

    def _prefill_line(self, sums: _Sums, cached: int) -> str:
        known = sums.new_tokens + cached
        self.cache_hit_rate = cached / known if known else 0.0
        return (
            f"prefill: {sums.prefill_steps} steps, {sums.new_requests} new requests, {sums.new_tokens} new tokens, "
            f"{cached} cached ({self.cache_hit_rate:.0%}), {self._load()}"
        )

    def _decode_line(self, sums: _Sums) -> str:
        length = self.accepted.get("spec_accept_length", 1.0)
        drafted = "" if length == 1 else f"{length:.2f} tokens a step and request, "
        return f"decode: {sums.decode_steps} steps, {self.gen_throughput:.1f} tokens/s, {drafted}{self._load()}"

    def _load(self) -> str:
        scheduler = self._scheduler
        num_pages = scheduler.memory.allocator.num_pages
        usage = (num_pages - scheduler.memory.available) / num_pages
        return f"{scheduler.num_running} running, {scheduler.num_waiting} waiting, usage {usage:.0%}"
