"""Errors of HTTP requests, and what is read of a body: JSON, codings, bounds."""

import json
import math
import re
import types
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_origin

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from service.http.body import UNKNOWN_FIELD, Body, field_types, is_body, types_in

# ---- JSON from outside: decoding, and a check of nesting before recursion.

# msgspec's errors: malformed or mistyped JSON, invalid UTF-8, too many levels.
JSON_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
MAX_DEPTH = 64  # of a request body; schemas of tools, the deepest honest values, stay below 20

_STRINGS = re.compile(rb'"[^"]*+"?')  # optional end: truncated text is scanned once
_KEPT = b'[{]}"'
_DROPPED = bytes(c for c in range(256) if c not in _KEPT)
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def decode_or_none(text: bytes, type_: Any = Any) -> Any:
    try:
        return msgspec.json.decode(text, type=type_)
    except JSON_ERRORS:
        return None


def object_of(text: bytes) -> dict[str, Any]:
    return decode_or_none(text, dict[str, Any]) or {}


def deeper_than(text: bytes, limit: int = MAX_DEPTH) -> bool:
    if text.count(b"[") + text.count(b"{") <= limit:
        return False
    brackets = _brackets(text)
    if b"[" * (limit + 1) in brackets:
        return True
    for _ in range(limit):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")  # the innermost level of every branch
    return b"[]" in brackets or brackets.count(b"[") > limit


def _brackets(text: bytes) -> bytes:
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept = text.translate(_ONE_KIND, _DROPPED).replace(b'""', b"")  # adjacent strings merge into one
    return _STRINGS.sub(b"", kept) if b'"' in kept else kept


# ---- errors

T = TypeVar("T")
B = TypeVar("B", bound=Body)

DRAINING = "draining"  # error code, and `status` on /health
MODEL_ERROR = "model_error"  # error code: the model gave no token for this request
INTERNAL_ERROR = "internal_error"  # error code: this request met a bug
# Of a 500 that the request may have caused, as others are served.
REQUEST_ERRORS = frozenset((MODEL_ERROR, INTERNAL_ERROR))

_NAMED = re.compile(r"(missing required|contains unknown) field `([^`]+)`")
_PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")


class ApiError(Exception):
    """A response other than 2xx. `field`: wrong part of the request. `code`: for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code
        self.retry_after_s = retry_after_s


def bad_field(field: str, message: str, *, code: str | None = None) -> ApiError:
    return ApiError(400, f"{field}: {message}", field=field, code=code)


def unsupported(field: str, message: str) -> ApiError:
    return bad_field(field, message, code="unsupported_parameter")


def missing(field: str) -> ApiError:
    return bad_field(field, "is missing")


def draining(message: str) -> ApiError:
    """An error on which routers try another worker."""
    return ApiError(503, message, code=DRAINING, retry_after_s=1)


def check_choice(field: str, value: str | None, known: Collection[str]) -> None:
    """Raises ApiError(400) unless it is null or one of `known`."""
    if value is not None and value not in known:
        raise bad_field(field, f"{value[:100]!r} is not one of {', '.join(known)}")


def decode_body(data: bytes, type_: type[T]) -> T:
    """Decode JSON strictly. Raises ApiError(400) with the field."""
    if deeper_than(data):
        raise ApiError(400, f"the body is nested too deeply (more than {MAX_DEPTH} levels)", code="invalid_json")
    try:
        return msgspec.json.decode(data, type=type_)
    except msgspec.ValidationError as e:
        raise _wrong_type(str(e)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e).removeprefix("JSON is malformed: ")
        raise ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json") from None


def _wrong_type(message: str) -> ApiError:
    match = _PATH.search(message)
    path, text = ("", message) if match is None else (match.group(1), message[: match.start()])
    named = _NAMED.search(text)
    field = ".".join(filter(None, (path, named[2] if named else "")))
    if named and named[1] == "contains unknown":
        return unsupported(field, "is no field that this server knows; leave it out")
    shown = text if match is None else f"{field}: {text[:1].lower()}{text[1:]}".removeprefix(": ")
    return ApiError(400, shown, field=field or None)


# ---- bodies of clients

MAX_INT_DIGITS = 4300  # of a number in JSON, as in Python


def plain(value: Any) -> Any:
    """A body as JSON values, without unknown fields."""
    if isinstance(value, Body):
        fields = type(value).model_fields.items()
        return {field.alias or name: plain(getattr(value, name)) for name, field in fields}
    return [plain(item) for item in value] if isinstance(value, list) else value


_ANY: type[Any] = cast(type[Any], Any)


def read_body(data: bytes, type_: type[B]) -> B:
    """Raises ApiError(400) that names the field."""
    return body_of(read_object(data), type_)


def read_object(data: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raises ApiError(400)."""
    try:
        value = decode_body(data, _ANY)
    except ApiError as error:
        if error.field is None:
            raise
        raise _number_out_of_range(data) from None
    if not isinstance(value, dict):
        raise ApiError(400, f"Expected `object`, got `{_KINDS[type(value)]}`")
    return value


