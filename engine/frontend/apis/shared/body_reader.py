"""Request bodies: fields are known, rejected because unsupported, or ignored by name.

A strict type decodes most bodies; names are checked only if that fails, also inside fields such as
`tools` (inner_fields.py).
"""

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web

from engine.frontend.apis.shared.ids_only import check_ids_only
from engine.frontend.apis.shared.inner_fields import strict, unknown_inside
from engine.frontend.apis.shared.resumable import take_resume
from engine.frontend.ignored_fields import IGNORED_HEADER, shown
from engine.frontend.services import SERVICES
from service.aside import BODIES
from service.http.errors import ApiError, bad_field, decode_body
from service.http.json_bounds import MOST_FIELDS, check_fields
from service.http.json_depth import decode_or_none
from service.http.stream import EXTRA_HEADERS

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

    async def read(self, request: web.BaseRequest) -> T:
        """Raises ApiError(400)."""
        data, names = await request.read(), request[SERVICES].model.template_names
        body, ignored = await BODIES.run(lambda: self.decode(take_resume(request, data), names), size=len(data))
        if ignored:
            extra = request[EXTRA_HEADERS] | {IGNORED_HEADER: shown(ignored)}
            request[EXTRA_HEADERS] = extra
            request[SERVICES].ignored.note(request.path, ignored)
        check_ids_only(request[SERVICES], body)
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
        ignored = list(self._unknown(fields))[:MOST_FIELDS]
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


async def beside_loop(request: web.BaseRequest, work: Callable[[], R]) -> R:
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
