"""Translates SGLang's and vLLM's flags before argparse. Pure.

Flags in `known` are ours; unknown ones pass, as argparse names the nearest.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

_V = TypeVar("_V")


class Values(Enum):
    """The number of words after a flag."""

    NONE = 0
    ONE = 1
    MANY = 2


@dataclass(frozen=True)
class Ignored:
    """A flag without effect; `why` completes the warning."""

    why: str
    values: Values = Values.NONE


@dataclass(frozen=True)
class Renamed:
    """A flag that becomes the words `to`, before its values."""

    to: tuple[str, ...]
    values: Values = Values.NONE


@dataclass(frozen=True)
class Fixed:
    """A flag whose only valid value is `same`; `why` completes the error."""

    same: tuple[str, ...]
    why: str
    values: Values = Values.ONE


@dataclass(frozen=True)
class RenamedValue:
    """A flag whose value becomes words of ours; `why` completes the error of any other value."""

    words: Mapping[str, tuple[str, ...]]
    why: str
    values: Values = Values.ONE


@dataclass(frozen=True)
class Missing:
    """A refused flag; `why` completes the error."""

    why: str


Entry = Ignored | Renamed | Fixed | RenamedValue | Missing


def each(value: _V, names: str) -> dict[str, _V]:
    """`names` stand apart by white space."""
    return dict.fromkeys(names.split(), value)


@dataclass(frozen=True)
class ForeignFlags:
    """Flags of another server. `families` are prefixes of further refused ones."""

    flags: Mapping[str, Entry]
    families: Mapping[str, str]

    def find(self, name: str) -> Entry | None:
        if name in self.flags:
            return self.flags[name]
        bare = name.replace("--no-", "--", 1)
        return next((Missing(why) for start, why in self.families.items() if bare.startswith(start)), None)


@dataclass(frozen=True)
class Translated:
    argv: list[str]
    warnings: list[str]


class CannotFollow(ValueError):
    """A refused flag, with the reason."""


def translate(argv: Sequence[str], *, known: Collection[str], foreign: ForeignFlags) -> Translated:
    words, done = deque(argv), Translated([], [])
    while words:
        word = words.popleft()
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        entry = None if name in known or not name.startswith("-") else foreign.find(dashed)
        if dashed in known and name.startswith("--"):
            done.argv.append(dashed + equals + value)
        elif entry is None:
            done.argv.append(word)
        else:
            _follow(dashed, entry, [value] if equals else _values(dashed, entry, words), done)
    return done


def _follow(name: str, entry: Entry, values: list[str], done: Translated) -> None:
    match entry:
        case Ignored(why):
            done.warnings.append(f"{name} is ignored: {why}")
        case Renamed(to):
            done.argv.extend([*to, *values])
        case Fixed(same, why):
            if values[0].lower() not in same:
                raise CannotFollow(
                    f"{name}: {why}; got {values[0]!r}, and {' or '.join(same)} is what this server does"
                )
        case RenamedValue(words, why):
            if values[0] not in words:
                raise CannotFollow(f"{name}: {why}; got {values[0]!r}, and {', '.join(words)} are known")
            done.argv.extend(words[values[0]])
        case Missing(why):
            raise CannotFollow(f"{name}: {why}")


def _values(name: str, entry: Entry, words: deque[str]) -> list[str]:
    count = Values.NONE if isinstance(entry, Missing) else entry.values
    taken: list[str] = []
    while words and not words[0].startswith("--") and (count is Values.MANY or len(taken) < count.value):
        taken.append(words.popleft())
    if not taken and count is not Values.NONE:
        raise CannotFollow(f"{name}: expected one argument")
    return taken
