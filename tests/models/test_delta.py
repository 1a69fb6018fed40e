"""Gated DeltaNet's layers: transformers' numbers, and bits that depend neither on the batch nor on how a prompt is cut."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from engine.kernels.conv import conv_kernel
from engine.kernels.delta import DeltaWeights
from engine.kv.state_pool import StatePool, StateSpec
from engine.kv.step_batch import StepBatch
from engine.layers.conv import ShortConv
from engine.layers.delta import GRID, GatedDelta
from engine.layers.recurrence import StepStates

SHAPES = [(2, 4, 8, 12), (1, 1, 128, 128), (2, 2, 6, 70), (3, 6, 20, 64)]  # key heads, value heads, keys, values
TAPS = 4


class DeltaLayers:
    """The convolution and the rule behind it, with random weights, and a pool of 4 requests."""

    def __init__(self, shape: tuple[int, int, int, int], *, dtype: torch.dtype = torch.float32) -> None:
        self.key_heads, self.heads, self.keys, self.values = shape
        self.dtype = dtype
        self.channels = 2 * self.key_heads * self.keys + self.heads * self.values
        generator = torch.Generator().manual_seed(sum(shape))

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator)

        self.random = random
        self.conv_weight = (random(self.channels, TAPS) * 0.5).to(dtype)
        weights = DeltaWeights(-random(self.heads).exp(), random(self.heads), 1 + 0.2 * random(self.values), 1e-6)
        self.weights = weights
        self.conv = ShortConv(self.conv_weight, None)
        self.delta = GatedDelta(weights, keys=self.keys, dtype=dtype)
        spec = StateSpec((self.channels, TAPS - 1), (self.heads, self.keys, self.values), str(dtype).split(".")[1])
        self.pool = StatePool([spec], num_slots=4, device="cpu")
        self.step = StepStates(self.pool)

    def inputs(self, count: int) -> Tensor:
        """[count, channels + values of all heads + 2 * heads]: what the product before gives."""
        return self.random(count, self.channels + self.heads * self.values + 2 * self.heads).to(self.dtype)

    def run(self, rows: Sequence[Tensor], slots: Sequence[int], *, decodes: Sequence[int] = ()) -> list[Tensor]:
        """One step of requests with these inputs; `decodes`: those whose token is one of an answer."""
        none = torch.zeros(0, dtype=torch.int64)
        lens = [len(x) for x in rows]
        self.pool.step = StepBatch(
            extend=len(decodes) < len(rows),
            q_lens=lens,
            kv_lens=lens,
            page_table=none,
            slots=none,
            token_pages=none,
            token_offsets=none,
            riders=decodes,
            state_slots=torch.tensor(slots, dtype=torch.int32),
        )
        self.step.begin()
        x, states = torch.cat(list(rows)), self.step.of(0)
        qkv, z, gates = torch.split(x, [self.channels, self.heads * self.values, 2 * self.heads], dim=1)
        out = self.delta(self.conv(qkv, states.conv, self.step), gates, z, states.recurrent, self.step)
        return list(torch.split(out, lens))

    def theirs(self, x: Tensor) -> Tensor:
        """Transformers' answer to a whole prompt, fp32."""
        qkv, z, gates = torch.split(x.float(), [self.channels, self.heads * self.values, 2 * self.heads], dim=1)
        mixed = causal_conv1d_fn(qkv.t().unsqueeze(0), self.conv_weight.float(), None, activation="silu")[0].t()
        keys, width = self.key_heads * self.keys, self.heads * self.values
        q, k, v = (
            part.unflatten(1, (heads, -1))
            for part, heads in zip(
                torch.split(mixed, [keys, keys, width], dim=1),
                (self.key_heads, self.key_heads, self.heads),
                strict=True,
            )
        )
        beta, time = gates.split(self.heads, dim=1)
        decay = self.weights.decay * torch.nn.functional.softplus(time + self.weights.bias)
        out, _ = torch_chunk_gated_delta_rule(
            *(part.unsqueeze(0) for part in (q, k, v, decay, beta.sigmoid())), use_qk_l2norm_in_kernel=True
        )
        norm = Qwen3NextRMSNormGated(self.values, eps=self.weights.eps)
        norm.weight.data = self.weights.norm
        with torch.inference_mode():
            gated: Tensor = norm(out.reshape(-1, self.values), z.reshape(-1, self.values))
        return gated.view(len(x), -1)


