"""Qwen2.5-VL's tower: windowed attention in most layers (arXiv:2502.13923)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.layers.norm import add
from engine.model_files.image_processing import ImageProcessing
from engine.model_files.tower_config import CHANNELS, WindowTower
from engine.models.vision.attention import FrameLayout, Spans
from engine.models.vision.block import GatedMLP, PatchMerger, VisionBlock, attention_of
from engine.models.vision.patches import Patches, places
from engine.models.vision.positions import AxialRope
from engine.models.vision.tower import Pixels
from engine.models.vision.weights import VisionWeights

EPS = 1e-6


class WindowedTower:
    """The `VisionTower` of Qwen2.5-VL. `size`: hidden size of the decoder."""

    def __init__(self, weights: VisionWeights, config: WindowTower, processing: ImageProcessing, *, size: int) -> None:
        self._config, self._device, self.feature_size = config, weights.device, size
        self._patches = Patches(config, processing, dtype=weights.dtype, device=weights.device)
        kernel = [config.hidden_size, CHANNELS, config.temporal_patch, config.patch, config.patch]
        self._embed = weights.convolution("patch_embed.proj", kernel, bias=False)
        self._rope = AxialRope(config.head_dim, theta=config.rope_theta, device=weights.device)
        self._blocks = [_block(weights.inside(f"blocks.{index}."), config) for index in range(config.depth)]
        self._merger = _merger(weights.inside("merger."), config, size=size)

    def encode(self, images: Sequence[Pixels]) -> list[Tensor]:
        return [self._encode(image) for image in images]

    def _encode(self, image: Pixels) -> Tensor:
        config, (time, rows, columns) = self._config, image.grid
        unit = config.merge**2
        order, windows = in_windows(rows // config.merge, columns // config.merge, side=config.window)
        patches = (order.unsqueeze(1) * unit + torch.arange(unit)).flatten()
        turn = self._rope.at(*(at[patches] for at in places(rows, columns, merge=config.merge)))
        x = _framed(self._embed(self._patches(image)), patches.to(self._device), frames=time)
        spans = [Spans(first * unit, runs, length * unit) for first, runs, length in windows]
        x = self._through_blocks(x, FrameLayout(time, turn), spans, [Spans(0, 1, rows * columns)])
        return _framed(self._merger(x), order.argsort().to(self._device), frames=time)

    def _through_blocks(self, x: Tensor, layout: FrameLayout, windows: list[Spans], whole: list[Spans]) -> Tensor:
        delta = None
        for index, block in enumerate(self._blocks):
            delta = block(x, delta, layout, whole if index in self._config.full_layers else windows)
        return x if delta is None else add(x, delta)


def in_windows(rows: int, columns: int, *, side: int) -> tuple[Tensor, list[Spans]]:
    """Order tokens [rows * columns] of a frame by window; return the windows' spans, too."""
    tokens = torch.arange(rows * columns).view(rows, columns)
    order, spans, first = [], [], 0
    for top, height in _cuts(rows, side):
        for left, width in _cuts(columns, side):
            part = tokens[top, left].unflatten(0, (-1, height)).unflatten(2, (-1, width))
            order.append(part.transpose(1, 2).flatten())
            spans.append(Spans(first, len(order[-1]) // (height * width), height * width))
            first += len(order[-1])
    return torch.cat(order), spans


def _cuts(size: int, side: int) -> list[tuple[slice, int]]:
    whole = size - size % side
    cuts = [(slice(0, whole), side), (slice(whole, size), size - whole)]
    return [(part, length) for part, length in cuts if part.start < part.stop]


def _framed(x: Tensor, order: Tensor, *, frames: int) -> Tensor:
    return x.unflatten(0, (frames, -1)).index_select(1, order).flatten(0, 1)


def _block(weights: VisionWeights, config: WindowTower) -> VisionBlock:
    hidden, width = config.hidden_size, config.intermediate_size
    attention = attention_of(weights, ["attn.qkv"], "attn.proj", hidden=hidden, heads=config.num_heads)
    mlp = GatedMLP(
        weights.linear(["mlp.gate_proj", "mlp.up_proj"], width, hidden, gates=True),
        weights.linear(["mlp.down_proj"], hidden, width),
    )
    return VisionBlock(
        (weights.rms_norm("norm1", hidden, eps=EPS), weights.rms_norm("norm2", hidden, eps=EPS)), attention, mlp
    )


def _merger(weights: VisionWeights, config: WindowTower, *, size: int) -> PatchMerger:
    width = config.hidden_size * config.merge**2
    return PatchMerger(
        weights.rms_norm("ln_q", config.hidden_size, eps=EPS),
        weights.linear(["mlp.0"], width, width),
        weights.linear(["mlp.2"], size, width),
        width=width,
    )
