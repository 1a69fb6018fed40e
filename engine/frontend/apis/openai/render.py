"""POST /v1/chat/completions/render, /v1/completions/render: vLLM's /inference/v1/generate body.

Routers choose a worker by the token ids. Nothing is computed.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from engine.frontend.apis.chat.body import READER as CHATS
from engine.frontend.apis.chat.plan import plan_chat
from engine.frontend.apis.openai.bodies import READER as COMPLETIONS
from engine.frontend.apis.openai.completions import plan_completion
from engine.frontend.apis.shared.fields import check_priority, each, fit_to_context
from engine.frontend.apis.shared.request import RequestFields
from engine.frontend.services import SERVICES
from engine.images import ImageInput
from engine.messages import LogprobOptions
from engine.sampling_params import SamplingParams
from service.http.stream import json_response

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
    s = request[SERVICES]
    body = await CHATS.read(request)
    plan = await plan_chat(s, body)
    sampling = fit_to_context(
        plan.sampling,
        num_prompt_tokens=len(plan.input_ids),
        images=plan.images,
        context_length=s.context_length,
        field="messages",
    )
    (salt,) = each("cache_salt", body.cache_salt, 1)
    return json_response(
        {
            **_shared(body, plan.model.shown),
            "request_id": body.rid or s.mint_id("chatcmpl-"),
            "token_ids": plan.input_ids,
            "features": _features(plan.images),
            "sampling_params": _sampling(body, sampling, plan.logprobs),
            "cache_salt": salt,
        }
    )


async def render_completion(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    body = await COMPLETIONS.read(request)
    plan = await plan_completion(s, body)
    id, many = body.rid or s.mint_id("cmpl-"), len(plan.input_ids) > 1
    salts, cut = each("cache_salt", body.cache_salt, len(plan.input_ids)), body.max_tokens is None
    rows = []
    for i, ids in enumerate(plan.input_ids):
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
