"""RoPE configuration, as in transformers' modeling_rope_utils.

"dynamic" RoPE assumes the maximum length, as in SGLang and vLLM: KV depends on no later token.
"""

import math
from dataclasses import dataclass

from engine.model_files.families import Family, RopeFamily
from engine.model_files.fields import Fields

KINDS = "default, dynamic, linear, llama3, longrope, yarn"
_WIDEN = ("dynamic", "linear", "yarn")  # others' max_position_embeddings include the scaling


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides all frequencies by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: divides low frequencies by `factor`, keeps high, interpolates between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): keeps pairs below `low`, divides those above `high`, with a ramp.

    `low`, `high`: pair indices, may be fractions. `attention_factor` multiplies cos and sin.
    """

    factor: float
    low: float
    high: float
    attention_factor: float


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """Divides the frequency of pair i by `factors[i]`; `attention_factor` multiplies cos and sin.

    LongRoPE (arXiv:2402.13753), and Llama 3.1 in GGUF files.
    """

    factors: tuple[float, ...]
    attention_factor: float = 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """RoPE on the first `dim` of a head. `interleaved`: pairs (0, 1), else (i, i + dim / 2)."""

    theta: float
    dim: int
    interleaved: bool = False
    scaling: Scaling | None = None


def read_rope(
    fields: Fields, *, context: int, head_dim: int, interleaved: bool, default_share: float = 1.0
) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4).

    `default_share`: rotary share of a head. Raises ConfigError.
    """
    name = _name(fields)
    inner = fields.inside(name)
    theta = inner.number("rope_theta", default=fields.number("rope_theta", default=10000.0), above=1)
    dim = _rotary_dim(fields, inner, head_dim=head_dim, default_share=default_share)
    if _kind(inner) == "dynamic":
        theta = _dynamic_theta(fields, name, inner, theta=theta, dim=dim)
    scaling = _scaling(fields, name, inner, theta=theta, dim=dim, context=context)
    return RopeConfig(theta=theta, dim=dim, interleaved=interleaved, scaling=scaling)


def scaled_context(fields: Fields, *, context: int) -> int:
    name = _name(fields)
    inner = fields.inside(name)
    if (kind := _kind(inner)) not in _WIDEN:
        return context
    original = _original(fields, inner, context=context) if kind == "yarn" else context
    factor = _factor(fields, name, inner.number("factor", default=context / original))
    return max(context, int(factor * original))


def softmax_factor(fields: Fields, rope: RopeConfig) -> float:
    """MLA's extra score factor with DeepSeek's YaRN: mscale of all dims, squared."""
    over_all = fields.inside(_name(fields)).number("mscale_all_dim", default=0.0)
    if not isinstance(rope.scaling, YarnScaling) or not over_all:
        return 1.0
    return _mscale(rope.scaling.factor, over_all) ** 2


def _name(fields: Fields) -> str:
    return "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"


def _rotary_dim(fields: Fields, inner: Fields, *, head_dim: int, default_share: float) -> int:
    name = "partial_rotary_factor"
    if fields.get("rotary_dim") is not None:  # MiniMax's name
        default_share = fields.count("rotary_dim", most=head_dim) / head_dim
    share = inner.number(name, default=fields.number(name, default=default_share))
    dim = int(head_dim * share)
    if not 0 < share <= 1 or dim % 2 or dim == 0:
        raise fields.error(name, f"{share:g} of head_dim {head_dim} are {dim} dims; RoPE needs pairs, 2 to {head_dim}")
    return dim


