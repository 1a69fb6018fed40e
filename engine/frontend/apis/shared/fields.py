"""Checks of request bodies' fields: sampling, prompts, limits, model, place."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec

from engine.frontend.apis.shared.constraints import Constraint, GrammarFields
from engine.frontend.apis.shared.request_body import (
    PerPrompt,
    RequestFields,
    RoutingFields,
    SamplingFields,
)
from engine.frontend.errors import from_invalid_param
from engine.frontend.services import Services
from engine.images import ImageInput, positions_taken
from engine.sampling_params import (
    MAX_BAD_WORDS,
    InvalidParam,
    ReasoningGate,
    SamplingParams,
    check_sampling_params,
)
from engine.text.incremental import compile_all
from engine.text.tokenizer import TooManyTokens
from service.http.errors import ApiError, bad_field, unsupported
from service.http.guard import RANK_HEADER, rank_in
from service.kv_events import MAX_NAMESPACE_CHARS, namespace_of
from service.waiter import BODIES

MAX_SAMPLES = 4096  # per request
MAX_STREAM_INTERVAL = 1 << 20
MAX_PRIORITY = 2**31 - 1
CONTEXT_EXCEEDED = "context_length_exceeded"  # error code
MAX_BAD_WORD_CHARS = 8192  # in total: they are tokenized at once


def build_sampling(
    s: Services,
    fields: SamplingFields,
    *,
    max_new_tokens: int | None,
    min_new_tokens: int | None,
    defaults: Mapping[str, float | int] | None = None,
    names: dict[str, str] | None = None,
    constraint: Constraint | None = None,
    reasoning: ReasoningGate | None = None,
) -> SamplingParams:
    """`defaults`: the checkpoint's. Raises ApiError(400, 404)."""
    s.model.check_generates()
    grammar: dict[str, Any] = {} if constraint is None else {constraint.spec.kind: constraint.spec.source}
    if constraint is not None:
        names = {**(names or {}), constraint.spec.kind: constraint.field}
    given = {name: getattr(fields, name) for name in _PLAIN if getattr(fields, name) is not None}
    params = SamplingParams(
        **{**(defaults or {}), **given},
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens or 0,
        stop=_several(fields.stop),
        stop_regex=_several(fields.stop_regex),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        no_stop_trim=bool(fields.no_stop_trim or fields.include_stop_str_in_output),
        allowed_token_ids=_allowed_ids(fields),
        bad_token_ids=_bad_ids(s, fields),
        reasoning=reasoning,
        **grammar,
    )
    try:
        check_sampling_params(params, vocab_size=s.model.vocab_size)
        compile_all(params.stop_regex)
    except InvalidParam as e:
        raise from_invalid_param(e, names=names) from None
    return params


_MADE = {"stop", "stop_regex", "stop_token_ids", "no_stop_trim", "allowed_token_ids"}
_PLAIN = (
    set(SamplingFields.model_fields) & set(SamplingParams.__struct_fields__) - set(GrammarFields.model_fields) - _MADE
)


def _allowed_ids(fields: SamplingFields) -> tuple[int, ...]:
    if fields.allowed_token_ids == []:
        raise bad_field("allowed_token_ids", "must not be empty; leave it out to allow every token")
    return tuple(fields.allowed_token_ids or ())


def _bad_ids(s: Services, fields: SamplingFields) -> tuple[tuple[int, ...], ...]:
    """Token sequences of bad words, with and without a leading space."""
    found: dict[tuple[int, ...], None] = {}
    if fields.bad_words and len(fields.bad_words) > MAX_BAD_WORDS:
        raise bad_field("bad_words", f"at most {MAX_BAD_WORDS} words, got {len(fields.bad_words)}")
    if sum(map(len, fields.bad_words or ())) > MAX_BAD_WORD_CHARS:
        raise bad_field("bad_words", f"words must have at most {MAX_BAD_WORD_CHARS} characters together")
    for word in fields.bad_words or ():
        if not word.strip():
            raise bad_field("bad_words", "words must not be empty, nor only spaces")
        try:
            for text in (word.lstrip(), " " + word.lstrip()):
                found[tuple(s.model.tokenizer.encode(text, add_special_tokens=False))] = None
        except ValueError as error:
            raise bad_field("bad_words", str(error)) from None
    return tuple(ids for ids in found if ids)


