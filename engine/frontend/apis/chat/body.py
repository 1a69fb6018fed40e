"""A chat with fields of OpenAI, SGLang and vLLM. Pure.

Other APIs translate to ChatBody.
"""

from collections.abc import Collection
from typing import Any

import msgspec

from engine.frontend.apis.chat.tools import Tool, ToolChoice
from engine.frontend.apis.shared.body_reader import CHAT, BodyReader
from engine.frontend.apis.shared.fields import RequestFields
from engine.frontend.apis.shared.stream import finite
from engine.messages import TokenLogprob
from engine.text.sample import TextOutput
from engine.text.tokenizer import Tokenizer
from service.http.errors import decode_or_none

MAX_TOP_LOGPROBS = 20
RESULTS = ("tool", "function")  # roles of calls' results
MEDIA = ("image_url", "video_url")
_OF_A_MESSAGE = "messages[]."  # prefix of ignored fields' paths


class MediaUrl(msgspec.Struct, kw_only=True):
    """A URL. `fps`: frames per second of a video. `detail` is ignored."""

    url: str
    detail: str | None = None
    fps: float | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | MediaUrl | None = None
    video_url: str | MediaUrl | None = None

    def field_at(self, message: int, index: int) -> str:
        return f"messages[{message}].content[{index}].{self.type}"


class PlacedPart(ContentPart, kw_only=True):
    """A part at `field` of another API's body."""

    field: str
    is_base64: bool = False

    def field_at(self, message: int, index: int) -> str:
        return self.field


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message.

    `reasoning`: vLLM's name of `reasoning_content`. `function_call`: older form of `tool_calls`.
    The last field is ignored.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None
    audio: Any = None
    annotations: Any = None


class RetainedMessage(ChatMessage, kw_only=True):
    """Message with `kept`: unknown fields that the chat template reads."""

    kept: dict[str, Any]


class _Messages(msgspec.Struct):
    messages: list[dict[str, Any]]


class ChatBody(RequestFields, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    function_call: Any = None
    modalities: list[str] | None = None


def keep_read_fields(body: ChatBody, data: bytes, ignored: list[str], names: Collection[str]) -> list[str]:
    """Keep ignored message fields that the chat template reads (`names`); return the others."""
    read = {path.removeprefix(_OF_A_MESSAGE) for path in ignored if path.startswith(_OF_A_MESSAGE)} & set(names)
    given = decode_or_none(data, _Messages) if read else None
    if given is None:
        return ignored
    body.messages = [
        RetainedMessage(**msgspec.structs.asdict(m), kept={name: fields[name] for name in read & fields.keys()})
        for m, fields in zip(body.messages, given.messages, strict=True)
    ]
    return [path for path in ignored if path.removeprefix(_OF_A_MESSAGE) not in read]


READER = BodyReader(
    body=ChatBody,
    refused=CHAT,
    looked_into=("messages", "tools", "tool_choice", "stream_options", "response_format"),
    keep=keep_read_fields,
)


# ---- OpenAI's logprobs of an answer. Pure.


def token_logprobs(output: TextOutput, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    pairs = zip(output.tokens.logprobs, output.logprob_texts, strict=False)
    return [_token(lp, text, top, tokenizer) for lp, (text, top) in pairs]


def _token(lp: TokenLogprob, text: str, top_texts: list[str], tokenizer: Tokenizer) -> dict[str, Any]:
    top = [_entry(t, i, p, tokenizer) for t, (p, i) in zip(top_texts, lp.top, strict=False)]
    return {**_entry(text, lp.token_id, lp.logprob, tokenizer), "top_logprobs": top}


def _entry(text: str, token_id: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    own = tokenizer.token_bytes(token_id)
    if own == b" " + text.encode():  # an answer's first token, without its leading space
        own = own[1:]
    return {"token": text, "logprob": finite(logprob), "bytes": list(own)}
