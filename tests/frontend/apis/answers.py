"""Answers of each API as its clients keep them, whole and from a stream; and the bodies that send them back. Pure."""

import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from engine.frontend.apis.anthropic.body import MESSAGES
from engine.frontend.apis.anthropic.messages import MessageView
from engine.frontend.apis.anthropic.translate import chat_of as of_messages
from engine.frontend.apis.chat.body import READER, ChatBody
from engine.frontend.apis.ollama.body import CHAT
from engine.frontend.apis.ollama.body import chat_of as of_ollama
from engine.frontend.apis.ollama.view import OllamaView, chat_message
from engine.frontend.apis.openai.chat import ChatView
from engine.frontend.apis.responses.body import READER as RESPONSES
from engine.frontend.apis.responses.chat import to_chat
from engine.frontend.apis.responses.view import ResponseView
from engine.frontend.apis.shared.samples import Head, Usage
from engine.messages import FinishReason, TokenOutput
from engine.text.parts import AnswerReaders, MintId, PartReader
from engine.text.sample import TextAnswers, TextOutput

FIRST, LAST = "the first question", "the last question"
RESULT = "the result"
NO_TOKENIZER: Any = None  # logprobs alone need one
Message = dict[str, Any]


class Said(NamedTuple):
    """A model's text, `kind` of its end, and how the server reads it and names calls."""

    text: str
    kind: str
    body: ChatBody
    reader: Callable[[], PartReader] | None
    mint_id: MintId

    @property
    def answers(self) -> TextAnswers:
        return TextAnswers() if self.reader is None else AnswerReaders(self.reader, self.mint_id)

    def outputs(self, size: int) -> list[TextOutput]:
        """In pieces of `size` characters."""
        pieces = [self.text[at : at + size] for at in range(0, len(self.text), size)] or [""]
        ends = [None] * (len(pieces) - 1) + [FinishReason(kind=self.kind)]
        return [
            TextOutput(text=text, tokens=TokenOutput(rid="r", new_ids=[1], finish=end))
            for text, end in zip(pieces, ends, strict=True)
        ]

    def of(self, view: Callable[..., Any], size: int) -> tuple[Any, list[Any]]:
        """The view's whole answer, or (size > 0) its chunks."""
        made = view(Head(id="x", model="m", created=1, usage=Usage([1], n=1)))
        if not size:
            return made.body(self.outputs(len(self.text) or 1)), []
        return None, [c for output in self.outputs(size) for c in made.chunks(0, output)] + made.last()


# ---- OpenAI's chats


def openai_message(said: Said, size: int) -> Message:
    view = partial(ChatView, said.body, tokenizer=NO_TOKENIZER, answers=said.answers, prompts=[[1]], weight_version=str)
    whole, chunks = said.of(view, size)
    return whole["choices"][0]["message"] if not size else _joined([c["choices"][0]["delta"] for c in chunks])


def _joined(deltas: list[Message]) -> Message:
    texts = {name: "".join(d.get(name) or "" for d in deltas) for name in ("content", "reasoning_content")}
    calls: dict[int, Message] = {}
    for new in (call for d in deltas for call in d.get("tool_calls") or ()):
        if new["index"] not in calls:
            calls[new["index"]] = {"id": new["id"], "type": new["type"], new["type"]: {}}
        call = calls[new["index"]]
        for name, text in new[call["type"]].items():
            call[call["type"]][name] = call[call["type"]].get(name, "") + text
    return {"role": "assistant", **{k: v or None for k, v in texts.items()}, "tool_calls": list(calls.values()) or None}


def openai_back(answer: Message) -> ChatBody:
    results = [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in answer["tool_calls"] or ()]
    turns = [{"role": "user", "content": FIRST}, answer, *results, {"role": "user", "content": LAST}]
    body: ChatBody = _decoded(READER, {"messages": turns})
    return body


# ---- its Responses


def response_items(said: Said, size: int) -> list[Message]:
    body, _ = RESPONSES.decode(b'{"input": "x"}')
    plan: Any = SimpleNamespace(sampling=SimpleNamespace(temperature=1.0, top_p=1.0))
    view = partial(
        ResponseView, body, plan, tokenizer=NO_TOKENIZER, answers=said.answers, on_done=lambda response: None
    )
    whole, chunks = said.of(view, size)
    return whole["output"] if not size else [c["item"] for c in chunks if c["type"] == "response.output_item.done"]


def response_back(answer: list[Message]) -> ChatBody:
    ids = [item["call_id"] for item in answer if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": id, "output": RESULT} for id in ids]
    items = [{"role": "user", "content": FIRST}, *answer, *results, {"role": "user", "content": LAST}]
    return to_chat(_decoded(RESPONSES, {"input": items}))


# ---- Anthropic's messages


def anthropic_blocks(said: Said, size: int, *, shows_thinking: bool = True) -> list[Message]:
    view = partial(MessageView, said.answers, fills_context=False, shows_thinking=shows_thinking)
    whole, chunks = said.of(view, size)
    if not size:
        return list(whole["content"])
    blocks = [dict(c["content_block"]) for c in chunks if c["type"] == "content_block_start"]
    texts = ["" for _ in blocks]
    for chunk in (c for c in chunks if c["type"] == "content_block_delta"):
        texts[chunk["index"]] += next(v for k, v in chunk["delta"].items() if k != "type")
    for block, text in zip(blocks, texts, strict=True):
        kind = "input" if block["type"] == "tool_use" else block["type"]
        block[kind] = object_or_none(text) or {} if kind == "input" else text
    return blocks


def object_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def anthropic_back(answer: list[Message]) -> ChatBody:
    ids = [block["id"] for block in answer if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": id, "content": RESULT} for id in ids]
    last = {"role": "user", "content": [*results, {"type": "text", "text": LAST}]}
    turns = [{"role": "user", "content": FIRST}, {"role": "assistant", "content": answer}, last]
    return of_messages(_decoded(MESSAGES, {"max_tokens": 1, "messages": turns}))


# ---- Ollama's chats


def ollama_message(said: Said, size: int) -> Message:
    view = partial(OllamaView, said.answers, model="m", start_ns=0, show=chat_message)
    whole, chunks = said.of(view, size)
    news = [chunk["message"] for chunk in chunks or [whole]]
    texts = {name: "".join(new.get(name, "") for new in news) for name in ("content", "thinking")}
    return {"role": "assistant", **texts, "tool_calls": [call for new in news for call in new.get("tool_calls", ())]}


def ollama_back(answer: Message) -> ChatBody:
    """As Ollama's own client sends it: it keeps no ids."""
    calls = [{"function": call["function"]} for call in answer["tool_calls"]]
    results = [{"role": "tool", "tool_name": call["function"]["name"], "content": RESULT} for call in calls]
    turns = [{"role": "user", "content": FIRST}, answer | {"tool_calls": calls}, *results]
    turns.append({"role": "user", "content": LAST})
    return of_ollama(_decoded(CHAT, {"model": "m", "messages": turns}))


def _decoded(reader: Any, body: Message) -> Any:
    """Of our own answers no field is unknown."""
    decoded, ignored = reader.decode(json.dumps(body).encode())
    assert ignored == []
    return decoded


class Api(NamedTuple):
    answer: Callable[[Said, int], Any]
    back: Callable[[Any], ChatBody]


APIS = {
    "openai": Api(openai_message, openai_back),
    "responses": Api(response_items, response_back),
    "anthropic": Api(anthropic_blocks, anthropic_back),
    "ollama": Api(ollama_message, ollama_back),
}