def _scaling(fields: Fields, name: str, inner: Fields, *, theta: float, dim: int, context: int) -> Scaling | None:
    match kind := _kind(inner):
        case "default" | "mrope" | "dynamic":  # "mrope": in older files of Qwen2.5-VL, which have `mrope_section`, too
            return None
        case "factors":  # in GGUF files
            return FrequencyFactors(inner.positive_numbers("factors", count=dim // 2))
        case "linear":
            return LinearScaling(_factor(fields, name, inner.number("factor")))
        case "llama3":
            return _llama3(fields, name, inner, context=context)
        case "yarn":
            return _yarn(fields, name, inner, theta=theta, dim=dim, context=context)
        case "longrope" | "su":  # "su": in the first Phi-3 checkpoints
            return _longrope(fields, inner, dim=dim, context=context)
    raise fields.error(name, f"rope_type {kind} is not supported; supported: {KINDS}")


def _kind(inner: Fields) -> str:
    return inner.text("rope_type", default=inner.text("type", default="default"))


def _dynamic_theta(fields: Fields, name: str, inner: Fields, *, theta: float, dim: int) -> float:
    factor = _factor(fields, name, inner.number("factor"))
    return theta if factor <= 1 or dim <= 2 else float(theta * (factor * factor - factor + 1) ** (dim / (dim - 2)))


def _llama3(fields: Fields, name: str, inner: Fields, *, context: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=inner.number("factor"),
        low_freq_factor=inner.number("low_freq_factor"),
        high_freq_factor=inner.number("high_freq_factor"),
        original_max_position_embeddings=inner.count("original_max_position_embeddings", default=context),
    )
    if min(scaling.factor, scaling.low_freq_factor) <= 0 or scaling.high_freq_factor <= scaling.low_freq_factor:
        raise fields.error(name, "llama3 needs factor > 0 and 0 < low_freq_factor < high_freq_factor")
    return scaling


def _yarn(fields: Fields, name: str, inner: Fields, *, theta: float, dim: int, context: int) -> YarnScaling:
    original = _original(fields, inner, context=context)
    factor = _factor(fields, name, inner.number("factor", default=context / original))
    fast, slow = inner.number("beta_fast", default=32.0), inner.number("beta_slow", default=1.0)
    if not fast > slow > 0:
        raise fields.error(name, f"yarn needs beta_fast > beta_slow > 0, got {fast:g} and {slow:g}")
    low, high = (dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow))
    if inner.flag("truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    return YarnScaling(factor, max(low, 0), min(high, dim - 1), _yarn_attention(inner, factor))


def _yarn_attention(inner: Fields, factor: float) -> float:
    if inner.get("attention_factor") is not None:
        return inner.number("attention_factor")
    mscale, over_all = inner.number("mscale", default=0.0), inner.number("mscale_all_dim", default=0.0)
    if mscale and over_all:
        return _mscale(factor, mscale) / _mscale(factor, over_all)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(fields: Fields, inner: Fields, *, dim: int, context: int) -> FrequencyFactors:
    """Factors of the whole context, as for "dynamic" RoPE."""
    original = _original(fields, inner, context=context)
    factors = inner.positive_numbers("long_factor" if context > original else "short_factor", count=dim // 2)
    factor = inner.number("factor", default=context / original)
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return FrequencyFactors(factors, inner.number("attention_factor", default=attention))


def _original(fields: Fields, inner: Fields, *, context: int) -> int:
    name = "original_max_position_embeddings"
    return inner.count(name, default=fields.count(name, default=context))


def _factor(fields: Fields, name: str, factor: float) -> float:
    if factor <= 0:
        raise fields.error(name, f"factor must be positive, got {factor:g}")
    return factor


# ---- Windows and RoPE by layer.

FULL, SLIDING = "full_attention", "sliding_attention"


def read_kinds(fields: Fields, *, family: Family, num_layers: int) -> list[str]:
    """FULL or SLIDING per layer, from `layer_types` or the family's default."""
    if family.recurrent is not None or family.latent:
        return [FULL] * num_layers  # of layers with KV; recurrent_config.py has the others
    if (kinds := fields.get("layer_types")) is not None:
        if not isinstance(kinds, list) or len(kinds) < num_layers or not {*kinds} <= {FULL, SLIDING}:
            raise fields.error("layer_types", f"must name {num_layers} layers, each {FULL} or {SLIDING}")
        return kinds[:num_layers]
    if family.window_period:
        period = fields.count("sliding_window_pattern", default=family.window_period)
        return [SLIDING if (layer + 1) % period else FULL for layer in range(num_layers)]
    first = fields.get("max_window_layers", 0) if family.gated_window else 0
    if not isinstance(first, int) or first < 0:
        raise fields.error("max_window_layers", f"must be a number of layers, got {first!r}")
    return [FULL if layer < first else SLIDING for layer in range(num_layers)]


def read_windows(fields: Fields, kinds: list[str], *, family: RopeFamily, context: int) -> tuple[int, ...]:
    if family.gated_window and not fields.flag("use_sliding_window", default=False):
        return ()
    if fields.get("sliding_window", family.default_window) is None:
        return ()
    window = fields.count("sliding_window", default=family.default_window)
    return (
        () if window >= context or SLIDING not in kinds else tuple(window if kind == SLIDING else 0 for kind in kinds)
    )


def read_ropes(
    fields: Fields, kinds: list[str], *, family: RopeFamily, context: int, head_dim: int
) -> tuple[RopeConfig, tuple[RopeConfig | None, ...]]:
    """`ModelConfig.rope` and `.layer_ropes`."""

    interleaved = family.interleaved and fields.flag("rope_interleave", default=True)

    def read(of: Fields) -> RopeConfig:
        return read_rope(
            of, context=context, head_dim=head_dim, interleaved=interleaved, default_share=family.rotary_share
        )

    if family.rope_of_kinds:
        by_kind = {kind: read(_of_kind(fields, kind)) for kind in (FULL, SLIDING)}
        ropes: tuple[RopeConfig | None, ...] = tuple(by_kind[kind] for kind in kinds)
        rope = by_kind[FULL]
    else:
        rope = read(fields)
        if family.named_rope and fields.get("position_embedding_type") != "rope":
            return rope, (None,) * len(kinds)
        ropes = _some_pre_rope(fields, rope, count=len(kinds)) if family.some_unturned else ()
    return rope, ropes if set(ropes) - {rope} else ()


def _of_kind(fields: Fields, kind: str) -> Fields:
    """RoPE fields of a kind; transformers 4 scales only full attention."""
    nested = fields.get("rope_parameters")
    if isinstance(nested, dict) and FULL in nested:
        return fields.with_values(rope_parameters=fields.inside("rope_parameters").inside(kind).values())
    if kind == FULL:
        return fields
    theta = fields.get("rope_local_base_freq")
    return fields.with_values(rope_scaling=None, **({} if theta is None else {"rope_theta": theta}))


def _some_pre_rope(fields: Fields, rope: RopeConfig, *, count: int) -> tuple[RopeConfig | None, ...]:
    turned = fields.get("no_rope_layers")
    if turned is None:
        period = fields.count("no_rope_layer_interval", default=4)
        turned = [(layer + 1) % period != 0 for layer in range(count)]
    if not isinstance(turned, list) or len(turned) < count or not all(value in (0, 1) for value in turned):
        raise fields.error("no_rope_layers", f"must be a list of {count} numbers, each 0 or 1")
    return tuple(rope if value else None for value in turned[:count])