@pytest.fixture(params=["c", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr("engine.layers.delta.delta_kernel", lambda: None)
        monkeypatch.setattr("engine.layers.conv.conv_kernel", lambda: None)
    elif conv_kernel() is None:
        pytest.skip("no C compiler")
    return str(request.param)


def in_parts(layers: DeltaLayers, x: Tensor, ends: Sequence[int], slot: int) -> Tensor:
    """x in steps that end at `ends`; single tokens behind the first are those of an answer."""
    starts = [0, *ends[:-1]]
    return torch.cat(
        [
            layers.run([x[a:b]], [slot], decodes=[0] if b - a == 1 and a else [])[0]
            for a, b in zip(starts, ends, strict=True)
        ]
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_and_answers_are_those_of_transformers(form: str, shape: tuple[int, int, int, int]) -> None:
    """Prompts shorter than the convolution, of a chunk and about it; then tokens one by one."""
    for slot, count in ((1, 1), (2, 2), (3, 3), (4, GRID), (1, GRID + 1), (2, 2 * GRID + 6)):
        layers = DeltaLayers(shape)
        x = layers.inputs(count + 3)
        ours = in_parts(layers, x, [count, count + 1, count + 2, count + 3], slot)
        assert (ours - layers.theirs(x)).abs().max() < 2e-5, count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_depend_neither_on_cuts_nor_on_the_batch(form: str, dtype: torch.dtype) -> None:
    """C may cut anywhere and has one kernel for prompts and answers; torch may cut at multiples of its chunk."""
    layers = DeltaLayers(SHAPES[0], dtype=dtype)
    x, other = layers.inputs(3 * GRID + 5), layers.inputs(GRID)
    whole = in_parts(layers, x, [len(x)], 1)
    kept = layers.pool.conv(0)[1].clone(), layers.pool.recurrent(0)[1].clone()
    cuts = [GRID, 3 * GRID, len(x)] if form == "torch" else [1, 2, 3, 70, 71, len(x) - 1, len(x)]
    assert torch.equal(in_parts(layers, x, cuts, 2), whole)
    _, beside = layers.run([other, x[: 2 * GRID]], [4, 3])
    last, _ = layers.run([x[2 * GRID :], other[:1]], [3, 4], decodes=[1])
    assert torch.equal(torch.cat((beside, last)), whole)
    for slot in (2, 3):
        assert torch.equal(layers.pool.conv(0)[slot], kept[0]) and torch.equal(layers.pool.recurrent(0)[slot], kept[1])


def test_bf16_rounds_its_ends_alone() -> None:
    """The state is fp32: the error of 300 tokens is that of one rounding."""
    layers = DeltaLayers((2, 4, 32, 32), dtype=torch.bfloat16)
    x = layers.inputs(300)
    exact = layers.theirs(x)
    assert (layers.run([x], [1])[0].float() - exact).abs().max() < 0.02 * exact.abs().max()


def test_a_slot_is_touched_by_its_own_request_alone(form: str) -> None:
    layers = DeltaLayers(SHAPES[0])
    layers.pool.buffer.fill_(7)
    before = layers.pool.buffer.clone().view(5, -1)
    layers.run([layers.inputs(5)], [2])
    after = layers.pool.buffer.view(5, -1)
    assert [slot for slot in range(5) if not torch.equal(before[slot], after[slot])] == [2]
