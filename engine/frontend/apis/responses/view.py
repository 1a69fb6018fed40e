"""A response as JSON or typed events. Pure.

A whole answer is one long chunk whose events are dropped.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from engine.frontend.apis.chat.calls import MintId
from engine.frontend.apis.chat.logprobs import token_logprobs
from engine.frontend.apis.chat.plan import ChatPlan
from engine.frontend.apis.responses.body import ResponseBody
from engine.frontend.apis.responses.logprobs import TextLogprobs
from engine.frontend.apis.responses.output import Event, OutputItems
from engine.frontend.apis.shared.usage import Counts, Usage
from engine.messages import FinishReason
from engine.text.answer import AnswerReaders
from engine.text.parts import Part, PlainText
from engine.text.sample import TextOutput
from engine.text.tokenizer import Tokenizer


class ResponseView:
    """Events of one response. `on_done` gets the final response. `mint_id`: of calls."""

    def __init__(
        self,
        body: ResponseBody,
        plan: ChatPlan,
        *,
        tokenizer: Tokenizer,
        mint_id: MintId,
        on_done: Callable[[dict[str, Any]], None],
        id: str,
        model: str,
        created: int,
        usage: Usage,
    ) -> None:
        self._tokenizer = tokenizer
        self._logprobs = TextLogprobs(only_text=plan.reader is None) if body.wants_logprobs else None
        self._readers = None if plan.reader is None else AnswerReaders(plan.reader)
        self._on_done = on_done
        self._usage = usage
        self._response = {"id": id, "object": "response", "created_at": created, "model": model, **_echo(body, plan)}
        self._output = OutputItems(id, mint_id=mint_id)
        self.num_events = 0
        self._finish: FinishReason | None = None

    def body(self, answers: list[TextOutput]) -> dict[str, Any]:
        self.chunks(0, answers[0])
        return self._done()

    def chunks(self, index: int, output: TextOutput) -> list[Event]:
        self._usage.add(index, output)
        events = [] if self.num_events else self._begin()
        events += self._new(output)
        if output.tokens.finish is not None:
            self._finish = output.tokens.finish
            events += self._output.end(complete=self._finish.kind == "stop")
        return [self._numbered(event) for event in events]

    def last(self) -> list[Event]:
        response = self._done()
        kind = "completed" if response["status"] == "completed" else "incomplete"
        return [self._numbered({"type": f"response.{kind}", "response": response})]

    def _begin(self) -> list[Event]:
        response = self._as(status="in_progress", output=[], usage=None)
        return [{"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress")]

    def _new(self, output: TextOutput) -> list[Event]:
        if self._logprobs is not None:
            self._logprobs.feed(output.text, token_logprobs(output, self._tokenizer), output.logprob_spans)
        events = []
        for part in self._parts(output):
            events += self._output.add(part, self._logprobs_of(part))
        if output.tokens.finish is not None and self._logprobs is not None and (rest := self._logprobs.rest()):
            events += self._output.add_logprobs(rest)
        return events

    def _logprobs_of(self, part: Part) -> list[dict[str, Any]]:
        return self._logprobs.take(part.text) if self._logprobs is not None and isinstance(part, PlainText) else []

    def _parts(self, output: TextOutput) -> list[Part]:
        if self._readers is not None:
            return self._readers.read(0, output)
        return [PlainText(output.text)] if output.text else []

    def _done(self) -> dict[str, Any]:
        status, reason = _STATUS[self._finish.kind if self._finish else "abort"]
        details = None if reason is None else {"reason": reason}
        response = self._as(
            status=status, output=self._output.items, usage=usage_of(self._usage.total()), incomplete_details=details
        )
        self._on_done(response)
        return response

    def _as(self, **fields: Any) -> dict[str, Any]:
        return {**self._response, **fields}

    def _numbered(self, event: Event) -> Event:
        self.num_events += 1
        return {**event, "sequence_number": self.num_events - 1}


_STATUS = {
    "stop": ("completed", None),
    "length": ("incomplete", "max_output_tokens"),
    "abort": ("cancelled", None),
}


def usage_of(counts: Counts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.completion,
    }


def _echo(body: ResponseBody, plan: ChatPlan) -> dict[str, Any]:
    text = body.text
    return {
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None, **_given(body.reasoning)},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": plan.sampling.temperature,
        "text": {"format": {"type": "text"}, **_given(text)},
        "tool_choice": "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
        "tools": [_tool(msgspec.to_builtins(tool)) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": plan.sampling.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _given(struct: msgspec.Struct | None) -> dict[str, Any]:
    return {} if struct is None else _without_none(msgspec.to_builtins(struct))


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {k: _without_none(v) if isinstance(v, dict) else v for k, v in value.items() if v is not None}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Clients expect both keys."""
    return {"strict": None, "parameters": None, **{k: v for k, v in tool.items() if v is not None}}
