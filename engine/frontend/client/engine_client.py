"""The engine as the HTTP side sees it: send samples, receive their text, ask for state. One event loop, no threads.

Owns which samples are live, their names and texts, and the calls that wait for a reply. Must not know HTTP or any API's
shape.

A sample's name on the wire is its own (`wire rid`), never the user's alone: so outputs that are still on their way for
a request that was aborted cannot reach a new request of the same name.
"""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol, TypeVar

import msgspec

from engine.frontend.client.answers import absorb, without_tokens
from engine.frontend.client.deadline import too_late
from engine.frontend.client.forecast import PrefillForecast
from engine.frontend.client.tracing import NO_TRACES, SampleTrace, Traces
from engine.frontend.errors import from_finish, not_ready, refused
from engine.messages import (
    AbortRequest,
    ContinueGeneration,
    ControlReply,
    Drain,
    FlushCache,
    FlushReply,
    GenerateBatch,
    GenerateRequest,
    GetState,
    GetStep,
    LoadAdapter,
    PauseGeneration,
    SchedulerReady,
    StartProfile,
    StateReply,
    StepReply,
    StopProfile,
    ToFrontend,
    TokenBatch,
    TokenOutput,
    ToScheduler,
    UnloadAdapter,
    UpdateWeights,
)
from engine.text.sample import TextOutput
from service.http.errors import DRAINING, ApiError, bad_field
from service.telemetry.context import CURRENT
from service.waiter import Waiter

R = TypeVar("R", StateReply, StepReply, FlushReply, ControlReply)
Reply = StateReply | StepReply | FlushReply | ControlReply
Control = (
    PauseGeneration | ContinueGeneration | UpdateWeights | StartProfile | StopProfile | LoadAdapter | UnloadAdapter
)

MAX_RID_CHARS = 256
MAX_CALLS = 1024  # questions to the scheduler that may be open
FIRST_STATE = "s0"
CALL_TIMEOUT_S = 20.0  # a scheduler that is in a long step answers after it
# A scheduler that takes longer to answer is in a long step, and its last report stands for it. Below --health-silence-s.
PATIENCE_S = 0.5


class Observer(Protocol):
    """Told about the life of samples; seconds."""

    def on_start(self, num_prompt_tokens: int) -> None: ...
    def on_reject(self) -> None: ...
    def on_tokens(self, *, num_tokens: int, gap_s: float, first: bool) -> None: ...
    def on_end(self, output: TextOutput | None, *, elapsed_s: float) -> None: ...


class Text(Protocol):
    """Gives the outputs of one sample their text, in order."""

    def read(self, output: TokenOutput) -> TextOutput: ...


