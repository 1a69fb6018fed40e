"""Bodies of clients' requests: their base class, strict reading, and errors that name the field."""

import json
import math
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple, TypeGuard, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import CoreSchema, ErrorDetails

from service.http.errors import ApiError, bad_field, decode_body

B = TypeVar("B", bound="Body")

MAX_INT_DIGITS = 4300  # of a number in JSON, as in Python


def _fail_fast(schema: Any) -> None:
    """Millions of wrong entries would each become an error."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class Body(BaseModel):
    """A JSON object that a client sends, or a part of one. Unknown fields are in `model_extra`.

    Values are not converted: "1" is no number. Only the first wrong entry of a list is reported.
    """

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


def optional(description: str, *examples: Any, **more: Any) -> Any:
    """A field that a client may leave out, null by default. `more`: pydantic's options of a field."""
    default = {} if "default_factory" in more else {"default": None}
    return Field(**{**default, **more}, description=description, examples=list(examples))


def field_types(body: type[Body]) -> dict[str, Any]:
    """Types of the fields by their names in JSON."""
    return {field.alias or name: field.annotation for name, field in body.model_fields.items()}


def plain(value: Any) -> Any:
    """A body as JSON values, without unknown fields."""
    if isinstance(value, Body):
        fields = type(value).model_fields.items()
        return {field.alias or name: plain(getattr(value, name)) for name, field in fields}
    return [plain(item) for item in value] if isinstance(value, list) else value


def types_in(hint: Any) -> list[Any]:
    """Members of a union, without annotations."""
    if get_origin(hint) is Annotated:
        return types_in(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [one for member in get_args(hint) for one in types_in(member)]
    return [hint]


def is_body(hint: Any) -> TypeGuard[type[Body]]:
    return isinstance(hint, type) and issubclass(hint, Body)


# ---- reading

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
        field = next(_out_of_range(json.loads(data, parse_int=_int), ""), "")
        raise bad_field(field, "number out of range") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"Expected `object`, got `{_KINDS[type(value)]}`")
    return value


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
    deepest = [one for one in faults if not any(_is_inside(other, one) for other in faults)]
    return min(deepest, key=lambda fault: fault.place).error


def _is_inside(inner: _Fault, outer: _Fault) -> bool:
    return len(inner.place) > len(outer.place) and inner.place[: len(outer.place)] == outer.place


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
        elif is_body(taken) and (step in (known := field_types(taken)) or detail["type"] == "extra_forbidden"):
            name, names = str(step), list(value)
            inner = f"{path}.{name}".removeprefix(".")
            if name not in known:
                error = bad_field(inner, _UNKNOWN, code="unsupported_parameter")
                return _Fault((*place, names.index(name)), inner, error)
            if name not in value:
                text = f"object missing required field `{name}`"
                shown = f"{inner}: {text}" if path else text.capitalize()
                return _Fault((*place, math.inf), inner, ApiError(400, shown, field=inner))
            place, path = [*place, names.index(name)], inner
            value, hint = value[name], known[name]
        elif step == "[key]":
            path = path.removesuffix("[...]")
            return _Fault(tuple(place), path, bad_field(path, "expected `int`, got `str`"))
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


# ---- JSON schemas


class _Schema(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # the name again


def schemas_of(bodies: Sequence[type[Body]], *, refs: str) -> dict[str, Any]:
    """Schemas by name, of the bodies and what is in them. `refs`: a reference to {model}."""
    found = models_json_schema([(body, "validation") for body in bodies], ref_template=refs, schema_generator=_Schema)
    schemas: dict[str, Any] = found[1].get("$defs", {})
    return schemas
