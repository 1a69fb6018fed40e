"""Request bodies: fields are known, rejected because unsupported, or ignored by name.

A strict type decodes most bodies; names are checked only if that fails, also inside fields such as
`tools` (body_reader.py).
"""

import difflib
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from engine.frontend.apis.shared.ids_only import check_ids_only
from engine.frontend.apis.shared.resumable import take_resume
from engine.frontend.errors import IGNORED_HEADER, shown
from engine.frontend.services import SERVICES
from service.http.errors import MAX_FIELDS, ApiError, bad_field, check_fields, decode_body, decode_or_none
from service.http.request import Request
from service.http.routes import EXTRA_HEADERS
from service.waiter import BODIES

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

EMPTY: tuple[Any, ...] = (None, False, 0, "", [], {})
FOR_THE_ROUTER = frozenset({"session_id", "routing_key", "bootstrap_pair_key"})


@dataclass(frozen=True, slots=True)
class Unserved:
    """An unsupported field. `harmless`: values without effect."""

    remedy: str
    harmless: tuple[Any, ...] = EMPTY


@dataclass(frozen=True, kw_only=True)
class BodyReader(Generic[T]):
    """Decodes bodies and reports unknown fields.

    `looked_into`: fields whose inner unknown fields are ignored by path. `inside`: a field whose
    inner fields must be known. `keep`: takes (body, its JSON, ignored fields, names in the
    template); keeps what the template reads, returns the others.
    """

    body: type[T]
    refused: Mapping[str, Unserved]
    looked_into: tuple[str, ...] = ()
    inside: "Inside | None" = None
    keep: Callable[[T, bytes, list[str], Collection[str]], list[str]] | None = None
    strict: type[T] = field(init=False)
    names: frozenset[str] = field(init=False)
    inner: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        types = {f.name: f.type for f in msgspec.structs.fields(self.body)}
        inside = () if self.inside is None else (self.inside.field,)
        object.__setattr__(self, "strict", strict(self.body, (*self.looked_into, *inside)))
        object.__setattr__(self, "names", _names(self.body) | FOR_THE_ROUTER)
        object.__setattr__(self, "inner", {name: types[name] for name in self.looked_into})

    async def read(self, request: Request) -> T:
        """Raises ApiError(400)."""
        data, names = await request.read(), request[SERVICES].model.template_names
        body, ignored = await BODIES.run(lambda: self.decode(take_resume(request, data), names), size=len(data))
        if ignored:
            extra = request[EXTRA_HEADERS] | {IGNORED_HEADER: shown(ignored)}
            request[EXTRA_HEADERS] = extra
            request[SERVICES].ignored.note(request.path, ignored)
        if not request[SERVICES].model.has_text:
            check_ids_only(body)
        return body

    def decode(self, data: bytes, names: Collection[str] = ()) -> tuple[T, list[str]]:
        """Return the body and its ignored fields. Raises ApiError(400)."""
        try:
            return decode_body(data, self.strict), []
        except ApiError:
            fields = decode_or_none(data, dict[str, msgspec.Raw])
            if fields is None:
                raise
        check_fields(fields)
        ignored = list(self._unknown(fields))[:MAX_FIELDS]
        if self.inside is not None:
            self.inside.check(fields.get(self.inside.field))
        body = decode_body(data, self.body)
        return body, ignored if self.keep is None else self.keep(body, data, ignored, names)

    def _unknown(self, fields: Mapping[str, msgspec.Raw]) -> Iterator[str]:
        for name, raw in fields.items():
            if name in self.refused:
                _check_unserved(self.refused[name], name, raw)
            elif name not in self.names:
                yield name
            elif name in self.inner:
                yield from unknown_inside(raw, self.inner[name], name)


async def beside_loop(request: Request, work: Callable[[], R]) -> R:
    """Run `work` on a body's values, in a thread if the body is long."""
    return await BODIES.run(work, size=len(await request.read()))


