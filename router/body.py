"""Request bodies: reads the top-level fields that routing needs, and writes both workers' bodies.
Pure.

Unchanged values keep their bytes, and workers refuse wrong ones.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from service.flags import untagged
from service.http.errors import JSON_ERRORS, MAX_DEPTH, ApiError, check_fields, decode_or_none, deeper_than
from service.responses.items import inner_text

BYTES_PER_TOKEN = 4  # of text; an estimate for load balancing
TOKENS_PER_IMAGE = 1024  # likewise
DEFAULT_OUTPUT_TOKENS = 128  # assumed when the request does not bound its answer
MAX_COUNTED_OUTPUT_TOKENS = 512  # answers are mostly far shorter than the bound that clients send
MAX_SAMPLES = 4096  # per request

FIRST_RESPONSE_FIELD = "first_response_id"  # of a conversation that the router stores
HISTORY_FIELD = "history"  # items before a response's input, which the router stores
BOOTSTRAP_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key")
RANK_FIELDS = ("routed_dp_rank", "data_parallel_rank")
_NULL = b"null"
_FIRST_INSIDE = re.compile(rb"\[\s*(.)")


class Api(StrEnum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    GENERATE = "/generate"
    EMBEDDINGS = "/v1/embeddings"
    ENCODE = "/encode"
    SCORE = "/v1/score"
    RERANK = "/v1/rerank"
    RERANK_PLAIN = "/rerank"
    RERANK_V2 = "/v2/rerank"
    SCORE_PAIRS = "/score"
    CLASSIFY = "/classify"
    CLASSIFY_V1 = "/v1/classify"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"
    OLLAMA_CHAT = "/api/chat"
    OLLAMA_GENERATE = "/api/generate"


# APIs with one prompt, which the worker renders.
CHATS = frozenset((Api.CHAT, Api.MESSAGES, Api.RESPONSES, Api.OLLAMA_CHAT, Api.OLLAMA_GENERATE))
# APIs that need no decode worker.
_RERANKS = (Api.RERANK, Api.RERANK_PLAIN, Api.RERANK_V2)
_CLASSIFIES = (Api.CLASSIFY, Api.CLASSIFY_V1)
ALONE = frozenset((Api.EMBEDDINGS, Api.ENCODE, Api.SCORE, Api.SCORE_PAIRS, *_RERANKS, *_CLASSIFIES))
PUTS = (Api.GENERATE, Api.ENCODE)  # as in SGLang
OLLAMA = frozenset((Api.OLLAMA_CHAT, Api.OLLAMA_GENERATE))  # they stream by default
# In the order in which they appear in a prompt.
_PROMPT_FIELDS = {
    Api.CHAT: ("messages",),
    Api.COMPLETIONS: ("prompt",),
    Api.EMBEDDINGS: ("input",),
    Api.ENCODE: ("text",),
    Api.SCORE: ("query", "items"),
    **dict.fromkeys(_RERANKS, ("query", "documents")),
    Api.SCORE_PAIRS: ("text_2",),
    **dict.fromkeys(_CLASSIFIES, ("input",)),
    Api.GENERATE: ("text",),
    Api.MESSAGES: ("system", "messages"),
    Api.RESPONSES: ("instructions", HISTORY_FIELD, "input"),
    Api.OLLAMA_CHAT: ("messages",),
    Api.OLLAMA_GENERATE: ("system", "prompt"),
}


# Bounds of an answer's tokens, where a request has one sample, and otherwise.
_BOUNDS: Mapping[Api, tuple[str, ...]] = {Api.MESSAGES: ("max_tokens",), Api.RESPONSES: ("max_output_tokens",)}
_OPENAI_BOUNDS = ("max_completion_tokens", "max_tokens")


class BadBody(ApiError):
    """A body that cannot be routed."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(400, message, field=field)


class _Sampling(msgspec.Struct):
    n: Any = None
    max_new_tokens: Any = None


