"""Users' names of live samples and groups, unique over a worker's frontends."""

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from engine.frontend.client.shared_requests import SharedRequests
from service.http.errors import ApiError, bad_field

MAX_RID_CHARS = 256


class Name(NamedTuple):
    """Name of a request. `owner`: empty without key."""

    owner: str
    text: str


class LiveNames:
    """Names of running requests. `shared`: with other frontends, if any."""

    def __init__(self, shared: SharedRequests | None) -> None:
        self._shared = shared
        self._rids: dict[Name, list[str]] = {}  # wire names

    def check(self, samples: Sequence[Name], groups: Iterable[Name]) -> None:
        """Raises ApiError(400) for a duplicate, invalid or used name."""
        if len(set(samples)) < len(samples):
            raise bad_field("rid", "the same id is given twice")
        for name in sorted({*samples, *groups}):
            if not 0 < len(name.text) <= MAX_RID_CHARS:
                raise bad_field("rid", f"must have 1 to {MAX_RID_CHARS} characters")
            if name in self._rids:
                raise _in_use(name)

    def claim(self, names: Iterable[Name]) -> None:
        """Claim all names over frontends, or none. Raises ApiError(400)."""
        if self._shared is None:
            return
        claimed: list[Name] = []
        for name in set(names):
            if not self._shared.claim(_in_file(name)):
                for taken in claimed:
                    self._shared.release(_in_file(taken))
                raise _in_use(name)
            claimed.append(name)

    def add(self, name: Name, wire_rid: str) -> None:
        self._rids.setdefault(name, []).append(wire_rid)

    def of(self, text: str, owner: str | None) -> Sequence[str]:
        """Wire names. `owner` None: any."""
        if owner is not None:
            return self._rids.get(Name(owner, text), ())
        return [rid for name, rids in self._rids.items() if name.text == text for rid in rids]

    def leave(self, name: Name, gone: Container[str]) -> None:
        """Remove the samples `gone`; the last one frees the name."""
        left = [rid for rid in self._rids.get(name, ()) if rid not in gone]
        if left:
            self._rids[name] = left
            return
        self._rids.pop(name, None)
        if self._shared is not None:
            self._shared.release(_in_file(name))


def _in_file(name: Name) -> str:
    return "/".join(name)


def _in_use(name: Name) -> ApiError:
    return bad_field("rid", f"a request with id {name.text!r} is running")
