"""Vision towers by family: CLIP, Qwen3-VL (learned positions), Qwen2.5-VL (windows)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.layers.norm import add
from engine.model_files.tower_config import CHANNELS, ClipTower, ImageProcessing, LearnedTower, WindowTower
from engine.model_files.vision_config import CLIP, PROJECTOR, VISUAL, VisionConfig
from engine.models.part import ModelPart
from engine.models.vision.block import (
    ACTIVATIONS,
    AxialRope,
    FrameLayout,
    GatedMLP,
    LearnedPositions,
    PatchMerger,
    PlainMLP,
    Spans,
    VisionBlock,
    VisionWeights,
    attention_of,
)
from engine.models.vision.tower import Patches, Pixels, VisionTower, places

# ---- LLaVA 1.5's tower: states of an inner CLIP layer, projected (arXiv:2310.03744).


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
        self._blocks = [_clip_block(weights.inside(f"encoder.layers.{index}."), config) for index in used]
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


def _clip_block(weights: VisionWeights, config: ClipTower) -> VisionBlock:
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


# ---- The tower of Qwen3-VL and Qwen3.5: learned positions, RoPE, deepstack.

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
        self._blocks = [_learned_block(weights.inside(f"blocks.{index}."), config) for index in range(config.depth)]
        self._merger = _learned_merger(weights.inside("merger."), config, size=size)
        self._inside = {
            layer: _learned_merger(weights.inside(f"deepstack_merger_list.{level}."), config, size=size, after=True)
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


def _learned_block(weights: VisionWeights, config: LearnedTower) -> VisionBlock:
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


def _learned_merger(weights: VisionWeights, config: LearnedTower, *, size: int, after: bool = False) -> PatchMerger:
    width = config.hidden_size * config.merge**2
    return PatchMerger(
        weights.layer_norm("norm", width if after else config.hidden_size, eps=EPS),
        weights.linear(["linear_fc1"], width, width),
        weights.linear(["linear_fc2"], size, width),
        width=width,
        after=after,
    )


# ---- Qwen2.5-VL's tower: windowed attention in most layers (arXiv:2502.13923).


class WindowedTower:
    """The `VisionTower` of Qwen2.5-VL. `size`: hidden size of the decoder."""

    def __init__(self, weights: VisionWeights, config: WindowTower, processing: ImageProcessing, *, size: int) -> None:
        self._config, self._device, self.feature_size = config, weights.device, size
        self._patches = Patches(config, processing, dtype=weights.dtype, device=weights.device)
        kernel = [config.hidden_size, CHANNELS, config.temporal_patch, config.patch, config.patch]
        self._embed = weights.convolution("patch_embed.proj", kernel, bias=False)
        self._rope = AxialRope(config.head_dim, theta=config.rope_theta, device=weights.device)
        self._blocks = [_windowed_block(weights.inside(f"blocks.{index}."), config) for index in range(config.depth)]
        self._merger = _windowed_merger(weights.inside("merger."), config, size=size)

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


def _windowed_block(weights: VisionWeights, config: WindowTower) -> VisionBlock:
    hidden, width = config.hidden_size, config.intermediate_size
    attention = attention_of(weights, ["attn.qkv"], "attn.proj", hidden=hidden, heads=config.num_heads)
    mlp = GatedMLP(
        weights.linear(["mlp.gate_proj", "mlp.up_proj"], width, hidden, gates=True),
        weights.linear(["mlp.down_proj"], hidden, width),
    )
    return VisionBlock(
        (weights.rms_norm("norm1", hidden, eps=EPS), weights.rms_norm("norm2", hidden, eps=EPS)), attention, mlp
    )


def _windowed_merger(weights: VisionWeights, config: WindowTower, *, size: int) -> PatchMerger:
    width = config.hidden_size * config.merge**2
    return PatchMerger(
        weights.rms_norm("ln_q", config.hidden_size, eps=EPS),
        weights.linear(["mlp.0"], width, width),
        weights.linear(["mlp.2"], size, width),
        width=width,
    )


# ---- Loads the vision tower of a model.


def load_tower(part: ModelPart) -> VisionTower | None:
    """Load the tower on the first stage of a multimodal model. Raises ConfigError."""
    config = part.config.vision
    if config is None or not part.place.is_first_stage:
        return None
    assert config.deepstack_levels <= len(part.share.layers), "check_layout has accepted the stages"
    return _tower(part, config)


def _tower(part: ModelPart, config: VisionConfig) -> VisionTower:
    tower, processing, size = config.tower, config.processing, part.config.hidden_size
    if isinstance(tower, ClipTower):
        weights, projector = VisionWeights(part.checkpoint, CLIP), VisionWeights(part.checkpoint, PROJECTOR)
        return ProjectedClip(weights, projector, tower, processing, size=size)
    weights = VisionWeights(part.checkpoint, VISUAL)
    if isinstance(tower, LearnedTower):
        return DeepstackTower(weights, tower, processing, size=size)
    return WindowedTower(weights, tower, processing, size=size)