class _Options(msgspec.Struct):
    num_predict: Any = None


class ParsedBody(msgspec.Struct, frozen=True, kw_only=True):
    """`fields`: name -> JSON text. Token counts are estimates over all samples."""

    api: Api
    fields: dict[str, msgspec.Raw]
    num_samples: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    wants_input_logprobs: bool = False  # or another output that only prefill's answer contains

    @property
    def streams(self) -> bool:
        stream = _raw(self.fields, "stream")
        return stream == b"true" or (not stream and self.api in OLLAMA)


_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_sampling_decoder = msgspec.json.Decoder(_Sampling | list[_Sampling])
_encode = msgspec.json.Encoder().encode


def parse_body(api: Api, body: bytes) -> ParsedBody:
    """Raises BadBody."""
    if deeper_than(body):
        raise BadBody(None, f"the body is nested too deeply (more than {MAX_DEPTH} levels)")
    try:
        fields = _fields_decoder.decode(body)
        check_fields(fields)
        prompts, prompt_tokens = _prompt_shape(api, prompt_of(api, fields))
    except JSON_ERRORS as err:
        raise BadBody(None, f"the body is not a JSON object: {err}") from None
    if prompts > MAX_SAMPLES:
        raise BadBody(None, f"one request may hold at most {MAX_SAMPLES} prompts, this one holds {prompts}")
    samplings = _samplings(api, fields)
    per_prompt = samplings if len(samplings) == prompts else samplings[:1] * prompts
    samples = output_tokens = 0
    for sampling in per_prompt:
        count = _count(sampling.n)
        samples += count
        output_tokens += count * _output_tokens(sampling.max_new_tokens)
    if samples > MAX_SAMPLES:
        raise BadBody("n", f"one request may ask for at most {MAX_SAMPLES} samples, this one asks for {samples}")
    return ParsedBody(
        api=api,
        fields=fields,
        num_samples=samples,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        wants_input_logprobs=_wants_input_logprobs(api, fields),
    )


def write_bodies(parsed: ParsedBody, *, host: str, port: int | None, rooms: Sequence[int]) -> tuple[bytes, bytes]:
    """The prefill and the decode body with bootstrap fields.

    Sample j of prompt i has rooms[i * n + j]. Client values are overwritten. Prefill never streams,
    so its errors have a real status.
    """
    assert len(rooms) == parsed.num_samples, (len(rooms), parsed.num_samples)
    fields: dict[str, object] = {k: v for k, v in parsed.fields.items() if k not in BOOTSTRAP_FIELDS}
    many = len(rooms) > 1
    fields["bootstrap_host"] = [host] * len(rooms) if many else host
    fields["bootstrap_port"] = [port] * len(rooms) if many else port
    fields["bootstrap_room"] = list(rooms) if many else rooms[0]
    decode = _encode(fields)
    if "stream" not in fields and not parsed.streams:
        return decode, decode
    fields["stream"] = False
    fields.pop("stream_options", None)
    return _encode(fields), decode


def with_fields(parsed: ParsedBody, changes: Mapping[str, bytes]) -> ParsedBody:
    fields = {**parsed.fields, **{name: msgspec.Raw(text) for name, text in changes.items()}}
    _, prompt_tokens = _prompt_shape(parsed.api, prompt_of(parsed.api, fields))
    return msgspec.structs.replace(parsed, fields=fields, prompt_tokens=prompt_tokens)


def write_body(parsed: ParsedBody) -> bytes:
    return _encode(parsed.fields)


def named_model(parsed: ParsedBody) -> str:
    name = decode_or_none(_raw(parsed.fields, "model"), str) or ""
    return untagged(name) if parsed.api in OLLAMA else name


def named_priority(parsed: ParsedBody) -> int | None:
    value = _small(_raw(parsed.fields, "priority"))
    return value if isinstance(value, int) else None


