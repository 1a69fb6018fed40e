"""Parameters of a call as a request body: names of the HTTP API, vLLM's and SGLang's."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from pydantic import ConfigDict, ValidationError

from engine.frontend.apis.chat.body import MAX_TOP_LOGPROBS
from engine.frontend.apis.shared.constraints import ResponseFormat, StructuredFields
from engine.frontend.apis.shared.fields import check_range
from engine.frontend.apis.shared.request_body import SamplingFields
from engine.messages import LogprobOptions
from service.flags import nearest
from service.http.body import optional
from service.http.errors import bad_field, plain
from tandem.errors import RequestError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# Other names -> the body's.
_ALIASES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
# Fields of vLLM's object that shape its objects, not the tokens.
_FORM = ("detokenize", "extra_args", "flat_logprobs", "output_kind", "output_text_buffer_length", "skip_clone")
_ELSEWHERE = {
    "stream": "AsyncLLM streams: async for output in llm.generate(prompt)",
    "stream_options": "AsyncLLM streams, and every result has its counts",
    "echo": "a result has its prompt; prompt_logprobs=0 scores it",
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), "an LLM is one worker for both phases"),
}


class Sampling(SamplingFields, StructuredFields):
    """`tandem.SamplingParams`: the sampling fields of the HTTP API, with vLLM's names.

    Others have the default of `/v1/completions`: the checkpoint's generation_config.json, and 16
    tokens (a chat: what fits). `logprobs`, `prompt_logprobs`: alternatives per token, 0 to 20.
    """

    model_config = ConfigDict(strict=False, extra="forbid", arbitrary_types_allowed=True)

    max_tokens: int | None = optional("Most tokens of the answer.", 16)
    min_tokens: int | None = optional("Least tokens of the answer.", 4)
    logprobs: int | None = optional("Alternatives per token of the answer, 0 to 20.", 5)
    prompt_logprobs: int | None = optional("Alternatives per token of the prompt, 0 to 20.", 5)
    response_format: ResponseFormat | None = optional("Form of the answer.", {"type": "json_object"})

    if not TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None:
            """Raises RequestError."""
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise _wrong_field(error.errors()[0], list(type(self).model_fields)) from None


def _wrong_field(detail: "ErrorDetails", known: list[str]) -> RequestError:
    name = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        problem = "is no sampling parameter" + nearest(_ALIASES.get(name, name), known, otherwise="; leave it out")
    else:
        problem = f"{detail['msg'].replace('Input should', 'must')}, got {detail['input']!r}"
    return RequestError(f"{name}: {problem}", field=name)


SamplingParams = Sampling  # its public name; engine/sampling_params.py has the checked fields
SamplingLike = Sampling | Mapping[str, Any] | object | None


class WantedLogprobs(NamedTuple):
    """Numbers of alternatives per token, None for no logprobs."""

    answer: int | None = None
    prompt: int | None = None

    @property
    def options(self) -> LogprobOptions | None:
        if self.answer is None and self.prompt is None:
            return None
        return LogprobOptions(
            start_len=-1 if self.prompt is None else 0, top_num=max(self.answer or 0, self.prompt or 0)
        )


def fields_of(sampling_params: SamplingLike, more: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a body from both; `more` has precedence. Raises RequestError."""
    fields = _renamed(_given(sampling_params)) | _renamed(more)
    for name, remedy in _ELSEWHERE.items():
        if fields.get(name) is not None:
            raise RequestError(f"{name}: is no argument here: {remedy}", field=name)
    return fields


def take_logprobs(fields: dict[str, Any], *, chat: bool) -> WantedLogprobs:
    """Remove the counts of logprobs from `fields`; a chat may leave HTTP's switch there.

    Raises ApiError(400).
    """
    found: dict[str, int | None] = {"prompt_logprobs": fields.pop("prompt_logprobs", None)}
    if not (chat and isinstance(fields.get("logprobs"), bool)):
        found["logprobs"] = fields.pop("logprobs", None)
    for name, value in found.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise bad_field(name, f"must be a number of alternatives per token, 0 to {MAX_TOP_LOGPROBS}, got {value!r}")
        check_range(name, value, MAX_TOP_LOGPROBS)
    return WantedLogprobs(found.get("logprobs"), found["prompt_logprobs"])


def encoded(fields: Mapping[str, Any]) -> bytes:
    """The JSON of a body; arrays are lists. Raises RequestError."""
    try:
        return msgspec.json.encode(fields, enc_hook=_listed)
    except (TypeError, ValueError, UnicodeEncodeError) as error:
        name = next((name for name, value in fields.items() if not _is_json(value)), None)
        raise RequestError(f"{name or 'arguments'}: cannot be sent as JSON: {error}", field=name) from None


def _given(params: SamplingLike) -> dict[str, Any]:
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return dict(params)
    if isinstance(params, Sampling):
        found = {name: plain(getattr(params, name)) for name in type(params).model_fields}
    elif isinstance(params, msgspec.Struct):
        found = msgspec.structs.asdict(params)
    elif dataclasses.is_dataclass(params) and not isinstance(params, type):
        found = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    else:
        kind = "a class, not an object of it" if isinstance(params, type) else type(params).__name__
        raise RequestError(f"sampling_params: must be a SamplingParams or a dict, got {kind}", field="sampling_params")
    return {
        name: value
        for name, value in found.items()
        if value is not None and not name.startswith("_") and name not in _FORM
    }


def _renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        own = _ALIASES.get(name, name)
        if own in found:
            raise RequestError(f"{name}: is another name of {own}; give one of them", field=name)
        found[own] = value
    return found


def _listed(value: Any) -> Any:
    """NumPy's and torch's arrays, numbers and enums."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON")


def _is_json(value: Any) -> bool:
    try:
        msgspec.json.encode(value, enc_hook=_listed)
    except (TypeError, ValueError):
        return False
    return True
