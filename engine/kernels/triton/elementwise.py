# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Norms and MLP gates for GPUs, one launch each.

Operations of elementwise.c, rounded like torch's operators in engine/layers.
"""

import torch
import triton
import triton.language as tl

GATE_TILE = 1024


@triton.jit
def rms_norm_kernel(x_ptr, delta_ptr, weight_ptr, out_ptr, width, eps, OFFSET: tl.constexpr, TILE: tl.constexpr):
    """Program (row): x [T, width] += delta, out = norm(x) * (weight + OFFSET), dense."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, TILE)
    mask = at < width
    x = tl.load(x_ptr + row + at, mask=mask, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row + at, mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row + at, x, mask=mask)
    wide = x.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32) + OFFSET
    tl.store(out_ptr + row + at, (wide * factor * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gate_kernel(x_ptr, out_ptr, width, GELU: tl.constexpr, TILE: tl.constexpr):
    """Program (row, tile): x [T, 2 * width] -> out [T, width], dense. GELU: by tanh."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = at < width
    gate = tl.load(x_ptr + row * 2 * width + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + at, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    power = gate
    if GELU:  # (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y))
        power = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    gated = (gate / (1.0 + tl.exp(-power))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + at, (gated * up).to(dtype), mask=mask)


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
        assert x.is_contiguous() and weight.shape == (width,), (x.shape, x.stride(), weight.shape)
        assert delta is None or (delta.is_contiguous() and delta.shape == x.shape), delta
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        rms_norm_kernel[(rows,)](
            x,
            delta,
            weight,
            out,
            width,
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
