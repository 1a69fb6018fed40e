"""Samples of a request: their parameters, and their HTTP answers, whole or in events."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from fastapi import Response

from engine.frontend.apis.shared.constraints import (
    Constraint,
    format_constraint,
    only_one,
    plain_constraint,
    structured_constraint,
)
from engine.frontend.apis.shared.fields import (
    Chosen,
    build_sampling,
    check_hidden_states,
    check_priority,
    check_stream_interval,
    fit_to_context,
    is_constrained,
    namespaces_of,
    routed_rank,
)
from engine.frontend.apis.shared.image_encoders import with_image_encoders
from engine.frontend.apis.shared.prefix_sources import with_prefix_source
from engine.frontend.apis.shared.request_body import RequestFields, RoutingFields
from engine.frontend.apis.shared.resumable import (
    UNFRAMED,
    Frames,
    Unframed,
    answer_framed,
    earlier_of,
    going_on,
    has_last,
    resume_of,
    started_of,
)
from engine.frontend.apis.shared.retained import retained
from engine.frontend.bootstraps import BootstrapFields, build_bootstraps
from engine.frontend.client.generation import Generation
from engine.frontend.services import SERVICES, Services
from engine.images import ImageInput
from engine.messages import Bootstrap, GenerateRequest, LogprobOptions
from engine.sampling_params import ReasoningGate, SamplingParams
from engine.text.reasoning import ReasoningTokens
from engine.text.sample import TextOutput
from service.http.errors import ApiError
from service.http.guard import owner_in, request_timeout_s
from service.http.image_encoders import ENCODERS_HEADER
from service.http.keep_alive import NO_BEATS_HEADER, KeepAlive
from service.http.prefix_source import PREFIX_HEADER
from service.http.reconnect import KEEP_HEADER
from service.http.request import DirectWrites, HttpRequest, StreamedResponse
from service.http.resume import Begun
from service.http.routes import DONE, SSE_HEADERS, errors_of, event, json_response
from service.security.keys import VOUCHER_HEADER

# ---- HTTP answers of a generation

LOWEST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI uses this


class View(Protocol):
    """An API's view of samples. `last` follows the last chunk."""

    def body(self, answers: list[TextOutput]) -> Any: ...
    def chunks(self, index: int, output: TextOutput) -> list[Any]: ...
    def last(self) -> list[Any]: ...


@dataclass(frozen=True, kw_only=True)
class Framing:
    """How an API frames its stream.

    `encode`: a chunk; `done`: the end; `number_from`: numbers chunks; `repeats`: chunks show a
    sample from the start. Errors: service/http/routes.py.
    """

    headers: Mapping[str, str] = field(default_factory=lambda: SSE_HEADERS)
    encode: Callable[[Any], bytes] = event
    done: bytes = b""
    number_from: Callable[[Any, int], None] | None = None
    repeats: bool = False


EVENTS = Framing(done=DONE)  # OpenAI's


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


async def answer(
    request: HttpRequest,
    generation: Generation,
    *,
    view: View,
    stream: bool,
    framing: Framing = EVENTS,
    begun: Begun | None = None,
    has_logprobs: bool = False,
) -> Response:
    """Serve the generation, then abort what is unfinished.

    Headers wait for the first output, so that its error has a status, at most until a comment is
    due. `begun`: it may move to another worker.
    """
    with generation:
        if begun is None:
            if not stream:
                return json_response(view.body(await generation.collect()))
            return await _stream(request, generation, view=view, framing=framing, frames=UNFRAMED)
        generation.can_move = True
        if not stream:
            return await answer_framed(request, generation, show=view.body, begun=begun)
        keeps = KEEP_HEADER in request.headers and framing.headers is SSE_HEADERS
        with retained(request, generation, begun) if keeps else nullcontext() as kept:
            numbered = _num_events(request) if framing.number_from else None
            frames = Frames(begun, repeats=framing.repeats, num_events=numbered, kept=kept, has_logprobs=has_logprobs)
            return await _stream(request, generation, view=view, framing=framing, frames=frames)


def _num_events(request: HttpRequest) -> int:
    """Events that the client has of another worker."""
    resume = resume_of(request)
    return 0 if resume is None else resume.num_events


def _silence_s(request: HttpRequest) -> float:
    return 0.0 if NO_BEATS_HEADER in request.headers else request[SERVICES].spec.server.sse_keep_alive_interval_s


