"""Gated DeltaNet layers (Qwen3-Next, Qwen3.5): a recurrent state instead of KV.

x -> q | k | v | z | beta | time    one product
q | k | v -> short convolution -> delta rule -> norm, gated by z -> one product

A rank has some key heads, the value heads that read them, and their convolution channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.delta import DeltaWeights
from engine.layers.conv import ShortConv
from engine.layers.delta import GatedDelta
from engine.layers.linear import Linear, LinearSite
from engine.layers.norm import Normed
from engine.layers.rope import Turn
from engine.model_files.recurrent_config import DeltaConfig
from engine.models.attention import Attend
from engine.models.part import ModelPart, in_one
from engine.models.remembered import Remembered
from engine.parallel.layout import Cut


class _Cuts(NamedTuple):
    keys: Cut
    values: Cut
    heads: Cut


class DeltaMixer:
    """A Gated DeltaNet mixer, called like `Attention`, without LoRA sites."""

    def __init__(self, part: ModelPart, prefix: str, config: DeltaConfig) -> None:
        checkpoint, cuts = part.checkpoint, _cuts(part, config)
        heads = cuts.heads
        self._in = _by_key_head(part, prefix, config) if config.by_key_head else _apart(part, prefix, cuts)
        self._widths = [2 * len(cuts.keys) + len(cuts.values), len(cuts.values), 2 * len(heads)]
        conv = checkpoint.take_rows([f"{prefix}conv1d.weight"] * 3, _qkv(cuts), [1, config.taps])
        self._conv = ShortConv(conv.squeeze(1), None)
        decay, bias = (
            checkpoint.take(f"{prefix}{name}", [heads], dtype=torch.float32) for name in ("A_log", "dt_bias")
        )
        norm = checkpoint.take(f"{prefix}norm.weight", [config.value_dim], dtype=torch.float32)
        weights = DeltaWeights(decay.exp().neg(), bias, norm, part.config.rms_norm_eps)
        self._delta = GatedDelta(weights, keys=config.key_dim, dtype=checkpoint.dtype)
        self._out, _ = part.rows(f"{prefix}out_proj", cuts.values)
        head = config.key_dim, config.value_dim
        self.states = Remembered(_qkv(cuts), heads, taps=config.taps, head=head, dtype=checkpoint.dtype_name)
        self.sites: list[LinearSite] = []

    def __call__(self, norm: Normed, x: Tensor, delta: Tensor | None, turn: Turn, attend: Attend) -> Tensor:
        return self._out(self._recurred(self.states.product(self._in, norm, x, delta)))

    def pass_again(self, rows: Tensor) -> None:
        """Rerun the recurrence over the kept `rows`, from the states before them."""
        self._recurred(self.states.product_again(rows))

    def _recurred(self, product: Tensor) -> Tensor:
        step, states = self.states.now()
        qkv, z, gates = torch.split(product, self._widths, dim=1)
        mixed = self._conv(qkv, states.conv, step)
        return self._delta(mixed, gates, z, states.recurrent, step)


def _cuts(part: ModelPart, config: DeltaConfig) -> _Cuts:
    size, rank = part.place.tp_size, part.place.tp_rank
    own = config.key_heads // size
    key_heads = Cut(config.key_heads, range(own * rank, own * (rank + 1)))
    heads = Cut(config.value_heads, key_heads.times(config.group).taken)
    return _Cuts(key_heads.times(config.key_dim), heads.times(config.value_dim), heads)


def _qkv(cuts: _Cuts) -> list[Cut]:
    keys, values = cuts.keys, cuts.values
    return in_one([keys, keys, values])


def _apart(part: ModelPart, prefix: str, cuts: _Cuts) -> Linear:
    names = [f"{prefix}in_proj_{name}" for name in ("qkv", "qkv", "qkv", "z", "b", "a")]
    return part.columns(names, [*_qkv(cuts), cuts.values, cuts.heads, cuts.heads])[0]


def _by_key_head(part: ModelPart, prefix: str, config: DeltaConfig) -> Linear:
    size, rank = part.place.tp_size, part.place.tp_rank
    own, group, values = config.key_heads // size, config.group, config.group * config.value_dim
    parts, numbers = [config.key_dim, config.key_dim, values, values], [group, group]
    rows = []
    for sizes in (parts, numbers):
        each = sum(sizes)
        rows.append(Cut(config.key_heads * each, range(own * rank * each, own * (rank + 1) * each)))
    order = [*_gathered(parts, own, at=0), *_gathered(numbers, own, at=len(rows[0]))]
    names = [f"{prefix}in_proj_{name}" for name in ("qkvz", "ba")]
    return part.columns(names, rows, order=tuple(order))[0]


def _gathered(sizes: list[int], heads: int, *, at: int) -> list[int]:
    """Row order that ungroups parts of `sizes` in `heads` segments, from row `at`."""
    each, begin = sum(sizes), at
    order: list[int] = []
    for size in sizes:
        for head in range(heads):
            order += range(begin + head * each, begin + head * each + size)
        begin += size
    return order
