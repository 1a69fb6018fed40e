"""Running samples of one HTTP request: `feed` adds outputs, a handler takes them. Their traces."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, NamedTuple, Protocol

from engine.frontend.client.scheduler_link import Name
from engine.frontend.errors import from_finish
from engine.messages import FinishReason, GenerateRequest, KVSource, Stage, TokenOutput
from engine.text.sample import TextOutput
from service.http.errors import ApiError
from service.telemetry.context import Record, Span, TraceContext, Tracer, unix_offset_s
from service.waiter import Waiter

# ---- Trace records of samples: stages with request id and wall-clock times.


class Traces(NamedTuple):
    """The tracer of samples. `process`: "prefill" | "decode" | "unified"; `model`: served name."""

    tracer: Tracer
    process: str
    model: str


class SampleTrace:
    """Health probes are not recorded."""

    def __init__(
        self, owner: Traces, request: GenerateRequest, rid: str, context: TraceContext, dp_rank: int | None = None
    ) -> None:
        """`dp_rank`: None with one rank."""
        room = 0 if request.bootstrap is None else request.bootstrap.room
        self._owner = owner
        self._request = (rid, room, len(request.input_ids), request.sampling.max_new_tokens or 0, request.lora)
        self._dp_rank = dp_rank
        self._context = context
        self._start_s = self._end_s = time.monotonic()
        self._offset_s = 0.0
        self._span_context = owner.tracer.span_under(context.traceparent) if context.operation else None
        self._result: tuple[list[Stage], int, int, str, str] = ([], 0, 0, "", "")
        self._ended = False
        self._first_token_s: float | None = None

    def first_token(self) -> None:
        self._first_token_s = time.monotonic()

    def end(self, last: TokenOutput | None) -> None:
        """`last`: the output with the finish, None if the client left."""
        if self._ended or not self._context.operation:
            return
        self._ended = True
        self._end_s, self._offset_s = time.monotonic(), unix_offset_s()
        if last is None or last.finish is None:
            self._result = ([], 0, 0, "abort", "cancelled")
        else:
            finish = last.finish
            error = str(finish.status) if finish.status else ""
            self._result = (last.stages, last.completion_tokens, last.cached_tokens, finish.kind, error)
        self._owner.tracer.add(self._context.request_id, self._record, span=self._span_context)

    def _record(self) -> Record:
        stages, _, _, _, error = self._result
        return Record(
            request_id=self._context.request_id,
            process=self._owner.process,
            operation=self._context.operation,
            model=self._owner.model,
            start_s=self._wall(self._start_s),
            end_s=self._wall(self._end_s),
            error=error,
            attributes=self._attributes(),
            spans=[self._span(stage) for stage in stages],
        )

    def _attributes(self) -> dict[str, Any]:
        rid, room, num_prompt, max_tokens, lora = self._request
        _, completion, cached, kind, _ = self._result
        attributes: dict[str, Any] = {
            "gen_ai.response.id": rid,
            "gen_ai.request.max_tokens": max_tokens,
            "gen_ai.usage.input_tokens": num_prompt,
            "gen_ai.usage.output_tokens": completion,
            "gen_ai.usage.cache_read.input_tokens": cached,
            "gen_ai.response.finish_reasons": [kind],
        }
        if room:
            attributes["tandem.bootstrap_room"] = str(room)  # above 2**53: no number in JSON
        if self._dp_rank is not None:
            attributes["tandem.dp_rank"] = self._dp_rank
        if lora:
            attributes["tandem.lora"] = lora
        if self._first_token_s is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = self._first_token_s - self._start_s
        return attributes

    def _span(self, stage: Stage) -> Span:
        attributes = {"tandem.num_tokens": stage.num_tokens} if stage.num_tokens else {}
        start_s, end_s = self._wall(stage.start_s), self._wall(stage.end_s)
        return Span(name=stage.name, start_s=start_s, end_s=end_s, attributes=attributes)

    def _wall(self, monotonic_s: float) -> float:
        return monotonic_s + self._offset_s


NO_TRACES = Traces(Tracer(ring_size=0), process="unified", model="")


# ---- generation


class SampleObserver(Protocol):
    def on_start(self, num_prompt_tokens: int) -> None: ...
    def on_reject(self) -> None: ...
    def on_tokens(self, *, num_tokens: int, gap_s: float, first: bool) -> None: ...
    def on_end(self, output: TextOutput | None, *, elapsed_s: float) -> None: ...


@dataclass(slots=True)
class Sample:
    """A sample under the user's `name`. `is_empty`: 0 tokens; it runs for 1, which is dropped."""

    name: str
    wire_rid: str
    num_prompt_tokens: int
    is_empty: bool
    trace: SampleTrace
    last_token_s: float | None = None


