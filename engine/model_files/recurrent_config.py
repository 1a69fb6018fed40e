"""Recurrent layer configuration."""

import math
from dataclasses import dataclass, replace

from engine.model_files.fields import Fields, read_multipliers

RECURRENT, FULL = "linear_attention", "full_attention"
OTHER_NAMES = {"mamba": RECURRENT, "attention": FULL}  # older names
MAX_TAPS = 8  # limit of the C kernel's convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Gated DeltaNet in `layers`. Value head h reads key head h // (value_heads / key_heads).

    `taps`: of the convolution. `by_key_head`: rows of q, k, v and gates are grouped by key head
    (Qwen3-Next).
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_key_head: bool

    beside_attention = False

    def tp_problem(self, size: int) -> str | None:
        return None if self.key_heads % size == 0 else f"does not divide the {self.key_heads} key heads"

    def sizes(self) -> dict[str, int]:
        return {"linear_num_value_heads * linear_value_head_dim": self.value_heads * self.value_dim}

    @property
    def group(self) -> int:
        return self.value_heads // self.key_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """Mamba2 in `layers`, parallel to attention with `beside_attention`. A group shares B and C.

    `taps`: of the convolution. `norm`: "gate first", "norm first" or "". `limits`: of time.
    `factors`: per part of the input product, empty for 1; `out_factor`: of the output product.
    """

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    conv_bias: bool
    norm: str
    limits: tuple[float, float]
    beside_attention: bool = False
    factors: tuple[float, ...] = ()
    out_factor: float = 1.0

    def tp_problem(self, size: int) -> str | None:
        """More ranks than groups replicate B and C, unless a norm spans a group."""
        if self.groups % size == 0:
            return None
        if self.norm:
            return f"does not divide the {self.groups} groups of heads, over which there is a norm,"
        copies = size % self.groups == 0 and self.heads % size == 0
        return None if copies else f"does not fit the {self.heads} heads in {self.groups} groups"

    def sizes(self) -> dict[str, int]:
        return {"mamba_n_heads * mamba_d_head": self.heads * self.head_dim}


RecurrentConfig = DeltaConfig | MambaConfig


def read_granite_mamba(fields: Fields, num_layers: int) -> MambaConfig:
    return _mamba(fields, _recurrent_layers(fields, num_layers), norm="gate first")


def read_falcon_mamba(fields: Fields, num_layers: int) -> MambaConfig:
    norm = ""
    if fields.flag("mamba_rms_norm", default=False):
        norm = "norm first" if fields.flag("mamba_norm_before_gate", default=True) else "gate first"
    inner = None if fields.get("mamba_d_ssm") is None else fields.count("mamba_d_ssm")
    into = fields.number("ssm_in_multiplier", default=1.0)
    return replace(
        _mamba(fields, tuple(range(num_layers)), norm=norm, inner=inner),
        beside_attention=True,
        factors=tuple(into * factor for factor in read_multipliers(fields, "ssm_multipliers", count=5)),
        out_factor=fields.number("ssm_out_multiplier", default=1.0),
    )


def _mamba(fields: Fields, layers: tuple[int, ...], *, norm: str, inner: int | None = None) -> MambaConfig:
    """`inner`: values of all heads; default `mamba_expand` times the hidden size."""
    if fields.flag("mamba_proj_bias", default=False):
        raise fields.error("mamba_proj_bias", "a bias in Mamba's products is not supported")
    heads, groups = fields.count("mamba_n_heads", default=128), fields.count("mamba_n_groups", default=1)
    if inner is None:
        inner = int(fields.number("mamba_expand", default=2) * fields.count("hidden_size"))
    if inner % heads or heads % groups:
        raise fields.error("mamba_n_heads", f"{heads} heads of {inner} values in {groups} groups; each needs as many")
    head_dim = fields.get("mamba_d_head", "auto")
    if head_dim not in ("auto", None, inner // heads):
        raise fields.error(
            "mamba_d_head", f"{head_dim!r} in place of {inner // heads}, {inner} values of {heads} heads"
        )
    return MambaConfig(
        layers=layers,
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state_dim=fields.count("mamba_d_state", default=256),
        taps=_taps(fields, "mamba_d_conv"),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        norm=norm,
        limits=_limits(fields),
    )


def _limits(fields: Fields) -> tuple[float, float]:
    limits = fields.get("time_step_limit") or [0.0, math.inf]
    numbers = isinstance(limits, list) and len(limits) == 2 and all(isinstance(limit, int | float) for limit in limits)
    if not numbers or not 0 <= limits[0] < limits[1]:
        raise fields.error("time_step_limit", f"must be two numbers, the lower one first, got {limits!r}")
    return float(limits[0]), float(limits[1])


def _taps(fields: Fields, name: str) -> int:
    taps = fields.count(name, default=4)
    if not 2 <= taps <= MAX_TAPS:
        raise fields.error(name, f"{taps} is not supported; 2 to {MAX_TAPS} are")
    return taps


def read_delta(fields: Fields, num_layers: int, *, by_key_head: bool = False) -> DeltaConfig:
    delta = DeltaConfig(
        layers=_recurrent_layers(fields, num_layers),
        key_heads=fields.count("linear_num_key_heads", default=16),
        value_heads=fields.count("linear_num_value_heads", default=32),
        key_dim=fields.count("linear_key_head_dim", default=128),
        value_dim=fields.count("linear_value_head_dim", default=128),
        taps=_taps(fields, "linear_conv_kernel_dim"),
        by_key_head=by_key_head,
    )
    if delta.value_heads % delta.key_heads:
        raise fields.error(
            "linear_num_value_heads", f"{delta.value_heads} is not a multiple of linear_num_key_heads {delta.key_heads}"
        )
    return delta


def _recurrent_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    every = fields.count("full_attention_interval", default=4)
    kinds = (
        fields.get("layer_types")
        or fields.get("layers_block_type")
        or [FULL if (i + 1) % every == 0 else RECURRENT for i in range(num_layers)]
    )
    if isinstance(kinds, list):
        kinds = [OTHER_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*kinds} <= {RECURRENT, FULL}:
        raise fields.error("layer_types", f"must name {num_layers} layers, each {RECURRENT} or {FULL}")
    if FULL not in kinds:
        raise fields.error("layer_types", f"names no {FULL} layer; a model without KV is not supported")
    return tuple(index for index, kind in enumerate(kinds) if kind == RECURRENT)