class Generation:
    """The samples of one HTTP request. A context manager: leaving it aborts what has not finished."""

    def __init__(
        self,
        client: "EngineClient",
        names: list[str],
        wire_rids: list[str],
        num_prompt_tokens: list[int],
        empty: list[bool],
        groups: list[str],
        traces: list[SampleTrace],
    ) -> None:
        self.names = names  # of each sample, as the user sees it
        self.num_prompt_tokens = num_prompt_tokens
        self._client = client
        self._wire_rids = wire_rids
        self._empty = empty
        self._traces = traces
        self._groups = groups
        self._unfinished = set(range(len(wire_rids)))
        self._pending: dict[int, TextOutput] = {}
        self._error: ApiError | None = None
        self._changed = Waiter()
        self._start_s = client.now_s()
        self._last_token_s: list[float | None] = [None] * len(wire_rids)

    @property
    def done(self) -> bool:
        """All samples finished and everything was taken."""
        return not self._unfinished and not self._pending

    async def next(self) -> list[tuple[int, TextOutput]]:
        """What came since the last call, at most one output for each sample (its index first).

        Raises ApiError when a sample failed or the engine is gone.
        """
        while not self._pending and self._error is None:
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        pending, self._pending = self._pending, {}
        return list(pending.items())

    async def collect(self) -> list[TextOutput]:
        """Every sample's whole output, in order."""
        answers: dict[int, TextOutput] = {}
        while not self.done:
            for index, output in await self.next():
                if index in answers:
                    absorb(answers[index], output)
                else:
                    answers[index] = output
        return [answers[i] for i in range(len(self._wire_rids))]

    def __enter__(self) -> "Generation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.release(self._wire_rids, [*self.names, *self._groups])
        for index in sorted(self._unfinished):
            self._client.abort_wire(self._wire_rids[index])
            self._client.observer.on_end(None, elapsed_s=self._client.now_s() - self._start_s)
            self._traces[index].end(None)

    def feed(self, index: int, output: TextOutput, now_s: float) -> None:
        self._observe(index, output, now_s)
        finish = output.tokens.finish
        if finish is not None:
            self._unfinished.discard(index)
            self._client.observer.on_end(output, elapsed_s=now_s - self._start_s)
            self._traces[index].end(output.tokens)
        if finish is not None and finish.kind == "abort" and finish.status:
            return self.fail(from_finish(finish))
        output = without_tokens(output) if self._empty[index] else output
        if index in self._pending:
            absorb(self._pending[index], output)
        else:
            self._pending[index] = output
        self._changed.wake()

    def fail(self, error: ApiError) -> None:
        self._error = self._error or error
        self._changed.wake()

    def _observe(self, index: int, output: TextOutput, now_s: float) -> None:
        num_tokens = len(output.tokens.new_ids)
        if num_tokens == 0:
            return
        last_s = self._last_token_s[index]
        gap_s = now_s - (self._start_s if last_s is None else last_s)
        self._client.observer.on_tokens(num_tokens=num_tokens, gap_s=gap_s, first=last_s is None)
        if last_s is None:
            self._traces[index].first_token()
        self._last_token_s[index] = now_s


