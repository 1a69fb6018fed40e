"""SGLang's POST /generate: text or token ids, cumulative streaming."""

from collections.abc import Sequence

import msgspec
from fastapi import Response

from engine.frontend.apis.chat.reading import check_budget, gate_of, needed_format
from engine.frontend.apis.native.body import (
    READER,
    GenerateBody,
    NativeView,
    SamplingBody,
    logprob_options,
    media_sources,
)
from engine.frontend.apis.shared.constraints import plain_constraint
from engine.frontend.apis.shared.fields import (
    MAX_SAMPLES,
    build_sampling,
    check_hidden_states,
    check_lora_path,
    check_num_samples,
    check_priority,
    check_stream_interval,
    each,
    fit_to_context,
    id_lists,
    namespaces_of,
    prompts_ids,
)
from engine.frontend.apis.shared.media import load_media, media_prompt
from engine.frontend.apis.shared.resumable import resume_of, started_of
from engine.frontend.apis.shared.routes import RouteTags, put_route, token_route
from engine.frontend.apis.shared.samples import bootstraps_of, samples_of, start
from engine.frontend.apis.shared.stream import Framing, answer
from engine.frontend.services import SERVICES, Services
from engine.images import ImageInput
from engine.messages import GenerateRequest
from engine.sampling_params import SamplingParams
from engine.text.reasoning import Opening, opening_of
from service.http.api import ApiRouter
from service.http.errors import bad_field
from service.http.request import HttpRequest
from service.http.routes import DONE, EVENTS_TYPE
from service.waiter import BODIES

API = ApiRouter(RouteTags.GENERATE)
_CUMULATIVE = Framing(done=DONE, repeats=True)
DEFAULT_NEW_TOKENS = 128
PROMPT_TAIL_TOKENS = 32  # may hold a reasoning marker
INSIDE = "sampling_params."
LIMIT = "sampling_params.max_new_tokens"
PARAMS_BYTES = 2048  # reading as much costs as much as checking parameters


@API.on(put_route, "/generate", GenerateBody, streams=EVENTS_TYPE)
@API.on(token_route, "/generate", GenerateBody, streams=EVENTS_TYPE)
async def generate(request: HttpRequest) -> Response:
    """Continue a text or token ids."""
    s = request[SERVICES]
    body = await READER.read(request)
    prompts, images, single = await _prompts(s, body)
    given = [p or SamplingBody() for p in each("sampling_params", body.sampling_params, len(prompts))]
    params = await _all_params(s, given)
    n = params[0].n
    if len({p.n for p in params}) > 1:
        raise bad_field("sampling_params.n", "must be the same for all prompts of a batch")
    check_num_samples(len(prompts), n, field="input_ids" if body.input_ids is not None else "text")
    fitted = [
        fit_to_context(
            p,
            num_prompt_tokens=len(ids),
            images=images[i] if images else (),
            context_length=s.context_length,
            field=LIMIT,
            cut="max_new_tokens" not in one.model_fields_set,  # the default is cut to what fits
        )
        for i, (p, ids, one) in enumerate(zip(params, prompts, given, strict=True))
    ]
    if body.require_reasoning or body.max_thinking_tokens is not None:
        fitted = [_after_reasoning(s, body, p, ids) for p, ids in zip(fitted, prompts, strict=True)]
    requests, groups = _requests(request, body, prompts=prompts, images=images, given=given, params=fitted, n=n)
    resume = resume_of(request)
    requests, generation = start(request, body, requests, groups=groups if resume is None else resume.groups)
    view = NativeView(
        generation,
        requests,
        has_text=s.model.has_text,
        texts=bool(body.return_text_in_logprobs),
        single=single and n == 1,
        weight_version=lambda: s.weight_version,
    )
    begun = started_of(request, requests, id="", groups=groups, created=0)
    return await answer(request, generation, view=view, stream=bool(body.stream), framing=_CUMULATIVE, begun=begun)