def named_dp_rank(parsed: ParsedBody) -> int | None:
    found = (_small(raw) for name in RANK_FIELDS if (raw := _raw(parsed.fields, name)))
    return next((value for value in found if isinstance(value, int)), None)


def without_dp_rank(parsed: ParsedBody) -> ParsedBody:
    fields = {name: raw for name, raw in parsed.fields.items() if name not in RANK_FIELDS}
    return msgspec.structs.replace(parsed, fields=fields)


def prompt_of(api: Api, fields: Mapping[str, msgspec.Raw]) -> bytes:
    texts = [_raw(fields, name) for name in _PROMPT_FIELDS[api]]
    if api is Api.RESPONSES:  # one list of items, so that the turns of a conversation share their prefix
        return b",".join([texts[0], *filter(None, map(inner_text, texts[1:]))])
    text = b"".join(texts)
    return _raw(fields, "input_ids") if api in (Api.GENERATE, Api.ENCODE) and not text else text


def _prompt_shape(api: Api, raw: bytes) -> tuple[int, int]:
    """Count prompts and tokens, without decoding long prompts."""
    if api in CHATS or not raw.startswith(b"["):
        return 1, len(raw) // BYTES_PER_TOKEN + 1
    match = _FIRST_INSIDE.match(raw)
    first = match[1] if match else b""
    if first not in (b'"', b"["):
        return 1, raw.count(b",") + 1
    tokens = raw.count(b",") + 1 if first == b"[" else len(raw) // BYTES_PER_TOKEN + 1
    return max(1, len(_list_decoder.decode(raw))), tokens


def _samplings(api: Api, fields: dict[str, msgspec.Raw]) -> list[_Sampling]:
    if api is Api.GENERATE:
        return _native_samplings(_raw(fields, "sampling_params"))
    if api in OLLAMA:
        options = decode_or_none(_raw(fields, "options"), _Options)
        return [_Sampling() if options is None else _Sampling(max_new_tokens=options.num_predict)]
    bound = next((raw for name in _BOUNDS.get(api, _OPENAI_BOUNDS) if (raw := _raw(fields, name))), b"")
    n = None if api in _BOUNDS else _small(_raw(fields, "n"))
    return [_Sampling(n=n, max_new_tokens=_small(bound))]


def _native_samplings(raw: bytes) -> list[_Sampling]:
    try:
        decoded = _sampling_decoder.decode(raw) if raw else _Sampling()
    except JSON_ERRORS:
        return [_Sampling()]
    return (decoded or [_Sampling()]) if isinstance(decoded, list) else [decoded]


def _wants_input_logprobs(api: Api, fields: dict[str, msgspec.Raw]) -> bool:
    if api in CHATS or api in ALONE:
        return False
    if api is Api.COMPLETIONS:
        return _raw(fields, "echo") == b"true" and _raw(fields, "logprobs") not in (b"", b"false")
    if b"true" in _raw(fields, "return_hidden_states"):
        return True
    if b"true" not in _raw(fields, "return_logprob"):
        return False
    start = decode_or_none(_raw(fields, "logprob_start_len"))
    return any(isinstance(at, int) and at >= 0 for at in (start if isinstance(start, list) else [start]))


def _raw(fields: Mapping[str, msgspec.Raw], name: str) -> bytes:
    value = fields.get(name)
    text = b"" if value is None else bytes(value)
    return b"" if text == _NULL else text


def _small(raw: bytes) -> object:
    return decode_or_none(raw) if raw and raw[:1] in b"-0123456789" else None


def _count(n: object) -> int:
    return n if isinstance(n, int) and not isinstance(n, bool) and n >= 1 else 1


def _output_tokens(bound: object) -> int:
    if isinstance(bound, int | float) and bound >= 0:
        return int(min(bound, MAX_COUNTED_OUTPUT_TOKENS))
    return DEFAULT_OUTPUT_TOKENS
