"""LLaVA 1.5's tower: states of an inner CLIP layer, projected (arXiv:2310.03744)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.layers.norm import add
from engine.model_files.image_processing import ImageProcessing
from engine.model_files.tower_config import CHANNELS, ClipTower
from engine.models.vision.attention import FrameLayout, Spans
from engine.models.vision.block import ACTIVATIONS, PlainMLP, VisionBlock, attention_of
from engine.models.vision.patches import Patches
from engine.models.vision.tower import Pixels
from engine.models.vision.weights import VisionWeights


class ProjectedClip:
    """A CLIP `VisionTower` with projector.

    `size`: hidden size of the decoder. Unused last layers are not loaded.
    """

    def __init__(
        self,
        weights: VisionWeights,
        projector: VisionWeights,
        config: ClipTower,
        processing: ImageProcessing,
        *,
        size: int,
    ) -> None:
        self._config, self.feature_size, hidden = config, size, config.hidden_size
        self._patches = Patches(config, processing, dtype=weights.dtype, device=weights.device)
        first = weights.inside("embeddings.")
        kernel = [hidden, CHANNELS, config.patch, config.patch]
        self._embed = first.convolution("patch_embedding", kernel, bias=False)
        self._class = first.tensor("class_embedding", [hidden])
        self._positions = first.tensor("position_embedding.weight", [config.side**2 + 1, hidden])
        self._norm = weights.layer_norm("pre_layrnorm", hidden, eps=config.eps)
        used = range(max(config.taken))
        self._blocks = [_block(weights.inside(f"encoder.layers.{index}."), config) for index in used]
        for index in range(len(used), config.depth):
            weights.ignore(f"encoder.layers.{index}.")
        weights.ignore("post_layernorm.")
        weights.ignore("embeddings.position_ids")  # in old files: 0, 1, ...
        width, bias = hidden * len(config.taken), config.projector_bias
        self._up = projector.linear(["linear_1"], size, width, bias=bias)
        self._down = projector.linear(["linear_2"], size, size, bias=bias)
        self._activation = ACTIVATIONS[config.projector]

    def encode(self, images: Sequence[Pixels]) -> list[Tensor]:
        return [self._encode(image) for image in images]

    def _encode(self, image: Pixels) -> Tensor:
        side = self._config.side
        patches = self._embed(self._patches(Pixels(image.pixels, (1, side, side))))
        x = self._norm(torch.cat((self._class.unsqueeze(0), patches)).add_(self._positions))
        states = self._states(x)
        first = 0 if self._config.keeps_class else 1
        rows = torch.cat([states[number][first:] for number in self._config.taken], 1)
        return self._down(self._activation(self._up(rows)))

    def _states(self, x: Tensor) -> dict[int, Tensor]:
        layout, whole = FrameLayout(1, None), [Spans(0, 1, len(x))]
        found = {0: x.clone()} if 0 in self._config.taken else {}
        delta = None
        for number, block in enumerate(self._blocks, 1):
            delta = block(x, delta, layout, whole)
            if number in self._config.taken:
                x, delta = add(x, delta), None
                found[number] = x.clone() if number < len(self._blocks) else x
        return found


def _block(weights: VisionWeights, config: ClipTower) -> VisionBlock:
    hidden, width = config.hidden_size, config.intermediate_size
    qkv = [f"self_attn.{name}_proj" for name in "qkv"]
    attention = attention_of(weights, qkv, "self_attn.out_proj", hidden=hidden, heads=config.num_heads)
    mlp = PlainMLP(
        weights.linear(["mlp.fc1"], width, hidden),
        weights.linear(["mlp.fc2"], hidden, width),
        activation=ACTIVATIONS[config.activation],
    )
    norms = (weights.layer_norm(f"layer_norm{i}", hidden, eps=config.eps) for i in (1, 2))
    before_attention, before_mlp = norms
    return VisionBlock((before_attention, before_mlp), attention, mlp)