@dataclass(eq=False)
class Generation:
    """A context manager; `on_leave` aborts unfinished samples.

    `resumed`: another worker's output by sample; `ended`: samples it finished. `can_move`: the
    handler supports moves. `moved`: KV source by sample.
    """

    samples: list[Sample]
    names: Collection[Name]
    _: KW_ONLY
    observer: SampleObserver
    now_s: Callable[[], float]
    on_done: Callable[["Generation"], None]
    on_leave: Callable[["Generation"], None]
    resumed: Sequence[tuple[int, TextOutput]] = ()
    ended: InitVar[Collection[int]] = ()

    def __post_init__(self, ended: Collection[int]) -> None:
        self.can_move = False
        self.moved: dict[int, KVSource | None] = {}
        self._unfinished = set(range(len(self.samples))) - set(ended)
        self._pending: dict[int, TextOutput] = {}
        self._error: ApiError | None = None
        self._changed = Waiter()
        self._follower: Callable[[], None] | None = None
        self._is_due = False  # a call of the follower is scheduled
        self._start_s = self.now_s()

    @property
    def unfinished(self) -> list[Sample]:
        return [self.samples[i] for i in sorted(self._unfinished)]

    @property
    def done(self) -> bool:
        return not self._unfinished and not self._pending

    async def next(self) -> list[tuple[int, TextOutput]]:
        """Wait for new outputs, one (index, output) per sample at most. Raises ApiError."""
        while not self._pending and self._error is None:
            await self._changed.wait()
        return self.take()

    def take(self) -> list[tuple[int, TextOutput]]:
        """New outputs without waiting. Raises ApiError."""
        if self._error is not None:
            raise self._error
        pending, self._pending = self._pending, {}
        return list(pending.items())

    @property
    def has_news(self) -> bool:
        return bool(self._pending)

    @property
    def ends(self) -> bool:
        return not self._unfinished or self._error is not None

    @contextmanager
    def followed(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Call `on_change` soon after changes, coalesced. No `next` meanwhile."""
        self._follower = on_change
        try:
            yield
        finally:
            self._follower = None

    async def collect(self) -> list[TextOutput]:
        answers = dict(self.resumed)
        while not self.done:
            for index, output in await self.next():
                add(answers, index, output)
        return [answers[i] for i in range(len(self.samples))]

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *error: object) -> None:
        self.on_leave(self)
        for sample in self.unfinished:
            self.observer.on_end(None, elapsed_s=self.now_s() - self._start_s)
            sample.trace.end(None)

    def feed(self, index: int, output: TextOutput, now_s: float) -> None:
        sample, finish = self.samples[index], output.tokens.finish
        self._observe(sample, len(output.tokens.new_ids), now_s)
        if finish is not None:
            self._unfinished.discard(index)
            if not self._unfinished:
                self.on_done(self)
            self.observer.on_end(output, elapsed_s=now_s - self._start_s)
            sample.trace.end(output.tokens)
        if finish is not None and not output.tokens.ends:
            self.moved[index], output.tokens.finish = output.tokens.source, None
        elif finish is not None and finish.kind == "abort" and finish.status:
            return self.fail(from_finish(finish))
        add(self._pending, index, without_tokens(output) if sample.is_empty else output)
        self._wake()

    def fail(self, error: ApiError) -> None:
        """Make `next` raise `error`; the first error stays."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        self._changed.wake()
        if self._follower is not None and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._follow)

    def _follow(self) -> None:
        self._is_due = False
        if self._follower is not None:
            self._follower()

    def _observe(self, sample: Sample, num_tokens: int, now_s: float) -> None:
        if num_tokens == 0:
            return
        last_s = sample.last_token_s
        gap_s = now_s - (self._start_s if last_s is None else last_s)
        self.observer.on_tokens(num_tokens=num_tokens, gap_s=gap_s, first=last_s is None)
        if last_s is None:
            sample.trace.first_token()
        sample.last_token_s = now_s


def add(outputs: dict[int, TextOutput], index: int, output: TextOutput) -> None:
    if index in outputs:
        absorb(outputs[index], output)
    else:
        outputs[index] = output


def absorb(into: TextOutput, new: TextOutput) -> None:
    """Append `new` to `into`, both owned by the caller."""
    into.text += new.text
    into.logprob_texts += new.logprob_texts
    into.logprob_spans += new.logprob_spans
    into.input_logprob_texts += new.input_logprob_texts
    into.tokens.extend(new.tokens)


def without_tokens(output: TextOutput) -> TextOutput:
    tokens = output.tokens
    tokens.new_ids, tokens.logprobs, tokens.hidden = [], [], []
    output.text, output.logprob_texts, output.logprob_spans = "", [], []
    if tokens.finish is not None and tokens.finish.kind == "stop":
        tokens.finish = FinishReason(kind="length")
    return output
