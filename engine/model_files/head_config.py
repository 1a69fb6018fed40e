"""The model's head: token logits, labels or none."""

from dataclasses import dataclass
from pathlib import Path

from engine.model_files.families import FAMILIES, Family
from engine.model_files.fields import Fields
from engine.model_files.other_kinds import other_kind
from engine.model_files.sentence_config import read_pooling
from engine.model_files.vision_families import VISION_FAMILIES

TOKENS, LABELS, NOTHING = "tokens", "labels", "nothing"
_KINDS = {"ForCausalLM": TOKENS, "ForSequenceClassification": LABELS, "Model": NOTHING}


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A model's head.

    `kind`: TOKENS, LABELS or NOTHING (pooled vectors). `labels`: names. `pooling`: "mean" or
    "last", as in sentence-transformers. `unit`: scale to unit length.
    """

    kind: str = TOKENS
    labels: tuple[str, ...] = ()
    pooling: str = "last"
    unit: bool = True


TOKEN_HEAD = HeadConfig()


def read_family(fields: Fields) -> tuple[str, Family, str]:
    """Return (architecture, family, head kind). Raises ConfigError.

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
        return HeadConfig(NOTHING, pooling=pooling.mode, unit=pooling.unit)
    return HeadConfig(NOTHING) if kind == NOTHING else TOKEN_HEAD


def _labels(fields: Fields) -> tuple[str, ...]:
    given = fields.get("id2label")
    if given is None:
        return tuple(f"LABEL_{i}" for i in range(fields.count("num_labels", default=2)))
    numbers = [str(i) for i in range(len(given))] if isinstance(given, dict) else []
    if not numbers or set(given) != set(numbers) or not all(isinstance(name, str) for name in given.values()):
        raise fields.error("id2label", "must name the labels 0, 1, ... of the classifier")
    return tuple(given[number] for number in numbers)
