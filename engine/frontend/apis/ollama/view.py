"""Ollama's answer: objects with increments, the last with counts and times."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from engine.frontend.apis.shared.samples import Head
from engine.frontend.apis.shared.stream import View
from engine.text.sample import (
    Arguments,
    CallBegins,
    Part,
    PlainText,
    ReasoningText,
    TextAnswers,
    TextOutput,
    ToolCall,
    WholeAnswer,
    joined,
)
from service.http.errors import object_of

Show = Callable[[WholeAnswer], dict[str, Any]]


class OllamaView(View):
    """`model`: as requested; `start_ns`: arrival. `show`: renders text, reasoning and calls."""

    def __init__(self, answers: TextAnswers, head: Head, *, model: str, start_ns: int, show: Show) -> None:
        self._answers = answers
        self._usage = head.usage
        self._model = model
        self._start_ns = start_ns
        self._show = show
        self._call: ToolCall | None = None  # its arguments are shown whole

    def body(self, answers: list[TextOutput]) -> dict[str, Any]:
        return self._last(joined(self._parts(answers[0])), answers[0])

    def chunks(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        news = [new for part in self._parts(output) for new in self._news(part)]
        if output.tokens.finish is None:
            return [self._chunk(new) for new in news]
        return [*map(self._chunk, [*news, *self._ended_call()]), self._last(WholeAnswer(), output)]

    def _parts(self, output: TextOutput) -> list[Part]:
        self._usage.add(0, output)
        return self._answers.read(0, output)

    def _news(self, part: Part) -> list[WholeAnswer]:
        match part:
            case PlainText(text):
                return [*self._ended_call(), WholeAnswer(text=text)]
            case ReasoningText(text):
                return [*self._ended_call(), WholeAnswer(reasoning=text)]
            case CallBegins(_, name, id):
                ended, self._call = self._ended_call(), ToolCall(name, id)
                return ended
            case Arguments(_, text):
                assert self._call is not None
                self._call.arguments += text
                return []

    def _ended_call(self) -> list[WholeAnswer]:
        call, self._call = self._call, None
        return [] if call is None else [WholeAnswer(calls=[call])]

    def _chunk(self, new: WholeAnswer) -> dict[str, Any]:
        return {**_head(self._model), **self._show(new), "done": False}

    def _last(self, shown: WholeAnswer, output: TextOutput) -> dict[str, Any]:
        finish, counts, times = output.tokens.finish, self._usage.total(), output.tokens.times
        assert finish is not None
        return {
            **_head(self._model),
            **self._show(shown),
            "done": True,
            "done_reason": finish.kind,
            "total_duration": time.monotonic_ns() - self._start_ns,
            "load_duration": 0,
            "prompt_eval_count": counts.prompt,
            "prompt_eval_duration": _nanoseconds(times.get("prefill_time")),
            "eval_count": counts.completion,
            "eval_duration": _nanoseconds(times.get("decode_time")),
        }


def loaded(model: str, shown: dict[str, Any]) -> dict[str, Any]:
    """The answer without a prompt, which loads the model in Ollama."""
    return {**_head(model), **shown, "done": True, "done_reason": "load"}


def chat_message(answer: WholeAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["thinking"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    return {"message": message}


def response_text(answer: WholeAnswer) -> dict[str, Any]:
    return {"response": answer.text, **({"thinking": answer.reasoning} if answer.reasoning else {})}


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": timestamp(time.time())}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": object_of(call.arguments.encode())}
    return {"id": call.id, "function": function}


def _nanoseconds(seconds: Any) -> int:
    return int(seconds * 1e9) if isinstance(seconds, int | float) else 0
