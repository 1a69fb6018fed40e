"""Windows and RoPE by layer."""

from engine.model_files.families import Family
from engine.model_files.fields import Fields
from engine.model_files.rope_config import RopeConfig, read_rope

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


def read_windows(fields: Fields, kinds: list[str], *, family: Family, context: int) -> tuple[int, ...]:
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
    """Return `ModelConfig.rope` and `.layer_ropes`."""

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
    """RoPE fields of a kind; transformers 4 scales only full attention."""
    nested = fields.get("rope_parameters")
    if isinstance(nested, dict) and FULL in nested:
        return fields.with_values(rope_parameters=fields.inside("rope_parameters").inside(kind).values())
    if kind == FULL:
        return fields
    theta = fields.get("rope_local_base_freq")
    return fields.with_values(rope_scaling=None, **({} if theta is None else {"rope_theta": theta}))


def _some_unturned(fields: Fields, rope: RopeConfig, *, count: int) -> tuple[RopeConfig | None, ...]:
    turned = fields.get("no_rope_layers")
    if turned is None:
        period = fields.count("no_rope_layer_interval", default=4)
        turned = [(layer + 1) % period != 0 for layer in range(count)]
    if not isinstance(turned, list) or len(turned) < count or not all(value in (0, 1) for value in turned):
        raise fields.error("no_rope_layers", f"must be a list of {count} numbers, each 0 or 1")
    return tuple(rope if value else None for value in turned[:count])
