"""The tower of Qwen3-VL and Qwen3.5: learned positions, RoPE, deepstack."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.layers.norm import add
from engine.model_files.image_processing import ImageProcessing
from engine.model_files.tower_config import CHANNELS, LearnedTower
from engine.models.vision.attention import FrameLayout, Spans
from engine.models.vision.block import ACTIVATIONS, PatchMerger, PlainMLP, VisionBlock, attention_of
from engine.models.vision.patches import Patches, places
from engine.models.vision.positions import AxialRope, LearnedPositions
from engine.models.vision.tower import Pixels
from engine.models.vision.weights import VisionWeights

EPS = 1e-6


class DeepstackTower:
    """The `VisionTower` of Qwen3-VL. `size`: hidden size of the decoder."""

    def __init__(self, weights: VisionWeights, config: LearnedTower, processing: ImageProcessing, *, size: int) -> None:
        self._config, hidden = config, config.hidden_size
        self.feature_size = size * (1 + len(config.deepstack_layers))
        self._patches = Patches(config, processing, dtype=weights.dtype, device=weights.device)
        kernel = [hidden, CHANNELS, config.temporal_patch, config.patch, config.patch]
        self._embed = weights.convolution("patch_embed.proj", kernel, bias=True)
        table = weights.tensor("pos_embed.weight", [config.side**2, hidden])
        self._positions = LearnedPositions(table, side=config.side)
        self._rope = AxialRope(config.head_dim, theta=config.rope_theta, device=weights.device)
        self._blocks = [_block(weights.inside(f"blocks.{index}."), config) for index in range(config.depth)]
        self._merger = _merger(weights.inside("merger."), config, size=size)
        self._inside = {
            layer: _merger(weights.inside(f"deepstack_merger_list.{level}."), config, size=size, after=True)
            for level, layer in enumerate(config.deepstack_layers)
        }

    def encode(self, images: Sequence[Pixels]) -> list[Tensor]:
        return [self._encode(image) for image in images]

    def _encode(self, image: Pixels) -> Tensor:
        time, rows, columns = image.grid
        at = places(rows, columns, merge=self._config.merge)
        x = self._embed(self._patches(image))
        x.unflatten(0, (time, -1)).add_(self._positions.at(*at, size=(rows, columns)))
        layout, whole = FrameLayout(time, self._rope.at(*at)), [Spans(0, 1, rows * columns)]
        levels: list[Tensor] = []
        delta = None
        for index, block in enumerate(self._blocks):
            delta = block(x, delta, layout, whole)
            if index in self._inside:
                x, delta = add(x, delta), None
                levels.append(self._inside[index](x))
        merged = self._merger(x if delta is None else add(x, delta))
        return torch.cat((merged, *levels), 1) if levels else merged


def _block(weights: VisionWeights, config: LearnedTower) -> VisionBlock:
    hidden, width = config.hidden_size, config.intermediate_size
    attention = attention_of(weights, ["attn.qkv"], "attn.proj", hidden=hidden, heads=config.num_heads)
    mlp = PlainMLP(
        weights.linear(["mlp.linear_fc1"], width, hidden),
        weights.linear(["mlp.linear_fc2"], hidden, width),
        activation=ACTIVATIONS[config.activation],
    )
    return VisionBlock(
        (weights.layer_norm("norm1", hidden, eps=EPS), weights.layer_norm("norm2", hidden, eps=EPS)), attention, mlp
    )


def _merger(weights: VisionWeights, config: LearnedTower, *, size: int, after: bool = False) -> PatchMerger:
    width = config.hidden_size * config.merge**2
    return PatchMerger(
        weights.layer_norm("norm", width if after else config.hidden_size, eps=EPS),
        weights.linear(["linear_fc1"], width, width),
        weights.linear(["linear_fc2"], size, width),
        width=width,
        after=after,
    )
