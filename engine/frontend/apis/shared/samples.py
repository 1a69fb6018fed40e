"""Samples of a request: parameters and answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from engine.frontend.apis.shared.constraints import (
    Constraint,
    format_constraint,
    only_one,
    plain_constraint,
    structured_constraint,
)
from engine.frontend.apis.shared.fields import (
    build_sampling,
    check_hidden_states,
    check_priority,
    check_stream_interval,
    fit_to_context,
)
from engine.frontend.apis.shared.image_encoders import with_image_encoders
from engine.frontend.apis.shared.prefix_sources import with_prefix_source
from engine.frontend.apis.shared.request import Chosen, RequestFields, namespaces_of
from engine.frontend.apis.shared.resumable import earlier_of, going_on, resume_of, started_of
from engine.frontend.apis.shared.routed import routed_rank
from engine.frontend.apis.shared.stream import EVENTS, Framing, View, answer
from engine.frontend.services import SERVICES, Services
from engine.images import ImageInput
from engine.messages import GenerateRequest, LogprobOptions
from engine.sampling_params import ReasoningGate, SamplingParams
from engine.text.reasoning import ReasoningTokens
from engine.text.sample import TextOutput
from service.http.guard import owner_in

# ---- Token usage of a request. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Token counts. `reasoning`: part of `completion`."""

    prompt: int
    completion: int
    cached: int
    reasoning: int


class Usage:
    """Samples are prompt-major, `n` each; a prompt counts once.

    `count_reasoning`: makes a sample's counter.
    """

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


# ---- samples


def body_constraint(body: RequestFields) -> Constraint | None:
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
    request: web.BaseRequest,
    body: RequestFields,
    *,
    id_prefix: str,
    prompts: list[list[int]],
    params: SamplingParams,
    logprobs: LogprobOptions | None,
    constraint: Constraint | None,
    model: Chosen,
    field: str,
    view: Callable[..., View],
    images: Sequence[list[ImageInput]] = (),
    cut: bool = False,
    framing: Framing = EVENTS,
    count_reasoning: Callable[[], ReasoningTokens] | None = None,
) -> web.StreamResponse:
    """Run `params.n` samples of each prompt, prompt-major. Raises ApiError.

    `field`: of the prompts. `cut`: fit the answer to the context. `view`: takes id, model, created,
    usage. `images`: per prompt. `count_reasoning`: makes a sample's counter.
    """
    s, n = request[SERVICES], params.n
    resume = resume_of(request)
    id = body.rid or s.mint_id(id_prefix) if resume is None else resume.id
    samplings = [
        sampling
        for i, ids in enumerate(prompts)
        for sampling in s.samples_of(
            fit_to_context(
                params,
                num_prompt_tokens=len(ids),
                images=images[i] if images else (),
                context_length=s.context_length,
                field=field,
                cut=cut,
            )
        )
    ]
    bootstraps = s.bootstraps_of(request, body, num_prompts=len(prompts), n=n)
    namespaces = namespaces_of(body, len(prompts))
    hidden_states = check_hidden_states(s, body.return_hidden_states)
    interval, priority = check_stream_interval(body.stream_interval), check_priority(body.priority)
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
            lora=model.lora,
            namespace=namespaces[i // n],
            return_hidden_states=hidden_states,
            images=images[i // n] if images else [],
        )
        for i, sampling in enumerate(samplings)
    ]
    requests, groups = with_prefix_source(request, going_on(resume, requests)), [id] * len(requests)
    requests = with_image_encoders(request, requests) if images else requests
    generation = s.client.generate(
        requests,
        groups=groups,
        timeout_s=s.timeout_of(request),
        dp_rank=routed_rank(body, request.headers),
        earlier=earlier_of(resume, requests),
        owner=owner_in(request),
    )
    usage = Usage([len(ids) for ids in prompts], n=n, count_reasoning=count_reasoning)
    created = int(time.time()) if resume is None else resume.created
    shown = view(id=id, model=model.shown, created=created, usage=usage)
    begun = started_of(request, requests, id=id, groups=groups, created=created)
    return await answer(
        request,
        generation,
        view=shown,
        stream=bool(body.stream),
        framing=framing,
        begun=begun,
        has_logprobs=logprobs is not None,
    )