@dataclass(frozen=True, kw_only=True)
class Inside:
    field: str
    type: type[msgspec.Struct]
    refused: Mapping[str, Unserved]

    def check(self, raw: msgspec.Raw | None) -> None:
        """Raises ApiError(400) for a rejected or unknown field."""
        value = None if raw is None else decode_or_none(raw, dict[str, msgspec.Raw] | list[dict[str, msgspec.Raw]])
        known = _names(self.type)
        for fields in value if isinstance(value, list) else [value or {}]:
            for name, part in fields.items():
                if name in self.refused:
                    _check_unserved(self.refused[name], f"{self.field}.{name}", part)
                elif name not in known:
                    raise bad_field(f"{self.field}.{name[:64]}", _unknown_field(name, sorted(known)))


def _check_unserved(refused: Unserved, name: str, raw: msgspec.Raw) -> None:
    if decode_or_none(raw) not in refused.harmless:
        raise bad_field(name, f"is not supported by this server; {refused.remedy}", code="unsupported_parameter")


def _unknown_field(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name[:64], known, n=1)
    return "is no sampling parameter" + (f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}")


def _names(type_: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(f.encode_name for f in msgspec.structs.fields(type_))


# ---- unknown fields inside objects


def strict(body: type[msgspec.Struct], inside: Collection[str] = ()) -> Any:
    """`body` without unknown fields, also in its fields `inside`.

    Open types (`dict`, `Any`) are not checked.
    """
    return _strict(body, lambda field: field.name in inside, ())


def _strict(body: type[msgspec.Struct], is_meant: Callable[[FieldInfo], bool], above: tuple[type, ...]) -> Any:
    """`above`: structs that contain it; recursion is strict twice."""
    fields = []
    if above.count(body) < 2:
        for field in filter(is_meant, msgspec.structs.fields(body)):
            default: Any = msgspec.field(**{k: getattr(field, k) for k in ("default", "default_factory")})
            fields.append((field.name, _strict_type(field.type, (*above, body)), default))
    return msgspec.defstruct(f"Strict{body.__name__}", fields, bases=(body,), kw_only=True, forbid_unknown_fields=True)


def _strict_type(type_: Any, above: tuple[type, ...]) -> Any:
    if get_origin(type_) in (Union, types.UnionType):
        return Union[tuple(_strict_type(one, above) for one in get_args(type_))]  # noqa: UP007 (made here)
    if get_origin(type_) is list:
        return list[_strict_type(get_args(type_)[0], above)]  # type: ignore[misc]
    return _strict(type_, _holds_structs, above) if _is_struct(type_) else type_


def unknown_inside(raw: msgspec.Raw, type_: Any, path: str) -> list[str]:
    """Paths of unknown fields, `[]` for list items. Nulls of SDKs are ignored."""
    return list(dict.fromkeys(_unknown(decode_or_none(raw), type_, path)))


def _unknown(value: Any, type_: Any, path: str) -> Iterator[str]:
    if get_origin(type_) in (Union, types.UnionType):
        for one in get_args(type_):
            yield from _unknown(value, one, path)
    elif get_origin(type_) is list and isinstance(value, list):
        for item in value:
            yield from _unknown(item, get_args(type_)[0], f"{path}[]")
    elif _is_struct(type_) and isinstance(value, dict):
        known = {f.encode_name: f.type for f in msgspec.structs.fields(type_)}
        for name, inner in value.items():
            if name in known:
                yield from _unknown(inner, known[name], f"{path}.{name}")
            elif inner is not None:
                yield f"{path}.{name}"


def _holds_structs(field: FieldInfo) -> bool:
    return _structs_in(field.type)


def _structs_in(type_: Any) -> bool:
    return _is_struct(type_) or any(map(_structs_in, get_args(type_)))


def _is_struct(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, msgspec.Struct)


# ---- Unsupported fields, with remedies (see `body_reader.py`).

SHAPE = "leave it out; logit_bias, allowed_token_ids, bad_words and constraints shape an answer"
TEXT_ONLY = "leave it out; this server takes text and token ids"
NO_AUDIO = "audio is not served here: leave it out, or send what is said as text"
NO_BEAMS = "leave it out; n gives several answers"
SESSIONS = "send the whole conversation each time; session_id keeps requests on one worker"

NOT_EVEN_0 = (None,)  # 0 has an effect

SAMPLING = {
    "beam_width": Unserved(NO_BEAMS, (*EMPTY, 1)),
    "custom_params": Unserved(SHAPE),
    "length_penalty": Unserved(NO_BEAMS, (None, 1)),
    "logits_processors": Unserved(SHAPE),
    "prompt_logprobs": Unserved("set return_logprob and logprob_start_len beside sampling_params", NOT_EVEN_0),
    "repetition_detection": Unserved("leave it out; max_new_tokens and repetition_penalty bound repetitions"),
    "spaces_between_special_tokens": Unserved("leave it out; text is shown as the tokenizer decodes it", (None, True)),
    "truncate_prompt_tokens": Unserved("cut the prompt before you send it", NOT_EVEN_0),
    "use_beam_search": Unserved(NO_BEAMS),
    "watermark": Unserved(SHAPE),
    "watermarking": Unserved(SHAPE),
}
REQUEST = {
    **SAMPLING,
    "custom_logit_processor": Unserved(SHAPE),
    "ec_transfer_params": Unserved("leave it out; tandem router pairs workers"),
    "input_embeds": Unserved(TEXT_ONLY),
    "input_ids": Unserved("send token ids to /v1/completions or /generate"),
    "kv_transfer_params": Unserved(
        "leave it out: tandem router, sglang-router and smg pair these workers, vllm-router does not"
    ),
    "logprob_token_ids": Unserved("ask /generate, which has token_ids_logprob"),
    "mm_processor_kwargs": Unserved(TEXT_ONLY),
    "prompt_embeds": Unserved(TEXT_ONLY),
    "prompt_logprobs": Unserved(
        "ask /v1/completions with echo and logprobs, or /generate with return_logprob and logprob_start_len 0",
        NOT_EVEN_0,
    ),
    "repetition_detection": Unserved("leave it out; max_tokens and repetition_penalty bound repetitions"),
    "return_tokens_as_token_ids": Unserved("set return_token_ids instead"),
    "session_params": Unserved(SESSIONS),
    "vllm_xargs": Unserved("leave it out; it is for plugins of vLLM"),
}
COMPLETION = {
    **REQUEST,
    "add_special_tokens": Unserved("send the prompt as token ids to choose them all", (None, True)),
    "input_ids": Unserved("send them as prompt"),
    "suffix": Unserved("leave it out; this server completes at the end alone"),
}
CHAT = {
    **REQUEST,
    "add_special_tokens": Unserved("render the chat yourself and send it to /v1/completions"),
    "audio": Unserved("leave it out; answers are text"),
    "chat_template": Unserved(
        "leave it out, or render the chat yourself and send it to /v1/completions; start the server with another template"
    ),
    "documents": Unserved("give what the template reads in chat_template_kwargs"),
    "echo": Unserved("ask /v1/completions"),
    "functions": Unserved("use tools"),
    "media_io_kwargs": Unserved(TEXT_ONLY),
    "prediction": Unserved("leave it out; answers are the same without"),
    "web_search_options": Unserved("search yourself, with a tool"),
}
GENERATE = {
    "audio_data": Unserved(NO_AUDIO),
    "custom_logit_processor": Unserved(SHAPE),
    "input_embeds": Unserved(TEXT_ONLY),
    "session_params": Unserved(SESSIONS),
    "watermark": Unserved(SHAPE),
}
EMBEDDING = {
    "chat_template": Unserved("render the text yourself"),
    "messages": Unserved("send the text as input"),
    "truncate_prompt_tokens": Unserved("cut the input before you send it", NOT_EVEN_0),
}


# ---- Bodies of other companies' APIs: errors in their terms. Pure.


def missing_in(body: type[msgspec.Struct], chat: BodyReader[Any], remedy: str) -> dict[str, Unserved]:
    """Chat fields absent in `body`, to reject instead of ignoring them."""
    only_there = {
        name: Unserved(remedy, (*EMPTY, 1) if name == "n" else EMPTY) for name in sorted(chat.body.__struct_fields__)
    }
    known = body.__struct_fields__
    return {name: refused for name, refused in {**only_there, **chat.refused}.items() if name not in known}


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in ApiErrors. `names`: parts of our names -> theirs, in order."""
    try:
        yield
    except ApiError as error:
        raise _renamed(error, names) from None


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    if error.field is None:
        return error
    field = error.field
    for ours, theirs in names.items():
        field = field.replace(ours, theirs)
    message = error.message.replace(error.field, field)
    return ApiError(error.status, message, field=field, code=error.code, retry_after_s=error.retry_after_s)
