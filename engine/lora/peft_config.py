"""Reads adapter_config.json of a PEFT directory. Never torch.

Rejects unsupported fields that change answers. Names: peft.LoraConfig.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from service.flags import ConfigError

V = TypeVar("V")

CONFIG_FILE = "adapter_config.json"
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")  # MLA
_PHI = ("dense", "fc1", "fc2")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", *_LATENT, *_PHI)
MAX_CONFIG_BYTES = 1 << 20
MAX_NUMBER = 1e30  # above any trained value

# field -> supported values
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (None, False),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []),
}
# initializations that change base weights: such adapters fit another model
_OTHER_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """`ranks`, `alphas`: rank_pattern and alpha_pattern, by suffix of a matrix name."""

    rank: int
    alpha: float
    rslora: bool
    ranks: dict[str, int]
    alphas: dict[str, float]

    def rank_of(self, matrix: str) -> int:
        """`matrix`: such as "model.layers.0.self_attn.q_proj"."""
        return _by_end(self.ranks, matrix, self.rank)

    def scale_of(self, matrix: str) -> float:
        """Factor of B A: alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732)."""
        rank = self.rank_of(matrix)
        return _by_end(self.alphas, matrix, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def read_peft_config(folder: Path) -> PeftConfig:
    """Raises ConfigError that names file and field."""
    file = folder / CONFIG_FILE
    fields = _read(file)
    if fields.get("peft_type", "LORA") != "LORA":
        raise ConfigError(f"{file}: peft_type {fields['peft_type']!r} is not supported; only LORA is")
    for name, fine in _UNSUPPORTED.items():
        if fields.get(name) not in fine:
            raise ConfigError(f"{file}: {name} {fields[name]!r} is not supported; export the adapter without it")
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_OTHER_BASE):
        raise ConfigError(
            f"{file}: init_lora_weights {start!r} changes the base model too; convert the adapter to plain LoRA in PEFT"
        )
    _check_targets(file, fields.get("target_modules"))
    return PeftConfig(
        rank=_rank(file, "r", fields.get("r")),
        alpha=_number(file, "lora_alpha", fields.get("lora_alpha")),
        rslora=fields.get("use_rslora") is True,
        ranks={end: _rank(file, "rank_pattern", r) for end, r in _pattern(file, "rank_pattern", fields).items()},
        alphas={end: _number(file, "alpha_pattern", a) for end, a in _pattern(file, "alpha_pattern", fields).items()},
    )


def _read(file: Path) -> dict[str, Any]:
    if not file.parent.is_dir():
        raise ConfigError(f"{file.parent}: no such directory; give the local directory of a PEFT adapter")
    if file.exists() and not file.is_file():  # a pipe or device has no end
        raise ConfigError(f"{file}: is no file; export the adapter again")
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"{file}: is longer than {MAX_CONFIG_BYTES} bytes; this is no adapter_config.json of PEFT"
            )
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}); is this the directory of a PEFT adapter?"
        ) from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{file}: is not valid JSON; export the adapter again") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{file}: must be a JSON object; export the adapter again")
    return fields


def _check_targets(file: Path, targets: object) -> None:
    if targets is None or isinstance(targets, str):
        return
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise ConfigError(f"{file}: target_modules must be a list of names, got {targets!r}")
    for target in targets:
        if target.rpartition(".")[2] not in TARGETS:
            raise ConfigError(f"{file}: target_modules: {target!r} is not supported; supported: {', '.join(TARGETS)}")


def _pattern(file: Path, field: str, fields: dict[str, Any]) -> dict[str, Any]:
    value = fields.get(field) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: {field} must be an object of names, got {value!r}")
    for end in value:
        if not re.fullmatch(r"[A-Za-z0-9_.]+", end):
            raise ConfigError(f"{file}: {field}: {end!r} is a pattern; only the ends of names are supported")
    return value


def _by_end(values: dict[str, V], matrix: str, default: V) -> V:
    return next((v for end, v in values.items() if f".{matrix}".endswith(f".{end}")), default)


def _rank(file: Path, field: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{file}: {field}: a rank must be a whole number of at least 1, got {value!r}")
    return value


def _number(file: Path, field: str, value: object) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not -MAX_NUMBER <= number <= MAX_NUMBER:
        raise ConfigError(f"{file}: {field}: must be a number, got {str(value)[:40]}")
    return float(number)


# ---- Flags of adapters. Never torch.

MAX_NAME_CHARS = 256


def lora_enabled(enable: bool, paths: Sequence[str]) -> bool:
    return enable or bool(paths)


def named_paths(paths: Sequence[str]) -> dict[str, str]:
    """Map names to directories of `--lora-paths`. Raises ConfigError."""
    named: dict[str, str] = {}
    for entry in paths:
        name, equals, path = entry.partition("=")
        path = path if equals else entry
        if problem := name_problem(name):
            raise ConfigError(f"--lora-paths {entry}: the name {problem}")
        if not path:
            raise ConfigError(f"--lora-paths {entry}: names no directory; write NAME=DIRECTORY")
        if name in named:
            raise ConfigError(f"--lora-paths: two adapters are called {name!r}")
        named[name] = path
    return named


def name_problem(name: str) -> str | None:
    if not 0 < len(name) <= MAX_NAME_CHARS:
        return f"must have 1 to {MAX_NAME_CHARS} characters"
    if not name.isprintable() or name != name.strip():
        return "must be printable, without space around it"
    return None


def check_lora(paths: Sequence[str], *, max_loaded: int | None) -> None:
    """Raise ConfigError for bad names or too many adapters."""
    named = named_paths(paths)
    if max_loaded is not None and len(named) > max_loaded:
        raise ConfigError(f"--lora-paths: {len(named)} adapters are more than --max-loaded-loras {max_loaded}")
