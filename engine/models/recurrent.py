"""Recurrent layers with or without attention: Gated DeltaNet and Mamba2."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels import tape
from engine.kernels.recurrent import DeltaWeights, MambaWeights
from engine.kv.cache_spec import StateShard
from engine.kv.kv_pool import DTYPES
from engine.kv.state_pool import StateSpec
from engine.layers.linear import Addend, Linear, LinearSite, NoNorm, Normed, RowLinear, add, settled
from engine.layers.recurrence import GatedDelta, LayerStates, Mamba, ShortConv, StepStates
from engine.layers.rope import Turn
from engine.model_files.recurrent_config import DeltaConfig, MambaConfig
from engine.models.layer import Attend, Attention
from engine.models.part import ModelPart, in_one
from engine.parallel.layout import Cut, shared_range

# ---- The state of a recurrent layer: this rank's part, and its slots.


class Remembered:
    def __init__(self, channels: Sequence[Cut], heads: Cut, *, taps: int, head: tuple[int, int], dtype: str) -> None:
        """`channels`: parts of the convolution. `head`: keys and values of a state."""
        held = StateShard(tuple(cut.taken for cut in channels), channels[0].total, heads.taken, heads.total)
        self.spec = StateSpec((sum(map(len, channels)), taps - 1), (len(heads), *head), dtype, held)
        self._now: tuple[StepStates, LayerStates] | None = None
        self._number = 0

    def use(self, step: StepStates, layer: int) -> None:
        """Keep states there; `layer`: index among the recurrent layers."""
        self._now, self._number = (step, step.of(layer)), layer

    def now(self) -> tuple[StepStates, LayerStates]:
        assert self._now is not None, "use() comes first"
        return self._now

    def product(self, linear: Linear, norm: Normed, x: Tensor, delta: Addend | None) -> Tensor:
        """linear.of_norm(norm, x, delta); with drafts keep it for `product_again`."""
        step, _ = self.now()
        if not step.keeps:
            return linear.of_norm(norm, x, delta)
        with tape.lasting():
            product = linear.of_norm(norm, x, delta)
        step.products[self._number] = product
        return product

    def product_again(self, rows: Tensor) -> Tensor:
        step, _ = self.now()
        return step.products[self._number][rows]


class _Mixer:
    """A recurrence between two products, called like `Attention`, without LoRA sites."""

    states: Remembered
    _in: Linear
    _widths: list[int]
    _out: Linear | RowLinear

    def __init__(self) -> None:
        self.sites: list[LinearSite] = []

    def __call__(self, norm: Normed, x: Tensor, delta: Addend | None, turn: Turn, attend: Attend) -> Addend:
        return self._out.later(self._recurred(self.states.product(self._in, norm, x, delta)))

    @property
    def row_bytes(self) -> int:
        return sum(self._widths) * DTYPES[self.states.spec.dtype].itemsize

    def pass_again(self, rows: Tensor) -> None:
        self._recurred(self.states.product_again(rows))

    def _recurred(self, product: Tensor) -> Tensor:
        raise NotImplementedError


# ---- Gated DeltaNet (Qwen3-Next, Qwen3.5)


class _DeltaShards(NamedTuple):
    keys: Cut
    values: Cut
    heads: Cut


class DeltaMixer(_Mixer):
    """Gated DeltaNet.

    x -> q | k | v | z | beta | time    one product
    q | k | v -> short convolution -> delta rule -> norm, gated by z -> one product

    A rank has some key heads, the value heads that read them, and their convolution channels.
    """

    def __init__(self, part: ModelPart, prefix: str, config: DeltaConfig) -> None:
        super().__init__()
        checkpoint, cuts = part.checkpoint, _delta_shards(part, config)
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

    def _recurred(self, product: Tensor) -> Tensor:
        step, states = self.states.now()
        qkv, z, gates = torch.split(product, self._widths, dim=1)
        mixed = self._conv(qkv, states.conv, step)
        return self._delta(mixed, gates, z, states.recurrent, step)


def _delta_shards(part: ModelPart, config: DeltaConfig) -> _DeltaShards:
    size, rank = part.place.tp_size, part.place.tp_rank
    own = config.key_heads // size
    key_heads = Cut(config.key_heads, range(own * rank, own * (rank + 1)))
    heads = Cut(config.value_heads, key_heads.times(config.group).taken)
    return _DeltaShards(key_heads.times(config.key_dim), heads.times(config.value_dim), heads)


def _qkv(cuts: _DeltaShards) -> list[Cut]:
    keys, values = cuts.keys, cuts.values
    return in_one([keys, keys, values])


def _apart(part: ModelPart, prefix: str, cuts: _DeltaShards) -> Linear:
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


# ---- Mamba2 (Granite 4, Falcon-H1)


class _MambaShards(NamedTuple):
    heads: Cut
    inner: Cut
    wide: Cut


class MambaMixer(_Mixer):
    """Mamba2.

    x -> gate | values | B | C | time   one product
    values | B | C -> short convolution -> state space -> gate and norm -> one product

    A rank has some heads, their groups, which ranks may share, and convolution channels.
    """

    def __init__(self, part: ModelPart, prefix: str, config: MambaConfig) -> None:
        super().__init__()
        checkpoint, cuts = part.checkpoint, _mamba_shards(part, config)
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

    def _recurred(self, product: Tensor) -> Tensor:
        step, states = self.states.now()
        gate, mixed, time = torch.split(product, self._widths, dim=1)
        return self._mamba(self._conv(mixed, states.conv, step), time, gate, states.recurrent, step)


class ParallelMixers:
    """Attention plus Mamba2 in one layer (Falcon-H1)."""

    def __init__(self, attention: Attention, mamba: MambaMixer) -> None:
        self._attention, self._mamba = attention, mamba
        self.sites, self.states, self.pass_again = attention.sites, mamba.states, mamba.pass_again
        self.row_bytes = mamba.row_bytes

    def __call__(self, norm: Normed, x: Tensor, delta: Addend | None, turn: Turn, attend: Attend) -> Tensor:
        own, plain = norm.of_sum(x, delta), NoNorm()
        answer = settled(self._mamba(plain, own, None, turn, attend))
        return add(answer, self._attention(plain, own, None, turn, attend))


def _mamba_shards(part: ModelPart, config: MambaConfig) -> _MambaShards:
    size, rank = part.place.tp_size, part.place.tp_rank
    own = config.heads // size
    heads = Cut(config.heads, range(own * rank, own * (rank + 1)))
    groups = Cut(config.groups, shared_range(config.groups, rank, size))
    return _MambaShards(heads, heads.times(config.head_dim), groups.times(config.state_dim))
