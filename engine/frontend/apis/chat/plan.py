"""Plan of a chat: its checks, messages for the template, engine request and answer reader."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from engine.frontend.apis.chat.body import (
    MAX_TOP_LOGPROBS,
    MEDIA,
    RESULTS,
    ChatBody,
    ChatMessage,
    ContentPart,
    MediaUrl,
    PlacedPart,
)
from engine.frontend.apis.chat.calls import as_taken, call_ids
from engine.frontend.apis.chat.reading import AS_TEXT, chat_constraint, checked_reading, opened
from engine.frontend.apis.chat.tools import check_tools, template_tools
from engine.frontend.apis.shared.body_reader import NO_AUDIO
from engine.frontend.apis.shared.fields import check_range, check_request, choose_model, prompts_ids
from engine.frontend.apis.shared.media import load_media, media_prompt
from engine.frontend.apis.shared.samples import SamplesPlan, body_constraint, sampling_of
from engine.frontend.images.placeholders import LoadedMedia, Marks, MediaSource
from engine.frontend.services import Services
from engine.messages import LogprobOptions
from engine.text.chat_template import (
    REASONING,
    CallArguments,
    ChatTemplate,
    Parts,
    TemplateRefused,
    TextPart,
    joined,
    render_continued,
)
from engine.text.parts import INPUT, AnswerReaders, PartReader
from engine.text.sample import TextAnswers
from engine.text.template_reads import TemplateReads
from service.http.errors import bad_field, missing, plain, unsupported

PAGE_CHARS = 1024
MakeAnswers = Callable[[Callable[[str], str], str], TextAnswers]  # of what makes unique ids, and the prefix of calls
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAY_BE_NULL = ("assistant", *RESULTS)  # roles whose content may be null
PARTS = ("text", *MEDIA, "refusal")
AUDIO = ("input_audio", "audio_url", "audio")
TOGGLES = ("enable_thinking", "thinking")  # template variables that toggle reasoning


@dataclass(frozen=True, kw_only=True)
class ChatPlan(SamplesPlan):
    """Samples of one prompt. `answers` makes what reads them."""

    answers: MakeAnswers

    @property
    def input_ids(self) -> list[int]:
        return self.prompts[0]


async def plan_chat(
    s: Services,
    body: ChatBody,
    known: MutableMapping[MediaSource, LoadedMedia] | None = None,
    *,
    add_special_tokens: bool = False,
    fits: bool = True,
) -> ChatPlan:
    """Raises ApiError.

    `known`: loaded images, for repeated planning. `add_special_tokens`: in addition to the
    template's. `fits`: as in `prompts_ids`.
    """
    model = choose_model(s, body.model, body.lora_path)
    check_chat(body)
    has_parts = _has_tools(body) or s.model.reasoning is not None or body.thinking_token_budget is not None
    reading = checked_reading(s, body) if has_parts else None
    if reading is None:
        constraint = body_constraint(body)
    else:
        constraint = chat_constraint(body, reading.calls, in_channels=reading.calls_in_channels)
    sources = sources_of(body.messages)
    loaded = await load_media(s, sources, known) if sources else []
    text, prefix = await s.texts.rendering.run(partial(render_chat, s, body), size=rendering_size(s, body))
    how: Any = {"field": "messages", "add_special_tokens": add_special_tokens, "fits": fits}
    if loaded:
        ids, images = await media_prompt(s, text + prefix, loaded, **how)
    else:
        [ids], images = await prompts_ids(s, [text + prefix], **how), []
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    answer = (
        AS_TEXT if reading is None else opened(s, body, reading, text, prefix, is_constrained=constraint is not None)
    )
    return ChatPlan(
        sampling=sampling_of(
            s, body, max_tokens=getattr(body, name), name=name, constraint=constraint, reasoning=answer.gate
        ),
        prompts=[ids],
        images=[images],
        constraint=constraint,
        logprobs=LogprobOptions(top_num=body.top_logprobs or 0) if body.logprobs else None,
        model=model,
        count_reasoning=answer.count_reasoning,
        answers=(lambda mint, prefix: TextAnswers()) if answer.reader is None else _readers(s, body, answer.reader),
    )


def _readers(s: Services, body: ChatBody, reader: Callable[[], PartReader]) -> MakeAnswers:
    ids = partial(call_ids, s.spec.engine.tool_call_parser, s.model.tool_template, body.messages)
    return lambda mint, prefix: AnswerReaders(reader, ids(partial(mint, prefix)))


def rendering_size(s: Services, body: ChatBody) -> int:
    """Cost in characters; a message or tool adds a page. Raises ApiError(400)."""
    parts = [m.content if isinstance(m.content, list) else [] for m in body.messages]
    texts = [m.content or "" for m in body.messages if not isinstance(m.content, list)]
    texts += [part.text or "" for several in parts for part in several]
    size = sum(map(len, texts))
    s.texts.check_bytes(size, field="messages")
    others = [[m.reasoning_content or m.reasoning, m.refusal, m.tool_calls, m.function_call] for m in body.messages]
    more = [m.model_extra for m in body.messages]
    size += len(msgspec.json.encode((others, more, plain(body.tools), body.chat_template_kwargs)))
    return size + PAGE_CHARS * (len(body.messages) + len(body.tools or ()))


def render_chat(s: Services, body: ChatBody) -> tuple[str, str]:
    """The prompt text, and the start of the answer (`continue_final_message`)."""
    tools = template_tools(body.tools) if body.tools and body.tool_choice != "none" else None
    template = s.model.template if tools is None else s.model.tool_template
    if template is None:
        raise bad_field("messages", "this model has no chat template; use /v1/completions")
    messages = template_messages(body.messages, reads=template.reads, places=_places(template, s.model.marks))
    if any(m.tool_calls or m.function_call is not None or m.role in RESULTS for m in body.messages):
        messages = as_taken(messages, template.reads)
    effort = body.reasoning_effort
    extra = {
        "tools": tools,
        **({"reasoning_effort": effort, **dict.fromkeys(TOGGLES, effort != "none")} if effort else {}),
        **(body.chat_template_kwargs or {}),
    }
    try:
        if body.continue_final_message:
            return _continued(body, messages, partial(template.render, add_generation_prompt=False, extra=extra))
        return template.render(messages, add_generation_prompt=body.add_generation_prompt is not False, extra=extra), ""
    except TemplateRefused as e:
        raise bad_field("messages", str(e)) from None


def _continued(
    body: ChatBody, messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]
) -> tuple[str, str]:
    last = body.messages[-1]
    in_reasoning = last.content is None and not last.refusal and "reasoning_content" in messages[-1]
    split = render_continued(render, messages, in_reasoning=in_reasoning)
    if split is None:
        field = f"messages[{len(body.messages) - 1}].content"
        raise bad_field(field, "the answer continues it: it must end with text, which the model's chat template writes")
    return split


def _places(template: ChatTemplate, marks: Marks) -> Mapping[str, Any]:
    if "image" in template.source:
        return {"image_url": {"type": "image"}, "video_url": {"type": "video"}}
    return {"image_url": marks.image, "video_url": marks.video}


# ---- checks of a chat


def check_chat(body: ChatBody) -> None:
    check_request(body)
    if body.function_call not in (None, "none", "auto"):
        raise unsupported("function_call", "is not supported; use tools and tool_choice")
    if _has_tools(body):
        check_tools(body.tools, body.tool_choice)
    if body.modalities not in (None, [], ["text"]):
        raise unsupported("modalities", "only text is supported")
    check_range("top_logprobs", body.top_logprobs, MAX_TOP_LOGPROBS)
    if body.top_logprobs and not body.logprobs:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    _check_messages(body.messages)


def sources_of(messages: list[ChatMessage]) -> list[MediaSource]:
    """Images and videos of a chat, in order, checked."""
    return [
        _source(part, part.field_at(i, j))
        for i, m in enumerate(messages)
        if isinstance(m.content, list)
        for j, part in enumerate(m.content)
        if part.type in MEDIA
    ]


def _has_tools(body: ChatBody) -> bool:
    return bool(body.tools) or body.tool_choice is not None


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
            raise missing(f"messages[{i}].content")
        if m.audio is not None:
            raise unsupported(f"messages[{i}].audio", NO_AUDIO)
        for j, part in enumerate(m.content if isinstance(m.content, list) else []):
            _check_part(part, f"messages[{i}].content[{j}]")


def _check_part(part: ContentPart, field: str) -> None:
    if part.type in AUDIO:
        raise unsupported(f"{field}.{part.type}", NO_AUDIO)
    if part.type not in PARTS or getattr(part, part.type) is None:
        raise bad_field(
            field, f"must be a part of type {', '.join(PARTS)} with a field of that name, got {part.type[:100]!r}"
        )


# ---- messages of a chat for its template


def template_messages(
    messages: list[ChatMessage], *, reads: TemplateReads, places: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Plain dicts, contents as the template reads them, `developer` as `system`.

    `places`: per type in `MEDIA`, a part or a placeholder.
    """
    return [_template_message(m, reads, places) for m in messages]


def _template_message(m: ChatMessage, reads: TemplateReads, places: Mapping[str, Any]) -> dict[str, Any]:
    calls = _calls(m)
    message = {
        **{name: value for name, value in (m.model_extra or {}).items() if name in reads.names},
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
    """Reasoning under all template names; gpt-oss takes no `thinking` with content and calls."""
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
