"""Typed fields of a checkpoint's JSON files."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.flags import ConfigError


class Fields:
    """A JSON object; errors name file and field."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def error(self, name: str, message: str) -> ConfigError:
        return ConfigError(f"{self._path}: {name}: {message}")

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def values(self) -> dict[str, Any]:
        return dict(self._values)

    def with_values(self, **values: Any) -> "Fields":
        return Fields(self._path, {**self._values, **values})

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        return Fields(self._path, {**defaults, **self._values})

    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def inside(self, name: str) -> "Fields":
        """The object in field `name`, empty if absent or null."""
        value = self.get(name) or {}
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, got {value!r}")
        return Fields(self._path, value)

    def count(self, name: str, *, default: int | None = None, most: int | None = None) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, f"must be a positive integer, got {value!r}")
        if most is not None and value > most:
            raise self.error(name, f"must be at most {most}, got {value}")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(name, f"must be a number, got {value!r}")
        return float(value)

    def positive_numbers(self, name: str, *, count: int) -> tuple[float, ...]:
        value = self._value(name, None)
        numbers = isinstance(value, list) and all(isinstance(v, int | float) and 0 < v < math.inf for v in value)
        if not numbers or len(value) != count:
            raise self.error(name, f"must be a list of {count} positive numbers")
        return tuple(float(v) for v in value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {value!r}")
        return value

    def text(self, name: str, *, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, got {value!r}")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "is missing; is this a complete Hugging Face checkpoint?")
        return value


def read_fields(path: Path, *, required: bool) -> Fields:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return Fields(path, {})
        raise ConfigError(
            f"{path}: missing; --model-path must hold config.json, *.safetensors and tokenizer.json"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; check the path and its permissions") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: is not JSON; download the file again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must be a JSON object; download the file again")
    return Fields(path, value)
