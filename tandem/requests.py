"""Calls as requests of the worker: a checked body, its plan, its samples, results.

Bodies, checks and plans are those of the HTTP API, so tokens are a server's. Everything here runs
on the worker's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

import msgspec

from engine.frontend.apis.admin.weights import update_by_tensors
from engine.frontend.apis.chat.body import READER as CHATS
from engine.frontend.apis.chat.plan import plan_chat
from engine.frontend.apis.native.score import READER as LABEL_READER
from engine.frontend.apis.native.score import label_scores
from engine.frontend.apis.openai.completions import READER as COMPLETIONS
from engine.frontend.apis.openai.completions import plan_completion
from engine.frontend.apis.openai.embeddings import READER as EMBEDDINGS
from engine.frontend.apis.openai.embeddings import shortened
from engine.frontend.apis.openai.ranking import SCORE_READER, judge
from engine.frontend.apis.shared.body_reader import BodyReader
from engine.frontend.apis.shared.fields import routed_rank
from engine.frontend.apis.shared.ids_only import check_ids_only
from engine.frontend.apis.shared.prefill_only import PromptSender, embed, prompts_in, vector_of
from engine.frontend.apis.shared.request_body import RequestFields
from engine.frontend.apis.shared.samples import AnswerFormat, SamplesPlan, requests_of, samplings_of
from engine.frontend.client.generation import Generation
from engine.frontend.routes import ORDERS
from engine.frontend.services import Services
from engine.messages import GenerateRequest
from engine.text.sample import TextAnswers
from service.flags import nearest
from service.http.body import Body, field_types
from service.http.errors import bad_field
from tandem.errors import RequestError
from tandem.outputs import EmbeddingOutput, RequestOutput, ResultBuilder, ScoringOutput
from tandem.params import WantedLogprobs, encoded, take_logprobs

T = TypeVar("T")
B = TypeVar("B", bound=Body)
Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or vLLM's dict with one of them

_CHAT = AnswerFormat(id_prefix="chatcmpl-")


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """A checked request, not sent yet."""

    id: str
    requests: list[GenerateRequest]
    prompt: str | None
    wanted: WantedLogprobs
    answers: TextAnswers
    dp_rank: int | None

    @property
    def num_samples(self) -> int:
        return len(self.requests)

    def reading(self) -> ResultBuilder:
        head = RequestOutput(self.id, self.prompt, self.requests[0].input_ids, [])
        return ResultBuilder(head, n=self.num_samples, wanted=self.wanted, answers=self.answers)


# ---- bodies and plans


async def plan_prompt(
    s: Services, prompt: Prompt, fields: Mapping[str, Any], *, stream: bool = False
) -> PreparedRequest:
    """Check a prompt and its parameters. Raises ApiError, RequestError."""
    given = _prompt_in(prompt)
    values = {**fields, "prompt": given, "stream": stream}
    wanted = take_logprobs(values, chat=False)
    body = _body(s, COMPLETIONS, values)
    plan = await plan_completion(s, body)
    form = AnswerFormat(id_prefix="cmpl-", field="prompt", cut=body.max_tokens is None)
    return _planned(s, body, plan, form, wanted=wanted, prompt=given, answers=TextAnswers())


async def plan_conversation(
    s: Services, messages: Any, fields: Mapping[str, Any], *, stream: bool = False
) -> PreparedRequest:
    """Check a conversation and its parameters. Raises ApiError, RequestError."""
    values = {**fields, "messages": messages, "stream": stream}
    wanted = take_logprobs(values, chat=True)
    body = _body(s, CHATS, values)
    plan = await plan_chat(s, body)
    if plan.logprobs is not None:
        wanted = wanted._replace(answer=plan.logprobs.top_num)
    answers = plan.answers(s.mint_id, "call_")
    return _planned(s, body, plan, _CHAT, wanted=wanted, prompt=None, answers=answers)


def _planned(
    s: Services,
    body: RequestFields,
    plan: SamplesPlan,
    form: AnswerFormat,
    *,
    wanted: WantedLogprobs,
    prompt: object,
    answers: TextAnswers,
) -> PreparedRequest:
    _check_loaded(s, plan)
    id = body.rid or s.mint_id(form.id_prefix)
    samplings = samplings_of(s, plan, form)
    made = requests_of(s, body, plan, id=id, samplings=samplings, bootstraps=[None] * len(samplings))
    options = wanted.options
    return PreparedRequest(
        id=id,
        requests=made if options is None else [msgspec.structs.replace(one, logprobs=options) for one in made],
        prompt=prompt if isinstance(prompt, str) else None,
        wanted=wanted,
        answers=answers,
        dp_rank=routed_rank(body, {}),
    )


def _check_loaded(s: Services, plan: SamplesPlan) -> None:
    """The scheduler would name an unknown adapter only when other requests of the call run."""
    if plan.model.lora and plan.model.lora not in s.leaders.adapters:
        loaded = ", ".join(s.leaders.adapters) or "none"
        raise bad_field("lora_path", f"no adapter {plan.model.lora!r} is loaded; loaded: {loaded}")


def _prompt_in(prompt: Prompt) -> str | list[int]:
    """Raises ApiError(400)."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        named = {name: prompt[name] for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None}
        if len(named) != 1 or any(prompt.get(name) for name in prompt.keys() - {"prompt", "prompt_token_ids"}):
            raise bad_field("prompt", "a dict has either prompt or prompt_token_ids; images go into a chat's messages")
        (prompt,) = named.values()
        return _prompt_in(prompt)
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    found = list(ids) if isinstance(ids, Iterable) and not isinstance(ids, bytes) else [ids]
    if found and not isinstance(found[0], SupportsIndex):
        kind = type(prompt).__name__ if found == [prompt] else f"a list of {type(found[0]).__name__}"
        raise bad_field("prompt", f"must be a text or a list of token ids, got {kind}")
    return found


