"""What kind of attention each layer has: its window, and how it turns q and k. From config.json, checked. Never torch."""

from engine.model_files.families import Family
from engine.model_files.fields import Fields
from engine.model_files.rope_config import RopeConfig, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"


def read_kinds(fields: Fields, *, family: Family, num_layers: int) -> list[str]:
    """FULL or SLIDING of each layer: `layer_types`, or what the family means where the file does not name them.

    That is, all but each `window_period`-th are SLIDING, or all but the first `max_window_layers`.
    """
    if family.recurrent is not None or family.latent:
        return [FULL] * num_layers  # of those with KV; which ones have a state: recurrent_config.py
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


def read_windows(fields: Fields, kinds: list[str], *, family: Family, context: int) -> tuple[int, ...]:
    """Return the windows of layers, as of `ModelConfig.windows`."""
    if family.gated_window and not fields.flag("use_sliding_window", default=False):
        return ()
    if fields.get("sliding_window", family.default_window) is None:
        return ()
    window = fields.count("sliding_window", default=family.default_window)
    return (
        () if window >= context or SLIDING not in kinds else tuple(window if kind == SLIDING else 0 for kind in kinds)
    )


def read_ropes(
    fields: Fields, kinds: list[str], *, family: Family, context: int, head_dim: int
) -> tuple[RopeConfig, tuple[RopeConfig | None, ...]]:
    """(`ModelConfig.rope`, `.layer_ropes`)."""

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
        ropes = _some_unturned(fields, rope, count=len(kinds)) if family.some_unturned else ()
    return rope, ropes if set(ropes) - {rope} else ()


def _of_kind(fields: Fields, kind: str) -> Fields:
    """`fields` as if all layers were of this kind. transformers 4 scales the full ones only, and names the others' base apart."""
    nested = fields.get("rope_parameters")
    if isinstance(nested, dict) and FULL in nested:
        return fields.with_values(rope_parameters=fields.inside("rope_parameters").inside(kind).values())
    if kind == FULL:
        return fields
    theta = fields.get("rope_local_base_freq")
    return fields.with_values(rope_scaling=None, **({} if theta is None else {"rope_theta": theta}))


def _some_unturned(fields: Fields, rope: RopeConfig, *, count: int) -> tuple[RopeConfig | None, ...]:
    """`no_rope_layers`: 0 where a layer turns nothing (NoPE, SmolLM3); by default each `no_rope_layer_interval`-th."""
    turned = fields.get("no_rope_layers")
    if turned is None:
        period = fields.count("no_rope_layer_interval", default=4)
        turned = [(layer + 1) % period != 0 for layer in range(count)]
    if not isinstance(turned, list) or len(turned) < count or not all(value in (0, 1) for value in turned):
        raise fields.error("no_rope_layers", f"must be a list of {count} numbers, each 0 or 1")
    return tuple(rope if value else None for value in turned[:count])
