"""Plan of a chat: engine request and answer reader."""

import logging
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import msgspec
from aiohttp import web

from engine.frontend.apis.chat.body import ChatBody, RetainedMessage, check_chat, sources_of, template_messages
from engine.frontend.apis.chat.calls import CallIds, Reading, as_taken, call_ids, reading_of
from engine.frontend.apis.chat.tools import (
    forced,
    forced_calls,
    names_one,
    refuse_strict,
    strict_calls,
    template_tools,
    usable,
)
from engine.frontend.apis.shared.constraints import Constraint, only_one
from engine.frontend.apis.shared.fields import prompt_ids
from engine.frontend.apis.shared.media import Prompt, load_media, media_prompt
from engine.frontend.apis.shared.reasoning import check_budget, gate_of, reasoning_format
from engine.frontend.apis.shared.request import Chosen, choose_model
from engine.frontend.apis.shared.samples import answer_samples, body_constraint, sampling_of
from engine.frontend.apis.shared.stream import EVENTS, Framing, View
from engine.frontend.images.placeholders import LoadedMedia, Marks
from engine.frontend.images.source import MediaSource
from engine.frontend.services import Services
from engine.images import ImageInput
from engine.messages import LogprobOptions
from engine.sampling_params import ReasoningGate, SamplingParams
from engine.text.chat_template import ChatTemplate, TemplateRefused, render_continued
from engine.text.parts import PartReader
from engine.text.reasoning import HARMONY, Opening, ReasoningFormat, ReasoningTokens, opening_of
from engine.text.tokenizer import Tokenizer
from engine.text.tool_calls import CallFormat
from service.http.errors import bad_field

log = logging.getLogger(__name__)

PAGE_CHARS = 1024
NO_PARSER = "this server was started without --tool-call-parser"
TOGGLES = ("enable_thinking", "thinking")  # template variables that toggle reasoning


