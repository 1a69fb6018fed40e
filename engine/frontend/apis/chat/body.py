"""A chat with fields of OpenAI, SGLang and vLLM, and their checks. Pure.

Other APIs translate to ChatBody.
"""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from engine.frontend.apis.chat.tools import Tool, ToolChoice, check_tools
from engine.frontend.apis.shared.body_reader import CHAT, NO_AUDIO, BodyReader
from engine.frontend.apis.shared.fields import RequestFields, check_range, check_request
from engine.frontend.apis.shared.stream import finite
from engine.frontend.images.placeholders import MediaSource
from engine.messages import TokenLogprob
from engine.text.chat_template import REASONING, CallArguments, Parts, TextPart, joined
from engine.text.parts import INPUT
from engine.text.sample import TextOutput
from engine.text.template_reads import TemplateReads
from engine.text.tokenizer import Tokenizer
from service.http.errors import bad_field, decode_or_none

MAX_TOP_LOGPROBS = 20
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RESULTS = ("tool", "function")  # roles of calls' results
MAY_BE_NULL = ("assistant", *RESULTS)  # roles whose content may be null
MEDIA = ("image_url", "video_url")
PARTS = ("text", *MEDIA, "refusal")
AUDIO = ("input_audio", "audio_url", "audio")
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

    @property
    def has_tools(self) -> bool:
        return bool(self.tools) or self.tool_choice is not None

    @property
    def has_earlier_calls(self) -> bool:
        return any(m.tool_calls or m.function_call is not None or m.role in RESULTS for m in self.messages)


def check_chat(body: ChatBody) -> None:
    check_request(body)
    if body.function_call not in (None, "none", "auto"):
        raise bad_field("function_call", "is not supported; use tools and tool_choice", code="unsupported_parameter")
    if body.has_tools:
        check_tools(body.tools, body.tool_choice)
    if body.modalities not in (None, [], ["text"]):
        raise bad_field("modalities", "only text is supported", code="unsupported_parameter")
    check_range("top_logprobs", body.top_logprobs, MAX_TOP_LOGPROBS)
    if body.top_logprobs and not body.logprobs:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    _check_messages(body.messages)


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


def sources_of(messages: list[ChatMessage]) -> list[MediaSource]:
    """Images and videos of a chat, in order, checked."""
    return [
        _source(part, part.field_at(i, j))
        for i, m in enumerate(messages)
        if isinstance(m.content, list)
        for j, part in enumerate(m.content)
        if part.type in MEDIA
    ]


def _source(part: ContentPart, field: str) -> MediaSource:
    given = getattr(part, part.type)
    url = given if isinstance(given, MediaUrl) else MediaUrl(url=given)
    return MediaSource(
        field=field,
        url=url.url,
        fps=url.fps,
        is_video=part.type == "video_url",
        is_base64=isinstance(part, PlacedPart) and part.is_base64,
    )


def _check_messages(messages: list[ChatMessage]) -> None:
    if not messages:
        raise bad_field("messages", "must not be empty")
    for i, m in enumerate(messages):
        if m.role not in ROLES:
            raise bad_field(f"messages[{i}].role", f"{m.role!r} is not one of {', '.join(ROLES)}")
        if m.content is None and m.role not in MAY_BE_NULL:
            raise bad_field(f"messages[{i}].content", "is missing")
        if m.audio is not None:
            raise bad_field(f"messages[{i}].audio", NO_AUDIO, code="unsupported_parameter")
        for j, part in enumerate(m.content if isinstance(m.content, list) else []):
            _check_part(part, f"messages[{i}].content[{j}]")


def _check_part(part: ContentPart, field: str) -> None:
    if part.type in AUDIO:
        raise bad_field(f"{field}.{part.type}", NO_AUDIO, code="unsupported_parameter")
    if part.type not in PARTS or getattr(part, part.type) is None:
        raise bad_field(
            field, f"must be a part of type {', '.join(PARTS)} with a field of that name, got {part.type[:100]!r}"
        )


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


# ---- Messages of a chat for its template. Pure.

NO_PLACES: Mapping[str, Any] = {}
STRINGS = TemplateReads(
    parts=False,
    strings=True,
    null=False,
    calls_beside_null=False,
    one_call=False,
    short_ids=False,
    names=frozenset(),
)


def template_messages(
    messages: list[ChatMessage], *, reads: TemplateReads = STRINGS, places: Mapping[str, Any] = NO_PLACES
) -> list[dict[str, Any]]:
    """Plain dicts, contents as the template reads them, `developer` as `system`.

    `places`: per type in `MEDIA`, a part or a placeholder.
    """
    return [_template_message(m, reads, places) for m in messages]


def _template_message(m: ChatMessage, reads: TemplateReads, places: Mapping[str, Any]) -> dict[str, Any]:
    calls = _calls(m)
    message = {
        **(m.kept if isinstance(m, RetainedMessage) else {}),
        "role": "system" if m.role == "developer" else m.role,
        "content": _content(m, reads, places, calls=bool(calls)),
        **{name: value for name in ("name", "tool_call_id") if (value := getattr(m, name)) is not None},
    }
    if calls:
        message["tool_calls"] = calls
    return message | _reasoning(m, message)


def _content(m: ChatMessage, reads: TemplateReads, places: Mapping[str, Any], *, calls: bool) -> str | Parts | None:
    """Null with calls stays null if the template tests for it; others would render "None"."""
    if m.content and isinstance(m.content, list):
        return _parts(m.content, reads, places)
    if m.content is None and not m.refusal and reads.null and calls:
        return None
    text = str(m.content or m.refusal or "")
    return text if reads.strings else Parts.of_text(text)


def _parts(parts: list[ContentPart], reads: TemplateReads, places: Mapping[str, Any]) -> str | Parts:
    shown = Parts(_part(part, places) for part in parts)
    keeps = reads.parts or not all(isinstance(part, TextPart) for part in shown)
    return shown if keeps else joined(shown)


def _part(part: ContentPart, places: Mapping[str, Any]) -> Any:
    shown = places[part.type] if part.type in MEDIA else getattr(part, part.type)
    return TextPart(shown) if isinstance(shown, str) else shown


def _reasoning(m: ChatMessage, message: dict[str, Any]) -> dict[str, str]:
    """Reasoning under all template names.

    gpt-oss rejects `thinking` with both content and calls.
    """
    text = m.reasoning_content or m.reasoning
    names = REASONING[:2] if message["content"] and message.get("tool_calls") else REASONING
    return dict.fromkeys(names, text) if text else {}


def _calls(m: ChatMessage) -> list[dict[str, Any]]:
    if m.function_call is not None:  # of OpenAI's first API for calls
        return [_call({"type": "function", "function": m.function_call})]
    return [_call(call) for call in m.tool_calls or ()]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    custom, function = call.get("custom"), call.get("function")
    if isinstance(custom, dict):
        function = {"name": custom.get("name"), "arguments": {INPUT: custom.get("input")}}
        call = {"id": call.get("id"), "type": "function"}
    if not isinstance(function, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": CallArguments.of(function.get("arguments"))}}