class EngineClient:
    """`send` queues one message for the scheduler process; `max_live`: samples that may run or wait before 503 is the answer.

    `open_text`: begins the text of a sample. `early_rejection`: 503 is the answer too for a request whose first token would
    come after its own timeout. `traces`: what keeps the record of each sample.
    """

    def __init__(
        self,
        *,
        send: Callable[[ToScheduler | GetStep], None],
        open_text: Callable[[GenerateRequest], Text],
        now_s: Callable[[], float],
        observer: Observer,
        max_live: int,
        early_rejection: bool = False,
        traces: Traces = NO_TRACES,
    ) -> None:
        self.now_s = now_s
        self._traces = traces
        self.observer = observer
        self.info: dict[str, int | float | str | bool | None] = {}
        self.ready = asyncio.Event()
        self.last_heard_s = float("-inf")  # when the scheduler's loop last said anything
        self.last_state: StateReply | None = None
        self.updated: dict[str, int | str] = {}  # model_path and weight_version, since the weights were changed
        self.adapters: dict[str, str] = {}  # name -> path of those that requests may name
        self._send = send
        self._open_text = open_text
        self.max_live = max_live
        self._early_rejection = early_rejection
        self.forecast = PrefillForecast()
        self._closed: ApiError | None = None
        self._ended = False  # nobody is there to be asked
        self._live: dict[str, tuple[Generation, int, Text]] = {}
        self._names: dict[str, list[str]] = {}  # user's name -> wire rids, of live samples
        self._calls: dict[str, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count(1)

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def closed(self) -> ApiError | None:
        """Why no request is accepted any more (None: they are)."""
        return self._closed

    @property
    def is_draining(self) -> bool:
        """It ends in good order: live samples go on."""
        return self._closed is not None and self._closed.code == DRAINING

    def generate(
        self, requests: list[GenerateRequest], *, groups: list[str] | None = None, timeout_s: float | None = None
    ) -> Generation:
        """Send the samples. `requests[i].rid` is the user's name of sample i; `groups[i]` one more name to abort it by.

        `timeout_s`: how long the client will wait; then the engine ends them. Raises ApiError: 503 while starting, ending, full, or too busy for
        the timeout, 400 for a name that is in use.
        """
        self._check_open(len(requests))
        self._check_timeout(requests, timeout_s)
        names, texts = [r.rid for r in requests], [self._open_text(r) for r in requests]
        self._check_names({*names, *(groups or [])}, names)
        wire = [f"{name}:{next(self._numbers):x}" for name in names]
        empty = [r.sampling.max_new_tokens == 0 and not r.pooling for r in requests]
        context = CURRENT.get()
        traces = [self._traces.begin(r, name, context) for r, name in zip(requests, names, strict=True)]
        generation = Generation(self, names, wire, [len(r.input_ids) for r in requests], empty, groups or [], traces)
        for i, name_set in enumerate(zip(names, groups or names, strict=True)):
            self._live[wire[i]] = (generation, i, texts[i])
            for name in set(name_set):
                self._names.setdefault(name, []).append(wire[i])
        try:
            about = context.request_id
            sent = [
                _on_wire(r, rid, about, empty=e, timeout_s=timeout_s)
                for r, rid, e in zip(requests, wire, empty, strict=True)
            ]
            self._send(sent[0] if len(sent) == 1 else GenerateBatch(sent))
            for request, rid in zip(requests, wire, strict=True):
                self.observer.on_start(len(request.input_ids))
                self.forecast.add(rid, len(request.input_ids), self.now_s())
        except BaseException:
            generation.__exit__(None, None, None)
            raise
        return generation

    def abort(self, name: str) -> bool:
        """Abort the live samples of this name (a sample or a group); False when there are none."""
        wire_rids = self._names.get(name, [])
        for rid in wire_rids:
            self._send(AbortRequest(rid=rid))
        return bool(wire_rids)

    def abort_all(self) -> None:
        self._send(AbortRequest(rid="", all=True))

    def abort_wire(self, wire_rid: str) -> None:
        """Tell the scheduler, if there is one that listens: a dead one's memory is gone anyway."""
        if self._closed is None or self._closed.code != "engine_dead":
            with suppress(ApiError):
                self._send(AbortRequest(rid=wire_rid))

    def release(self, wire_rids: list[str], names: list[str]) -> None:
        for rid in wire_rids:
            self._live.pop(rid, None)
            self.forecast.drop(rid, self.now_s())
        gone = set(wire_rids)
        for name in names:
            left = [r for r in self._names.get(name, []) if r not in gone]
            if left:
                self._names[name] = left
            else:
                self._names.pop(name, None)

    async def state(self, *, check: bool = False, timeout_s: float = CALL_TIMEOUT_S) -> StateReply:
        """Raises ApiError(503) when the scheduler does not answer in time."""
        return await self._call(GetState(call_id=f"s{next(self._numbers)}", check=check), StateReply, timeout_s)

    async def recent_state(self, *, timeout_s: float = CALL_TIMEOUT_S) -> StateReply:
        """As `state`; of a scheduler that is in a long step, what it said before the step.

        Raises ApiError(503) when it is silent or stalled.
        """
        try:
            return await self.state(timeout_s=PATIENCE_S)
        except ApiError:
            if self._closed is not None or self.last_state is None:
                return await self.state(timeout_s=timeout_s)
            if (await self.step(timeout_s=timeout_s)).stalled:
                raise
            return self.last_state

    async def step(self, *, timeout_s: float = CALL_TIMEOUT_S) -> StepReply:
        """What the scheduler's loop does at this moment; it answers in the middle of a step, too.

        Raises ApiError(503) when the process is frozen, or its loop has ended.
        """
        return await self._call(GetStep(call_id=f"b{next(self._numbers)}"), StepReply, timeout_s)

    async def flush_cache(self, *, timeout_s: float = CALL_TIMEOUT_S) -> FlushReply:
        return await self._call(FlushCache(call_id=f"f{next(self._numbers)}"), FlushReply, timeout_s)

    async def control(self, message: Control, *, timeout_s: float = CALL_TIMEOUT_S) -> ControlReply:
        """Raises ApiError: what the scheduler refuses, or 503 when it does not answer in time."""
        reply = await self._call(message, ControlReply, timeout_s)
        if not reply.ok:
            raise refused(reply)
        return reply

    def mint_call_id(self) -> str:
        return f"c{next(self._numbers)}"

    def announce_drain(self) -> None:
        """The scheduler may have peers, who should look elsewhere."""
        with suppress(ApiError):
            self._send(Drain())

    def close(self, error: ApiError) -> None:
        """Accept nothing more; samples that are live go on."""
        self._closed = self._closed or error

    def end(self, error: ApiError) -> None:
        """The engine is being ended in good order: who asks it anything fails with `error`, now and later."""
        self._ended = True
        self.fail_all(error)

    def fail_all(self, error: ApiError) -> None:
        """The engine is gone: everything that waits fails with `error`."""
        self._closed = error
        for generation, _, _ in list(self._live.values()):
            generation.fail(error)
        for call in list(self._calls.values()):
            if not call.done():
                call.set_exception(error)

    def on_message(self, message: ToFrontend) -> None:
        now_s = self.now_s()
        if not isinstance(message, StepReply):  # another thread than the loop's says it
            self.last_heard_s = now_s
        if isinstance(message, StateReply):
            self.last_state = message
        if isinstance(message, TokenBatch):
            for output in message.outputs:
                self._route(output, now_s)
        elif isinstance(message, SchedulerReady):
            self.info = message.info
            self.ready.set()
            with suppress(ApiError):  # before any request, so that there is a `last_state` in the first long step
                self._send(GetState(call_id=FIRST_STATE))
        else:
            if isinstance(message, ControlReply) and "weight_version" in message.values:
                self.updated = message.values  # also when whoever asked for it has gone away
            if isinstance(message, ControlReply) and message.adapters is not None:
                self.adapters = message.adapters
            call = self._calls.get(message.call_id)
            if call is not None and not call.done():
                call.set_result(message)

    def _route(self, output: TokenOutput, now_s: float) -> None:
        live = self._live.get(output.rid)
        if live is not None:
            generation, index, text = live
            self.forecast.start(output.rid, now_s)
            generation.feed(index, text.read(output), now_s)

    async def _call(self, message: GetState | GetStep | FlushCache | Control, reply: type[R], timeout_s: float) -> R:
        if self._closed is not None and (self._ended or self._closed.code == "engine_dead"):
            raise self._closed
        if len(self._calls) >= MAX_CALLS:
            raise ApiError(
                503, f"{len(self._calls)} questions to the scheduler are open", code="queue_full", retry_after_s=1
            )
        call: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[message.call_id] = call
        try:
            self._send(message)
            answer = await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            raise not_ready(f"the scheduler did not answer within {timeout_s:g} s") from None
        finally:
            del self._calls[message.call_id]
        assert isinstance(answer, reply)
        return answer

    def _check_open(self, num_samples: int) -> None:
        if self._closed is not None:
            raise self._closed
        if not self.ready.is_set():
            raise not_ready("the model is still loading; try again soon")
        if num_samples > self.max_live:
            raise ApiError(
                400, f"{num_samples} samples in one request are more than this server ever queues ({self.max_live})"
            )
        if len(self._live) + num_samples > self.max_live:
            raise ApiError(
                503,
                f"the queue is full ({len(self._live)} requests); try again later",
                code="queue_full",
                retry_after_s=1,
            )

    def _check_timeout(self, requests: list[GenerateRequest], timeout_s: float | None) -> None:
        if timeout_s is None or not self._early_rejection:
            return
        wait_s = self.forecast.wait_s(sum(len(r.input_ids) for r in requests), self.now_s())
        if wait_s is not None and wait_s > timeout_s:
            self.observer.on_reject()
            raise too_late(wait_s, timeout_s)

    def _check_names(self, all_names: set[str], names: list[str]) -> None:
        if len(set(names)) < len(names):
            raise bad_field("rid", "the same id is given twice")
        for name in sorted(all_names):
            if not 0 < len(name) <= MAX_RID_CHARS:
                raise bad_field("rid", f"must have 1 to {MAX_RID_CHARS} characters")
            if name in self._names:
                raise bad_field("rid", f"a request with id {name!r} is running")


def _on_wire(
    request: GenerateRequest, rid: str, request_id: str, *, empty: bool, timeout_s: float | None
) -> GenerateRequest:
    sampling = msgspec.structs.replace(request.sampling, max_new_tokens=1) if empty else request.sampling
    return msgspec.structs.replace(request, rid=rid, sampling=sampling, timeout_s=timeout_s, request_id=request_id)
