"""POST /v1/completions: body -> plan -> view."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from fastapi import Response

from engine.frontend.apis.chat.body import READER as CHATS
from engine.frontend.apis.chat.body import ChatBody
from engine.frontend.apis.chat.plan import plan_chat
from engine.frontend.apis.openai.chat import CHAT_FORMAT, OpenAIView, ending_of
from engine.frontend.apis.shared.body_reader import COMPLETION, BodyReader
from engine.frontend.apis.shared.fields import (
    check_num_samples,
    check_priority,
    check_range,
    check_request,
    choose_model,
    each,
    prompts_ids,
    prompts_of,
)
from engine.frontend.apis.shared.request_body import RequestFields
from engine.frontend.apis.shared.routes import RouteTags, token_route
from engine.frontend.apis.shared.samples import (
    AnswerFormat,
    Head,
    SamplesPlan,
    answer_samples,
    body_constraint,
    fitted_to_prompts,
    sampling_of,
)
from engine.frontend.apis.shared.stream import finite
from engine.frontend.services import SERVICES, Services
from engine.images import ImageInput
from engine.messages import LogprobOptions, TokenLogprob
from engine.sampling_params import SamplingParams
from engine.text.incremental import places_of
from engine.text.sample import Span, TextOutput
from service.http.api import ApiRouter
from service.http.body import optional, required
from service.http.errors import bad_field, plain
from service.http.request import HttpRequest
from service.http.routes import EVENTS_TYPE, json_response

API = ApiRouter(RouteTags.CHATS)

# ---- Body of /v1/completions, and its checks. Pure.

MAX_COMPLETION_LOGPROBS = 5
DEFAULT_COMPLETION_TOKENS = 16


class CompletionBody(RequestFields):
    prompt: str | list[str | int | list[int]] = required(
        "A text, several texts, token ids, or several lists of them.", "The capital of France is"
    )
    echo: bool | None = optional("True: the answer begins with the prompt. Default false.", False)
    logprobs: int | None = optional(
        f"Likeliest tokens to show beside each token, 0 to {MAX_COMPLETION_LOGPROBS}. Default: no logprobs.", 1
    )
    best_of: int | None = optional("Only the value of n: every sample is returned.", 1)


READER = BodyReader(body=CompletionBody, refused=COMPLETION, looked_into=("stream_options", "response_format"))


def check_completion(body: CompletionBody) -> None:
    check_request(body)
    check_range("logprobs", body.logprobs, MAX_COMPLETION_LOGPROBS)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_field(
            "best_of",
            "must equal n: this server returns every sample, and sampling more to keep the best is not supported",
        )


# ---- Text completions with logprobs. Pure.


_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class Echo(NamedTuple):
    """A prompt's text and its tokens' places."""

    text: str = ""
    spans: Sequence[Span] = ()


class CompletionView(OpenAIView):
    """`echoes`: by sample. `has_text`: false for chunks without text."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, head: Head, *, echoes: list[Echo], has_text: bool, **more: Any) -> None:
        super().__init__(body, head, **more)
        self._has_text = has_text
        self._logprobs = body.logprobs is not None
        self._echoes = echoes
        self._begun: set[int] = set()

    def _choice(self, index: int, output: TextOutput) -> dict[str, Any]:
        text = self._echoes[index].text + output.text
        return {"index": index, "text": text, "logprobs": self._logprobs_of(index, output), **ending_of(output)}

    def _deltas(self, index: int, output: TextOutput) -> list[dict[str, Any]]:
        text = output.text if index in self._begun else self._echoes[index].text + output.text
        logprobs = self._logprobs_of(index, output)
        self._begun.add(index)
        finished = output.tokens.finish is not None
        if self._has_text and not text and not finished and not (logprobs and logprobs["tokens"]):
            return []
        ending = ending_of(output) if finished else {"finish_reason": None, "matched_stop": None}
        return [{"index": index, "text": text, "logprobs": logprobs, **ending}]

    def _logprobs_of(self, index: int, output: TextOutput) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        echo, tokens = self._echoes[index], output.tokens
        given = zip(tokens.input_logprobs, output.input_logprob_texts, echo.spans, strict=False)
        made = zip(tokens.logprobs, output.logprob_texts, output.logprob_spans, strict=False)
        rows = [_row(lp, _as_it_stands(text, echo.text[a:b]), top, a) for lp, (text, top), (a, b) in given]
        rows += [_row(lp, text, top, len(echo.text) + a) for lp, (text, top), (a, _) in made]
        return {name: [row[i] for row in rows] for i, name in enumerate(_COLUMNS)}


