"""POST /v1/completions: body -> plan -> view."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from engine.frontend.apis.chat.body import READER as CHATS
from engine.frontend.apis.chat.plan import plan_chat
from engine.frontend.apis.openai.view import (
    DEFAULT_COMPLETION_TOKENS,
    READER,
    CompletionBody,
    CompletionView,
    Echo,
    check_completion,
)
from engine.frontend.apis.openai.view import READER as COMPLETIONS
from engine.frontend.apis.shared.fields import (
    check_num_samples,
    check_priority,
    each,
    fit_to_context,
    prompts_ids,
    prompts_of,
)
from engine.frontend.apis.shared.request import RequestFields, choose_model
from engine.frontend.apis.shared.samples import SamplesPlan, answer_samples, body_constraint, sampling_of
from engine.frontend.services import SERVICES, Services
from engine.images import ImageInput
from engine.messages import LogprobOptions
from engine.sampling_params import SamplingParams
from engine.text.incremental import places_of
from service.http.api_shapes import json_response


@dataclass(frozen=True, kw_only=True)
class CompletionPlan(SamplesPlan):
    """A checked completion. `given`: prompts of the body."""

    given: list[str | list[int]]


async def plan_completion(s: Services, body: CompletionBody) -> CompletionPlan:
    """Raises ApiError."""
    model = choose_model(s, body.model, body.lora_path)
    check_completion(body)
    prompts = prompts_of(body.prompt, field="prompt")
    check_num_samples(len(prompts), body.n or 1, field="prompt")
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    constraint = body_constraint(body)
    params = sampling_of(s, body, max_tokens=limit, name="max_tokens", constraint=constraint)
    ids = await prompts_ids(s, prompts, field="prompt")
    logprobs = None
    if body.logprobs is not None:
        logprobs = LogprobOptions(start_len=0 if body.echo else -1, top_num=body.logprobs)
    return CompletionPlan(
        given=prompts, prompts=ids, sampling=params, constraint=constraint, logprobs=logprobs, model=model
    )


async def completions(request: web.BaseRequest) -> web.StreamResponse:
    s = request[SERVICES]
    body = await READER.read(request)
    plan = await plan_completion(s, body)
    n, ids = plan.sampling.n, plan.prompts
    echoes = [
        await _echo(s, prompt, tokens, with_places=plan.logprobs is not None) if body.echo else Echo()
        for prompt, tokens in zip(plan.given, ids, strict=True)
    ]
    return await answer_samples(
        request,
        body,
        plan,
        id_prefix="cmpl-",
        field="prompt",
        cut=body.max_tokens is None,
        view=partial(
            CompletionView,
            body,
            echoes=[echo for echo in echoes for _ in range(n)],
            has_text=s.model.has_text,
            prompts=[p for p in ids for _ in range(n)],
            weight_version=lambda: s.weight_version,
        ),
    )


async def _echo(s: Services, prompt: str | list[int], ids: list[int], *, with_places: bool) -> Echo:
    tokenizer, text = s.model.tokenizer, prompt
    if not isinstance(text, str):
        (text,) = await s.decode_all([text], skip_special_tokens=False)
    return Echo(text, await asyncio.to_thread(places_of, tokenizer, ids, text) if with_places else ())


# ---- POST /v1/.../render

# Our names of sampling parameters -> vLLM's.
_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
}
_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
_MADE = ("reasoning", "bad_token_ids")  # vLLM has the original fields
_AS_THEY_CAME = ("bad_words", "thinking_token_budget")


async def render_chat_completion(request: web.BaseRequest) -> web.Response:
    """POST /v1/chat/completions/render, /v1/completions/render: vLLM's /inference/v1/generate body.

    Routers choose a worker by the token ids. Nothing is computed.
    """
    s = request[SERVICES]
    body = await CHATS.read(request)
    plan = await plan_chat(s, body)
    sampling = fit_to_context(
        plan.sampling,
        num_prompt_tokens=len(plan.input_ids),
        images=plan.images[0],
        context_length=s.context_length,
        field="messages",
    )
    (salt,) = each("cache_salt", body.cache_salt, 1)
    return json_response(
        {
            **_shared(body, plan.model.shown),
            "request_id": body.rid or s.mint_id("chatcmpl-"),
            "token_ids": plan.input_ids,
            "features": _features(plan.images[0]),
            "sampling_params": _sampling(body, sampling, plan.logprobs),
            "cache_salt": salt,
        }
    )


async def render_completion(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    body = await COMPLETIONS.read(request)
    plan = await plan_completion(s, body)
    id, many = body.rid or s.mint_id("cmpl-"), len(plan.prompts) > 1
    salts, cut = each("cache_salt", body.cache_salt, len(plan.prompts)), body.max_tokens is None
    rows = []
    for i, ids in enumerate(plan.prompts):
        sampling = fit_to_context(
            plan.sampling, num_prompt_tokens=len(ids), context_length=s.context_length, field="prompt", cut=cut
        )
        rows.append(
            {
                **_shared(body, plan.model.shown),
                "request_id": f"{id}-{i}" if many else id,
                "token_ids": ids,
                "features": None,
                "sampling_params": _sampling(body, sampling, plan.logprobs),
                "cache_salt": salts[i],
            }
        )
    return json_response(rows)


def _shared(body: RequestFields, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "stream": bool(body.stream),
        "stream_options": body.stream_options if body.stream else None,
        "priority": check_priority(body.priority),
    }


def _sampling(body: RequestFields, params: SamplingParams, logprobs: LogprobOptions | None) -> dict[str, Any]:
    named = {
        _NAMES.get(name, name): value
        for name, value in msgspec.to_builtins(params, str_keys=True).items()
        if name not in (*_GRAMMARS, *_MADE)
    }
    if params.grammar is not None:
        named["structured_outputs"] = {_GRAMMARS[params.grammar.kind]: params.grammar.source}
    if logprobs is not None:
        named["logprobs"] = logprobs.top_num
    return named | {name: value for name in _AS_THEY_CAME if (value := getattr(body, name, None)) is not None}


def _features(images: Sequence[ImageInput]) -> dict[str, Any] | None:
    """Image places without pixels, as vLLM does for cached ones."""
    if not images:
        return None
    return {
        "mm_hashes": {"image": [image.key.hex() for image in images]},
        "mm_placeholders": {"image": [{"offset": image.start, "length": image.num_tokens} for image in images]},
    }
