"""Samples of a request: parameters and answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from fastapi import Response

from engine.frontend.apis.shared.constraints import (
    Constraint,
    GrammarFields,
    StructuredFields,
    format_constraint,
    only_one,
    plain_constraint,
    structured_constraint,
)
from engine.frontend.apis.shared.conversations import completed
from engine.frontend.apis.shared.fields import (
    Chosen,
    build_sampling,
    check_hidden_states,
    check_priority,
    check_stream_interval,
    fit_to_context,
    namespaces_of,
    routed_rank,
)
from engine.frontend.apis.shared.request_body import RequestFields, RoutingFields
from engine.frontend.apis.shared.resumable import earlier_of, going_on, resume_of, started_of
from engine.frontend.apis.shared.stream import EVENTS, Framing, View, answer
from engine.frontend.bootstraps import BootstrapFields, build_bootstraps
from engine.frontend.client.generation import Generation
from engine.frontend.services import SERVICES, Services
from engine.images import ImageInput
from engine.messages import Bootstrap, GenerateRequest, LogprobOptions
from engine.sampling_params import ReasoningGate, SamplingParams
from engine.text.reasoning import ReasoningTokens
from engine.text.sample import TextOutput
from service.http.guard import owner_in, request_timeout_s
from service.http.request import HttpRequest
from service.security.keys import VOUCHER_HEADER

# ---- Token usage of a request. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """`reasoning`: part of `completion`."""

    prompt: int
    completion: int
    cached: int
    reasoning: int


class Usage:
    """Tokens of samples, prompt-major, `n` each; a prompt counts once."""

    def __init__(
        self,
        num_prompt_tokens: list[int],
        *,
        n: int,
        count_reasoning: Callable[[], ReasoningTokens] | None = None,
    ) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._n = n
        self._completion = [0] * (len(num_prompt_tokens) * n)
        self._cached = [0] * len(num_prompt_tokens)
        self._reasoning = [count_reasoning() for _ in self._completion] if count_reasoning is not None else []

    def add(self, index: int, output: TextOutput) -> None:
        self._completion[index] += len(output.tokens.new_ids)
        if self._reasoning:
            self._reasoning[index].add(output.tokens.new_ids)
        if index % self._n == 0:  # later samples hit the first one's pages, which saves the user nothing
            prompt = index // self._n
            self._cached[prompt] = max(self._cached[prompt], output.tokens.cached_tokens)

    def of_sample(self, index: int) -> Counts:
        prompt = index // self._n
        return Counts(
            prompt=self._num_prompt_tokens[prompt],
            completion=self._completion[index],
            cached=self._cached[prompt],
            reasoning=self._reasoning[index].num if self._reasoning else 0,
        )

    def total(self) -> Counts:
        return Counts(
            prompt=sum(self._num_prompt_tokens),
            completion=sum(self._completion),
            cached=sum(self._cached),
            reasoning=sum(counter.num for counter in self._reasoning),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Facts of a request's answer. `model`: its shown name."""

    id: str
    model: str
    created: int
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """`field`: of the prompts. `cut`: fit the answer to the context."""

    id_prefix: str
    field: str = "messages"
    framing: Framing = EVENTS
    cut: bool = False


# ---- samples


@dataclass(frozen=True, kw_only=True)
class SamplesPlan:
    """`sampling.n` samples of each prompt, prompt-major.

    `images`: per prompt, at their places in it. `count_reasoning`: makes a sample's counter, if the
    model reasons.
    """

    prompts: list[list[int]]
    sampling: SamplingParams
    constraint: Constraint | None
    logprobs: LogprobOptions | None
    model: Chosen
    images: Sequence[list[ImageInput]] = ()
    count_reasoning: Callable[[], ReasoningTokens] | None = None


_CONSTRAINTS = ("response_format", *GrammarFields.model_fields, *StructuredFields.model_fields)


def body_constraint(body: RequestFields) -> Constraint | None:
    if all(getattr(body, name) is None for name in _CONSTRAINTS):
        return None
    return only_one(format_constraint(body.response_format), plain_constraint(body), structured_constraint(body))


def sampling_of(
    s: Services,
    body: RequestFields,
    *,
    max_tokens: int | None,
    name: str,
    constraint: Constraint | None,
    reasoning: ReasoningGate | None = None,
) -> SamplingParams:
    """`name`: the field of `max_tokens`. Raises ApiError(400)."""
    return build_sampling(
        s,
        body,
        max_new_tokens=max_tokens,
        min_new_tokens=body.min_tokens,
        defaults=s.model.sampling_defaults,
        names={"max_new_tokens": name, "min_new_tokens": "min_tokens"},
        constraint=constraint,
        reasoning=reasoning,
    )