async def _stream(
    request: HttpRequest, generation: Generation, *, view: View, framing: Framing, frames: Unframed
) -> Response:
    for index, output in generation.resumed:
        view.chunks(index, output)  # the client has them
    if framing.number_from:
        framing.number_from(view, _num_events(request))
    with KeepAlive(request, interval_s=_silence_s(request)) as alive:
        try:
            response = await _events(request, generation, view=view, framing=framing, alive=alive, frames=frames)
        except ApiError as e:
            if alive.stream is None:
                raise
            response = alive.stream  # too late for a status; `done` does not follow
            await response.write(frames.failed(e.status) + errors_of(request).last_event(e))
        await alive.end()
        await response.end()
        return response


async def _events(
    request: HttpRequest,
    generation: Generation,
    *,
    view: View,
    framing: Framing,
    alive: KeepAlive,
    frames: Unframed,
) -> StreamedResponse:
    def show(outputs: list[tuple[int, TextOutput]]) -> bytes:
        return b"".join([_shown(view, framing, index, output, frames) for index, output in outputs])

    news = [] if generation.done else await generation.next()
    response = await alive.open(headers=framing.headers)
    await _write(response, show(news))
    direct = DirectWrites(response, take=lambda: show(generation.take()), is_over=lambda: generation.ends)
    with generation.followed(direct.on_change):
        while not generation.ends:
            if generation.has_news:
                await _write(response, show(generation.take()))
            else:
                await direct.wait()
    await _write(response, show(generation.take()))
    if generation.moved:
        await response.write(frames.leave(generation.moved))
        return response
    if not has_last(request):
        await _write(response, frames.before_last(list(map(framing.encode, view.last()))))
    await _write(response, framing.done or frames.nothing())
    return response


def _shown(view: View, framing: Framing, index: int, output: TextOutput, frames: Unframed) -> bytes:
    if frames.leaves_out(output):  # a view from the start would repeat the last event
        return b""
    return frames.before(index, output, list(map(framing.encode, view.chunks(index, output))))


async def _write(response: StreamedResponse, events: bytes) -> None:
    if events:
        await response.write(events)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Facts of a request's answer. `model`: its shown name."""

    id: str
    model: str
    created: int
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How an API answers. `field`: of the prompts. `cut`: fit the answer to the context."""

    id_prefix: str
    field: str = "messages"
    framing: Framing = EVENTS
    cut: bool = False


# ---- samples

# What completes the requests, by the router's header that asks for it.
_BY_HEADER = ((PREFIX_HEADER, with_prefix_source), (ENCODERS_HEADER, with_image_encoders))


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


def body_constraint(body: RequestFields) -> Constraint | None:
    if not is_constrained(body):
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
    """Run the samples. Raises ApiError."""
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
    requests = requests if resume is None else going_on(resume, requests)
    for header, completed in _BY_HEADER:
        if header in request.headers:
            requests = completed(request, requests)
    generation = s.client.generate(
        requests,
        groups=groups,
        timeout_s=request_timeout_s(request.headers),
        dp_rank=routed_rank(body, request.headers),
        earlier=() if resume is None else earlier_of(resume, requests),
        owner=owner_in(request),
    )
    return requests, generation


def samplings_of(s: Services, plan: SamplesPlan, format: AnswerFormat) -> list[SamplingParams]:
    """Parameters of all samples, with a seed each. Raises ApiError(400)."""
    return [
        sampling
        for i, ids in enumerate(plan.prompts)
        for sampling in samples_of(
            s,
            fit_to_context(
                plan.sampling,
                num_prompt_tokens=len(ids),
                images=plan.images[i] if plan.images else (),
                context_length=s.context_length,
                field=format.field,
                cut=format.cut,
            ),
        )
    ]


def requests_of(
    s: Services,
    body: RequestFields,
    plan: SamplesPlan,
    *,
    id: str,
    samplings: Sequence[SamplingParams],
    bootstraps: Sequence[Bootstrap | None],
) -> list[GenerateRequest]:
    """Requests of all samples, named after `id`. Raises ApiError(400)."""
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
    """n samples with consecutive seeds."""
    first = s.prng.getrandbits(62) if params.seed is None else params.seed
    return [msgspec.structs.replace(params, n=1, seed=_int64(first + j)) for j in range(params.n)]


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


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
