"""Prompts that the worker of prompts answers alone: embeddings and scores. No decode worker takes part, nothing is transferred."""

import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from engine.frontend.apis.shared.fields import check_num_samples, prompt_ids, prompts_of, too_long
from engine.frontend.apis.shared.heads import check_generates
from engine.frontend.apis.shared.models import choose_model
from engine.frontend.apis.shared.namespaces import PerPrompt, namespaces_of
from engine.frontend.apis.shared.routed import routed_rank
from engine.frontend.services import SERVICES, Services
from engine.messages import GenerateRequest, LogprobOptions
from engine.sampling_params import SamplingParams
from engine.text.sample import TextOutput
from service.http.caller_names import owner_in
from service.http.errors import ApiError

NOTHING_NEW = SamplingParams(max_new_tokens=0, temperature=0.0, seed=0)
ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, seed=0)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """`name`: of the whole request; `namespaces`: of each prompt. `dp_rank`: that the client names. `model`: as answers show it."""

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
    def rids(self) -> list[str]:
        return [self.name] if len(self.ids) == 1 else [f"{self.name}-{i}" for i in range(len(self.ids))]


class AloneBody(msgspec.Struct, kw_only=True):
    """The common fields of bodies of such prompts."""

    model: str | None = None
    rid: str | None = None
    lora_path: str | None = None
    cache_salt: PerPrompt = None
    extra_key: PerPrompt = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None


async def prompts_in(
    request: web.BaseRequest, body: AloneBody, given: str | Sequence[str | int | list[int]], *, field: str, prefix: str
) -> Prompts:
    """Return the prompts of `field`, one or several. `prefix`: of a name where the body has none. Raises ApiError(400, 404)."""
    s = request[SERVICES]
    several = prompts_of(given, field=field)  # type: ignore[arg-type]
    check_num_samples(len(several), 1, field=field)
    return named_prompts(request, body, [await fitting_ids(s, one, field=field) for one in several], prefix=prefix)


def named_prompts(request: web.BaseRequest, body: AloneBody, ids: list[list[int]], *, prefix: str) -> Prompts:
    """Prompts of token ids. Raises ApiError(400, 404)."""
    s = request[SERVICES]
    model = choose_model(s, body.model, body.lora_path)
    return Prompts(
        ids=ids,
        name=body.rid or s.mint_id(prefix),
        model=model.shown,
        lora=model.lora,
        namespaces=namespaces_of(body, len(ids)),
        dp_rank=routed_rank(body, request.headers),
    )


def check_computes_prompts(s: Services) -> None:
    if s.spec.mode == "decode":
        raise ApiError(400, "a decode worker computes no prompts; send it to a prefill worker or to the router")


async def fitting_ids(s: Services, prompt: str | list[int], *, field: str, room: int = 0) -> list[int]:
    """Token ids that the context holds, with `room` more. Raises ApiError(400)."""
    ids = await prompt_ids(s, prompt, field=field)
    if len(ids) + room > s.context_length:
        raise too_long(field, f"a text has {len(ids)} tokens", context_length=s.context_length)
    return ids


async def embed(request: web.BaseRequest, prompts: Prompts) -> list[TextOutput]:
    """Answers for `vector_of`."""
    s = request[SERVICES]
    return await _pooled(request, prompts, s.spec.engine.embedding_pooling or s.model.head.pooling)


async def label_logits(request: web.BaseRequest, prompts: Prompts) -> list[list[float]]:
    """Return for each prompt the logits of a classifier's labels."""
    return [vector_of(answer).tolist() for answer in await _pooled(request, prompts, "labels")]


async def _pooled(request: web.BaseRequest, prompts: Prompts, pooling: str) -> list[TextOutput]:
    requests = [
        GenerateRequest(
            rid=rid,
            input_ids=ids,
            sampling=NOTHING_NEW,
            skip_cache_insert=True,
            alone=True,
            pooling=pooling,
            unit=request[SERVICES].model.head.unit,
            lora=prompts.lora,
            namespace=namespace,
        )
        for rid, ids, namespace in zip(prompts.rids, prompts.ids, prompts.namespaces, strict=True)
    ]
    return await _answers(request, prompts, requests)


def vector_of(answer: TextOutput) -> "array.array[float]":
    return array.array("f", _whole(answer, bool(answer.tokens.hidden)).tokens.hidden[-1])


async def next_logprobs(
    request: web.BaseRequest, prompts: Prompts, *, token_ids: tuple[int, ...], priority: int
) -> list[list[float]]:
    """Return for each prompt the logprobs of these tokens as its next one. Raises ApiError(404) where the model has no head for them."""
    check_generates(request[SERVICES])
    requests = [
        GenerateRequest(
            rid=rid,
            input_ids=ids,
            sampling=ONE_TOKEN,
            logprobs=LogprobOptions(token_ids=token_ids),
            alone=True,
            priority=priority,
            lora=prompts.lora,
            namespace=namespace,
        )
        for rid, ids, namespace in zip(prompts.rids, prompts.ids, prompts.namespaces, strict=True)
    ]
    answers = await _answers(request, prompts, requests)
    whole = [_whole(answer, bool(answer.tokens.logprobs)) for answer in answers]
    return [[logprob for logprob, _ in answer.tokens.logprobs[0].requested] for answer in whole]


async def _answers(request: web.BaseRequest, prompts: Prompts, requests: list[GenerateRequest]) -> list[TextOutput]:
    s = request[SERVICES]
    groups = [prompts.name] * len(requests)
    timeout_s = s.timeout_of(request)
    owner, rank = owner_in(request), prompts.dp_rank
    with s.client.generate(requests, groups=groups, timeout_s=timeout_s, dp_rank=rank, owner=owner) as generation:
        return await generation.collect()


def _whole(answer: TextOutput, is_there: bool) -> TextOutput:
    finish = answer.tokens.finish
    if not is_there or (finish is not None and finish.kind == "abort"):
        raise ApiError(499, "the request was aborted", code="aborted")
    return answer
