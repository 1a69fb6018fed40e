"""What a chat asks of the engine, and how its answer is read: a plan, made once, for any API that shows it."""

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from engine.frontend.apis.chat.body import ChatBody, check_chat, template_messages
from engine.frontend.apis.chat.tools import forced, forced_calls, strict_calls, template_tools, usable
from engine.frontend.apis.shared.constraints import Constraint, only_one
from engine.frontend.apis.shared.fields import prompt_ids
from engine.frontend.apis.shared.models import Chosen, choose_model
from engine.frontend.apis.shared.samples import answer_samples, body_constraint, sampling_of
from engine.frontend.apis.shared.stream import EVENTS, Framing, View
from engine.frontend.services import Services
from engine.messages import LogprobOptions
from engine.sampling_params import SamplingParams
from engine.text.chat_template import TemplateRefused
from engine.text.parts import PartReader
from engine.text.tool_calls import ARRAY, FORMATS, CallFormat, ToolCalls
from service.http.errors import bad_field


@dataclass(frozen=True, kw_only=True)
class ChatPlan:
    """`sampling.n` samples of one prompt. `reader`: makes the reader of a sample's parts; None: its text is the answer."""

    input_ids: list[int]
    sampling: SamplingParams
    constraint: Constraint | None
    logprobs: LogprobOptions | None
    model: Chosen
    reader: Callable[[], PartReader] | None


async def plan_chat(s: Services, body: ChatBody) -> ChatPlan:
    """Raises ApiError."""
    model = choose_model(s, body.model, body.lora_path)
    check_chat(body)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    format = call_format(s, body)
    constraint = chat_constraint(body, format)
    if format is not None and body.skip_special_tokens is None and s.model.tokenizer.is_special(format.marker):
        body.skip_special_tokens = False  # the reader must see its marker
    return ChatPlan(
        sampling=sampling_of(s, body, max_tokens=limit, name=name, constraint=constraint),
        input_ids=await prompt_ids(s, render_chat(s, body), field="messages", add_special_tokens=False),
        constraint=constraint,
        logprobs=LogprobOptions(top_num=body.top_logprobs or 0) if body.logprobs else None,
        model=model,
        reader=_reader(body, format),
    )


async def answer_chat(
    request: web.BaseRequest,
    body: ChatBody,
    plan: ChatPlan,
    *,
    id_prefix: str,
    view: Callable[..., View],
    framing: Framing = EVENTS,
) -> web.StreamResponse:
    """Run the plan's samples and show them. `view` takes id, model, created, usage. Raises ApiError."""
    return await answer_samples(
        request,
        body,
        id_prefix=id_prefix,
        prompts=[plan.input_ids],
        params=plan.sampling,
        logprobs=plan.logprobs,
        constraint=plan.constraint,
        model=plan.model,
        field="messages",
        view=view,
        framing=framing,
    )


def render_chat(s: Services, body: ChatBody) -> str:
    if s.model.template is None:
        raise bad_field("messages", "this model has no chat template; use /v1/completions")
    messages = template_messages(body.messages)
    prefix = messages.pop()["content"] if body.continue_final_message and messages[-1]["role"] == "assistant" else ""
    extra = {
        "tools": template_tools([] if body.tool_choice == "none" else body.tools or []),
        **({"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}),
        **(body.chat_template_kwargs or {}),
    }
    try:
        return s.model.template.render(
            messages, add_generation_prompt=body.add_generation_prompt is not False, extra=extra
        ) + str(prefix)
    except TemplateRefused as e:
        raise bad_field("messages", str(e)) from None


def call_format(s: Services, body: ChatBody) -> CallFormat | None:
    if not usable(body.tools, body.tool_choice):
        return None
    return ARRAY if forced(body.tool_choice) else FORMATS.get(s.spec.engine.tool_call_parser or "")


def chat_constraint(body: ChatBody, format: CallFormat | None) -> Constraint | None:
    """A forced call is a constraint like any other. Strict functions count only where nothing else constrains the answer."""
    tools, plain = usable(body.tools, body.tool_choice), body_constraint(body)
    if forced(body.tool_choice):
        only = body.tool_choice != "required" or body.parallel_tool_calls is False
        return only_one(forced_calls(tools, only_one=only), plain)
    return plain or (strict_calls(tools, format) if format is not None else None)


def _reader(body: ChatBody, format: CallFormat | None) -> Callable[[], PartReader] | None:
    if format is None:
        return None
    names = [tool.function.name for tool in usable(body.tools, body.tool_choice)]
    return lambda: ToolCalls(format, names)
