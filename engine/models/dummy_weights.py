"""Generated weights for `--load-format dummy`: any config.json runs.

Elements depend on tensor name and index. Widths make the next token depend on last token and
context, and drafts sometimes right.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

NUMBERS = 1_000_003  # period of the noise; a prime, so that matrix rows differ
BLOCK = 1 << 22  # elements generated at once
# Standard deviations times the root of the inputs: most matrices; MLP output; attention output;
# head.
GAIN, ADDED, ATTENDED, HEAD = 1.6, 0.02, 0.12, 6.0
EMBEDDED, SPREAD = 1.0, 0.2  # embeddings; vectors
ADDS, ATTENDS = ("down_proj.weight", "w2.weight"), ("o_proj.weight", "out_proj.weight")
JOINS = ("mtp.fc.weight", "eh_proj.weight")  # [hidden, embedding and hidden]
ROOT_3 = math.sqrt(3)  # half the width of the uniform distribution with standard deviation 1


class DummyTensors:
    """`folder`: directory of config.json."""

    described_by = "config.json"

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._noise = dict[torch.device, Tensor]()

    def names(self) -> Collection[str]:
        return ()

    def where(self, name: str) -> str:
        return self._folder

    def open(self, name: str, shape: Sequence[int], taken: Sequence[range]) -> Callable[[Tensor], object]:
        if name.endswith(JOINS):
            return lambda out: out.copy_(torch.eye(*shape)[tuple(slice(part.start, part.stop) for part in taken)])
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]) % NUMBERS
        center = 1.0 if len(shape) == 1 and "norm" in name else 0.0
        return lambda out: self._fill(out, shape, taken, start=start, center=center, spread=_spread(name, shape))

    def close(self) -> None:
        self._noise.clear()

    def _fill(
        self, out: Tensor, shape: Sequence[int], taken: Sequence[range], *, start: int, center: float, spread: float
    ) -> None:
        noise = self._noise_on(out.device)
        if all(len(part) == size for part, size in zip(taken[1:], shape[1:], strict=True)):
            self._fill_run(out.view(-1), noise, start + taken[0].start * math.prod(shape[1:]))
        else:
            self._fill_cut(out, noise, shape, taken, start=start)
        out.mul_(spread).add_(center)

    def _fill_run(self, out: Tensor, noise: Tensor, at: int) -> None:
        done, at = 0, at % NUMBERS
        while done < len(out):
            count = min(len(out) - done, NUMBERS - at)
            out[done : done + count].copy_(noise[at : at + count])
            done, at = done + count, 0

    def _fill_cut(
        self, out: Tensor, noise: Tensor, shape: Sequence[int], taken: Sequence[range], *, start: int
    ) -> None:
        rows, row_size = taken[0], max(1, math.prod(map(len, taken[1:])))
        for first in range(0, len(rows), step := max(1, BLOCK // row_size)):
            block = rows[first : first + step]
            places = (_places([block, *taken[1:]], shape, device=out.device) + start) % NUMBERS
            out[first : first + len(block)].copy_(noise[places])

    def _noise_on(self, device: torch.device) -> Tensor:
        if device not in self._noise:
            generator = torch.Generator().manual_seed(0)
            uniform = torch.rand(NUMBERS, generator=generator) * 2 - 1
            self._noise[device] = (uniform * ROOT_3).to(device)
        return self._noise[device]


def _spread(name: str, shape: Sequence[int]) -> float:
    if len(shape) == 1:
        return SPREAD
    if name.endswith("embed_tokens.weight"):
        return EMBEDDED
    return _gain(name) / math.sqrt(math.prod(shape[1:]))


def _gain(name: str) -> float:
    if name == "lm_head.weight":
        return HEAD
    return ADDED if name.endswith(ADDS) else ATTENDED if name.endswith(ATTENDS) else GAIN


def _places(taken: Sequence[range], shape: Sequence[int], *, device: torch.device) -> Tensor:
    places, stride = torch.zeros((), dtype=torch.int64, device=device), 1
    for dim in reversed(range(len(shape))):
        own = torch.arange(taken[dim].start, taken[dim].stop, device=device) * stride
        places = places + own.view(-1, *[1] * (len(shape) - 1 - dim))
        stride *= shape[dim]
    return places