def _several(value: str | list[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def check_stream_interval(value: int | None, *, field: str = "stream_interval") -> int | None:
    """Raises ApiError(400)."""
    check_range(field, value, MAX_STREAM_INTERVAL, low=1)
    return value


def check_priority(value: int | None) -> int:
    """Raises ApiError(400)."""
    check_range("priority", value, MAX_PRIORITY, low=-MAX_PRIORITY)
    return value or 0


def check_hidden_states(s: Services, wanted: bool | None) -> bool:
    """Raises ApiError(400) if the server does not return them."""
    if wanted and not s.spec.engine.enable_return_hidden_states:
        raise unsupported("return_hidden_states", "this server was started without --enable-return-hidden-states")
    return bool(wanted)


def check_num_samples(num_prompts: int, n: int, *, field: str) -> None:
    if num_prompts * n > MAX_SAMPLES:
        raise bad_field(
            field, f"{num_prompts} prompts with {n} samples each are more than {MAX_SAMPLES} in one request"
        )


def prompts_of(value: str | list[str | int | list[int]], *, field: str) -> list[str | list[int]]:
    """One or several prompts, texts or token ids. Raises ApiError(400)."""
    kinds = {str} if isinstance(value, str) else set(map(type, value))
    if len(kinds) > 1:
        raise bad_field(field, "must be a string, a list of strings, a list of token ids or a list of such lists")
    one = isinstance(value, str) or kinds == {int}
    prompts = cast(list[str | list[int]], [value] if one else value)
    if not prompts or not all(prompts):
        raise bad_field(field, "must not be empty")
    return prompts


def each(field: str, value: Any, num_prompts: int) -> list[Any]:
    """One value per prompt, from one or a list. Raises ApiError(400)."""
    if not isinstance(value, list):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise bad_field(field, f"has {len(value)} entries for {num_prompts} prompts")
    return value


def id_lists(value: list[Any], *, field: str) -> tuple[list[list[int]], bool]:
    """Lists of token ids, and whether only one was given. Raises ApiError(400) for a mixture."""
    kinds = set(map(type, value))
    if kinds <= {int}:
        return [value], True
    if int in kinds:
        raise bad_field(field, "must be a list of token ids or a list of such lists")
    return value, False


def check_token_ids(ids: list[int], *, field: str, vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):  # a Python loop over a long prompt takes milliseconds
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise bad_field(field, f"{wrong} is not a token id (0 to {vocab_size - 1})")


def check_prompt_ids(ids: list[int], *, field: str, vocab_size: int) -> list[int]:
    if not ids:
        raise bad_field(field, "must not be empty")
    check_token_ids(ids, field=field, vocab_size=vocab_size)
    return ids


async def prompts_ids(
    s: Services,
    prompts: Sequence[str | list[int]],
    *,
    field: str,
    limit_field: str = "",
    add_special_tokens: bool = True,
    fits: bool = True,
) -> list[list[int]]:
    """Tokenize and check prompts, all text or all ids. Raises ApiError(400).

    `limit_field`: for length errors. `fits`: require that the context holds them. Texts too long
    by characters are rejected early.
    """
    most = s.context_length - 1 if fits else None
    if isinstance(prompts[0], str):
        texts = cast(Sequence[str], prompts)
        try:
            lists = await s.texts.encode_all(texts, field=field, add_special_tokens=add_special_tokens, most=most)
        except TooManyTokens as e:
            raise _no_room(limit_field or field, f"the prompt has {e}", context_length=s.context_length) from None
    else:
        lists = cast(list[list[int]], list(prompts))
    check = partial(check_prompt_ids, field=field, vocab_size=s.model.vocab_size)
    return await BODIES.run(lambda: list(map(check, lists)), size=sum(map(len, lists)))


def fit_to_context(
    params: SamplingParams,
    *,
    num_prompt_tokens: int,
    images: Sequence[ImageInput] = (),
    context_length: int,
    field: str,
    cut: bool = False,
) -> SamplingParams:
    """Set a missing (or with `cut` too large) max_new_tokens to the context's rest.

    Raises ApiError(400) if it does not fit.
    """
    taken = positions_taken(num_prompt_tokens, images) if images else num_prompt_tokens
    room = context_length - taken
    wanted = params.max_new_tokens
    if room < 1:
        of_videos = f", which take {taken} positions by the time of their videos" if taken > num_prompt_tokens else ""
        raise _no_room(field, f"the prompt has {num_prompt_tokens} tokens{of_videos}", context_length=context_length)
    if wanted is not None and max(wanted, 1) > room and not cut:
        what = (
            f"you requested {num_prompt_tokens + wanted} tokens "
            f"({num_prompt_tokens} in the messages, {wanted} in the completion)"
        )
        raise too_long(field, what, context_length=context_length)
    limit = room if wanted is None else min(wanted, room)
    return msgspec.structs.replace(params, max_new_tokens=limit, min_new_tokens=min(params.min_new_tokens, limit))


def _no_room(field: str, what: str, *, context_length: int) -> ApiError:
    return too_long(field, f"{what}, and an answer needs room too", context_length=context_length)


def too_long(field: str, what: str, *, context_length: int) -> ApiError:
    """OpenAI's message and code."""
    return ApiError(
        400,
        f"This model's maximum context length is {context_length} tokens. However, {what}. "
        f"Shorten the prompt, or request fewer tokens ({field}).",
        field=field,
        code=CONTEXT_EXCEEDED,
    )


# ---- Prefix cache namespaces. Pure.


def namespaces_of(body: RoutingFields, num_prompts: int) -> list[tuple[str, ...]]:
    """Raises ApiError(400)."""
    if body.cache_salt is None and body.extra_key is None:
        return [()] * num_prompts
    salts, keys = (_checked(name, getattr(body, name), num_prompts) for name in ("cache_salt", "extra_key"))
    return list(map(namespace_of, salts, keys))


def _checked(field: str, value: PerPrompt, num_prompts: int) -> list[str | None]:
    parts: list[str | None] = each(field, value, num_prompts)
    for part in parts:
        if part is not None and len(part) > MAX_NAMESPACE_CHARS:
            raise bad_field(field, f"must have at most {MAX_NAMESPACE_CHARS} characters, got {len(part)}")
    return parts


# ---- The model or LoRA adapter of a request; "BASE:ADAPTER" is SGLang's form.

OFF = "this server was started without --enable-lora"


class Chosen(NamedTuple):
    """The model of a request. `shown`: in answers; `lora`: adapter, empty for the base model."""

    shown: str
    lora: str


def choose_model(s: Services, model: str | None, lora_path: str | None) -> Chosen:
    """The model that both fields name. Raises ApiError, 404 if unknown."""
    named = _adapter_in(s, model)
    if named and lora_path and named != lora_path:
        raise bad_field("lora_path", f"is {lora_path!r}, and model names the adapter {named!r}; leave one out")
    lora = named or check_lora_path(s, lora_path)
    return Chosen(lora or s.model.served_name, lora)


def check_lora_path(s: Services, lora_path: str | None) -> str:
    if lora_path and not s.model.lora:
        raise unsupported("lora_path", OFF)
    return lora_path or ""


def _adapter_in(s: Services, model: str | None) -> str:
    own = s.model.own_names
    if model is None or model in own:
        return ""
    for name in (model, *(model[len(base) + 1 :] for base in own if base and model.startswith(f"{base}:"))):
        if name in s.leaders.adapters:
            return name
    more = f", with the adapters {', '.join(s.leaders.adapters)}" if s.leaders.adapters else ""
    raise ApiError(
        404,
        f"the model {model!r} does not exist; this server has {s.model.served_name!r}{more}",
        field="model",
        code="model_not_found",
    )


def routed_rank(body: RoutingFields, headers: Mapping[str, str]) -> int | None:
    """The client's DP rank, by a field or the header. Raises ApiError(400)."""
    new, old = body.routed_dp_rank, body.data_parallel_rank
    if new is not None and old is not None and new != old:
        raise bad_field("data_parallel_rank", f"is {old}, and routed_dp_rank is {new}; give one of them")
    name, named = ("data_parallel_rank", old) if new is None else ("routed_dp_rank", new)
    in_header = rank_in(headers)
    if named is not None and in_header is not None and named != in_header:
        raise bad_field(name, f"is {named}, and the header {RANK_HEADER} is {in_header}; give one of them")
    return in_header if named is None else named


# ---- checks of a request


def check_request(body: RequestFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "needs stream to be true")


def check_range(field: str, value: int | None, high: int, *, low: int = 0) -> None:
    """Raises ApiError(400) unless it is null or within the bounds."""
    if value is not None and not low <= value <= high:
        raise bad_field(field, f"must be between {low} and {high}, got {value}")
