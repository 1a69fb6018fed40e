"""The samples of a completion or a chat."""

from aiohttp import web

from engine.frontend.apis.openai.bodies import OpenAIFields
from engine.frontend.apis.shared.constraints import Constraint, format_constraint, only_one, plain_constraint
from engine.frontend.apis.shared.fields import build_sampling, check_priority, check_stream_interval, fit_to_context
from engine.frontend.bootstraps import build_bootstraps
from engine.frontend.client.generation import Generation
from engine.frontend.services import SERVICES, Services
from engine.messages import GenerateRequest, LogprobOptions
from engine.sampling_params import SamplingParams
from service.security.secret import VOUCHER_HEADER


def body_constraint(body: OpenAIFields) -> Constraint | None:
    return only_one(format_constraint(body.response_format), plain_constraint(body))


def sampling_of(
    s: Services, body: OpenAIFields, *, max_tokens: int | None, name: str, constraint: Constraint | None
) -> SamplingParams:
    """`name`: the field that `max_tokens` came from. Raises ApiError(400)."""
    return build_sampling(
        body,
        vocab_size=s.model.vocab_size,
        max_new_tokens=max_tokens,
        min_new_tokens=body.min_tokens,
        defaults=s.model.sampling_defaults,
        names={"max_new_tokens": name, "min_new_tokens": "min_tokens"},
        constraint=constraint,
    )


def start(
    request: web.BaseRequest,
    body: OpenAIFields,
    *,
    id: str,
    prompts: list[list[int]],
    params: SamplingParams,
    logprobs: LogprobOptions | None,
    constraint: Constraint | None,
    lora: str,
    field: str,
    cut: bool = False,
) -> Generation:
    """Send `params.n` samples of each prompt, prompt-major. Raises ApiError.

    `field`: of the prompts; errors name it. `cut`: shorten the answer to what fits the context.
    """
    s, n = request[SERVICES], params.n
    bootstraps = build_bootstraps(
        body,
        mode=s.session.mode,
        num_prompts=len(prompts),
        n=n,
        default_port=s.session.default_bootstrap_port,
        mint_room=s.mint_room,
    )
    samplings = [
        sampling
        for ids in prompts
        for sampling in s.samples_of(
            fit_to_context(params, num_prompt_tokens=len(ids), context_length=s.context_length, field=field, cut=cut)
        )
    ]
    interval, priority = check_stream_interval(body.stream_interval), check_priority(body.priority)
    s.bootstrap_allowlist.check(bootstraps, voucher=request.headers.get(VOUCHER_HEADER, ""))
    requests = [
        GenerateRequest(
            rid=id if len(samplings) == 1 else f"{id}-{i}",
            input_ids=prompts[i // n],
            sampling=sampling,
            logprobs=logprobs,
            bootstrap=bootstraps[i],
            stream=bool(body.stream),
            stream_interval=interval,
            priority=priority,
            grammar_field="" if constraint is None else constraint.field,
            lora=lora,
        )
        for i, sampling in enumerate(samplings)
    ]
    return s.client.generate(requests, groups=[id] * len(requests), timeout_s=s.timeout_of(request))
