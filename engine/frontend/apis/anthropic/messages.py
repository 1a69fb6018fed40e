"""POST /v1/messages and /v1/messages/count_tokens: body -> chat -> plan -> view."""

from functools import partial
from typing import Any

from fastapi import Response

from engine.frontend.apis.anthropic.body import COUNT_TOKENS, MESSAGES, CountTokensBody, MessagesBody
from engine.frontend.apis.anthropic.translate import NAMES, chat_of, sampled_chat_of
from engine.frontend.apis.chat.plan import plan_chat
from engine.frontend.apis.shared.body_reader import beside_loop, in_words_of
from engine.frontend.apis.shared.resumable import ids_of
from engine.frontend.apis.shared.routes import RouteTags, token_route
from engine.frontend.apis.shared.samples import AnswerFormat, Counts, Head, answer_samples
from engine.frontend.apis.shared.stream import Framing, View
from engine.frontend.services import SERVICES
from engine.text.sample import (
    Arguments,
    CallBegins,
    Part,
    PlainText,
    ReasoningText,
    TextAnswers,
    TextOutput,
    ToolCall,
    joined,
)
from service.http.api import ApiRouter
from service.http.errors import object_of
from service.http.request import HttpRequest
from service.http.routes import EVENTS_TYPE, json_response, typed_event

API = ApiRouter(RouteTags.MESSAGES)

# ---- an answer as a message

_REASONS = {"stop": "end_turn", "length": "max_tokens"}
FULL = "model_context_window_exceeded"


class MessageView(View):
    """A chat's answer as Anthropic's message, whole or as typed events.

    message_start, then per block content_block_start, content_block_delta ..., content_block_stop;
    then message_delta, message_stop. `fills_context`: the token limit is the context's.
    """

    def __init__(self, answers: TextAnswers, head: Head, *, fills_context: bool, shows_thinking: bool) -> None:
        self._answers = answers
        self._fills_context = fills_context
        self._shows_thinking = shows_thinking
        self._head = {"id": head.id, "type": "message", "role": "assistant", "model": head.model}
        self._usage = head.usage
        self._has_started = False
        self._num_blocks = 0
        self._open = ""  # type of the open block, empty if none

    def body(self, answers: list[TextOutput]) -> dict[str, Any]:
        output = answers[0]
        self._usage.add(0, output)
        content = self._content(self._parts(output))
        return {**self._head, "content": content, **self._ending(output), "usage": usage_of(self._usage.total())}

    def chunks(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        self._usage.add(index, output)
        events = [] if self._has_started else self._start()
        for part in self._parts(output):
            events += self._events(part)
        if output.tokens.finish is not None:
            ending = {"delta": self._ending(output), "usage": usage_of(self._usage.total())}
            events += [*self._close(), {"type": "message_delta", **ending}, {"type": "message_stop"}]
        return events

    def _parts(self, output: TextOutput) -> list[Part]:
        parts = self._answers.read(0, output)
        return parts if self._shows_thinking else [p for p in parts if not isinstance(p, ReasoningText)]

    def _content(self, parts: list[Part]) -> list[dict[str, Any]]:
        whole = joined(parts)
        blocks = [_thinking_block(whole.reasoning)] if whole.reasoning else []
        blocks += [{"type": "text", "text": whole.text}] if whole.text else []
        return [*blocks, *map(_call_block, whole.calls)]

    # ---- events

    def _start(self) -> list[dict[str, Any]]:
        self._has_started = True
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **nothing, "usage": usage_of(self._usage.total())}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def _events(self, part: Part) -> list[dict[str, Any]]:
        match part:
            case PlainText(text):
                return [*self._enter("text", {"type": "text", "text": ""}), self._delta("text", text)]
            case ReasoningText(text):
                return [*self._enter("thinking", _thinking_block("")), self._delta("thinking", text)]
            case CallBegins(_, name, id):
                return [*self._close(), *self._enter("tool_use", _call_block(ToolCall(name, id)))]
            case Arguments(_, text):
                return [self._delta("input_json", text, name="partial_json")]

    def _enter(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        if self._open == kind:
            return []
        closing, self._open = self._close(), kind
        return [*closing, {"type": "content_block_start", "index": self._num_blocks, "content_block": block}]

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open, index = "", self._num_blocks
        self._num_blocks += 1
        return [{"type": "content_block_stop", "index": index}]

    def _delta(self, kind: str, text: str, *, name: str = "") -> dict[str, Any]:
        delta = {"type": f"{kind}_delta", name or kind: text}
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _ending(self, output: TextOutput) -> dict[str, Any]:
        finish = output.tokens.finish
        assert finish is not None
        reason = _REASONS.get(finish.kind, finish.kind)
        sequence = finish.matched if isinstance(finish.matched, str) else None
        if finish.kind == "stop" and self._answers.has_called(0):
            reason = "tool_use"
        elif finish.kind == "stop" and sequence is not None:
            reason = "stop_sequence"
        elif finish.kind == "length" and self._fills_context:
            reason = FULL
        return {"stop_reason": reason, "stop_sequence": sequence if reason == "stop_sequence" else None}


def usage_of(counts: Counts) -> dict[str, Any]:
    """Anthropic separates computed and cached prompt tokens."""
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.completion,
        "output_tokens_details": {"thinking_tokens": counts.reasoning},
    }


def _call_block(call: ToolCall) -> dict[str, Any]:
    """Arguments too deep to parse become an empty object, as clients require one."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": object_of(call.arguments.encode())}


def _thinking_block(text: str) -> dict[str, Any]:
    """The signature is empty; only Anthropic's servers use it."""
    return {"type": "thinking", "thinking": text, "signature": ""}


# ---- messages

_FORMAT = AnswerFormat(id_prefix="msg_", framing=Framing(encode=typed_event), cut=True)


@API.on(token_route, "/v1/messages", MessagesBody, streams=EVENTS_TYPE)
async def messages(request: HttpRequest) -> Response:
    """Answer a conversation."""
    s = request[SERVICES]
    body = await MESSAGES.read(request)
    with in_words_of(NAMES):
        reasons = bool(s.spec.engine.reasoning_parser)
        chat = await beside_loop(request, partial(sampled_chat_of, body, reasons=reasons))
        plan = await plan_chat(s, chat)
        view = partial(
            MessageView,
            plan.answers(ids_of(request).mint, "toolu_"),
            fills_context=len(plan.input_ids) + body.max_tokens > s.context_length,
            shows_thinking=body.thinking is None or body.thinking.display != "omitted",
        )
        return await answer_samples(request, chat, plan, _FORMAT, view=view)


@API.on(token_route, "/v1/messages/count_tokens", CountTokensBody, computes=False)
async def count_tokens(request: HttpRequest) -> Response:
    """Count the tokens of a conversation."""
    body = await COUNT_TOKENS.read(request)
    with in_words_of(NAMES):
        chat = await beside_loop(request, partial(chat_of, body))
        plan = await plan_chat(request[SERVICES], chat, fits=False)
    return json_response({"input_tokens": len(plan.input_ids)})
