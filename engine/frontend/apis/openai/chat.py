"""POST /v1/chat/completions: body -> plan -> view; the base of OpenAI's views."""

import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import Response

from engine.frontend.apis.chat.body import READER, ChatBody, token_logprobs
from engine.frontend.apis.chat.plan import plan_chat
from engine.frontend.apis.shared.request_body import RequestFields, StreamOptions
from engine.frontend.apis.shared.resumable import ids_of
from engine.frontend.apis.shared.routes import RouteTags, token_route
from engine.frontend.apis.shared.samples import AnswerFormat, Counts, Head, answer_samples
from engine.frontend.apis.shared.stream import View
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
from engine.text.tokenizer import Tokenizer
from service.http.api import ApiRouter
from service.http.request import HttpRequest
from service.http.routes import EVENTS_TYPE

# ---- Optional fields of a choice: token ids (vLLM, SGLang), last hidden state (SGLang). Pure.


class Extras:
    """In a stream, ids come with the next text, hidden states last."""

    def __init__(self, body: RequestFields, prompts: Sequence[list[int]]) -> None:
        self._token_ids = bool(body.return_token_ids)
        self._hidden_states = bool(body.return_hidden_states)
        self._prompts: dict[int, list[int]] = dict(enumerate(prompts))  # not shown yet
        self._new: defaultdict[int, list[int]] = defaultdict(list)  # tokens not shown yet
        self._last: dict[int, bytes] = {}

    def add(self, index: int, output: TextOutput) -> None:
        self._new[index] += output.tokens.new_ids
        if output.tokens.hidden:
            self._last[index] = output.tokens.hidden[-1]

    def take(self, index: int, *, finished: bool) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        if self._token_ids:
            shown["token_ids"] = self._new.pop(index, [])
            if index in self._prompts:
                shown["prompt_token_ids"] = self._prompts.pop(index)
        if self._hidden_states and finished:
            shown["hidden_states"] = array.array("f", self._last.pop(index, b"")).tolist()
        return shown


# ---- Base of the views of chats and completions. Pure.


def usage_of(counts: Counts) -> dict[str, Any]:
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
        "reasoning_tokens": counts.reasoning,
    }


NO_OPTIONS = StreamOptions()


