"""Tiny random checkpoints of models that see images, as transformers writes them, and prompts with images for them."""

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING, AutoModelForImageTextToText

from engine.images import ImageInput, rope_delta, rope_positions
from engine.models.decoder import DenseDecoder
from engine.models.vision.tower import NO_IMAGES, ImageRows, Pixels, StepImages
from tests.models.reference_attend import Sequence
from tests.models.tiny_checkpoints import EOS, VOCAB_SIZE, edit_tensors, write_json, write_tokenizer

IMAGE, VIDEO, START, END = 4, 5, 6, 7  # special tokens of the tiny tokenizer
PATCH, MERGE, TEMPORAL = 4, 2, 2
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_QWEN3: dict[str, Any] = {
    **_TEXT,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_QWEN3_5: dict[str, Any] = {
    **_QWEN3,
    "head_dim": 32,
    "rope_parameters": {**_QWEN3["rope_parameters"], "partial_rotary_factor": 0.5},
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": TEMPORAL,
    "out_hidden_size": 64,
}
_LEARNED: dict[str, Any] = {**_VISION, "num_position_embeddings": 36}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **IDS,
        "text_config": {
            **_TEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {**_VISION, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},
    },
    "qwen3_vl": {
        **IDS,
        "text_config": _QWEN3,
        "vision_config": {**_LEARNED, "deepstack_visual_indexes": [0, 2]},
    },
    "qwen3_vl_moe": {
        **IDS,
        "text_config": {**_QWEN3, **_EXPERTS, "tie_word_embeddings": False},
        "vision_config": {**_LEARNED, "deepstack_visual_indexes": [1]},
    },
    "qwen3_5": {**IDS, "text_config": _QWEN3_5, "vision_config": _LEARNED},
    "qwen3_5_moe": {
        **IDS,
        "text_config": {**_QWEN3_5, **_EXPERTS, "shared_expert_intermediate_size": 24},
        "vision_config": _LEARNED,
    },
    "llava": {
        "image_token_index": IMAGE,
        "image_seq_length": 16,
        "text_config": {**_TEXT, "model_type": "llama", "head_dim": 16},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
    },
}
MEAN, STD = [0.4, 0.5, 0.6], [0.3, 0.25, 0.2]
PROCESSING: dict[str, Any] = {"image_mean": MEAN, "image_std": STD}
SMART = {
    "min_pixels": 64,
    "max_pixels": 4096,
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": TEMPORAL,
}
CROPS = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}


def make_seeing_checkpoint(folder: Path, family: str, *, seed: int = 0, **fields: Any) -> str:
    """Write a checkpoint of `family` (of FAMILIES) into `folder`, its weights drawn wide; returns its path. `fields`: of config.json."""
    model = their_model(family, seed=seed, **fields)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    write_json(folder / "preprocessor_config.json", PROCESSING | (CROPS if family == "llava" else SMART))
    return str(folder)


def with_mtp(folder: Path, family: str) -> str:
    """Write a checkpoint whose MTP layer is a copy of a layer of its own, so that some of its drafts are right and others wrong: of a hybrid."""
    text = {**FAMILIES[family]["text_config"], "mtp_num_hidden_layers": 1}
    path = make_seeing_checkpoint(folder, family, text_config=text)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        layer, size = "model.language_model.layers.1.", text["hidden_size"]
        own = {name.removeprefix(layer): tensor for name, tensor in tensors.items() if name.startswith(layer)}
        tensors |= {f"mtp.layers.0.{name}": tensor.clone() for name, tensor in own.items()}
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        tensors |= {f"mtp.{name}.weight": torch.zeros(size) for name in norms}
        tensors["mtp.fc.weight"] = torch.cat((torch.eye(size), torch.eye(size)), 1)

    edit_tensors(folder / "model.safetensors", add)
    return path


def their_model(family: str, *, seed: int = 0, **fields: Any) -> PreTrainedModel:
    config = CONFIG_MAPPING[family](**{**FAMILIES[family], **fields}, attn_implementation="eager")
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    draw(model, seed=seed, adds=family.startswith("qwen3_5"))
    return model


