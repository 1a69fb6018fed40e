"""Layers of Gated DeltaNet and Mamba2 between their products, with random weights and a pool of 4 requests; and transformers'.

Transformers is imported where it is called: Triton's interpreter runs these layers without.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.recurrent import DeltaWeights, MambaWeights
from engine.kv.state_pool import StatePool, StateSpec
from engine.kv.step_batch import StepBatch
from engine.layers.recurrence import GatedDelta, Mamba, ShortConv, StepStates

TAPS = 4


class Inputs:
    """Random numbers, the convolution over `channels`, and the states of 4 requests. `widths`: of the parts of a row."""

    def __init__(self, channels: int, state: tuple[int, ...], widths: Sequence[int], dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(sum(state))
        self.widths, self.dtype = list(widths), dtype
        self.conv_weight = (self.random(channels, TAPS) * 0.5).to(dtype)
        spec = StateSpec((channels, TAPS - 1), state, str(dtype).split(".")[1])
        self.pool = StatePool([spec], num_slots=4, device="cpu")
        self.step = StepStates(self.pool)

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator)

    def rows(self, count: int) -> Tensor:
        return self.random(count, sum(self.widths)).to(self.dtype)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.split(x, self.widths, dim=1))

    def convolved(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """By transformers, fp32."""
        from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

        weight = self.conv_weight.float()
        mixed: Tensor = causal_conv1d_fn(x.float().t().unsqueeze(0), weight, bias, activation="silu")[0].t()
        return mixed


class Layers(Protocol):
    inputs: Inputs

    def __call__(self, x: Tensor) -> Tensor:
        """What the layers make of rows of the step."""

    def theirs(self, x: Tensor) -> Tensor:
        """Transformers' answer to a whole prompt, fp32."""


class DeltaLayers:
    def __init__(self, shape: tuple[int, int, int, int], *, dtype: torch.dtype = torch.float32) -> None:
        """`shape`: key heads, value heads, keys, values."""
        self._key_heads, self._heads, self._keys, self._values = shape
        inner = self._heads * self._values
        channels = 2 * self._key_heads * self._keys + inner
        state = (self._heads, self._keys, self._values)
        self.inputs = Inputs(channels, state, [channels, inner, 2 * self._heads], dtype)
        random = self.inputs.random
        self._weights = DeltaWeights(
            -random(self._heads).exp(), random(self._heads), 1 + 0.2 * random(self._values), 1e-6
        )
        self._conv = ShortConv(self.inputs.conv_weight, None)
        self._delta = GatedDelta(self._weights, keys=self._keys, dtype=dtype)

    def __call__(self, x: Tensor) -> Tensor:
        step, (qkv, z, gates) = self.inputs.step, self.inputs.split(x)
        states = step.of(0)
        return self._delta(self._conv(qkv, states.conv, step), gates, z, states.recurrent, step)

    def theirs(self, x: Tensor) -> Tensor:
        from transformers.models.qwen3_next import modeling_qwen3_next as theirs

        qkv, z, gates = self.inputs.split(x.float())
        keys, heads = self._key_heads * self._keys, (self._key_heads, self._key_heads, self._heads)
        parts = torch.split(self.inputs.convolved(qkv, None), [keys, keys, self._heads * self._values], dim=1)
        q, k, v = (part.unflatten(1, (count, -1)) for part, count in zip(parts, heads, strict=True))
        beta, time = torch.split(gates, self._heads, dim=1)
        decay = self._weights.decay * functional.softplus(time + self._weights.bias)
        rule = (part.unsqueeze(0) for part in (q, k, v, decay, beta.sigmoid()))
        out, _ = theirs.torch_chunk_gated_delta_rule(*rule, use_qk_l2norm_in_kernel=True)
        norm = theirs.Qwen3NextRMSNormGated(self._values, eps=self._weights.eps)
        norm.weight.data = self._weights.norm
        with torch.inference_mode():
            gated: Tensor = norm(out.reshape(-1, self._values), z.reshape(-1, self._values))
        return gated.view(len(x), -1)


