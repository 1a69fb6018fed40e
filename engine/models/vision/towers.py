"""Vision towers by family: CLIP, Qwen3-VL (learned positions), Qwen2.5-VL (windows)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.layers.linear import Linear, add
from engine.model_files.tensor_names import CLIP, PROJECTOR, VISUAL
from engine.model_files.tower_config import CHANNELS, ClipTower, ImageProcessing, LearnedTower, TowerConfig, WindowTower
from engine.model_files.vision_config import VisionConfig
from engine.models.part import ModelPart
from engine.models.vision.block import (
    ACTIVATIONS,
    AxialRope,
    BlockNames,
    FrameLayout,
    LearnedPositions,
    Spans,
    VisionWeights,
    block_of,
    merger_of,
)
from engine.models.vision.tower import Patches, Pixels, VisionTower, places


class _Layers:
    def __init__(
        self, weights: VisionWeights, config: TowerConfig, processing: ImageProcessing, names: BlockNames, *, depth: int
    ) -> None:
        self._patches = Patches(config, processing, dtype=weights.dtype, device=weights.device)
        self._blocks = [block_of(weights.inside(f"{names.place}{index}."), config, names) for index in range(depth)]

    def _through(
        self,
        x: Tensor,
        layout: FrameLayout,
        spans: Callable[[int], list[Spans]],
        inside: Mapping[int, Callable[[Tensor], Tensor]],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """By layer, what `inside` makes of states, which later layers change."""
        found, delta = {}, None
        for index, block in enumerate(self._blocks):
            delta = block(x, delta, layout, spans(index))
            if index in inside:
                x, delta = add(x, delta), None
                found[index] = inside[index](x)
        return x if delta is None else add(x, delta), found


# ---- LLaVA 1.5's tower: states of an inner CLIP layer, projected (arXiv:2310.03744).

_CLIP_NAMES = BlockNames(
    place="encoder.layers.",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    norms=("layer_norm1", "layer_norm2"),
    up=("mlp.fc1",),
    down="mlp.fc2",
)


class ProjectedClip(_Layers):
    """`size`: hidden size of the decoder. Unused last layers are not loaded."""

    def __init__(
        self,
        weights: VisionWeights,
        projector: VisionWeights,
        config: ClipTower,
        processing: ImageProcessing,
        *,
        size: int,
    ) -> None:
        used = max(config.taken)
        super().__init__(weights, config, processing, _CLIP_NAMES, depth=used)
        self._config, self.feature_size, hidden = config, size, config.hidden_size
        first = weights.inside("embeddings.")
        self._embed = first.convolution("patch_embedding", [hidden, CHANNELS, config.patch, config.patch], bias=False)
        self._class = first.tensor("class_embedding", [hidden])
        self._positions = first.tensor("position_embedding.weight", [config.side**2 + 1, hidden])
        self._norm = weights.norm("pre_layrnorm", hidden, eps=config.eps)
        for index in range(used, config.depth):
            weights.ignore(f"encoder.layers.{index}.")
        weights.ignore("post_layernorm.")
        weights.ignore("embeddings.position_ids")  # in old files: 0, 1, ...
        width, bias = hidden * len(config.taken), config.projector_bias
        self._up = projector.linear(["linear_1"], size, width, bias=bias)
        self._down = projector.linear(["linear_2"], size, size, bias=bias)
        self._activation = ACTIVATIONS[config.projector]

    def encode(self, image: Pixels) -> Tensor:
        side = self._config.side
        patches = self._embed(self._patches(Pixels(image.pixels, (1, side, side))))
        x = self._norm(torch.cat((self._class.unsqueeze(0), patches)).add_(self._positions))
        states = self._states(x)
        first = 0 if self._config.keeps_class else 1
        rows = torch.cat([states[number][first:] for number in self._config.taken], 1)
        return self._down(self._activation(self._up(rows)))

    def _states(self, x: Tensor) -> dict[int, Tensor]:
        before = {0: x.clone()} if 0 in self._config.taken else {}
        whole, inside = [Spans(0, 1, len(x))], {number - 1: torch.clone for number in self._config.taken if number}
        _, found = self._through(x, FrameLayout(1, None), lambda index: whole, inside)
        return before | {index + 1: state for index, state in found.items()}


def _patch_embedding(weights: VisionWeights, config: TowerConfig, *, bias: bool) -> Linear:
    shape = [config.hidden_size, CHANNELS, config.temporal_patch, config.patch, config.patch]
    return weights.convolution("patch_embed.proj", shape, bias=bias)


# ---- The tower of Qwen3-VL and Qwen3.5: learned positions, RoPE, deepstack.

_LEARNED_NAMES = BlockNames(up=("mlp.linear_fc1",), down="mlp.linear_fc2")


class DeepstackTower(_Layers):
    """Qwen3-VL. `size`: hidden size of the decoder."""

    def __init__(self, weights: VisionWeights, config: LearnedTower, processing: ImageProcessing, *, size: int) -> None:
        super().__init__(weights, config, processing, _LEARNED_NAMES, depth=config.depth)
        self._config, hidden = config, config.hidden_size
        self.feature_size = size * (1 + len(config.deepstack_layers))
        self._embed = _patch_embedding(weights, config, bias=True)
        table = weights.tensor("pos_embed.weight", [config.side**2, hidden])
        self._positions = LearnedPositions(table, side=config.side)
        self._rope = AxialRope(config.head_dim, theta=config.rope_theta, device=weights.device)
        self._merger = merger_of(weights.inside("merger."), config, _LEARNED_NAMES, size=size)
        others = [weights.inside(f"deepstack_merger_list.{level}.") for level in range(len(config.deepstack_layers))]
        self._inside = {
            layer: merger_of(others[level], config, _LEARNED_NAMES, size=size, after=True)
            for level, layer in enumerate(config.deepstack_layers)
        }

    def encode(self, image: Pixels) -> Tensor:
        time, rows, columns = image.grid
        at = places(rows, columns, merge=self._config.merge)
        x = self._embed(self._patches(image))
        x.unflatten(0, (time, -1)).add_(self._positions.at(*at, size=(rows, columns)))
        layout, whole = FrameLayout(time, self._rope.at(*at)), [Spans(0, 1, rows * columns)]
        x, levels = self._through(x, layout, lambda index: whole, self._inside)
        merged = self._merger(x)
        return torch.cat((merged, *levels.values()), 1) if levels else merged


# ---- Qwen2.5-VL's tower: windowed attention in most layers (arXiv:2502.13923).

_WINDOWED_NAMES = BlockNames(
    up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj", merger=("ln_q", "mlp.0", "mlp.2"), rms=True
)


class WindowedTower(_Layers):
    """Qwen2.5-VL. `size`: hidden size of the decoder."""

    def __init__(self, weights: VisionWeights, config: WindowTower, processing: ImageProcessing, *, size: int) -> None:
        super().__init__(weights, config, processing, _WINDOWED_NAMES, depth=config.depth)
        self._config, self._device, self.feature_size = config, weights.device, size
        self._embed = _patch_embedding(weights, config, bias=False)
        self._rope = AxialRope(config.head_dim, theta=config.rope_theta, device=weights.device)
        self._merger = merger_of(weights.inside("merger."), config, _WINDOWED_NAMES, size=size)

    def encode(self, image: Pixels) -> Tensor:
        config, (time, rows, columns) = self._config, image.grid
        unit = config.merge**2
        order, windows = in_windows(rows // config.merge, columns // config.merge, side=config.window)
        patches = (order.unsqueeze(1) * unit + torch.arange(unit)).flatten()
        turn = self._rope.at(*(at[patches] for at in places(rows, columns, merge=config.merge)))
        x = _framed(self._embed(self._patches(image)), patches.to(self._device), frames=time)
        spans = [Spans(first * unit, runs, length * unit) for first, runs, length in windows]
        whole, full = [Spans(0, 1, rows * columns)], config.full_layers
        x, _ = self._through(x, FrameLayout(time, turn), lambda index: whole if index in full else spans, {})
        return _framed(self._merger(x), order.argsort().to(self._device), frames=time)


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
