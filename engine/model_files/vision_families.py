"""Properties of multimodal architectures that config.json lacks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.model_files.fields import Fields
from engine.model_files.image_processing import CLIP_MEAN, CLIP_STD, HALF, CenterCrop, ImageProcessing, PixelRange
from engine.model_files.tower_config import ClipTower, Tower, read_clip, read_learned, read_windows


@dataclass(frozen=True, slots=True)
class MropeConfig:
    """M-RoPE (arXiv:2409.12191): a head's pairs for time, row and column.

    `interleaved`: pairs 1, 4, ... are row, 2, 5, ... column; else in sections.
    """

    sections: tuple[int, int, int]
    interleaved: bool

    def dimensions(self) -> list[int]:
        time, rows, columns = self.sections
        if not self.interleaved:
            return [0] * time + [1] * rows + [2] * columns
        found = [0] * sum(self.sections)
        for dimension, count in ((1, rows), (2, columns)):
            for pair in range(dimension, min(3 * count, len(found)), 3):
                found[pair] = dimension
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """Properties of an architecture that its config.json lacks.

    text:         text architecture, empty to use `text_config`'s model_type
    text_fields, fixed: its default and unchangeable fields
    flat:         older files have text fields at top level
    either_ties:  embeddings are tied if either part sets it; else the outer one decides
    tower, processing: reader given the text model's hidden size; default given the tower
    ids:          default ids of image, video, start and end token
    image_id:     field of the image token
    times_videos: videos have RoPE time instead of text
    """

    text: str = ""
    text_fields: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    flat: bool = False
    either_ties: bool = False
    tower: Callable[[Fields, int], Tower]
    processing: Callable[[Tower], ImageProcessing]
    ids: tuple[int, int | None, int | None, int | None]
    image_id: str = "image_token_id"
    mrope: MropeConfig | None = None
    times_videos: bool = False


def _qwen2_processing(tower: Tower) -> ImageProcessing:
    pixels = (tower.patch * tower.merge) ** 2  # of a token
    return ImageProcessing(
        size=PixelRange(4 * pixels, 16384 * pixels),
        video=PixelRange(128 * pixels, 768 * pixels),
        mean=CLIP_MEAN,
        std=CLIP_STD,
    )


def _qwen3_processing(tower: Tower) -> ImageProcessing:
    return ImageProcessing(
        size=PixelRange(65536, 16777216), video=PixelRange(4096, 25165824, over_frames=True), mean=HALF, std=HALF
    )


def _clip_processing(tower: Tower) -> ImageProcessing:
    assert isinstance(tower, ClipTower)
    side = tower.side * tower.patch
    return ImageProcessing(size=CenterCrop(side, side, side), mean=CLIP_MEAN, std=CLIP_STD)


_QWEN_IDS = (151655, 151656, 151652, 151653)
_QWEN2_5_VL = VisionFamily(
    text="Qwen2ForCausalLM",
    text_fields={"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    flat=True,
    either_ties=True,
    tower=lambda fields, hidden: read_windows(fields, hidden=hidden),
    processing=_qwen2_processing,
    ids=_QWEN_IDS,
    mrope=MropeConfig((16, 24, 24), interleaved=False),
    times_videos=True,
)
_QWEN3_VL = VisionFamily(
    text="Qwen3ForCausalLM",
    text_fields={"rope_theta": 5e5},
    tower=lambda fields, hidden: read_learned(fields, hidden=hidden, deepstack=True),
    processing=_qwen3_processing,
    ids=_QWEN_IDS,
    mrope=MropeConfig((24, 20, 20), interleaved=True),
)
_QWEN3_5 = VisionFamily(
    text="Qwen3_5ForCausalLM",
    tower=lambda fields, hidden: read_learned(fields, hidden=hidden, deepstack=False),
    processing=_qwen3_processing,
    ids=(248056, 248057, 248053, 248054),
    mrope=MropeConfig((11, 11, 10), interleaved=True),
)
_LLAVA = VisionFamily(
    text_fields={  # Llama's, absent in the first files
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    either_ties=True,
    tower=lambda fields, hidden: read_clip(fields),
    processing=_clip_processing,
    ids=(32000, None, None, None),
    image_id="image_token_index",
)

VISION_FAMILIES: dict[str, VisionFamily] = {
    "LlavaForConditionalGeneration": _LLAVA,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_5_VL,
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": replace(
        _QWEN3_VL, text="Qwen3MoeForCausalLM", fixed={"norm_topk_prob": True}
    ),
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": replace(_QWEN3_5, text="Qwen3_5MoeForCausalLM"),
}