def _body(s: Services, reader: BodyReader[B], values: Mapping[str, Any]) -> B:
    """Raises ApiError(400), also for an unknown name."""
    body, ignored = reader.decode(encoded(values), s.model.template_names)
    if unknown := [name for name in ignored if name in values]:  # fields inside, as of messages, are ignored
        leave = "; leave it out (docs/python.md names the arguments)"
        hint = nearest(unknown[0], field_types(reader.body), otherwise=leave)
        raise bad_field(unknown[0], f"is no argument of this call{hint}")
    if not s.model.has_text:
        check_ids_only(body)
    return body


# ---- samples


class Slots:
    """Bounds the samples in flight; more wait here in order."""

    def __init__(self, s: Services) -> None:
        self._s = s
        self._taken = 0
        self._queue = asyncio.Lock()
        self._freed = asyncio.Event()

    @property
    def limit(self) -> int:
        """Twice what runs at a time, so that the next batch waits at the scheduler."""
        client = self._s.client
        return min(client.max_live, 2 * client.leaders.num_ranks * client.max_running)

    async def take(self, count: int) -> None:
        """Wait for room; a count beyond the limit has all."""
        async with self._queue:
            while self._taken and self._taken + count > self.limit:
                self._freed.clear()
                await self._freed.wait()
            self._taken += count

    def give(self, count: int) -> None:
        self._taken -= count
        self._freed.set()


def sent(s: Services, planned: PreparedRequest) -> Generation:
    """Send. The end of the result's block aborts what still runs. Raises ApiError."""
    groups = [planned.id] * planned.num_samples
    return s.client.generate(planned.requests, groups=groups, dp_rank=planned.dp_rank)


async def answered(s: Services, planned: PreparedRequest) -> RequestOutput:
    """The whole answer. Raises ApiError."""
    reading = planned.reading()
    with sent(s, planned) as generation:
        for index, output in enumerate(await generation.collect()):
            reading.add(index, output)
    return reading.result()


class AnswerStream:
    """The results of one request while it runs; `leave` aborts it."""

    def __init__(self, s: Services, slots: Slots, planned: PreparedRequest) -> None:
        self._s, self._slots, self._planned = s, slots, planned
        self._reading = planned.reading()
        self._generation: Generation | None = None
        self._over = False

    async def next(self) -> RequestOutput | None:
        """Wait for new tokens: what there is now, None after the last. Raises ApiError."""
        if self._over:
            return None
        try:
            generation = self._generation or await self._started()
            for index, output in await generation.next():
                self._reading.add(index, output)
        except BaseException:
            self.leave()
            raise
        if generation.done:
            self.leave()
        return self._reading.result()

    def leave(self) -> None:
        """A second call does nothing."""
        self._over = True
        if self._generation is not None:
            generation, self._generation = self._generation, None
            generation.__exit__(None, None, None)
            self._slots.give(self._planned.num_samples)

    async def _started(self) -> Generation:
        await self._slots.take(self._planned.num_samples)
        try:
            if self._over:
                raise asyncio.CancelledError
            self._generation = sent(self._s, self._planned)
        finally:
            if self._generation is None:
                self._slots.give(self._planned.num_samples)
        return self._generation


