"""POST /v1/completions and /v1/chat/completions: body -> samples -> view. GET /v1/models."""

import time
from typing import Any

import msgspec
from aiohttp import web

from engine.frontend.apis.openai.bodies import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    OpenAIFields,
    check_chat,
    check_completion,
    template_messages,
)
from engine.frontend.apis.openai.tool_view import ToolChatView
from engine.frontend.apis.openai.tools import forced, forced_calls, strict_calls, template_tools, usable
from engine.frontend.apis.openai.usage import Usage
from engine.frontend.apis.openai.view import ChatView, CompletionView
from engine.frontend.apis.shared.constraints import Constraint, format_constraint, only_one, plain_constraint
from engine.frontend.apis.shared.fields import (
    build_bootstraps,
    build_sampling,
    check_num_samples,
    check_priority,
    check_prompt_ids,
    check_stream_interval,
    fit_to_context,
    prompts_of,
)
from engine.frontend.apis.shared.models import adapter_cards, choose_model
from engine.frontend.apis.shared.stream import answer
from engine.frontend.client.generation import Generation
from engine.frontend.services import SERVICES, Services
from engine.messages import GenerateRequest, LogprobOptions
from engine.sampling_params import SamplingParams
from engine.text.chat_template import TemplateRefused
from engine.text.tool_calls import ARRAY, FORMATS, CallFormat, ToolCalls
from service.http.errors import bad_field, decode_body
from service.http.stream import json_response
from service.security.voucher import VOUCHER_HEADER


async def completions(request: web.BaseRequest) -> web.StreamResponse:
    s = request[SERVICES]
    body = decode_body(await request.read(), CompletionBody)
    model = choose_model(s, body.model, body.lora_path)
    check_completion(body)
    prompts = prompts_of(body.prompt, field="prompt")
    check_num_samples(len(prompts), body.n or 1, field="prompt")
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    constraint = body_constraint(body)
    params = _sampling(s, body, max_tokens=limit, name="max_tokens", constraint=constraint)
    ids = [await _prompt_ids(s, p) for p in prompts]
    logprobs = (
        None if body.logprobs is None else LogprobOptions(start_len=0 if body.echo else -1, top_num=body.logprobs)
    )
    id = body.rid or s.mint_id("cmpl-")
    cut = body.max_tokens is None
    requests = _requests(s, body, id=id, prompts=ids, params=params, logprobs=logprobs, field="prompt", cut=cut)
    s.bootstrap_allowlist.check([r.bootstrap for r in requests], voucher=request.headers.get(VOUCHER_HEADER, ""))
    generation = _start(s, requests, id=id, constraint=constraint, lora=model.lora, timeout_s=s.timeout_of(request))
    echoes = [_echo(s, p) if body.echo else "" for p in prompts for _ in range(params.n)]
    view = CompletionView(
        body,
        echoes=echoes,
        logprobs=logprobs is not None,
        id=id,
        model=model.shown,
        created=int(time.time()),
        usage=Usage([len(p) for p in ids], n=params.n),
    )
    return await answer(request, generation, view=view, stream=bool(body.stream))


async def chat_completions(request: web.BaseRequest) -> web.StreamResponse:
    s = request[SERVICES]
    body = decode_body(await request.read(), ChatBody)
    model = choose_model(s, body.model, body.lora_path)
    check_chat(body)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    format = call_format(s, body)
    constraint = chat_constraint(body, format)
    params = _sampling(s, body, max_tokens=limit, name=name, constraint=constraint)
    if format is not None and body.skip_special_tokens is None and s.tokenizer.is_special(format.marker):
        params = msgspec.structs.replace(params, skip_special_tokens=False)  # the reader must see its marker
    ids = check_prompt_ids(
        await s.encode(render_chat(s, body), field="messages", add_special_tokens=False),
        field="messages",
        vocab_size=s.vocab_size,
    )
    logprobs = LogprobOptions(top_num=body.top_logprobs or 0) if body.logprobs else None
    id = body.rid or s.mint_id("chatcmpl-")
    requests = _requests(s, body, id=id, prompts=[ids], params=params, logprobs=logprobs, field="messages", cut=False)
    s.bootstrap_allowlist.check([r.bootstrap for r in requests], voucher=request.headers.get(VOUCHER_HEADER, ""))
    generation = _start(s, requests, id=id, constraint=constraint, lora=model.lora, timeout_s=s.timeout_of(request))
    view = _chat_view(
        s,
        body,
        format,
        logprobs=logprobs is not None,
        id=id,
        model=model.shown,
        created=int(time.time()),
        usage=Usage([len(ids)], n=params.n),
    )
    return await answer(request, generation, view=view, stream=bool(body.stream))


async def list_models(request: web.BaseRequest) -> web.Response:
    return json_response({"object": "list", "data": _model_cards(request[SERVICES])})


