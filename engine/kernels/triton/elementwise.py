# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Norms and MLP gates for GPUs, one launch each.

Operations of elementwise.c, rounded like torch's operators in engine/layers.
"""

import torch
import triton
import triton.language as tl

GATE_TILE = 1024


@triton.jit
def _normed(x, weight, width, eps):
    """x * weight over the RMS of x, a row; all fp32."""
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)) * weight


@triton.jit
def rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, out_ptr, width, x_stride, eps, OFFSET: tl.constexpr, TILE: tl.constexpr
):
    """Program (row): x [T, width] += delta, out = norm(x) * (weight + OFFSET).

    All but x are dense.
    """
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, TILE)
    mask = at < width
    x_ptr += tl.program_id(0).to(tl.int64) * x_stride
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row + at, mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + at, x, mask=mask)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32) + OFFSET
    tl.store(out_ptr + row + at, _normed(x.to(tl.float32), weight, width, eps).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_sum_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, inner_ptr, out_ptr, width, eps, inner_eps, offset, inner_offset, TILE: tl.constexpr
):
    """Program (row): x [T, width] += norm(delta), rounded; out = norm(x). All are dense."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, TILE)
    mask = at < width
    dtype = x_ptr.dtype.element_ty
    delta = tl.load(delta_ptr + row + at, mask=mask, other=0.0).to(tl.float32)
    inner = tl.load(inner_ptr + at, mask=mask, other=0.0).to(tl.float32) + inner_offset
    delta = _normed(delta, inner, width, inner_eps).to(dtype).to(tl.float32)
    x = (tl.load(x_ptr + row + at, mask=mask, other=0.0).to(tl.float32) + delta).to(dtype)
    tl.store(x_ptr + row + at, x, mask=mask)
    if out_ptr is not None:
        weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32) + offset
        tl.store(out_ptr + row + at, _normed(x.to(tl.float32), weight, width, eps).to(dtype), mask=mask)


@triton.jit
def whole_norm_kernel(x_ptr, q_ptr, k_ptr, q_width, k_width, x_stride, eps, TILE: tl.constexpr):
    """Program (row, 0 or 1): norms of q or k over all heads, in place; x [T, x_stride], q first."""
    x_ptr += tl.program_id(0).to(tl.int64) * x_stride
    at, is_k = tl.arange(0, TILE), tl.program_id(1) == 1
    width = tl.where(is_k, k_width, q_width)
    at_x = at + tl.where(is_k, q_width, 0)
    mask = at < width
    x = tl.load(x_ptr + at_x, mask=mask, other=0.0)
    weight = tl.load(tl.where(is_k, k_ptr + at, q_ptr + at), mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptr + at_x, _normed(x.to(tl.float32), weight, width, eps).to(x.dtype), mask=mask)


def whole_norm(qkv: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], *, eps: float) -> None:
    """Norm q and k of qkv [T, n] over all heads, in place."""
    (q, k), tile = weights, triton.next_power_of_2(max(map(len, weights)))
    assert qkv.stride(1) == 1 and q.dtype == k.dtype, (qkv.stride(), q.dtype, k.dtype)
    whole_norm_kernel[(len(qkv), 2)](
        qkv, q, k, len(q), len(k), qkv.stride(0), eps, TILE=tile, num_warps=8 if tile > 2048 else 4
    )


def norm_of_normed_sum(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    inner: torch.Tensor,
    *,
    eps: float,
    inner_eps: float,
    offsets: tuple[float, float],
) -> torch.Tensor:
    """Add delta's norm by `inner` to x [T, D]; return its norm, or x without a weight."""
    rows, width = x.shape
    assert x.is_contiguous() and delta.is_contiguous() and delta.shape == x.shape, (x.stride(), delta.shape)
    assert inner.shape == (width,) and (weight is None or weight.shape == (width,)), inner.shape
    out, warps = None if weight is None else torch.empty_like(x), 8 if width > 2048 else 4
    tile = triton.next_power_of_2(width)
    norm_sum_norm_kernel[(rows,)](
        x, delta, weight, inner, out, width, eps, inner_eps, *offsets, TILE=tile, num_warps=warps
    )
    return x if out is None else out


@triton.jit
def gated(gate, up, dtype, GELU: tl.constexpr):
    """activation(gate), rounded to `dtype`, times up; all fp32. GELU: by tanh."""
    power = gate
    if GELU:  # (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y))
        power = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1.0 + tl.exp(-power))).to(dtype).to(tl.float32) * up


@triton.jit
def gate_kernel(x_ptr, out_ptr, width, GELU: tl.constexpr, TILE: tl.constexpr):
    """Program (row, tile): x [T, 2 * width] -> out [T, width], dense."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = at < width
    gate = tl.load(x_ptr + row * 2 * width + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + at, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * width + at, gated(gate, up, dtype, GELU).to(dtype), mask=mask)


class TritonElementwise:
    """GPU `Elementwise` without rotary embedding (rope_write.py)."""

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        eps: float,
        delta: torch.Tensor | None = None,
        offset: float = 0.0,
    ) -> torch.Tensor:
        rows, width = x.shape
        assert x.stride(1) == 1 and weight.shape == (width,), (x.shape, x.stride(), weight.shape)
        assert delta is None or (delta.is_contiguous() and delta.shape == x.shape), delta
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        rms_norm_kernel[(rows,)](
            x,
            delta,
            weight,
            out,
            width,
            x.stride(0),
            eps,
            OFFSET=offset,
            TILE=triton.next_power_of_2(width),
            num_warps=8 if width > 2048 else 4,
        )
        return out

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return self._gated(x, gelu=False)

    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return self._gated(x, gelu=True)

    def _gated(self, x: torch.Tensor, *, gelu: bool) -> torch.Tensor:
        rows, width = x.shape[0], x.shape[1] // 2
        assert x.is_contiguous() and x.shape[1] == 2 * width, (x.shape, x.stride())
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        gate_kernel[(rows, triton.cdiv(width, GATE_TILE))](x, out, width, GELU=gelu, TILE=GATE_TILE, num_warps=4)
        return out