async def _prompts(s: Services, body: GenerateBody) -> tuple[list[list[int]], list[list[ImageInput]], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise bad_field("text", "give either text or input_ids")
    field = "input_ids" if body.text is None else "text"
    given, single = _given(body)
    if body.image_data or body.video_data:
        sources = media_sources(body, len(given), single=single)
        found = [
            await media_prompt(s, one, await load_media(s, own), field=field, limit_field=LIMIT)
            for one, own in zip(given, sources, strict=True)
        ]
        return [prompt.ids for prompt in found], [prompt.images for prompt in found], single
    return await prompts_ids(s, given, field=field, limit_field=LIMIT), [], single


def _given(body: GenerateBody) -> tuple[Sequence[str | list[int]], bool]:
    if body.text is None:
        return id_lists(body.input_ids or [], field="input_ids")
    texts = [body.text] if isinstance(body.text, str) else body.text
    if not texts or not all(texts):
        raise bad_field("text", "must not be empty")
    return texts, isinstance(body.text, str)


async def _all_params(s: Services, given: Sequence[SamplingBody]) -> list[SamplingParams]:
    """Built once each, many in a thread. Raises ApiError(400)."""
    distinct = {id(one): one for one in given}
    if sum(len(one.bad_words or ()) for one in distinct.values()) > MAX_SAMPLES:
        raise bad_field(INSIDE + "bad_words", f"at most {MAX_SAMPLES} words in one request; send fewer")
    made = await BODIES.run(
        lambda: {key: _params(s, one) for key, one in distinct.items()}, size=PARAMS_BYTES * len(distinct)
    )
    return [made[id(one)] for one in given]


def _params(s: Services, p: SamplingBody) -> SamplingParams:
    names = {"seed": "sampling_seed"} if p.seed is None else None
    if p.seed is None:
        p.seed = p.sampling_seed
    default = max(DEFAULT_NEW_TOKENS, p.min_new_tokens or 0)
    return build_sampling(
        s,
        p,
        max_new_tokens=p.max_new_tokens if "max_new_tokens" in p.model_fields_set else default,
        min_new_tokens=p.min_new_tokens,
        names=names,
        constraint=plain_constraint(p, inside=INSIDE),
    )


def _after_reasoning(s: Services, body: GenerateBody, params: SamplingParams, prompt: list[int]) -> SamplingParams:
    """Raises ApiError(400)."""
    format = needed_format(s, field="require_reasoning" if body.require_reasoning else "max_thinking_tokens")
    check_budget(s, body.max_thinking_tokens, field="max_thinking_tokens")
    tail = s.model.tokenizer.decode(prompt[-PROMPT_TAIL_TOKENS:], skip_special_tokens=False)
    opening = Opening.OPEN if body.require_reasoning else opening_of(format, tail)
    gate = gate_of(format, opening, budget=body.max_thinking_tokens, is_constrained=params.grammar is not None)
    return msgspec.structs.replace(params, reasoning=gate)


def _requests(
    request: HttpRequest,
    body: GenerateBody,
    *,
    prompts: list[list[int]],
    images: list[list[ImageInput]],
    given: list[SamplingBody],
    params: list[SamplingParams],
    n: int,
) -> tuple[list[GenerateRequest], list[str]]:
    s = request[SERVICES]
    bootstraps = bootstraps_of(s, request, body, num_prompts=len(prompts), n=n)
    rids = _rids(s, body.rid, len(prompts))
    logprobs = logprob_options(body, prompts, vocab_size=s.model.vocab_size)
    hidden_states = [
        check_hidden_states(s, wanted)
        for wanted in each("return_hidden_states", body.return_hidden_states, len(prompts))
    ]
    intervals = [check_stream_interval(p.stream_interval, field="sampling_params.stream_interval") for p in given]
    priority = check_priority(body.priority)
    namespaces = namespaces_of(body, len(prompts))
    loras = [check_lora_path(s, name) for name in each("lora_path", body.lora_path, len(prompts))]
    requests: list[GenerateRequest] = []
    for i, ids in enumerate(prompts):
        for j, sampling in enumerate(samples_of(s, params[i])):
            requests.append(
                GenerateRequest(
                    rid=rids[i] if n == 1 else f"{rids[i]}-{j}",
                    input_ids=ids,
                    sampling=sampling,
                    logprobs=logprobs[i],
                    bootstrap=bootstraps[i * n + j],
                    return_hidden_states=hidden_states[i],
                    stream=bool(body.stream),
                    stream_interval=intervals[i],
                    priority=priority,
                    lora=loras[i],
                    namespace=namespaces[i],
                    grammar_field="" if sampling.grammar is None else INSIDE + sampling.grammar.kind,
                    images=images[i] if images else [],
                )
            )
    return requests, [rids[i // n] for i in range(len(requests))]


def _rids(s: Services, rid: str | list[str] | None, num_prompts: int) -> list[str]:
    if rid is None:
        return [s.mint_id("") for _ in range(num_prompts)]
    if isinstance(rid, str):
        return [rid] if num_prompts == 1 else [f"{rid}_{i}" for i in range(num_prompts)]
    rids = each("rid", rid, num_prompts)
    if len(set(rids)) < len(rids):
        raise bad_field("rid", "the same id is given twice")
    return rids
