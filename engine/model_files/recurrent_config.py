"""Layers that remember a state of fixed size in place of K and V, from the fields of config.json, checked. Never torch."""

from dataclasses import dataclass

from engine.model_files.fields import Fields

RECURRENT, FULL = "linear_attention", "full_attention"
MOST_TAPS = 8  # of the convolution, as C holds them


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Gated DeltaNet in `layers`; the others have attention. Value head h reads key head h // (value_heads / key_heads).

    `taps`: inputs of the convolution. `by_key_head`: the checkpoint's rows of q, k, v and the gates follow one another for each key
    head (Qwen3-Next).
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_key_head: bool

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads


def read_delta(fields: Fields, num_layers: int, *, by_key_head: bool = False) -> DeltaConfig:
    delta = DeltaConfig(
        layers=_recurrent_layers(fields, num_layers),
        key_heads=fields.count("linear_num_key_heads", default=16),
        value_heads=fields.count("linear_num_value_heads", default=32),
        key_dim=fields.count("linear_key_head_dim", default=128),
        value_dim=fields.count("linear_value_head_dim", default=128),
        taps=fields.count("linear_conv_kernel_dim", default=4),
        by_key_head=by_key_head,
    )
    if delta.value_heads % delta.key_heads:
        raise fields.error(
            "linear_num_value_heads", f"{delta.value_heads} is not a multiple of linear_num_key_heads {delta.key_heads}"
        )
    if not 2 <= delta.taps <= MOST_TAPS:
        raise fields.error("linear_conv_kernel_dim", f"{delta.taps} is not supported; 2 to {MOST_TAPS} are")
    return delta


def read_delta_by_key_head(fields: Fields, num_layers: int) -> DeltaConfig:
    return read_delta(fields, num_layers, by_key_head=True)


def _recurrent_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    every = fields.count("full_attention_interval", default=4)
    kinds = fields.get("layer_types") or [FULL if (i + 1) % every == 0 else RECURRENT for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*kinds} <= {RECURRENT, FULL}:
        raise fields.error("layer_types", f"must name {num_layers} layers, each {RECURRENT} or {FULL}")
    if FULL not in kinds:
        raise fields.error("layer_types", f"names no {FULL} layer; a model without KV is not supported")
    return tuple(index for index, kind in enumerate(kinds) if kind == RECURRENT)