async def answer_samples(
    request: HttpRequest,
    body: RequestFields,
    plan: SamplesPlan,
    format: AnswerFormat,
    *,
    view: Callable[[Head], View],
) -> Response:
    s, resume = request[SERVICES], resume_of(request)
    id = body.rid or s.mint_id(format.id_prefix) if resume is None else resume.id
    created = int(time.time()) if resume is None else resume.created
    samplings = samplings_of(s, plan, format)
    bootstraps = bootstraps_of(s, request, body, num_prompts=len(plan.prompts), n=plan.sampling.n)
    samples = requests_of(s, body, plan, id=id, samplings=samplings, bootstraps=bootstraps)
    groups = [id] * len(samples)
    requests, generation = start(request, body, samples, groups=groups)
    usage = Usage(list(map(len, plan.prompts)), n=plan.sampling.n, count_reasoning=plan.count_reasoning)
    return await answer(
        request,
        generation,
        view=view(Head(id=id, model=plan.model.shown, created=created, usage=usage)),
        stream=bool(body.stream),
        framing=format.framing,
        begun=started_of(request, requests, id=id, groups=groups, created=created),
        has_logprobs=plan.logprobs is not None,
    )


def start(
    request: HttpRequest, body: RoutingFields, requests: list[GenerateRequest], *, groups: list[str]
) -> tuple[list[GenerateRequest], Generation]:
    """Send requests, completed by what a router names. Raises ApiError."""
    s, resume = request[SERVICES], resume_of(request)
    requests = completed(request, body, requests if resume is None else going_on(resume, requests))
    generation = s.client.generate(
        requests,
        groups=groups,
        timeout_s=request_timeout_s(request.headers),
        dp_rank=routed_rank(body, request.headers),
        earlier=() if resume is None else earlier_of(resume, requests),
        owner=owner_in(request),
    )
    return requests, generation


def fitted_to_prompts(s: Services, plan: SamplesPlan, format: AnswerFormat) -> list[SamplingParams]:
    """Parameters by prompt, which fit the context with it. Raises ApiError(400)."""
    return [
        fit_to_context(
            plan.sampling,
            num_prompt_tokens=len(ids),
            images=plan.images[i] if plan.images else (),
            context_length=s.context_length,
            field=format.field,
            cut=format.cut,
        )
        for i, ids in enumerate(plan.prompts)
    ]


def samplings_of(s: Services, plan: SamplesPlan, format: AnswerFormat) -> list[SamplingParams]:
    """Parameters of all samples, with a seed each. Raises ApiError(400)."""
    return [sampling for params in fitted_to_prompts(s, plan, format) for sampling in samples_of(s, params)]


def requests_of(
    s: Services,
    body: RequestFields,
    plan: SamplesPlan,
    *,
    id: str,
    samplings: Sequence[SamplingParams],
    bootstraps: Sequence[Bootstrap | None],
) -> list[GenerateRequest]:
    """Raises ApiError(400)."""
    n = plan.sampling.n
    namespaces = namespaces_of(body, len(plan.prompts))
    hidden_states = check_hidden_states(s, body.return_hidden_states)
    interval, priority = check_stream_interval(body.stream_interval), check_priority(body.priority)
    return [
        GenerateRequest(
            rid=id if len(samplings) == 1 else f"{id}-{i}",
            input_ids=plan.prompts[i // n],
            sampling=sampling,
            logprobs=plan.logprobs,
            bootstrap=bootstraps[i],
            stream=bool(body.stream),
            stream_interval=interval,
            priority=priority,
            grammar_field="" if plan.constraint is None else plan.constraint.field,
            lora=plan.model.lora,
            namespace=namespaces[i // n],
            return_hidden_states=hidden_states,
            images=plan.images[i // n] if plan.images else [],
        )
        for i, sampling in enumerate(samplings)
    ]


def samples_of(s: Services, params: SamplingParams) -> list[SamplingParams]:
    first = s.prng.getrandbits(62) if params.seed is None else params.seed
    return [msgspec.structs.replace(params, n=1, seed=(first + j + 2**63) % 2**64 - 2**63) for j in range(params.n)]


def bootstraps_of(
    s: Services, request: HttpRequest, fields: BootstrapFields, *, num_prompts: int, n: int
) -> list[Bootstrap | None]:
    """Raises ApiError(400)."""
    bootstraps = build_bootstraps(
        fields,
        mode=s.spec.mode,
        num_prompts=num_prompts,
        n=n,
        default_port=s.spec.default_bootstrap_port,
        mint_room=s.mint_room,
    )
    s.spec.bootstrap_allowlist.check(bootstraps, voucher=request.headers.get(VOUCHER_HEADER, ""))
    return bootstraps
