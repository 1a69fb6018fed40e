"""The model's head: token logits, labels or none."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model_files.directory import other_kind
from engine.model_files.families import FAMILIES, Family
from engine.model_files.fields import Fields
from engine.model_files.vision_config import VISION_FAMILIES
from service.flags import ConfigError

# ---- Pooling of sentence-transformers (modules.json).

FILE = "modules.json"
_KNOWN = ("Transformer", "Pooling", "Normalize")
_MODES = {"mean": "mean", "lasttoken": "last"}  # their names -> ours
_OLD_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken"}
_OLD_PREFIX = "pooling_mode_"


def read_pooling(folder: Path) -> tuple[str, bool] | None:
    """`pooling` and `unit` of HeadConfig; None for other models. Raises ConfigError."""
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
    return _mode(folder / place / "config.json"), "Normalize" in kinds


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


TOKENS, LABELS, NOTHING = "tokens", "labels", "nothing"
_KINDS = {"ForCausalLM": TOKENS, "ForSequenceClassification": LABELS, "Model": NOTHING}


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A model's head. `kind`: TOKENS, LABELS or NOTHING (pooled vectors). `labels`: names.

    `pooling`: "mean" or "last", as in sentence-transformers. `unit`: scale to unit length.
    """

    kind: str = TOKENS
    labels: tuple[str, ...] = ()
    pooling: str = "last"
    unit: bool = True


TOKEN_HEAD = HeadConfig()


def read_family(fields: Fields) -> tuple[str, Family, str]:
    """(architecture, family, head kind). Raises ConfigError.

    Dense families also have classifiers and headless models.
    """
    names = fields.get("architectures")
    known = ", ".join(sorted([*FAMILIES, *VISION_FAMILIES]))
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise other_kind(fields, []) or fields.error("architectures", f"must name the model class; supported: {known}")
    for name in names:
        if (found := _found(name)) is not None:
            return name, *found
    if (other := other_kind(fields, names)) is not None:
        raise other
    raise fields.error(
        "architectures",
        f"{names[0]} is not supported; supported: {known}, and of dense ones ...ForSequenceClassification and ...Model",
    )


def family_of(architecture: str) -> Family:
    found = _found(architecture)
    assert found is not None, architecture
    return found[0]


def _found(architecture: str) -> tuple[Family, str] | None:
    for suffix, kind in _KINDS.items():
        if architecture.endswith(suffix):
            family = FAMILIES.get(f"{architecture.removesuffix(suffix)}ForCausalLM")
            if family is not None and (kind == TOKENS or family.experts is None):
                return family, kind
    return None


def read_head(fields: Fields, kind: str, *, folder: Path) -> HeadConfig:
    if kind == LABELS:
        return HeadConfig(LABELS, _labels(fields))
    pooling = read_pooling(folder)
    if pooling is not None:
        return HeadConfig(NOTHING, (), *pooling)
    return HeadConfig(NOTHING) if kind == NOTHING else TOKEN_HEAD


def _labels(fields: Fields) -> tuple[str, ...]:
    given = fields.get("id2label")
    if given is None:
        return tuple(f"LABEL_{i}" for i in range(fields.count("num_labels", default=2)))
    numbers = [str(i) for i in range(len(given))] if isinstance(given, dict) else []
    if not numbers or set(given) != set(numbers) or not all(isinstance(name, str) for name in given.values()):
        raise fields.error("id2label", "must name the labels 0, 1, ... of the classifier")
    return tuple(given[number] for number in numbers)