def draw(model: PreTrainedModel, *, seed: int, adds: bool) -> None:
    """`adds`: norms of the text model add 1 to their weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            is_norm = "norm" in name or "ln_q" in name
            is_around_one = is_norm and name.endswith("weight") and not (adds and _adds(name))
            parameter.copy_(noise + 1.0 if is_around_one else noise)


def _adds(name: str) -> bool:
    return "visual" not in name and "linear_attn" not in name


class Prompt(NamedTuple):
    """`ids` with placeholders, `images` and the frames [frames, height, width, 3] uint8 of each. `kinds`: of tokens: 0 text, 1 image, 2 video."""

    ids: list[int]
    images: list[ImageInput]
    frames: list[torch.Tensor]
    kinds: list[int]


class PromptMaker:
    """Builds a prompt piece by piece."""

    def __init__(self, seed: int = 3) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._prompt = Prompt([], [], [], [])

    def text(self, count: int) -> "PromptMaker":
        ids = torch.randint(16, VOCAB_SIZE, (count,), generator=self._generator).tolist()
        return self._add(ids, [0] * count)

    def image(
        self, rows: int, columns: int, *, time: int = 1, frames: int = 1, time_step: int = 1, kind: int = 1
    ) -> "PromptMaker":
        """Of `rows` x `columns` patches; between a start and an end token."""
        count, token = time * rows * columns // MERGE**2, IMAGE if kind == 1 else VIDEO
        self._add([START], [0])
        self._see((time, rows, columns), MERGE, count, (frames, rows * PATCH, columns * PATCH), time_step)
        self._add([token] * count, [kind] * count)
        return self._add([END], [0])

    def fixed_image(self, side: int, *, count: int) -> "PromptMaker":
        """Of `side` x `side` pixels, `count` tokens without a shape."""
        self._see((count, 1, 1), 1, count, (1, side, side), 1)
        return self._add([IMAGE] * count, [1] * count)

    def done(self) -> Prompt:
        return self._prompt

    def _add(self, ids: list[int], kinds: list[int]) -> "PromptMaker":
        self._prompt.ids.extend(ids)
        self._prompt.kinds.extend(kinds)
        return self

    def _see(self, grid: tuple[int, int, int], merge: int, count: int, size: tuple[int, int, int], step: int) -> None:
        pixels = torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=self._generator)
        image = ImageInput(
            start=len(self._prompt.ids),
            num_tokens=count,
            key=bytes(32),
            grid=grid,
            merge=merge,
            size=size,
            pixels=pixels.numpy().tobytes(),
            time_step=step,
        )
        self._prompt.images.append(image)
        self._prompt.frames.append(pixels)


def two_images(family: str, *, count: int = 16) -> Prompt:
    """Of different sizes, where the family takes such; else of `count` tokens each."""
    if family == "llava":
        return PromptMaker().text(5).fixed_image(32, count=count).text(3).fixed_image(32, count=count).text(6).done()
    return PromptMaker().text(5).image(6, 10).text(3).image(4, 4).text(6).done()


def features_of(model: DenseDecoder, prompt: Prompt) -> list[torch.Tensor]:
    assert model.vision is not None
    with torch.inference_mode():
        return [model.vision.encode(Pixels(f, i.grid)) for f, i in zip(prompt.frames, prompt.images, strict=True)]


def logits_of(model: DenseDecoder, prompt: Prompt, answer: list[int], *, cuts: list[int]) -> torch.Tensor:
    """[prompt and answer, vocab]: the prompt in chunks that end at `cuts`, then the tokens of `answer` one by one."""
    features, sequence = features_of(model, prompt), Sequence(model)
    bounds = [0, *cuts, len(prompt.ids)]
    logits = []
    for start, end in pairwise(bounds):
        positions = torch.tensor(rope_positions(prompt.images, start, end))
        rows = image_rows(prompt.images, features, start, end)
        logits.append(sequence.extend(prompt.ids[start:end], positions=positions, images=rows))
    delta = rope_delta(prompt.images)
    for place, token in enumerate(answer, len(prompt.ids)):
        logits.append(sequence.extend([token], positions=torch.tensor([place + delta])))
    return torch.cat(logits)


def image_rows(images: list[ImageInput], features: list[torch.Tensor], start: int, end: int) -> StepImages:
    """Of a step with tokens `start`..`end` - 1."""
    rows, parts = [], []
    for image, feature in zip(images, features, strict=True):
        first, last = max(start, image.start), min(end, image.end)
        if first < last:
            rows += range(first - start, last - start)
            parts.append(feature[first - image.start : last - image.start])
    return (ImageRows(torch.tensor(rows), torch.cat(parts)),) if rows else NO_IMAGES


def their_values(frames: torch.Tensor) -> torch.Tensor:
    """`frames` [..., 3] as the towers want them."""
    return (frames.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)


def their_patches(frames: torch.Tensor) -> torch.Tensor:
    """[patches, values]: by the definition, block after block of patches that are merged, the last frame again where one is missing."""
    if len(frames) % TEMPORAL:
        frames = torch.cat((frames, frames[-1:]))
    values, side, patches = their_values(frames), PATCH * MERGE, []
    for time in range(0, len(frames), TEMPORAL):
        for top in range(0, frames.shape[1], side):
            for left in range(0, frames.shape[2], side):
                for row in range(top, top + side, PATCH):
                    for column in range(left, left + side, PATCH):
                        patch = values[time : time + TEMPORAL, row : row + PATCH, column : column + PATCH]
                        patches.append(patch.permute(3, 0, 1, 2).flatten())
    return torch.stack(patches)