class MambaLayers:
    def __init__(
        self,
        shape: tuple[int, int, int, int],
        *,
        norm: str = "gate first",
        limits: tuple[float, float] = (0.0, torch.inf),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`shape`: groups, heads, keys, values. `norm`: "", "gate first" or "norm first"."""
        self._groups, self._heads, self._keys, self._values = shape
        inner = self._heads * self._values
        channels = inner + 2 * self._groups * self._keys
        state = (self._heads, self._keys, self._values)
        self.inputs = Inputs(channels, state, [inner, channels, self._heads], dtype)
        random = self.inputs.random
        self._bias = random(channels) * 0.3
        self._conv = ShortConv(self.inputs.conv_weight, self._bias)
        self._weights = MambaWeights(
            -random(self._heads).exp(),
            random(self._heads),
            random(self._heads),
            1 + 0.2 * random(inner) if norm else None,
            norm == "gate first",
            self._groups,
            1e-6,
            limits,
        )
        self._mamba = Mamba(self._weights, keys=self._keys, dtype=dtype)

    def __call__(self, x: Tensor) -> Tensor:
        step, (gate, mixed, time) = self.inputs.step, self.inputs.split(x)
        states = step.of(0)
        return self._mamba(self._conv(mixed, states.conv, step), time, gate, states.recurrent, step)

    def theirs(self, x: Tensor) -> Tensor:
        from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated, mamba2_chunk_scan

        weights, (gate, mixed, time) = self._weights, self.inputs.split(x.float())
        wide, inner = self._groups * self._keys, self._heads * self._values
        values, b, c = torch.split(self.inputs.convolved(mixed, self._bias), [inner, wide, wide], dim=1)
        out = mamba2_chunk_scan(
            values.unflatten(1, (self._heads, -1)).unsqueeze(0),
            time.unsqueeze(0),
            weights.decay,
            b.unflatten(1, (self._groups, -1)).unsqueeze(0),
            c.unflatten(1, (self._groups, -1)).unsqueeze(0),
            chunk_size=16,
            D=weights.skip,
            dt_bias=weights.bias,
            dt_softplus=True,
            dt_limit=weights.limits,
        ).reshape(len(x), inner)
        if weights.norm is None:
            return out * functional.silu(gate)
        norm = FalconH1RMSNormGated(
            inner, eps=weights.eps, n_groups=self._groups, norm_before_gate=not weights.gate_first
        )
        norm.weight.data = weights.norm
        with torch.inference_mode():
            normed: Tensor = norm(out.unsqueeze(0), gate.unsqueeze(0))[0]
        return normed


def run(
    layers: Layers,
    rows: Sequence[Tensor],
    slots: Sequence[int],
    *,
    decodes: Sequence[int] = (),
    drafted: Collection[int] = (),
) -> list[Tensor]:
    """One step of requests with these inputs; `decodes`: those whose token is one of an answer.

    `drafted`: entries that are of the request of the entry before them.
    """
    none, lens = torch.zeros(0, dtype=torch.int64), [len(x) for x in rows]
    layers.inputs.pool.step = StepBatch(
        extend=len(decodes) < len(rows),
        q_lens=lens,
        kv_lens=lens,
        page_table=none,
        slots=torch.tensor(slots),
        token_pages=none,
        token_offsets=none,
        riders=decodes,
        state_slots=slots,
        drafted=frozenset(drafted),
    )
    layers.inputs.step.begin()
    return list(torch.split(layers(torch.cat(list(rows))), lens))


def one_by_one(layers: Layers, x: Tensor, slot: int) -> Tensor:
    """Each token in a step of its own, as one of an answer."""
    return torch.cat([run(layers, [row], [slot], decodes=[0])[0] for row in torch.split(x, 1)])


def again(layers: Layers, x: Tensor, counts: Sequence[int], slots: Sequence[int]) -> None:
    """Pass x, so many rows of each request, on behind the states in `slots`."""
    layers.inputs.step.begin_again(counts, slots)
    layers(x)


def run_in_parts(layers: Layers, x: Tensor, ends: Sequence[int], slot: int) -> Tensor:
    """x in steps that end at `ends`; single tokens behind the first are those of an answer."""
    parts = zip([0, *ends[:-1]], ends, strict=True)
    return torch.cat([run(layers, [x[a:b]], [slot], decodes=[0] if b - a == 1 and a else [])[0] for a, b in parts])
