"""A response as JSON or typed events; whole, its events are dropped. Pure."""

from collections import deque
from collections.abc import Callable
from typing import Any

from engine.frontend.apis.chat.body import token_logprobs
from engine.frontend.apis.chat.plan import ChatPlan
from engine.frontend.apis.responses.body import ResponseBody
from engine.frontend.apis.shared.samples import Counts, Head
from engine.frontend.apis.shared.stream import View
from engine.messages import FinishReason
from engine.text.sample import Arguments, CallBegins, Part, PlainText, ReasoningText, Span, TextAnswers, TextOutput
from engine.text.tokenizer import Tokenizer
from service.http.body import Body
from service.http.errors import plain
from service.responses.items import item_id

Event = dict[str, Any]


class OutputItems:
    """Output items so far (`items`).

    output_item.added, content_part.added, *_text.delta..., *_text.done, content_part.done,
      output_item.done                                      text, reasoning
    output_item.added, function_call_arguments.delta..., function_call_arguments.done,
      output_item.done                                      a call
    """

    def __init__(self, response_id: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._response_id = response_id
        self._open: str | None = None  # type of the growing last item

    def add(self, part: Part, logprobs: list[dict[str, Any]]) -> list[Event]:
        """`logprobs`: of a `PlainText`'s tokens."""
        match part:
            case ReasoningText(text):
                return [*self._begin_unless("reasoning"), *self._grow(text, [])]
            case PlainText(text):
                return [*self._begin_unless("message"), *self._grow(text, logprobs)]
            case CallBegins(_, name, id):
                return self._begin("function_call", call_id=id, name=name, arguments="")
            case Arguments(_, text):
                self.items[-1]["arguments"] += text
                return [self._event("response.function_call_arguments.delta", delta=text)]

    def add_logprobs(self, logprobs: list[dict[str, Any]]) -> list[Event]:
        """Add logprobs of final tokens without text; not after calls or reasoning."""
        if self.items and self._open != "message":
            return []
        return [*self._begin_unless("message"), *self._grow("", logprobs)]

    def end(self, *, complete: bool) -> list[Event]:
        """End the last item; an empty answer is an empty message."""
        begun = [] if self.items else self._begin("message")
        return begun + self._close("completed" if complete else "incomplete")

    def _begin_unless(self, type: str) -> list[Event]:
        return [] if self._open == type else self._begin(type)

    def _begin(self, type: str, **fields: Any) -> list[Event]:
        events = self._close("completed")
        if type == "message":
            fields = {"role": "assistant", "content": []}
        elif type == "reasoning":
            fields = {"summary": [], "content": [], "encrypted_content": None}
        id = item_id(type, self._response_id, len(self.items))
        item = {"id": id, "type": type, "status": "in_progress", **fields}
        self.items.append(item)
        self._open = type
        events.append(self._item_event("added"))
        if type == "function_call":
            return events
        item["content"] = [_part(type)]
        return [*events, self._event("response.content_part.added", content_index=0, part=_part(type))]

    def _grow(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        part = self.items[-1]["content"][0]
        part["text"] += text
        if self._open == "reasoning":
            return [self._event("response.reasoning_text.delta", content_index=0, delta=text)]
        part["logprobs"] += logprobs
        return [self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def _close(self, status: str) -> list[Event]:
        type, self._open = self._open, None
        if type is None:
            return []
        item = self.items[-1]
        item["status"] = status
        if type == "function_call":
            done = self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
            return [done, self._item_event("done")]
        part = item["content"][0]
        kind, more = ("reasoning_text", {}) if type == "reasoning" else ("output_text", {"logprobs": part["logprobs"]})
        return [
            self._event(f"response.{kind}.done", content_index=0, text=part["text"], **more),
            self._event("response.content_part.done", content_index=0, part=dict(part)),
            self._item_event("done"),
        ]

    def _event(self, type: str, **fields: Any) -> Event:
        return {"type": type, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _item_event(self, what: str) -> Event:
        return {
            "type": f"response.output_item.{what}",
            "output_index": len(self.items) - 1,
            "item": dict(self.items[-1]),
        }


def _part(type: str) -> dict[str, Any]:
    if type == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


class TextLogprobs:
    """Logprobs of each text: `feed` text and tokens, `take` its logprobs.

    `only_text`: no other parts.

    A token belongs to the text in which its own text lies or starts.
    """

    def __init__(self, *, only_text: bool) -> None:
        self._only_text = only_text
        self._text = ""
        self._taken = 0  # position up to which texts were taken
        self._waiting: deque[tuple[Span, dict[str, Any]]] = deque()

    def feed(self, text: str, logprobs: list[dict[str, Any]], spans: list[Span]) -> None:
        self._text += text
        self._waiting.extend(zip(spans, logprobs, strict=False))

    def take(self, text: str) -> list[dict[str, Any]]:
        if self._only_text:
            return self.rest()
        start = max(self._taken, self._text.find(text, self._taken))
        self._taken = start + len(text)
        taken = []
        while self._waiting and self._waiting[0][0][0] < self._taken:
            (begin, end), logprob = self._waiting.popleft()
            if begin >= start or end > start:
                taken.append(logprob)
        return taken

    def rest(self) -> list[dict[str, Any]]:
        rest = [logprob for _, logprob in self._waiting]
        self._waiting.clear()
        return rest


# ---- view


class ResponseView(View):
    """`on_done` gets the final response."""

    def __init__(
        self,
        body: ResponseBody,
        plan: ChatPlan,
        head: Head,
        *,
        tokenizer: Tokenizer,
        answers: TextAnswers,
        on_done: Callable[[dict[str, Any]], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._logprobs = TextLogprobs(only_text=answers.is_plain) if body.wants_logprobs else None
        self._answers = answers
        self._on_done = on_done
        self._usage = head.usage
        self._response = {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "model": head.model,
            **_echo(body, plan),
        }
        self._output = OutputItems(head.id)
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
        for part in self._answers.read(0, output):
            events += self._output.add(part, self._logprobs_of(part))
        if output.tokens.finish is not None and self._logprobs is not None and (rest := self._logprobs.rest()):
            events += self._output.add_logprobs(rest)
        return events

    def _logprobs_of(self, part: Part) -> list[dict[str, Any]]:
        return self._logprobs.take(part.text) if self._logprobs is not None and isinstance(part, PlainText) else []

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
        "tool_choice": "auto" if body.tool_choice is None else plain(body.tool_choice),
        "tools": [_tool(plain(tool)) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": plan.sampling.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _given(part: Body | None) -> dict[str, Any]:
    return {} if part is None else _without_none(plain(part))


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {k: _without_none(v) if isinstance(v, dict) else v for k, v in value.items() if v is not None}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Clients expect both keys."""
    return {"strict": None, "parameters": None, **{k: v for k, v in tool.items() if v is not None}}
