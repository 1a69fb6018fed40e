"""Run by test_triton.py with TRITON_INTERPRET=1: recurrent layers by Triton beside torch and float64."""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from engine.kernels.triton import recurrent
from engine.kv.step_batch import DeviceStep
from engine.layers import recurrence
from tests.attention.triton.triton_numerics import guarded
from tests.models.recurrent_layers import TAPS, DeltaLayers, Layers, MambaLayers, again, run

CASES = {
    "delta": partial(DeltaLayers, (2, 4, 8, 12)),
    "delta, odd": partial(DeltaLayers, (1, 1, 6, 5)),
    "mamba, gate first": partial(MambaLayers, (2, 4, 8, 12)),
    "mamba, norm first": partial(MambaLayers, (1, 2, 6, 8), norm="norm first"),
    "mamba, limits": partial(MambaLayers, (1, 3, 8, 10), norm="", limits=(0.3, 0.9)),
}


def on_gpu(make: Any, **options: Any) -> Layers:
    recurrence.recurrent_on_gpu = lambda _: recurrent.TritonRecurrent()  # type: ignore[assignment]
    layers: Layers = make(**options)
    return layers


def by_torch(make: Any, **options: Any) -> Layers:
    recurrence.recurrent_on_gpu = lambda _: None
    layers: Layers = make(**options)
    layers.inputs.step.rows = None
    return layers


def check(name: str, dtype: torch.dtype = torch.float32) -> None:
    """Prompts, answers, both in a step, drafts, accepted drafts: outputs and states, slots in no order."""
    ours, plain = on_gpu(CASES[name], dtype=dtype), by_torch(CASES[name], dtype=dtype)
    near = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2**-4, "atol": 2**-4}
    rows = partial(torch.split, ours.inputs.rows(90), [2, 70, 5, 1, 1, 1, 4, 1, 3, 1, 1])
    a, b, c, d, e, f, g, h, i, j, k = rows()
    steps: list[tuple[list[Tensor], list[int], dict[str, Any]]] = [
        ([a, b, c], [3, 1, 4], {}),
        ([d, e, f], [4, 3, 1], {"decodes": [0, 1, 2]}),
        ([g, h], [2, 4], {"decodes": [1]}),
        ([*torch.split(i, 1), j, k], [3, 3, 3, 1, 1], {"decodes": range(5), "drafted": {1, 2, 4}}),
    ]
    for entries, slots, kinds in steps:
        found, right = (torch.cat(run(layers, entries, slots, **kinds)) for layers in (ours, plain))
        torch.testing.assert_close(found, right, **near)
        written = [slot for slot in ours.inputs.step.table.units[:, 4].tolist() if slot]
        assert sorted(written) == sorted({*slots}), "units race for a window"
    for layers in (ours, plain):
        again(layers, torch.cat((g[:2], h)), [2, 1], [2, 4])
    for of in ("conv", "recurrent"):
        torch.testing.assert_close(*(getattr(x.inputs.pool, of)(0) for x in (ours, plain)), **near)
    guarded.check()


def check_against_float64(name: str) -> None:
    """Answers by the formulas, row by row in float64."""
    layers = on_gpu(CASES[name])
    x = layers.inputs.rows(6)
    found = torch.cat([run(layers, [row], [2], decodes=[0])[0] for row in torch.split(x, 1)])
    right = exact_delta(layers, x) if isinstance(layers, DeltaLayers) else exact_mamba(layers, x)
    torch.testing.assert_close(found.double(), right, rtol=2e-6, atol=5e-6)