def _row(lp: TokenLogprob, text: str, top: list[str], offset: int) -> tuple[Any, ...]:
    return text, finite(lp.logprob), None if lp.logprob is None else _by_text(lp, text, top), offset


def _by_text(lp: TokenLogprob, text: str, top: list[str]) -> dict[str, float | None]:
    """Alternatives by text; duplicates (parts of characters) by id, in vLLM's form."""
    shown: dict[str, float | None] = {}
    for other, (logprob, token_id) in zip(top, lp.top, strict=False):
        is_taken = other in shown or other == text
        shown[f"token_id:{token_id}" if is_taken and token_id != lp.token_id else other] = finite(logprob)
    return {**shown, text: finite(lp.logprob)}


def _as_it_stands(text: str, seen: str) -> str:
    """The first token's text without the leading space it has elsewhere."""
    return seen if text == " " + seen else text


# ---- completions


async def plan_completion(s: Services, body: CompletionBody) -> SamplesPlan:
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
    return SamplesPlan(prompts=ids, sampling=params, constraint=constraint, logprobs=logprobs, model=model)


def format_of(body: CompletionBody) -> AnswerFormat:
    return AnswerFormat(id_prefix="cmpl-", field="prompt", cut=body.max_tokens is None)


@API.on(token_route, "/v1/completions", CompletionBody, streams=EVENTS_TYPE)
async def completions(request: HttpRequest) -> Response:
    """Continue a text, or several."""
    s = request[SERVICES]
    body = await READER.read(request)
    plan = await plan_completion(s, body)
    n, ids = plan.sampling.n, plan.prompts
    echoes = [
        await _echo(s, prompt, tokens, with_places=plan.logprobs is not None) if body.echo else Echo()
        for prompt, tokens in zip(prompts_of(body.prompt, field="prompt"), ids, strict=True)
    ]
    return await answer_samples(
        request,
        body,
        plan,
        format_of(body),
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
        (text,) = await s.texts.decode_all([text], skip_special_tokens=False)
    return Echo(text, await asyncio.to_thread(places_of, tokenizer, ids, text) if with_places else ())


# ---- POST /v1/.../render

# Our names of sampling parameters -> vLLM's.
_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
}
_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
_MADE = ("reasoning", "bad_token_ids")  # vLLM has the original fields
_AS_THEY_CAME = ("bad_words", "thinking_token_budget")


@API.on(token_route, "/v1/chat/completions/render", ChatBody, computes=False)
async def render_chat_completion(request: HttpRequest) -> Response:
    """Return the token ids of a chat, and compute nothing.

    The answer is the body of vLLM's /inference/v1/generate. Routers choose a worker by it.
    """
    s = request[SERVICES]
    body = await CHATS.read(request)
    (row,) = _rendered(s, body, await plan_chat(s, body), CHAT_FORMAT)
    return json_response(row)


@API.on(token_route, "/v1/completions/render", CompletionBody, computes=False)
async def render_completion(request: HttpRequest) -> Response:
    """Return the token ids of a prompt, and compute nothing.

    The answer is the body of vLLM's /inference/v1/generate. Routers choose a worker by it.
    """
    s = request[SERVICES]
    body = await READER.read(request)
    return json_response(_rendered(s, body, await plan_completion(s, body), format_of(body)))


def _rendered(s: Services, body: RequestFields, plan: SamplesPlan, form: AnswerFormat) -> list[dict[str, Any]]:
    id, salts = body.rid or s.mint_id(form.id_prefix), each("cache_salt", body.cache_salt, len(plan.prompts))
    return [
        {
            "model": plan.model.shown,
            "stream": bool(body.stream),
            "stream_options": plain(body.stream_options) if body.stream else None,
            "priority": check_priority(body.priority),
            "request_id": id if len(plan.prompts) == 1 else f"{id}-{i}",
            "token_ids": plan.prompts[i],
            "features": _features(plan.images[i]) if plan.images else None,
            "sampling_params": _sampling(body, sampling, plan.logprobs),
            "cache_salt": salts[i],
        }
        for i, sampling in enumerate(fitted_to_prompts(s, plan, form))
    ]


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