async def get_model(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    chosen = choose_model(s, request.path.removeprefix("/v1/models/"), None)
    return json_response(next(card for card in _model_cards(s) if card["id"] == chosen.shown))


def render_chat(s: Services, body: ChatBody) -> str:
    """Prompt text of the messages. Raises ApiError(400)."""
    if s.template is None:
        raise bad_field("messages", "this model has no chat template; use /v1/completions")
    messages = template_messages(body.messages)
    prefix = messages.pop()["content"] if body.continue_final_message and messages[-1]["role"] == "assistant" else ""
    extra = {
        "tools": template_tools([] if body.tool_choice == "none" else body.tools or []),
        **({"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}),
        **(body.chat_template_kwargs or {}),
    }
    try:
        return s.template.render(
            messages, add_generation_prompt=body.add_generation_prompt is not False, extra=extra
        ) + str(prefix)
    except TemplateRefused as e:
        raise bad_field("messages", str(e)) from None


def body_constraint(body: OpenAIFields) -> Constraint | None:
    """What the answer must look like. Raises ApiError(400)."""
    return only_one(format_constraint(body.response_format), plain_constraint(body))


def call_format(s: Services, body: ChatBody) -> CallFormat | None:
    """How the answer's tool calls are written; None: there are none to be read."""
    if not usable(body.tools, body.tool_choice):
        return None
    return ARRAY if forced(body.tool_choice) else FORMATS.get(s.tool_call_parser or "")


def chat_constraint(body: ChatBody, format: CallFormat | None) -> Constraint | None:
    """A forced call is a constraint like any other; strict functions only where nothing else constrains the answer."""
    tools, plain = usable(body.tools, body.tool_choice), body_constraint(body)
    if forced(body.tool_choice):
        only = body.tool_choice != "required" or body.parallel_tool_calls is False
        return only_one(forced_calls(tools, only_one=only), plain)
    return plain or (strict_calls(tools, format) if format is not None else None)


def _chat_view(s: Services, body: ChatBody, format: CallFormat | None, **kwargs: Any) -> ChatView:
    if format is None:
        return ChatView(body, tokenizer=s.tokenizer, **kwargs)
    names = [tool.function.name for tool in usable(body.tools, body.tool_choice)]
    return ToolChatView(
        body,
        tokenizer=s.tokenizer,
        reader=lambda: ToolCalls(format, names),
        mint_id=lambda: s.mint_id("call_"),
        **kwargs,
    )


def _sampling(
    s: Services, body: OpenAIFields, *, max_tokens: int | None, name: str, constraint: Constraint | None
) -> SamplingParams:
    return build_sampling(
        body,
        vocab_size=s.vocab_size,
        max_new_tokens=max_tokens,
        min_new_tokens=body.min_tokens,
        defaults=s.sampling_defaults,
        names={"max_new_tokens": name, "min_new_tokens": "min_tokens"},
        constraint=constraint,
    )


def _requests(
    s: Services,
    body: OpenAIFields,
    *,
    id: str,
    prompts: list[list[int]],
    params: SamplingParams,
    logprobs: LogprobOptions | None,
    field: str,
    cut: bool,
) -> list[GenerateRequest]:
    """The samples, prompt-major."""
    n = params.n
    bootstraps = build_bootstraps(
        body, mode=s.mode, num_prompts=len(prompts), n=n, default_port=s.default_bootstrap_port, mint_room=s.mint_room
    )
    samplings = [
        sampling
        for ids in prompts
        for sampling in s.samples_of(
            fit_to_context(params, num_prompt_tokens=len(ids), context_length=s.context_length, field=field, cut=cut)
        )
    ]
    single = len(samplings) == 1
    interval, priority = check_stream_interval(body.stream_interval), check_priority(body.priority)
    return [
        GenerateRequest(
            rid=id if single else f"{id}-{i}",
            input_ids=prompts[i // n],
            sampling=sampling,
            logprobs=logprobs,
            bootstrap=bootstraps[i],
            stream=bool(body.stream),
            stream_interval=interval,
            priority=priority,
        )
        for i, sampling in enumerate(samplings)
    ]


def _start(
    s: Services,
    requests: list[GenerateRequest],
    *,
    id: str,
    constraint: Constraint | None,
    lora: str,
    timeout_s: float | None,
) -> Generation:
    field = "" if constraint is None else constraint.field
    requests = [msgspec.structs.replace(r, grammar_field=field, lora=lora) for r in requests]
    return s.client.generate(requests, groups=[id] * len(requests), timeout_s=timeout_s)


async def _prompt_ids(s: Services, prompt: str | list[int]) -> list[int]:
    ids = prompt if isinstance(prompt, list) else await s.encode(prompt, field="prompt")
    return check_prompt_ids(ids, field="prompt", vocab_size=s.vocab_size)


def _echo(s: Services, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else s.tokenizer.decode(prompt, skip_special_tokens=False)


def _model_cards(s: Services) -> list[dict[str, Any]]:
    base = {
        "id": s.served_name,
        "object": "model",
        "created": s.started_unix_s,
        "owned_by": "tandem",
        "root": s.model_path,
        "parent": None,
        "max_model_len": s.context_length,
    }
    return [base, *adapter_cards(s, base)]