def _number_out_of_range(data: bytes) -> ApiError:
    """The error with the number's place, which msgspec does not tell."""
    try:
        field = next(_out_of_range(json.loads(data, parse_int=_int), ""))
    except (ValueError, StopIteration):  # the text behind the number is no JSON
        return ApiError(400, "the body is not valid JSON: number out of range", code="invalid_json")
    return bad_field(field, "number out of range")


def _int(digits: str) -> float:
    return int(digits) if len(digits) <= MAX_INT_DIGITS else math.inf


def _out_of_range(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _out_of_range(part, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _out_of_range(part, f"{path}[{index}]")
    elif isinstance(value, float) and math.isinf(value):
        yield path


def body_of(value: dict[str, Any], type_: type[B]) -> B:
    """Raises ApiError(400) that names the field."""
    try:
        return type_.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        raise _first_fault(details, value, type_) from None


# ---- Errors in JSON's words, the first of the text; branches of unions are not in their paths.

_KINDS = {bool: "bool", int: "int", float: "float", str: "str", types.NoneType: "null", list: "array", dict: "object"}
_UNKNOWN = "is no field that this server knows; leave it out"


class _Fault(NamedTuple):
    """`place`: of each step among its siblings in the text."""

    place: tuple[float, ...]
    path: str
    error: ApiError


def _first_fault(details: Sequence[ErrorDetails], value: Any, type_: type[Body]) -> ApiError:
    faults = [_fault(detail, value, type_) for detail in details]
    outer = {fault.place[:size] for fault in faults for size in range(len(fault.place))}
    return min((fault for fault in faults if fault.place not in outer), key=lambda fault: fault.place).error


def _fault(detail: ErrorDetails, value: Any, hint: Any) -> _Fault:
    place, path = list[float](), ""
    for step in detail["loc"]:
        taken = _taken(hint, value)
        if get_origin(taken) is list and isinstance(step, int):
            place, path = [*place, step], f"{path}[{step}]"
            value, hint = value[step], get_args(taken)[0]
        elif get_origin(taken) is dict and step != "[key]":
            names = list(map(str, value))
            place, path = [*place, names.index(str(step)) if str(step) in names else math.inf], f"{path}[...]"
            value, hint = value.get(step, value.get(str(step))), get_args(taken)[1]
        elif is_body(taken) and step in (known := field_types(taken)):
            name, names = str(step), list(value)
            inner = f"{path}.{name}".removeprefix(".")
            if name not in value:
                text = f"object missing required field `{name}`"
                shown = f"{inner}: {text}" if path else text.capitalize()
                return _Fault((*place, math.inf), inner, ApiError(400, shown, field=inner))
            place, path = [*place, names.index(name)], inner
            value, hint = value[name], known[name]
        elif step == "[key]":
            path = path.removesuffix("[...]")
            return _Fault(tuple(place), path, bad_field(path, "expected `int`, got `str`"))
    if detail["type"] == UNKNOWN_FIELD:
        inner = f"{path}.{detail['msg']}".removeprefix(".")
        return _Fault(tuple(place), inner, unsupported(inner, _UNKNOWN))
    return _Fault(tuple(place), path, bad_field(path, _problem(detail, value, hint)))


def _taken(hint: Any, value: Any) -> Any:
    """The member of a union that takes values of this kind."""
    return next((one for one in types_in(hint) if _kind(one) == _KINDS.get(type(value))), None)


def _problem(detail: ErrorDetails, value: Any, hint: Any) -> str:
    kinds = [_kind(one) for one in types_in(hint)]
    got = _KINDS[type(value)]
    if got == "int" and "float" in kinds:
        return "number out of range"
    if got in kinds:
        return detail["msg"].replace("Input should", "must")
    return f"expected `{' | '.join(sorted(kinds, key=_ORDER.index))}`, got `{got}`"


_ORDER = ["bool", "int", "float", "str", "object", "array", "null"]


def _kind(hint: Any) -> str:
    return "object" if is_body(hint) else _KINDS.get(get_origin(hint) or hint, "any")


# ---- limits of a server


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """`size_flag` sets `max_body_bytes`, if there is a flag."""

    max_body_bytes: int
    header_timeout_s: float = 60.0
    body_timeout_s: float = 300.0
    size_flag: str = ""

    def too_long(self) -> ApiError:
        hint = f" ({self.size_flag})" if self.size_flag else ""
        return ApiError(413, f"the body is longer than {self.max_body_bytes} bytes{hint}", code="body_too_large")

    def too_slow(self) -> ApiError:
        return ApiError(408, f"the body did not come within {self.body_timeout_s:g} s", code="body_too_slow")


# ---- Decompression of request bodies within bounds: gzip, deflate (RFC 9110, 8.4.1).

USUAL_TIMES = 40  # largest factor of honest chats
MAX_TIMES = 100  # allowed factor beyond `ALWAYS_BYTES`
ALWAYS_BYTES = 1 << 20
_PIECE_BYTES = 64 << 10  # per call of zlib
_MAX_MEMBERS = 1024  # per gzip body
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS  # `wbits` of zlib
_READ = frozenset(("gzip", "x-gzip", "deflate"))
_NOT_READ = frozenset(("br", "zstd", "compress", "x-compress", "dcb", "dcz", "exi", "aes128gcm", "pack200-gzip"))


def coding_of(encoding: str) -> str:
    """The coding, if any ("utf-8" is none). Raises ApiError(415)."""
    names = [name.strip().lower() for name in encoding.split(",")]
    codings = [name for name in names if name in _READ | _NOT_READ]
    if len(codings) > 1 or _NOT_READ.intersection(codings):
        text = f"Content-Encoding: {encoding[:40]!r} is not read here; send gzip, deflate, or the body as it is"
        raise ApiError(415, text, code="unsupported_media_type")
    return codings[0] if codings else ""


def inflate(data: bytes, coding: str, *, most_bytes: int) -> bytes:
    """Decompress. ApiError: 413 too large, 400 broken."""
    pieces, size, most = [], 0, min(most_bytes, max(ALWAYS_BYTES, MAX_TIMES * len(data)))
    if not data:
        return data
    try:
        for piece in _pieces(data, coding):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise _too_much(coding, most)
    except (zlib.error, EOFError) as error:
        raise ApiError(400, f"the body cannot be read as {coding}: {error}") from None
    return b"".join(pieces)


def _pieces(data: bytes, coding: str) -> Iterator[bytes]:
    bits = _bits(data, coding)
    inflater, rest, given, members = zlib.decompressobj(bits), b"", 0, 1
    while rest or given < len(data) or not inflater.eof:
        if inflater.eof:
            inflater, members = zlib.decompressobj(bits), members + 1
            if members > _MAX_MEMBERS:
                raise EOFError(f"it has more than {_MAX_MEMBERS} members")
        if len(rest) < _PIECE_BYTES:
            rest, given = rest + data[given : given + _PIECE_BYTES], given + _PIECE_BYTES
        piece = inflater.decompress(rest, _PIECE_BYTES)
        rest = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
        if not (piece or rest or inflater.eof or given < len(data)):
            raise EOFError("it is cut short")
        yield piece


def _bits(data: bytes, coding: str) -> int:
    if coding != "deflate":
        return _GZIP
    return _ZLIB if data[:1] and data[0] & 0xF == 8 else _RAW  # some clients omit zlib's header


def _too_much(coding: str, most: int) -> ApiError:
    message = (
        f"the body inflates to more than {most} bytes ({coding}: to {MAX_TIMES} times its size or {ALWAYS_BYTES} bytes, and to no "
        "more than a plain body has); send it as it is, or send less"
    )
    return ApiError(413, message, code="body_too_large")


# ---- Bounds of a body's JSON, whose objects take many times its bytes.

MAX_PARTS = 1 << 18  # lists, objects, texts and names: 50,000 messages of a chat
MAX_VALUES = 1 << 21  # entries of lists and objects: token ids
MAX_FIELDS = 1024  # top-level fields
_JSON_PIECE_BYTES = 4 << 20  # per call
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'[{,"')


def check_bounds(body: bytes) -> None:
    """Raise ApiError(413) for too much JSON; other text may pass."""
    marks = b"".join(map(_marks, _json_pieces(body)))
    texts = marks.count(b'"') // 2
    if texts <= MAX_PARTS:
        marks = _STRINGS.sub(b"", marks)
        lists = marks.count(b"[") + marks.count(b"{")
        if texts + lists <= MAX_PARTS and lists + marks.count(b",") <= MAX_VALUES:
            return
    message = (
        f"the body holds more than {MAX_PARTS} lists, objects and texts, or more than {MAX_VALUES} values; "
        "send less in one request"
    )
    raise ApiError(413, message, code="body_too_large")


def check_fields(fields: Collection[str]) -> None:
    """Raise ApiError(400) for too many fields."""
    if len(fields) > MAX_FIELDS:
        raise ApiError(400, f"the body has {len(fields)} fields; at most {MAX_FIELDS} are read")


def _json_pieces(body: bytes) -> list[bytes]:
    """Split, but not after an escaping backslash."""
    pieces, start = [], 0
    while start < len(body):
        piece = body[start : start + _JSON_PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the last one is an escape
            piece = body[start : start + len(piece) + 1]
        pieces.append(piece)
        start += len(piece)
    return pieces


def _marks(piece: bytes) -> bytes:
    if b"\\" in piece:
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
    return piece.translate(None, _NO_MARKS)
