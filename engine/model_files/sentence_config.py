"""Pooling of sentence-transformers (modules.json)."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.flags import ConfigError

FILE = "modules.json"
_KNOWN = ("Transformer", "Pooling", "Normalize")
_MODES = {"mean": "mean", "lasttoken": "last"}  # their names -> ours
_OLD_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken"}
_OLD_PREFIX = "pooling_mode_"


@dataclass(frozen=True, slots=True)
class Pooling:
    """How vectors are pooled. `mode`: "mean" or "last". `unit`: scale to unit length."""

    mode: str
    unit: bool


def read_pooling(folder: Path) -> Pooling | None:
    """None for other models. Raises ConfigError."""
    path = folder / FILE
    if not folder.is_dir() or not path.is_file():
        return None
    modules = _read(path)
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ConfigError(f"{path}: must be a list of modules; download the file again")
    kinds = [str(one.get("type", "")).rpartition(".")[2] for one in modules]
    if "Pooling" not in kinds:
        return None
    for kind in kinds:
        if kind not in _KNOWN:
            raise ConfigError(f"{path}: module {kind} is not supported; supported: {', '.join(_KNOWN)}")
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(f"{path}: modules must be {', '.join(_KNOWN)}, in this order, got {', '.join(kinds)}")
    place = str(modules[1].get("path", ""))
    if not re.fullmatch(r"\w+", place):
        raise ConfigError(f"{path}: path {place!r} of Pooling must be the name of a folder beside it")
    return Pooling(_mode(folder / place / "config.json"), unit="Normalize" in kinds)


def _mode(path: Path) -> str:
    fields = _read(path)
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: must be a JSON object; download the file again")
    given = fields.get("pooling_mode")
    if given is None:
        given = [_OLD_MODES.get(name, name) for name in fields if name.startswith(_OLD_PREFIX) and fields[name] is True]
    modes = given if isinstance(given, list) else [given]
    if len(modes) != 1 or modes[0] not in _MODES:
        shown = ", ".join(map(str, modes)) or "none"
        raise ConfigError(
            f"{path}: pooling_mode: {shown} is not supported; one of {', '.join(_MODES)} is (the first token of a decoder sees no other)"
        )
    return _MODES[modes[0]]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise ConfigError(f"{path}: is not readable JSON; download the file again") from None
