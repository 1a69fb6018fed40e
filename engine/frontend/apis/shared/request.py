"""Request fields except the prompt. Pure."""

from collections.abc import Mapping
from typing import Any, NamedTuple, get_type_hints

import msgspec
from msgspec import StructMeta

from engine.frontend.apis.shared.constraints import GrammarFields, ResponseFormat, Schema, StructuredOutputs
from engine.frontend.apis.shared.fields import SamplingFields, each
from engine.frontend.bootstraps import BootstrapFields, Fields
from engine.frontend.services import Services
from service.http.errors import ApiError, bad_field
from service.http.guard import RANK_HEADER, rank_in
from service.kv_events import MAX_NAMESPACE_CHARS, namespace_of

# ---- Fields of several APIs. Pure.

PerPrompt = str | list[str | None] | None  # one for all prompts, or one each


class Mixed(StructMeta):
    """Metaclass of bodies: adds the fields of all bases but the first, as a struct has one base."""

    def __new__(
        mcs: type[StructMeta], name: str, bases: tuple[Any, ...], namespace: dict[str, Any], **options: Any
    ) -> Any:
        struct, *mixins = bases
        fields = [(field, hint, getattr(m, field)) for m in mixins for field, hint in get_type_hints(m).items()]
        base = msgspec.defstruct(name, fields, bases=(struct,), kw_only=True)
        return StructMeta.__new__(StructMeta, name, (base,), namespace, **options)


class PlaceFields(Fields):
    """Prefix cache namespace (`cache_salt`: vLLM, SGLang; `extra_key`: SGLang), and DP rank."""

    cache_salt: PerPrompt = None
    extra_key: PerPrompt = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None


class OwnFields(BootstrapFields, PlaceFields):
    """Fields that bodies of other companies' APIs have, too."""

    rid: str | None = None
    priority: int | None = None
    lora_path: str | None = None
    user: str | None = None


def own_fields(body: OwnFields) -> dict[str, Any]:
    return {name: getattr(body, name) for name in get_type_hints(OwnFields)}


def namespaces_of(body: PlaceFields, num_prompts: int) -> list[tuple[str, ...]]:
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
        raise bad_field("lora_path", OFF, code="unsupported_parameter")
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


def routed_rank(body: PlaceFields, headers: Mapping[str, str]) -> int | None:
    """The client's DP rank: `routed_dp_rank`, `data_parallel_rank` (SGLang) or header.

    Raises ApiError(400).
    """
    new, old = body.routed_dp_rank, body.data_parallel_rank
    if new is not None and old is not None and new != old:
        raise bad_field("data_parallel_rank", f"is {old}, and routed_dp_rank is {new}; give one of them")
    name, named = ("data_parallel_rank", old) if new is None else ("routed_dp_rank", new)
    in_header = rank_in(headers)
    if named is not None and in_header is not None and named != in_header:
        raise bad_field(name, f"is {named}, and the header {RANK_HEADER} is {in_header}; give one of them")
    return in_header if named is None else named


# ---- request

_CONSTRAINTS = (
    *GrammarFields.__struct_fields__,
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestFields(SamplingFields, OwnFields, metaclass=Mixed, kw_only=True):
    """Fields of completions and chats."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    return_hidden_states: bool | None = None

    @property
    def is_constrained(self) -> bool:
        return any(getattr(self, name) is not None for name in _CONSTRAINTS)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


def check_request(body: RequestFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "needs stream to be true")


def check_range(field: str, value: int | None, high: int) -> None:
    if value is not None and not 0 <= value <= high:
        raise bad_field(field, f"must be between 0 and {high}, got {value}")
