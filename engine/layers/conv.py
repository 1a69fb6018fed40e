"""Causal depthwise convolution of recurrent layers, then SiLU."""

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.conv import DTYPES, MOST_TAPS, conv_kernel
from engine.layers.recurrence import StepStates


class ShortConv:
    """Causal convolution. `weight` [channels, taps], oldest first; `bias` [channels]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        on_cpu = weight.device.type == "cpu" and weight.dtype in DTYPES and weight.shape[1] <= MOST_TAPS
        self._kernel = conv_kernel() if on_cpu else None
        self._weight = weight.float().t().contiguous()
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor, state: Tensor, step: StepStates) -> Tensor:
        """x [T, channels] -> the same; updates state [slots, channels, taps - 1]."""
        if self._kernel is not None and step.rows is not None:
            return self._kernel(x, self._weight, self._bias, state, step.rows)
        taps, out = len(self._weight), torch.empty_like(x, memory_format=torch.contiguous_format)
        for (first, end, _), slot in zip(step.spans, step.slots, strict=True):
            inputs = torch.cat((state[slot].t(), x[first:end]))  # [taps - 1 + n, channels]
            windows = inputs.float().unfold(0, taps, 1)  # [n, channels, taps]
            sums = (windows * self._weight.t()).sum(-1)
            out[first:end] = functional.silu(sums if self._bias is None else sums + self._bias).to(x.dtype)
            state[slot] = inputs[len(inputs) - taps + 1 :].t()
        return out
