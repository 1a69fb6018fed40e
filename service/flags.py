"""Flags as fields of frozen dataclasses (CLI: deploy/flags.py)."""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

_METADATA = "flag"


class ConfigError(ValueError):
    """A wrong flag or file, with the remedy, on one line."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlagSpec:
    """Properties of a flag beyond name, type and default.

    unit: "s" for seconds, in a field that ends in `_s`    option: public name, if irregular
    above, least, most, below: of the number, or of each in a tuple
    special: values with a meaning of their own
    by_hand: no flag, or one that the command parses
    refused: values of other servers, each with the remedy
    """

    help: str
    choices: tuple[str, ...] | None = None
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unit: str | None = None
    above: float | None = None
    least: float | None = None
    most: float | None = None
    below: float | None = None
    special: Mapping[float, str] = dataclasses.field(default_factory=dict)
    option: str | None = None
    by_hand: bool = False

    def holds(self, value: float) -> bool:
        """Return whether a number is in range or special (nan: not)."""
        return value in self.special or (
            value == value
            and (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def refusal(self, value: Any) -> str | None:
        """Return why another server's value is refused, if so."""
        remedy = self.refused.get(value) if isinstance(value, str) else None
        return None if remedy is None else f"{value} is not served here: {remedy}"

    def bounds(self) -> str:
        """A text such as "above 0 and at most 1"."""
        if self.least is not None and self.most is not None:
            return f"{shown(self.least)} to {shown(self.most)}"
        lower = [f"above {shown(self.above)}"] if self.above is not None else []
        lower += [f"at least {shown(self.least)}"] if self.least is not None else []
        upper = [f"at most {shown(self.most)}"] if self.most is not None else []
        upper += ["finite" if self.below == math.inf else f"below {shown(self.below)}"] if self.below else []
        return " and ".join(lower + upper)

    def meanings(self) -> list[str]:
        return [f"{shown(value)}: {meaning}" for value, meaning in self.special.items()]


def flag(default: Any, help: str, **spec: Any) -> Any:
    return dataclasses.field(default=default, metadata={_METADATA: FlagSpec(help=help, **spec)})


def setting(default: Any, help: str, **spec: Any) -> Any:
    """Declare a field that no flag sets, with a `FlagSpec`: a test gives it."""
    return flag(default, help, by_hand=True, **spec)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlagSet:
    """Base of configs. Raises ConfigError."""

    topic: ClassVar[str] = ""  # group of its own fields in --help; "": the command names it

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for item in value if isinstance(value, tuple) else (value,):
                if item is not None and (wrong := _wrong(spec_of(field), item)) is not None:
                    default = "" if field.default in (None, (), "") else f"; the default is {shown(field.default)}"
                    raise ConfigError(f"{option_of(field)}: {wrong}{default}")


def spec_of(field: "dataclasses.Field[Any]") -> FlagSpec:
    spec = field.metadata[_METADATA]
    assert isinstance(spec, FlagSpec)
    return spec


def topic_of(config_class: type[FlagSet], name: str) -> str:
    owner = next(base for base in config_class.__mro__ if name in vars(base).get("__annotations__", ()))
    return str(vars(owner).get("topic", ""))


def option_of(field: "dataclasses.Field[Any]") -> str:
    """`--name-of-the-field`, without the `_s` of seconds."""
    spec = spec_of(field)
    if spec.option is not None:
        return spec.option
    name = field.name.removesuffix("_s") if spec.unit == "s" else field.name
    return "--" + name.replace("_", "-")


def values_by_name(config: Any) -> dict[str, Any]:
    """Values by flag name, for /server_info."""
    return {
        option_of(field).removeprefix("--").replace("-", "_"): getattr(config, field.name)
        for field in dataclasses.fields(config)
    }


def _wrong(spec: FlagSpec, value: Any) -> str | None:
    if (refusal := spec.refusal(value)) is not None:
        return refusal
    if spec.choices is not None and value not in spec.choices:
        return f"must be one of {', '.join(spec.choices)}, got {value!r}"
    if isinstance(value, int | float) and not isinstance(value, bool) and not spec.holds(value):
        special = "; ".join(spec.meanings())
        return f"must be {spec.bounds()}{f' ({special})' if special else ''}, got {shown(value)}"
    return None


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- The installed version.

PACKAGE = "tandem-serve"


@cache
def installed_version() -> str:
    """The version by pip, "unknown" if not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown"


# ---- Names of models in requests.

LATEST = ":latest"


def untagged(name: str) -> str:
    """Drop the tag that Ollama's clients add."""
    return name.removesuffix(LATEST)


def nearest(name: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """A question with the nearest `known` name, else `otherwise`."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else otherwise
