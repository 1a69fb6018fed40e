"""Trace records of samples: stages with request id and wall-clock times."""

import time
from typing import Any, NamedTuple

from engine.messages import GenerateRequest, Stage, TokenOutput
from service.telemetry.context import TraceContext
from service.telemetry.records import Record, Span, Tracer, unix_offset_s


class Traces(NamedTuple):
    """The tracer of samples. `process`: "prefill" | "decode" | "unified"; `model`: served name."""

    tracer: Tracer
    process: str
    model: str


class SampleTrace:
    """A running sample; keeps what the record needs. Health probes are not recorded."""

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
