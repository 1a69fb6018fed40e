"""Mamba2 layers: instead of attention (Granite 4), or parallel to it (Falcon-H1).

x -> gate | values | B | C | time   one product
values | B | C -> short convolution -> state space -> gate and norm -> one product

A rank has some heads, their groups, which ranks may share, and convolution channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.mamba import MambaWeights
from engine.layers.conv import ShortConv
from engine.layers.linear import LinearSite
from engine.layers.mamba import Mamba
from engine.layers.norm import NoNorm, Normed, add
from engine.layers.rope import Turn
from engine.model_files.recurrent_config import MambaConfig
from engine.models.attention import Attend, Attention
from engine.models.part import ModelPart, in_one
from engine.models.remembered import Remembered
from engine.parallel.layout import Cut, shared_range


class _Cuts(NamedTuple):
    heads: Cut
    inner: Cut
    wide: Cut


class MambaMixer:
    """A Mamba2 mixer, called like `Attention`, without LoRA sites."""

    def __init__(self, part: ModelPart, prefix: str, config: MambaConfig) -> None:
        checkpoint, cuts = part.checkpoint, _cuts(part, config)
        heads, inner, wide = cuts
        names, rows = [f"{prefix}in_proj"] * 5, in_one([inner, inner, wide, wide, heads])
        self._in, _ = part.columns(names, rows, factors=config.factors)
        self._widths = [len(inner), len(inner) + 2 * len(wide), len(heads)]
        channels = in_one([inner, wide, wide])
        conv = checkpoint.take_rows([f"{prefix}conv1d.weight"] * 3, channels, [1, config.taps])
        bias = checkpoint.take_rows([f"{prefix}conv1d.bias"] * 3, channels, []) if config.conv_bias else None
        self._conv = ShortConv(conv.squeeze(1), bias)
        decay, time, skip = (
            checkpoint.take(f"{prefix}{name}", [heads], dtype=torch.float32) for name in ("A_log", "dt_bias", "D")
        )
        norm = checkpoint.take(f"{prefix}norm.weight", [inner], dtype=torch.float32) if config.norm else None
        weights = MambaWeights(
            decay.exp().neg(),
            time,
            skip,
            norm,
            config.norm == "gate first",
            len(wide) // config.state_dim,
            part.config.rms_norm_eps,
            config.limits,
        )
        self._mamba = Mamba(weights, keys=config.state_dim, dtype=checkpoint.dtype)
        self._out, _ = part.rows(f"{prefix}out_proj", inner, factor=config.out_factor)
        head = config.state_dim, config.head_dim
        self.states = Remembered(channels, heads, taps=config.taps, head=head, dtype=checkpoint.dtype_name)
        self.sites: list[LinearSite] = []

    def __call__(self, norm: Normed, x: Tensor, delta: Tensor | None, turn: Turn, attend: Attend) -> Tensor:
        return self._out(self._recurred(self.states.product(self._in, norm, x, delta)))

    def pass_again(self, rows: Tensor) -> None:
        self._recurred(self.states.product_again(rows))

    def _recurred(self, product: Tensor) -> Tensor:
        step, states = self.states.now()
        gate, mixed, time = torch.split(product, self._widths, dim=1)
        return self._mamba(self._conv(mixed, states.conv, step), time, gate, states.recurrent, step)


class BesideMixers:
    """Attention plus Mamba2 in one layer (Falcon-H1)."""

    def __init__(self, attention: Attention, mamba: MambaMixer) -> None:
        self._attention, self._mamba = attention, mamba
        self.sites, self.states, self.pass_again = attention.sites, mamba.states, mamba.pass_again

    def __call__(self, norm: Normed, x: Tensor, delta: Tensor | None, turn: Turn, attend: Attend) -> Tensor:
        own, plain = norm.of_sum(x, delta), NoNorm()
        answer = self._mamba(plain, own, None, turn, attend)
        return add(answer, self._attention(plain, own, None, turn, attend))


def _cuts(part: ModelPart, config: MambaConfig) -> _Cuts:
    size, rank = part.place.tp_size, part.place.tp_rank
    own = config.heads // size
    heads = Cut(config.heads, range(own * rank, own * (rank + 1)))
    groups = Cut(config.groups, shared_range(config.groups, rank, size))
    return _Cuts(heads, heads.times(config.head_dim), groups.times(config.state_dim))