def _give(slots: Slots, count: int, task: "asyncio.Task[None]") -> None:
    slots.give(count)


async def in_order(
    slots: Slots, jobs: Sequence[tuple[int, Callable[[], Awaitable[T]]]], *, on_done: Callable[[], object]
) -> list[T]:
    """Run jobs with their numbers of samples; return results in the jobs' order.

    The first error ends the others.
    """
    found: dict[int, T] = {}

    async def run(index: int, job: Callable[[], Awaitable[T]]) -> None:
        found[index] = await job()
        on_done()

    try:
        async with asyncio.TaskGroup() as group:
            for index, (count, job) in enumerate(jobs):
                await slots.take(count)
                task = group.create_task(run(index, job))
                task.add_done_callback(partial(_give, slots, count))  # also if it never ran
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [found[index] for index in range(len(jobs))]


# ---- prompts without answers


async def embedded(s: Services, prompt: Prompt, fields: Mapping[str, Any]) -> EmbeddingOutput:
    """A prompt's vector. Raises ApiError, RequestError."""
    sender, body = PromptSender(s=s), _body(s, EMBEDDINGS, {**fields, "input": _prompt_in(prompt)})
    prompts = await prompts_in(sender, body, body.input, field="input", prefix="embd-")
    (answer,) = await embed(sender, prompts)
    vector = shortened(vector_of(answer), body.dimensions, unit=s.model.head.unit)
    return EmbeddingOutput(vector.tolist(), prompts.ids[0])


async def scored(s: Services, pair: tuple[Any, Any], fields: Mapping[str, Any]) -> ScoringOutput:
    """A pair's score, or the probabilities of `label_token_ids` behind it.

    Raises ApiError, RequestError.
    """
    sender, (first, second) = PromptSender(s=s), pair
    if fields.get("label_token_ids") is not None:
        labelled = _body(s, LABEL_READER, {**fields, "query": first, "items": [second]})
        prompts, (scores,) = await label_scores(sender, labelled)
        return ScoringOutput(scores, prompts.ids[0])
    body = _body(s, SCORE_READER, {**fields, "text_1": first, "text_2": second})
    prompts, scores = await judge(sender, body, [pair], fields=("text_1", "text_2"), prefix="score-")
    return ScoringOutput(scores, prompts.ids[0])


WeightSource = str | Path | Mapping[str, Any] | Iterable[tuple[str, Any]]  # a checkpoint, or tensors by its names


async def updated(
    s: Services, source: WeightSource, *, weight_version: str | None = None, abort_all_requests: bool | None = None
) -> None:
    """Have all schedulers take other weights. Raises ApiError, RequestError."""
    if isinstance(source, str | Path):
        fields = {"weight_version": weight_version, "abort_all_requests": abort_all_requests}
        await ordered(s, "/update_weights_from_disk", {"model_path": str(source), **fields})
        return
    data = await asyncio.to_thread(_file_of, source.items() if isinstance(source, Mapping) else source)
    await update_by_tensors(s, data, weight_version=weight_version, abort_all=bool(abort_all_requests))


def _file_of(tensors: Iterable[tuple[str, Any]]) -> bytes:
    """A safetensors file. Raises RequestError."""
    from safetensors.torch import save

    found: dict[str, Any] = {}
    for name, tensor in _pairs(tensors):
        if name in found:
            raise RequestError(f"source: {name} is given twice", field="source")
        found[name] = tensor.detach().to("cpu").contiguous().clone()  # clone: safetensors refuses shared memory
    if not found:
        raise RequestError("source: give at least one pair of name and tensor", field="source")
    return bytes(save(found))


def _pairs(tensors: Any) -> Iterator[tuple[str, Any]]:
    """Raises RequestError."""
    for pair in tensors if isinstance(tensors, Iterable) else [tensors]:
        match pair:
            case (str(), tensor) if hasattr(tensor, "detach"):
                yield pair
            case _:
                problem = (
                    "must be a checkpoint's path, or pairs of name and torch tensor, as model.state_dict() has them"
                )
                raise RequestError(f"source: {problem}, got {type(pair).__name__}", field="source")


async def ordered(s: Services, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Have all schedulers carry out the order of an HTTP route. Raises ApiError, RequestError."""
    given = {name: value for name, value in fields.items() if value is not None}
    return await ORDERS[path].carry_out(s, encoded(given))
