"""Unknown fields inside body objects, such as `stream_options.foo`. Pure.

Open types (`dict`, `Any`) are not checked.
"""

import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, Union, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo

from service.http.json_depth import decode_or_none


def strict(body: type[msgspec.Struct], inside: Collection[str] = ()) -> Any:
    """`body` without unknown fields, also in its fields `inside`."""
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