@dataclass(frozen=True, kw_only=True)
class ChatPlan:
    """`sampling.n` samples of one prompt. `reader`: of parts, None for plain text.

    `count_reasoning`: makes counters, if the model reasons. `images`: at their places in
    `input_ids`.
    """

    input_ids: list[int]
    images: list[ImageInput]
    sampling: SamplingParams
    constraint: Constraint | None
    logprobs: LogprobOptions | None
    model: Chosen
    reader: Callable[[], PartReader] | None
    count_reasoning: Callable[[], ReasoningTokens] | None
    call_ids: CallIds


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
    template's. `fits`: as in `prompt_ids`.
    """
    model = choose_model(s, body.model, body.lora_path)
    check_chat(body)
    reasoning = reasoning_format(s)
    check_reasoning(s, body, reasoning)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    reading = reading_of(body, reasoning=reasoning, tool_parser=s.spec.engine.tool_call_parser)
    check_calls(body, reading)
    constraint = chat_constraint(body, reading.calls, in_channels=reading.calls_in_channels)
    if body.skip_special_tokens is None and any(map(s.model.tokenizer.is_special, reading.markers)):
        body.skip_special_tokens = False  # the reader needs its markers
    sources = sources_of(body.messages)
    loaded = await load_media(s, sources, known) if sources else []
    prompt, prefix = await s.rendering.run(partial(render_chat, s, body), size=rendering_size(s, body))
    opening = Opening.CLOSED if reasoning is None else opening_of(reasoning, prompt, prefix=prefix)
    text = prompt + prefix
    input_ids, images = await _prompt(s, text, loaded, add_special_tokens=add_special_tokens, fits=fits)
    return ChatPlan(
        sampling=sampling_of(
            s,
            body,
            max_tokens=limit,
            name=name,
            constraint=constraint,
            reasoning=_gate(body, reasoning, opening, constraint),
        ),
        input_ids=input_ids,
        images=images,
        constraint=constraint,
        logprobs=LogprobOptions(top_num=body.top_logprobs or 0) if body.logprobs else None,
        model=model,
        reader=reading.reader(opening),
        count_reasoning=None if reasoning is None else partial(_counter, reading, opening, s.model.tokenizer),
        call_ids=call_ids(s.spec.engine.tool_call_parser, s.model.tool_template, messages=body.messages),
    )


async def _prompt(s: Services, text: str, loaded: list[LoadedMedia], *, add_special_tokens: bool, fits: bool) -> Prompt:
    if not loaded:
        ids = await prompt_ids(s, text, field="messages", add_special_tokens=add_special_tokens, fits=fits)
        return Prompt(ids, [])
    return await media_prompt(s, text, loaded, field="messages", add_special_tokens=add_special_tokens, fits=fits)


def rendering_size(s: Services, body: ChatBody) -> int:
    """Cost in characters; a message or tool adds a page. Raises ApiError(400)."""
    parts = [m.content if isinstance(m.content, list) else [] for m in body.messages]
    texts = [m.content or "" for m in body.messages if not isinstance(m.content, list)]
    texts += [part.text or "" for several in parts for part in several]
    size = sum(map(len, texts))
    s.check_text_bytes(size, field="messages")
    others = [[m.reasoning_content or m.reasoning, m.refusal, m.tool_calls, m.function_call] for m in body.messages]
    kept = [m.kept for m in body.messages if isinstance(m, RetainedMessage)]
    size += len(msgspec.json.encode((others, kept, body.tools, body.chat_template_kwargs)))
    return size + PAGE_CHARS * (len(body.messages) + len(body.tools or ()))


def check_calls(body: ChatBody, reading: Reading) -> None:
    """Explicit "auto" is rejected without parser, as in vLLM; else warn."""
    if not reading.functions or reading.calls is not None or reading.calls_in_channels:
        return
    if body.tool_choice == "auto":
        raise bad_field("tool_choice", f"auto: {NO_PARSER}; use required, or none", code="unsupported_parameter")
    warn_of_unread_calls()


@cache
def warn_of_unread_calls() -> None:
    """Log once; the answers stay useful."""
    log.warning("a request has tools, and %s: calls by the model's choice stay text", NO_PARSER)


def check_reasoning(s: Services, body: ChatBody, format: ReasoningFormat | None) -> None:
    if body.reasoning_effort == "none" and format is HARMONY:
        raise bad_field("reasoning_effort", "this model always reasons; use low, medium or high")
    check_budget(s, body.thinking_token_budget, field="thinking_token_budget")


def _gate(
    body: ChatBody, format: ReasoningFormat | None, opening: Opening, constraint: Constraint | None
) -> ReasoningGate | None:
    if format is None:
        return None
    return gate_of(format, opening, budget=body.thinking_token_budget, is_constrained=constraint is not None)


def _counter(reading: Reading, opening: Opening, tokenizer: Tokenizer) -> ReasoningTokens:
    assert reading.reasoning is not None
    ends = tuple(marker for marker in (reading.reasoning.end, reading.interrupts) if marker)
    return ReasoningTokens(start=reading.reasoning.start, ends=ends, opening=opening, token_bytes=tokenizer.token_bytes)


async def answer_chat(
    request: web.BaseRequest,
    body: ChatBody,
    plan: ChatPlan,
    *,
    id_prefix: str,
    view: Callable[..., View],
    framing: Framing = EVENTS,
    cut: bool = False,
) -> web.StreamResponse:
    """Answer a chat. `view` takes id, model, created, usage. Raises ApiError."""
    return await answer_samples(
        request,
        body,
        id_prefix=id_prefix,
        prompts=[plan.input_ids],
        images=[plan.images],
        params=plan.sampling,
        logprobs=plan.logprobs,
        constraint=plan.constraint,
        model=plan.model,
        field="messages",
        view=view,
        framing=framing,
        count_reasoning=plan.count_reasoning,
        cut=cut,
    )


def render_chat(s: Services, body: ChatBody) -> tuple[str, str]:
    """The prompt text, and the start of the answer (`continue_final_message`)."""
    tools = template_tools([] if body.tool_choice == "none" else body.tools or [])
    template = s.model.template_for(tools=tools is not None)
    if template is None:
        raise bad_field("messages", "this model has no chat template; use /v1/completions")
    messages = template_messages(body.messages, reads=template.reads, places=_places(template, s.model.marks))
    messages = as_taken(messages, template.reads)
    extra = {
        "tools": tools,
        **_effort(body.reasoning_effort),
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
    if template.knows_images:
        return {"image_url": {"type": "image"}, "video_url": {"type": "video"}}
    return {"image_url": marks.image, "video_url": marks.video}


def _effort(effort: str | None) -> dict[str, Any]:
    return {"reasoning_effort": effort, **dict.fromkeys(TOGGLES, effort != "none")} if effort else {}


def chat_constraint(body: ChatBody, format: CallFormat | None, *, in_channels: bool = False) -> Constraint | None:
    """Forced calls as constraint; strict functions apply only without another.

    `in_channels`: harmony calls, without schema support.
    """
    tools, plain = usable(body.tools, body.tool_choice), body_constraint(body)
    if forced(body.tool_choice):
        only = names_one(body.tool_choice) or body.parallel_tool_calls is False
        return only_one(forced_calls(tools, only_one=only), plain)
    if plain is None and in_channels:
        refuse_strict(tools)
    return plain or (strict_calls(tools, format) if format is not None else None)
