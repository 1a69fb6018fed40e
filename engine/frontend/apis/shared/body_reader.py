"""Request bodies: fields are known, rejected because unsupported, or ignored by name."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar, get_args

from engine.frontend.apis.shared.ids_only import check_ids_only
from engine.frontend.apis.shared.resumable import take_resume
from engine.frontend.errors import IGNORED_HEADER, shown
from engine.frontend.services import SERVICES
from service.flags import nearest
from service.http.body import Body, field_types, is_body, types_in
from service.http.errors import MAX_FIELDS, ApiError, bad_field, body_of, check_fields, read_object, unsupported
from service.http.request import HttpRequest
from service.http.routes import EXTRA_HEADERS
from service.waiter import BODIES

T = TypeVar("T", bound=Body)
R = TypeVar("R")

EMPTY: tuple[Any, ...] = (None, False, 0, "", [], {})
FOR_THE_ROUTER = frozenset({"routing_key", "bootstrap_pair_key"})


@dataclass(frozen=True, slots=True)
class Unserved:
    """An unsupported field. `harmless`: values without effect."""

    remedy: str
    harmless: tuple[Any, ...] = EMPTY


@dataclass(frozen=True, kw_only=True)
class BodyReader(Generic[T]):
    """Decodes bodies and reports unknown fields.

    `looked_into`: fields whose inner unknown fields are ignored by path. `inside`: a field whose
    inner fields must be known. `for_template`: start of the paths of fields that a chat template
    may read.
    """

    body: type[T]
    refused: Mapping[str, Unserved]
    looked_into: tuple[str, ...] = ()
    inside: "Inside | None" = None
    for_template: str = ""

    async def read(self, request: HttpRequest) -> T:
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
        """Body and ignored fields, without `names` of the template. Raises ApiError(400)."""
        fields = read_object(data)
        check_fields(fields)
        for name, value in fields.items():
            if name in self.refused:
                _check_unserved(self.refused[name], name, value)
        if self.inside is not None:
            self.inside.check(fields.get(self.inside.field))
        body = body_of(fields, self.body)
        ignored = self._unknown(body)
        if ignored and self.for_template:
            read = {self.for_template + name for name in names}
            ignored = [path for path in ignored if path not in read]
        return body, ignored[:MAX_FIELDS]

    def _unknown(self, body: T) -> list[str]:
        found: dict[str, None] = {}
        for name in self.looked_into:
            if (value := getattr(body, name)) is not None:
                _find_unknown(value, name, found)
        if body.model_extra:
            known = self.refused.keys() | FOR_THE_ROUTER
            found |= {name: None for name in body.model_extra if name not in known}
        return list(found)


async def beside_loop(request: HttpRequest, work: Callable[[], R]) -> R:
    """Run `work` on a body's values, in a thread if the body is long."""
    return await BODIES.run(work, size=len(await request.read()))


@dataclass(frozen=True, kw_only=True)
class Inside:
    field: str
    type: type[Body]
    refused: Mapping[str, Unserved]

    def check(self, value: Any) -> None:
        """Raises ApiError(400) for a rejected or unknown field."""
        known = field_types(self.type)
        for fields in value if isinstance(value, list) else [value]:
            for name in fields if isinstance(fields, dict) else ():
                if name in self.refused:
                    _check_unserved(self.refused[name], f"{self.field}.{name}", fields[name])
                elif name not in known:
                    near = nearest(name[:64], sorted(known), otherwise=f"; there are {', '.join(sorted(known))}")
                    raise bad_field(f"{self.field}.{name[:64]}", f"is no sampling parameter{near}")


def _check_unserved(refused: Unserved, name: str, value: Any) -> None:
    if value not in refused.harmless:
        raise unsupported(name, f"is not supported by this server; {refused.remedy}")


def _find_unknown(value: Any, path: str, found: dict[str, None]) -> None:
    """Add paths of unknown fields, `[]` for list items. Nulls of SDKs are ignored."""
    kind: Any = type(value)
    if isinstance(value, list):
        path += "[]"
        for item in value:
            _find_unknown(item, path, found)
    elif (holding := _holding_bodies(kind)) is not None:
        if extra := value.model_extra:
            found |= {f"{path}.{name}": None for name, given in extra.items() if given is not None}
        for name in holding:
            if (inner := getattr(value, name)) is not None:
                _find_unknown(inner, f"{path}.{name}", found)


@cache
def _holding_bodies(kind: type) -> list[str] | None:
    if not is_body(kind):
        return None
    return [name for name, field in kind.model_fields.items() if _holds_bodies(field.annotation)]


def _holds_bodies(hint: Any) -> bool:
    return any(is_body(one) or any(map(_holds_bodies, get_args(one))) for one in types_in(hint))


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


def missing_in(body: type[Body], chat: BodyReader[Any], remedy: str) -> dict[str, Unserved]:
    """Chat fields absent in `body`, to reject instead of ignoring them."""
    only_there = {
        name: Unserved(remedy, (*EMPTY, 1) if name == "n" else EMPTY) for name in sorted(chat.body.model_fields)
    }
    known = body.model_fields
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
