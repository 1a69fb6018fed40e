"""Requests that prefill workers answer: embeddings and scores."""

import array
import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from engine.frontend.apis.shared.fields import (
    check_num_samples,
    check_prompt_ids,
    choose_model,
    namespaces_of,
    prompts_of,
    routed_rank,
    too_long,
)
from engine.frontend.apis.shared.request_body import RoutingFields
from engine.frontend.services import SERVICES, Services
from engine.messages import GenerateRequest, LogprobOptions
from engine.sampling_params import SamplingParams
from engine.text.sample import TextOutput
from engine.text.tokenizer import TooManyTokens
from service.http.body import optional
from service.http.errors import MAX_VALUES, ApiError, bad_field
from service.http.guard import owner_in, request_timeout_s
from service.http.request import HttpRequest

NOTHING_NEW = SamplingParams(max_new_tokens=0, temperature=0.0, seed=0)
TURN_PROMPTS = 64  # sent at once, so that other requests get in between
TURN_PROMPTS_ON_CPU = 16  # any prompt takes at least 20 ms there
TURN_CHUNK = 8192  # tokens of a step without chunks
MIN_TIMEOUT_S = 0.001  # when no time is left: the engine reports the timeout
ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, seed=0)


@dataclass(frozen=True, kw_only=True)
class PromptSender:
    """Sender of prompts: an HTTP request, or a program without headers. `owner`: of names."""

    s: Services
    headers: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""

    @classmethod
    def of(cls, request: HttpRequest) -> "PromptSender":
        """Raises ApiError(400) for a malformed owner."""
        return cls(s=request[SERVICES], headers=request.headers, owner=owner_in(request))


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """`namespaces`: per prompt; `dp_rank`: from the client."""

    ids: list[list[int]]
    name: str
    model: str
    lora: str
    namespaces: list[tuple[str, ...]]
    dp_rank: int | None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.ids))

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}

    def listed(self, data: list[dict[str, Any]]) -> dict[str, Any]:
        """An answer with a list, as vLLM has it."""
        created = int(time.time())
        head = {"id": self.name, "object": "list", "created": created, "model": self.model}
        return {**head, "data": data, "usage": self.usage}

    @property
    def rids(self) -> list[str]:
        return [self.name] if len(self.ids) == 1 else [f"{self.name}-{i}" for i in range(len(self.ids))]


class PrefillOnlyBody(RoutingFields):
    model: str | None = optional(
        "Name of the model, of a LoRA adapter, or BASE:ADAPTER. Default: the model that is served.",
        "Qwen3-Embedding-0.6B",
    )
    rid: str | None = optional(
        "The request's id, for /abort_request (SGLang). Default: the server makes one.", "my-request-1"
    )
    lora_path: str | None = optional("Name of a loaded LoRA adapter (SGLang). Default: the base model.", "my-adapter")


async def prompts_in(
    sender: PromptSender,
    body: PrefillOnlyBody,
    given: str | Sequence[str | int | list[int]],
    *,
    field: str,
    prefix: str,
) -> Prompts:
    """The prompts of `field`. `prefix`: of a generated name. Raises ApiError(400, 404)."""
    s = sender.s
    several = prompts_of(given, field=field)  # type: ignore[arg-type]
    check_num_samples(len(several), 1, field=field)
    ids = cast(Sequence[list[int]], several)
    if isinstance(several[0], str):
        ids = await fitting_texts(s, cast(Sequence[str], several), field=field)
    return named_prompts(sender, body, fitting_lists(s, ids, field=field), prefix=prefix)


def named_prompts(sender: PromptSender, body: PrefillOnlyBody, ids: list[list[int]], *, prefix: str) -> Prompts:
    """Raises ApiError(400, 404)."""
    s = sender.s
    model = choose_model(s, body.model, body.lora_path)
    return Prompts(
        ids=ids,
        name=body.rid or s.mint_id(prefix),
        model=model.shown,
        lora=model.lora,
        namespaces=namespaces_of(body, len(ids)),
        dp_rank=routed_rank(body, sender.headers),
    )


async def fitting_texts(
    s: Services, texts: Iterable[str], *, field: str, room: int = 0, add_special_tokens: bool = True
) -> list[list[int]]:
    """Stop at the first text that does not fit. Raises ApiError(400)."""
    most = s.context_length - room
    try:
        return await s.texts.encode_all(texts, field=field, add_special_tokens=add_special_tokens, most=most)
    except TooManyTokens as e:
        raise too_long(field, f"a text has {e}", context_length=s.context_length) from None


