"""Typed fields of a checkpoint's JSON files."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
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

    def number(self, name: str, *, default: float | None = None, above: float = -math.inf) -> float:
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(name, f"must be a number, got {value!r}")
        if value <= above:
            raise self.error(name, f"must be above {above:g}, got {value:g}")
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

    def architecture(self) -> str:
        """The first model class, empty if none is named."""
        names = self.get("architectures")
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""

    def token_ids(self, name: str, *, vocab: int) -> list[int]:
        """The one or several ids in field `name`, none if absent or null."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        return [self.token_id(name, token, vocab=vocab) for token in ids]

    def token_id(self, name: str, value: Any, *, vocab: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab:
            raise self.error(name, f"{value!r} is not a token id (0 to {vocab - 1})")
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


# ---- Multipliers, caps and norms by which families differ from Llama.

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # transformers' names -> ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Arithmetic of a family; the defaults are Llama's.

    norm:             "rms", "layer" (LayerNorm) or "bare" (without weight and bias)
    activation:       "silu" or "gelu_tanh" of a gate; "gelu_tanh alone": no gate
    norm_offset:      RMS norms multiply by weight + norm_offset
    embedding_scale:  rounded to the model's dtype
    residual_scale:   multiplies outputs of attention and MLP
    attention_factor, gate_factor, down_factor: multiply weights of attention output and MLP
    attention_scale:  multiplies q.k; 0: head_dim ** -0.5
    score_cap:        cap * tanh(score / cap) of attention scores; 0: none
    sinks:            attention sinks, a score per query head
    clip:             q, k and v are clamped to -clip..clip before RoPE; 0: not
    logit_scale, logit_cap: multiplies and soft-caps logits
    """

    norm: str = "rms"
    activation: str = "silu"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_factor: float = 1.0
    gate_factor: float = 1.0
    down_factor: float = 1.0
    attention_scale: float = 0.0
    score_cap: float = 0.0
    sinks: bool = False
    clip: float = 0.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0

    @property
    def is_gated(self) -> bool:
        return not self.activation.endswith(" alone")


PLAIN = Arithmetic()


def read_plain(fields: Fields, **more: Any) -> Arithmetic:
    return Arithmetic(activation=_activation(fields), **more)


def read_olmo(fields: Fields) -> Arithmetic:
    return read_plain(fields, norm="bare", clip=_cap(fields, "clip_qkv"))


def read_phi(fields: Fields) -> Arithmetic:
    if fields.flag("qk_layernorm", default=False):
        raise fields.error("qk_layernorm", "LayerNorm of q and k is not supported")
    if (name := fields.text("hidden_act", default="gelu_new")) not in ("gelu_new", "gelu_pytorch_tanh"):
        raise fields.error("hidden_act", f"{name} is not supported; this architecture has gelu_new")
    return Arithmetic(norm="layer", activation="gelu_tanh alone")


def read_gemma(fields: Fields) -> Arithmetic:
    if fields.get("hidden_activation") is None and fields.get("hidden_act") == "gelu":
        fields = fields.with_values(hidden_act="gelu_pytorch_tanh")  # the meaning of Gemma 1's first files
    scalar = _cap(fields, "query_pre_attn_scalar")
    return read_plain(
        fields,
        norm_offset=1.0,
        embedding_scale=math.sqrt(fields.count("hidden_size")),
        attention_scale=0.0 if scalar == 0 else scalar**-0.5,
        score_cap=_cap(fields, "attn_logit_softcapping"),
        logit_cap=_cap(fields, "final_logit_softcapping"),
    )


def read_granite(fields: Fields) -> Arithmetic:
    return read_plain(
        fields,
        embedding_scale=_multiplier(fields, "embedding_multiplier"),
        residual_scale=_multiplier(fields, "residual_multiplier"),
        attention_scale=_multiplier(fields, "attention_multiplier"),
        logit_scale=1.0 / _multiplier(fields, "logits_scaling"),
    )


def read_falcon(fields: Fields) -> Arithmetic:
    """Fold multipliers of q, k and v into score scale and output."""
    if fields.flag("attention_bias", default=False) or fields.flag("projectors_bias", default=False):
        raise fields.error("attention_bias", "biases of attention and Mamba are not supported")
    into, key = _multiplier(fields, "attention_in_multiplier"), _multiplier(fields, "key_multiplier")
    gate, down = read_multipliers(fields, "mlp_multipliers", count=2)
    head_dim = fields.count("head_dim", default=fields.count("hidden_size") // fields.count("num_attention_heads"))
    return read_plain(
        fields,
        embedding_scale=_multiplier(fields, "embedding_multiplier"),
        attention_factor=into * _multiplier(fields, "attention_out_multiplier"),
        gate_factor=gate,
        down_factor=down,
        attention_scale=head_dim**-0.5 * into**2 * key,
        logit_scale=_multiplier(fields, "lm_head_multiplier"),
    )


def read_multipliers(fields: Fields, name: str, *, count: int) -> tuple[float, ...]:
    return (1.0,) * count if fields.get(name) is None else fields.positive_numbers(name, count=count)


def _activation(fields: Fields) -> str:
    name = "hidden_act" if fields.get("hidden_activation") is None else "hidden_activation"
    value = fields.text(name, default="silu")
    if value not in ACTIVATIONS:
        raise fields.error(name, f"{value} is not supported; supported: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[value]


def _cap(fields: Fields, name: str) -> float:
    return 0.0 if fields.get(name) is None else fields.number(name, above=0)


def _multiplier(fields: Fields, name: str) -> float:
    return fields.number(name, default=1.0, above=0)
