"""The users' names of live samples and groups: each has one place among the frontends of a worker."""

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from engine.frontend.client.shared_requests import SharedRequests
from service.http.errors import ApiError, bad_field

MAX_RID_CHARS = 256


class Name(NamedTuple):
    """`owner`: what may use it; "": all without a key."""

    owner: str
    text: str


class LiveNames:
    """`shared`: with the other frontends of the worker; None: there are none."""

    def __init__(self, shared: SharedRequests | None) -> None:
        self._shared = shared
        self._rids: dict[Name, list[str]] = {}  # names on the wire

    def check(self, samples: Sequence[Name], groups: Iterable[Name]) -> None:
        """Raises ApiError(400) for a name that no new request may have."""
        if len(set(samples)) < len(samples):
            raise bad_field("rid", "the same id is given twice")
        for name in sorted({*samples, *groups}):
            if not 0 < len(name.text) <= MAX_RID_CHARS:
                raise bad_field("rid", f"must have 1 to {MAX_RID_CHARS} characters")
            if name in self._rids:
                raise _in_use(name)

    def claim(self, names: Iterable[Name]) -> None:
        """Take the names from all frontends, or none of them. Raises ApiError(400)."""
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
        """Names on the wire. `owner`: None: of all."""
        if owner is not None:
            return self._rids.get(Name(owner, text), ())
        return [rid for name, rids in self._rids.items() if name.text == text for rid in rids]

    def leave(self, name: Name, gone: Container[str]) -> None:
        """Forget the samples `gone`; with its last one the name is free."""
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
