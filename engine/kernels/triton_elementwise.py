# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Norms, rotary positions and the gate of the MLP for GPUs (never run on one yet): one launch each.

The same operations as elementwise.c's, in any float type, rounded where torch's operators in engine/layers round.
"""

import torch
import triton
import triton.language as tl

GATE_TILE = 1024
HEAD_TILE = 8  # heads of a program: enough programs for one token


@triton.jit
def rms_norm_kernel(x_ptr, delta_ptr, weight_ptr, out_ptr, width, eps, ADDS: tl.constexpr, TILE: tl.constexpr):
    """Program (row): x [T, width] += delta, out = norm(x) * weight; all dense."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, TILE)
    mask = at < width
    x = tl.load(x_ptr + row + at, mask=mask, other=0.0)
    if ADDS:
        delta = tl.load(delta_ptr + row + at, mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row + at, x, mask=mask)
    wide = x.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + at, (wide * factor * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_turn_kernel(
    x_ptr,  # [T, x_stride]: the first HEADS * DIM elements of a row are changed
    weight_ptr,  # [HEADS, DIM]
    cosine_ptr,  # [T, turn_stride]
    sine_ptr,
    x_stride,
    turn_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NORMS: tl.constexpr,
    TILE: tl.constexpr,  # of half a head
    TILE_HEADS: tl.constexpr,
):
    """Program (token, tile of heads). A thread holds both elements of a pair: in place without a barrier."""
    HALF: tl.constexpr = DIM // 2
    dtype = x_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    dims = tl.arange(0, TILE)
    at = head[:, None] * DIM + dims[None, :]
    mask = (head < HEADS)[:, None] & (dims < HALF)[None, :]
    low = tl.load(x_ptr + token * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + token * x_stride + at + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORMS:
        factor = 1.0 / tl.sqrt(tl.sum(low * low + high * high, 1) / DIM + eps)
        low_weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
        high_weight = tl.load(weight_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
        low = (low * factor[:, None]).to(dtype).to(tl.float32) * low_weight
        high = (high * factor[:, None]).to(dtype).to(tl.float32) * high_weight
        low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    turn = token * turn_stride + dims
    mask_t = dims < HALF
    low_cosine = tl.load(cosine_ptr + turn, mask=mask_t, other=0.0).to(tl.float32)[None, :]
    high_cosine = tl.load(cosine_ptr + turn + HALF, mask=mask_t, other=0.0).to(tl.float32)[None, :]
    low_sine = tl.load(sine_ptr + turn, mask=mask_t, other=0.0).to(tl.float32)[None, :]
    high_sine = tl.load(sine_ptr + turn + HALF, mask=mask_t, other=0.0).to(tl.float32)[None, :]
    new_low = (low * low_cosine).to(dtype).to(tl.float32) + high * low_sine
    new_high = (high * high_cosine).to(dtype).to(tl.float32) + low * high_sine
    tl.store(x_ptr + token * x_stride + at, new_low.to(dtype), mask=mask)
    tl.store(x_ptr + token * x_stride + at + HALF, new_high.to(dtype), mask=mask)


@triton.jit
def silu_mul_kernel(x_ptr, out_ptr, width, TILE: tl.constexpr):
    """Program (row, tile): x [T, 2 * width] -> out [T, width], dense."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = at < width
    gate = tl.load(x_ptr + row * 2 * width + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + at, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + at, (silu * up).to(dtype), mask=mask)


class TritonElementwise:
    """As `Elementwise` (engine/kernels/elementwise.py)."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, *, eps: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, width = x.shape
        assert x.is_contiguous() and weight.shape == (width,), (x.shape, x.stride(), weight.shape)
        assert delta is None or (delta.is_contiguous() and delta.shape == x.shape), delta
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        rms_norm_kernel[(rows,)](
            x,
            x if delta is None else delta,
            weight,
            out,
            width,
            eps,
            ADDS=delta is not None,
            TILE=triton.next_power_of_2(width),
            num_warps=8 if width > 2048 else 4,
        )
        return out

    def norm_turn(
        self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], *, weight: torch.Tensor | None, eps: float
    ) -> None:
        (rows, heads, dim), (cosine, sine) = x.shape, turn
        assert x.stride()[1:] == (dim, 1) and dim % 2 == 0, (x.shape, x.stride())
        assert cosine.shape == sine.shape == (rows, 1, dim), cosine.shape
        assert cosine.stride() == sine.stride() and cosine.stride(2) == 1, cosine.stride()
        assert weight is None or (weight.is_contiguous() and weight.shape == (heads, dim)), (weight, x.shape)
        norm_turn_kernel[(rows, triton.cdiv(heads, HEAD_TILE))](
            x,
            x if weight is None else weight,
            cosine,
            sine,
            x.stride(0),
            cosine.stride(0),
            eps,
            HEADS=heads,
            DIM=dim,
            NORMS=weight is not None,
            TILE=triton.next_power_of_2(dim // 2),
            TILE_HEADS=HEAD_TILE,
            num_warps=4,
        )

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape[0], x.shape[1] // 2
        assert x.is_contiguous() and x.shape[1] == 2 * width, (x.shape, x.stride())
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        silu_mul_kernel[(rows, triton.cdiv(width, GATE_TILE))](x, out, width, TILE=GATE_TILE, num_warps=4)
        return out