class OpenAIView(View):
    """Base of both views. `prompts`: by sample, for `return_token_ids`."""

    object: str
    chunk_object: str

    def __init__(
        self,
        body: RequestFields,
        head: Head,
        *,
        weight_version: Callable[[], str],
        prompts: Sequence[list[int]] = (),
    ) -> None:
        self._options = body.stream_options or NO_OPTIONS
        wanted = body.return_token_ids or body.return_hidden_states
        self._extras = Extras(body, prompts) if wanted else None
        self._weight_version = weight_version
        self._head = {"id": head.id, "created": head.created, "model": head.model}
        self._chunk_head = {**self._head, "object": self.chunk_object}
        self._usage = head.usage

    def body(self, answers: list[TextOutput]) -> dict[str, Any]:
        for index, output in enumerate(answers):
            self._usage.add(index, output)
        choices = [self._choice(index, output) for index, output in enumerate(answers)]
        if self._extras is not None:
            for choice, output in zip(choices, answers, strict=True):
                self._extras.add(choice["index"], output)
                choice |= self._extras.take(choice["index"], finished=True)
        return {
            **self._head,
            "object": self.object,
            "choices": choices,
            "usage": usage_of(self._usage.total()),
            "metadata": {"weight_version": self._weight_version()},
        }

    def chunks(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        self._usage.add(index, output)
        deltas = self._deltas(index, output)
        if self._extras is not None:
            self._extras.add(index, output)
            if deltas:
                self._attach(deltas[-1], self._extras.take(index, finished=output.tokens.finish is not None))
        return [self._chunk(index, delta) for delta in deltas]

    def last(self) -> list[dict[str, Any]]:
        if not self._options.include_usage:
            return []
        return [{**self._chunk_head, "choices": [], "usage": usage_of(self._usage.total())}]

    def _chunk(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._chunk_head, "choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = usage_of(self._usage.of_sample(index))
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _attach(self, choice: dict[str, Any], extras: dict[str, Any]) -> None:
        choice.update(extras)

    def _choice(self, index: int, output: TextOutput) -> dict[str, Any]:
        raise NotImplementedError

    def _deltas(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        raise NotImplementedError


def ending_of(output: TextOutput) -> dict[str, Any]:
    finish = output.tokens.finish
    return {"finish_reason": finish.kind if finish else None, "matched_stop": finish.matched if finish else None}


# ---- OpenAI's chat answers, whole or in deltas. Pure.


class ChatView(OpenAIView):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        body: ChatBody,
        head: Head,
        *,
        tokenizer: Tokenizer,
        answers: TextAnswers,
        **more: Any,
    ) -> None:
        super().__init__(body, head, **more)
        self._logprobs = bool(body.logprobs)
        self._tokenizer = tokenizer
        self._answers = answers
        self._begun: set[int] = set()
        self._customs = {tool.function.name for tool in body.tools or () if tool.type == "custom"}
        self._custom_calls: set[tuple[int, int]] = set()  # started in a stream: (sample, call)

    def _choice(self, index: int, output: TextOutput) -> dict[str, Any]:
        whole = joined(self._answers.read(index, output))
        nothing = None if whole.calls or whole.reasoning else ""
        message = {
            "role": "assistant",
            "content": whole.text or nothing,
            "refusal": None,
            "reasoning_content": whole.reasoning or None,
            "tool_calls": [self._call(call) for call in whole.calls] or None,
        }
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs_of(output),
            **self._ending(index, output),
        }

    def _deltas(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        deltas = []
        if index not in self._begun:
            self._begun.add(index)
            deltas.append(_delta(index, {"role": "assistant", "content": ""}))
        deltas += [_delta(index, self._new(index, part)) for part in self._answers.read(index, output)]
        if output.logprob_texts and self._logprobs:
            self._add_logprobs(deltas, index, output)
        if output.tokens.finish is not None:
            deltas.append({**_delta(index, {}), **self._ending(index, output)})
        return deltas

    def _attach(self, choice: dict[str, Any], extras: dict[str, Any]) -> None:
        """SGLang streams hidden states in the delta."""
        if "hidden_states" in extras:
            choice["delta"]["hidden_states"] = extras.pop("hidden_states")
        super()._attach(choice, extras)

    def _new(self, sample: int, part: Part) -> dict[str, Any]:
        if isinstance(part, PlainText):  # for each token: faster than a match
            return {"content": part.text}
        match part:
            case ReasoningText(text):
                return {"reasoning_content": text}
            case CallBegins(call, name, id):
                if name in self._customs:
                    self._custom_calls.add((sample, call))
                return {"tool_calls": [{"index": call, **self._call(ToolCall(name, id))}]}
            case Arguments(call, text):
                is_custom = (sample, call) in self._custom_calls
                more = {"custom": {"input": text}} if is_custom else {"function": {"arguments": text}}
                return {"tool_calls": [{"index": call, **more}]}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        if call.name in self._customs:
            return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _ending(self, index: int, output: TextOutput) -> dict[str, Any]:
        ending = ending_of(output)
        if ending["finish_reason"] == "stop" and self._answers.has_called(index):
            ending["finish_reason"] = "tool_calls"
        return ending

    def _add_logprobs(self, deltas: list[dict[str, Any]], index: int, output: TextOutput) -> None:
        """Add logprobs to the first delta, or a new one: text may lag behind its tokens."""
        first = next((d for d in deltas if "role" not in d["delta"]), None)
        if first is None:
            first = _delta(index, {"content": ""})
            deltas.append(first)
        first["logprobs"] = self._logprobs_of(output)

    def _logprobs_of(self, output: TextOutput) -> dict[str, Any] | None:
        return {"content": token_logprobs(output, self._tokenizer), "refusal": None} if self._logprobs else None


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None}


# ---- chat


API = ApiRouter(RouteTags.CHATS)
CHAT_FORMAT = AnswerFormat(id_prefix="chatcmpl-")


@API.on(token_route, "/v1/chat/completions", ChatBody, streams=EVENTS_TYPE)
async def chat_completions(request: HttpRequest) -> Response:
    """Answer a chat."""
    s = request[SERVICES]
    body = await READER.read(request)
    plan = await plan_chat(s, body)
    view = partial(
        ChatView,
        body,
        tokenizer=s.model.tokenizer,
        answers=plan.answers(ids_of(request).mint, "call_"),
        prompts=[plan.input_ids] * plan.sampling.n,
        weight_version=lambda: s.weight_version,
    )
    return await answer_samples(request, body, plan, CHAT_FORMAT, view=view)
