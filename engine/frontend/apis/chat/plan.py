"""Plan of a chat: engine request and answer reader."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from engine.frontend.apis.chat.body import ChatBody, RetainedMessage, check_chat, sources_of, template_messages
from engine.frontend.apis.chat.calls import as_taken, call_ids
from engine.frontend.apis.chat.reading import AS_TEXT, Reading, chat_constraint, checked_reading, opened
from engine.frontend.apis.chat.tools import template_tools
from engine.frontend.apis.shared.constraints import Constraint
from engine.frontend.apis.shared.fields import choose_model, prompt_ids
from engine.frontend.apis.shared.media import Prompt, load_media, media_prompt
from engine.frontend.apis.shared.samples import SamplesPlan, body_constraint, sampling_of
from engine.frontend.images.placeholders import LoadedMedia, Marks, MediaSource
from engine.frontend.services import Services
from engine.messages import LogprobOptions
from engine.text.chat_template import ChatTemplate, TemplateRefused, render_continued
from engine.text.parts import AnswerReaders, PartReader
from engine.text.sample import PlainAnswers
from service.http.errors import bad_field

PAGE_CHARS = 1024
MakeAnswers = Callable[[Callable[[str], str], str], PlainAnswers]  # of what makes unique ids, and the prefix of calls
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
    template's. `fits`: as in `prompt_ids`.
    """
    model = choose_model(s, body.model, body.lora_path)
    check_chat(body)
    has_parts = body.has_tools or s.model.reasoning is not None or body.thinking_token_budget is not None
    reading = checked_reading(s, body) if has_parts else None
    constraint = body_constraint(body) if reading is None else _constraint(body, reading)
    sources = sources_of(body.messages)
    loaded = await load_media(s, sources, known) if sources else []
    text, prefix = await s.texts.rendering.run(partial(render_chat, s, body), size=rendering_size(s, body))
    prompt = await _prompt(s, text + prefix, loaded, add_special_tokens=add_special_tokens, fits=fits)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    answer = (
        AS_TEXT if reading is None else opened(s, body, reading, text, prefix, is_constrained=constraint is not None)
    )
    return ChatPlan(
        sampling=sampling_of(
            s, body, max_tokens=getattr(body, name), name=name, constraint=constraint, reasoning=answer.gate
        ),
        prompts=[prompt.ids],
        images=[prompt.images],
        constraint=constraint,
        logprobs=LogprobOptions(top_num=body.top_logprobs or 0) if body.logprobs else None,
        model=model,
        count_reasoning=answer.count_reasoning,
        answers=_plain if answer.reader is None else _readers(s, body, answer.reader),
    )


def _constraint(body: ChatBody, reading: Reading) -> Constraint | None:
    return chat_constraint(body, reading.calls, in_channels=reading.calls_in_channels)


def _plain(mint: Callable[[str], str], prefix: str) -> PlainAnswers:
    return PlainAnswers()


def _readers(s: Services, body: ChatBody, reader: Callable[[], PartReader]) -> MakeAnswers:
    ids = call_ids(s.spec.engine.tool_call_parser, s.model.tool_template, messages=body.messages)
    return lambda mint, prefix: AnswerReaders(reader, ids.minted_by(mint, prefix))


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
    s.texts.check_bytes(size, field="messages")
    others = [[m.reasoning_content or m.reasoning, m.refusal, m.tool_calls, m.function_call] for m in body.messages]
    kept = [m.kept for m in body.messages if isinstance(m, RetainedMessage)]
    size += len(msgspec.json.encode((others, kept, body.tools, body.chat_template_kwargs)))
    return size + PAGE_CHARS * (len(body.messages) + len(body.tools or ()))


def render_chat(s: Services, body: ChatBody) -> tuple[str, str]:
    """The prompt text, and the start of the answer (`continue_final_message`)."""
    tools = template_tools(body.tools) if body.tools and body.tool_choice != "none" else None
    template = s.model.template_for(tools=tools is not None)
    if template is None:
        raise bad_field("messages", "this model has no chat template; use /v1/completions")
    messages = template_messages(body.messages, reads=template.reads, places=_places(template, s.model.marks))
    if body.has_earlier_calls:
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