def fitting_lists(s: Services, lists: Iterable[list[int]], *, field: str, room: int = 0) -> list[list[int]]:
    """Check lists of token ids, each and in total. Raises ApiError(400)."""
    found, num_tokens = list[list[int]](), 0
    for ids in lists:
        if len(ids) + room > s.context_length:
            raise too_long(field, f"a text has {len(ids)} tokens", context_length=s.context_length)
        num_tokens += len(ids)
        if num_tokens > MAX_VALUES:
            raise bad_field(field, f"one request may hold at most {MAX_VALUES} tokens; send fewer texts")
        found.append(check_prompt_ids(ids, field=field, vocab_size=s.model.vocab_size))
    return found


async def embed(sender: PromptSender, prompts: Prompts) -> list[TextOutput]:
    """Answers for `vector_of`."""
    return await _pooled(sender, prompts, sender.s.model.head.pooling)


async def label_logits(sender: PromptSender, prompts: Prompts) -> list[list[float]]:
    return [vector_of(answer).tolist() for answer in await _pooled(sender, prompts, "labels")]


async def _pooled(sender: PromptSender, prompts: Prompts, pooling: str) -> list[TextOutput]:
    unit = sender.s.model.head.unit
    return await _answers(sender, prompts, sampling=NOTHING_NEW, skip_cache_insert=True, pooling=pooling, unit=unit)


def vector_of(answer: TextOutput) -> "array.array[float]":
    return array.array("f", _whole(answer, bool(answer.tokens.hidden)).tokens.hidden[-1])


def size_of(answers: Sequence[TextOutput]) -> int:
    return sum(len(hidden) for answer in answers for hidden in answer.tokens.hidden[-1:])


async def next_logprobs(
    sender: PromptSender, prompts: Prompts, *, token_ids: tuple[int, ...], priority: int
) -> list[list[float]]:
    """Logprobs of `token_ids` as each prompt's next token. Raises ApiError(404) without head."""
    sender.s.model.check_generates()
    options = LogprobOptions(token_ids=token_ids)
    answers = await _answers(sender, prompts, sampling=ONE_TOKEN, logprobs=options, priority=priority)
    whole = [_whole(answer, bool(answer.tokens.logprobs)) for answer in answers]
    return [[logprob for logprob, _ in answer.tokens.logprobs[0].requested] for answer in whole]


def shares(logits: list[float]) -> list[float]:
    """Softmax, equal shares if all are impossible."""
    top = max(logits)
    weights = [1.0 if logit == top else math.exp(logit - top) for logit in logits]
    return [weight / sum(weights) for weight in weights]


async def _answers(sender: PromptSender, prompts: Prompts, **fields: Any) -> list[TextOutput]:
    """Send batches, so that thousands of samples do not block other requests.

    `fields`: of every `GenerateRequest`.
    """
    requests = [
        GenerateRequest(rid=rid, input_ids=ids, alone=True, lora=prompts.lora, namespace=namespace, **fields)
        for rid, ids, namespace in zip(prompts.rids, prompts.ids, prompts.namespaces, strict=True)
    ]
    s, time_s = sender.s, asyncio.get_running_loop().time
    timeout_s, answers = request_timeout_s(sender.headers), list[TextOutput]()
    end_s = None if timeout_s is None else time_s() + timeout_s
    owner, rank = sender.owner, prompts.dp_rank
    most = TURN_PROMPTS_ON_CPU if s.leaders.info.get("device") == "cpu" else TURN_PROMPTS
    for turn in turns_of(requests, max_prompts=most, most_tokens=_turn_tokens(s)):
        left_s = None if end_s is None else max(end_s - time_s(), MIN_TIMEOUT_S)
        groups = [prompts.name] * len(turn)
        with s.client.generate(turn, groups=groups, timeout_s=left_s, dp_rank=rank, owner=owner) as generation:
            for answer in await generation.collect():
                finish = answer.tokens.finish
                answers.append(_whole(answer, finish is None or finish.kind != "abort"))
    return answers


def turns_of(
    requests: Sequence[GenerateRequest], *, max_prompts: int, most_tokens: int
) -> Iterator[list[GenerateRequest]]:
    """Batches of at most `max_prompts` and `most_tokens`, at least one sample each."""
    turn, num_tokens = list[GenerateRequest](), 0
    for request in requests:
        num_tokens += len(request.input_ids)
        if turn and (num_tokens > most_tokens or len(turn) == max_prompts):
            yield turn
            turn, num_tokens = [], len(request.input_ids)
        turn.append(request)
    yield turn


def _turn_tokens(s: Services) -> int:
    chunk, depth = (s.leaders.info.get(name) for name in ("chunked_prefill_size", "overlap_depth"))
    steps = depth if isinstance(depth, int) else 1
    return steps * s.leaders.num_ranks * (chunk if isinstance(chunk, int) and chunk > 0 else TURN_CHUNK)


def _whole(answer: TextOutput, is_there: bool) -> TextOutput:
    if not is_there:
        raise ApiError(499, "the request was aborted", code="aborted")
    return answer