def exact_delta(layers: Any, x: Tensor) -> Tensor:
    qkv, z, gates = layers.inputs.split(x.double())
    mixed, weights = convolved(layers, qkv), layers._weights
    heads, keys, values = layers._heads, layers._keys, layers._values
    state, outs = torch.zeros(heads, keys, values, dtype=torch.float64), []
    for row, gate, time in zip(mixed, gates[:, :heads].sigmoid(), gates[:, heads:], strict=True):
        q, k = row[: -heads * values].view(2, -1, keys).repeat_interleave(heads // layers._key_heads, 1)
        q, k = (y / (y.square().sum(1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        state = state * (weights.decay.double() * functional.softplus(time + weights.bias)).exp()[:, None, None]
        new = (row[-heads * values :].view(heads, values) - torch.einsum("hkv,hk->hv", state, k)) * gate[:, None]
        state = state + torch.einsum("hk,hv->hkv", k, new)
        out = torch.einsum("hkv,hk->hv", state, q) * keys**-0.5
        outs.append(out / (out.square().mean(1, keepdim=True) + weights.eps).sqrt() * weights.norm)
    return torch.stack(outs).flatten(1) * functional.silu(z)


def exact_mamba(layers: Any, x: Tensor) -> Tensor:
    gate, mixed, times = layers.inputs.split(x.double())
    weights, heads, keys, values = layers._weights, layers._heads, layers._keys, layers._values
    state, outs = torch.zeros(heads, keys, values, dtype=torch.float64), []
    for row, time in zip(convolved(layers, mixed), times, strict=True):
        own = row[: heads * values].view(heads, values)
        k, q = row[heads * values :].view(2, -1, keys).repeat_interleave(heads // weights.groups, 1)
        time = functional.softplus(time + weights.bias).clamp(*weights.limits)
        state = state * (time * weights.decay).exp()[:, None, None]
        state = state + torch.einsum("hk,hv->hkv", k, own * time[:, None])
        outs.append((torch.einsum("hkv,hk->hv", state, q) + own * weights.skip[:, None]).flatten())
    out, gate = torch.stack(outs), functional.silu(gate)
    if weights.norm is None:
        return out * gate
    grouped = (out * gate if weights.gate_first else out).unflatten(1, (weights.groups, -1))
    out = (grouped / (grouped.square().mean(2, keepdim=True) + weights.eps).sqrt()).flatten(1) * weights.norm
    return out if weights.gate_first else out * gate


def convolved(layers: Any, x: Tensor) -> Tensor:
    windows = functional.pad(x.t(), (TAPS - 1, 0)).t().unfold(0, TAPS, 1)
    return functional.silu((windows * layers.inputs.conv_weight).sum(2) + getattr(layers, "_bias", 0.0))


def check_recorded(name: str, dtype: torch.dtype) -> None:
    """A graph's step of two requests, one with a draft, and padding: bits of other steps, and no other slot is changed."""
    layers = on_gpu(CASES[name], dtype=dtype)
    pool, x = layers.inputs.pool, layers.inputs.rows(4)
    pool.buffer.view(dtype).copy_(torch.randn(pool.buffer.view(dtype).shape).mul(0.1))
    before = pool.buffer.clone()
    alone = (
        run(layers, [x[2:3]], [1], decodes=[0]),
        run(layers, [*torch.split(x[:2], 1)], [4, 4], decodes=range(2), drafted={1}),
    )
    after = pool.buffer.clone()
    pool.buffer.copy_(before)
    none = torch.zeros(0, dtype=torch.int64)
    pool.step = DeviceStep(
        none, none, none, none, none, state_rows=torch.tensor([[0, 2, 3, 4], [2, 3, 4, 4], [4, 1, 0, 0]])
    )
    layers.inputs.step.begin()
    assert torch.equal(layers(x)[:3], torch.cat([*alone[1], *alone[0]]))
    assert torch.equal(pool.buffer, after), "padding changed a state"
    guarded.check()


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    setattr(recurrent, "torch", guarded)  # noqa: B010
    for name in names:
        check(name)
        check_against_float64(name)
    for name in ("delta", "mamba, gate first"):
        check(name, torch.bfloat16)
        check_recorded(name, torch.float32)
        check_recorded(name, torch.bfloat16)


if __name__ == "__main__":
    main([*CASES])
    sys.exit(0)
