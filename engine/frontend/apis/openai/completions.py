"""POST /v1/completions: body -> plan -> view."""

import asyncio
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from engine.frontend.apis.openai.bodies import DEFAULT_COMPLETION_TOKENS, READER, CompletionBody, check_completion
from engine.frontend.apis.openai.view import CompletionView, Echo
from engine.frontend.apis.shared.constraints import Constraint
from engine.frontend.apis.shared.fields import check_num_samples, prompts_ids, prompts_of
from engine.frontend.apis.shared.models import Chosen, choose_model
from engine.frontend.apis.shared.samples import answer_samples, body_constraint, sampling_of
from engine.frontend.services import SERVICES, Services
from engine.messages import LogprobOptions
from engine.sampling_params import SamplingParams
from engine.text.incremental import places_of


@dataclass(frozen=True, kw_only=True)
class CompletionPlan:
    """A checked completion. `prompts`: of the body; `input_ids`: of each."""

    prompts: list[str | list[int]]
    input_ids: list[list[int]]
    sampling: SamplingParams
    constraint: Constraint | None
    logprobs: LogprobOptions | None
    model: Chosen


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
        prompts=prompts, input_ids=ids, sampling=params, constraint=constraint, logprobs=logprobs, model=model
    )


async def completions(request: web.BaseRequest) -> web.StreamResponse:
    s = request[SERVICES]
    body = await READER.read(request)
    plan = await plan_completion(s, body)
    n, ids = plan.sampling.n, plan.input_ids
    echoes = [
        await _echo(s, prompt, tokens, with_places=plan.logprobs is not None) if body.echo else Echo()
        for prompt, tokens in zip(plan.prompts, ids, strict=True)
    ]
    return await answer_samples(
        request,
        body,
        id_prefix="cmpl-",
        prompts=ids,
        params=plan.sampling,
        logprobs=plan.logprobs,
        constraint=plan.constraint,
        model=plan.model,
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
