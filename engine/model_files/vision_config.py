"""Vision configuration: tower, image tokens, positions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.model_files.fields import Fields
from engine.model_files.rope_config import RopeConfig
from engine.model_files.tower_config import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    VISION,
    CenterCrop,
    ClipTower,
    ImageProcessing,
    LearnedTower,
    PixelRange,
    Tower,
    read_clip,
    read_learned,
    read_processing,
    read_windows,
)

# ---- Properties of multimodal architectures that config.json lacks.


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
    """Properties of a multimodal architecture.

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
    tower=read_windows,
    processing=_qwen2_processing,
    ids=_QWEN_IDS,
    mrope=MropeConfig((16, 24, 24), interleaved=False),
    times_videos=True,
)
_QWEN3_VL = VisionFamily(
    text="Qwen3ForCausalLM",
    text_fields={"rope_theta": 5e5},
    tower=partial(read_learned, deepstack=True),
    processing=_qwen3_processing,
    ids=_QWEN_IDS,
    mrope=MropeConfig((24, 20, 20), interleaved=True),
)
_QWEN3_5 = VisionFamily(
    text="Qwen3_5ForCausalLM",
    tower=partial(read_learned, deepstack=False),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A tower, and tokens that stand for images and videos (None: no videos).

    `start_token_id`, `end_token_id`: around images, if any. `mrope`: if None, an `ImageInput` has
    grid (tokens, 1, 1) with merge 1, so that positions match text. `tokens_per_second`: RoPE
    positions per second of video; 0: each temporal patch is an image after its time as text.
    """

    tower: Tower
    processing: ImageProcessing
    image_token_id: int
    video_token_id: int | None = None
    start_token_id: int | None = None
    end_token_id: int | None = None
    mrope: MropeConfig | None = None
    tokens_per_second: float = 0.0

    @property
    def deepstack_levels(self) -> int:
        return len(self.tower.deepstack_layers) if isinstance(self.tower, LearnedTower) else 0

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Tokens of an image with `grid`, (time, rows, columns) of patches."""
        if isinstance(self.tower, ClipTower):
            return self.tower.num_tokens
        time, rows, columns = grid
        return time * rows * columns // self.tower.merge**2


def read_vision(
    fields: Fields, text: Fields, *, rope: RopeConfig, num_layers: int, folder: Path
) -> VisionConfig | None:
    """None without a supported tower. `text`: fields of the text model. Raises ConfigError."""
    family = vision_family(fields)
    if family is None or not isinstance(fields.get(VISION), dict):
        return None
    tower = family.tower(fields, text.count("hidden_size"))
    vocab = text.count("vocab_size")
    names = (family.image_id, "video_token_id", "vision_start_token_id", "vision_end_token_id")
    image, video, start, end = (
        None if default is None else _token(fields, name, default, vocab=vocab)
        for name, default in zip(names, family.ids, strict=True)
    )
    assert image is not None, "all families have a token for images"
    config = VisionConfig(
        tower=tower,
        processing=read_processing(folder, family.processing(tower), sizes=_sizes(tower)),
        image_token_id=image,
        video_token_id=video,
        start_token_id=start,
        end_token_id=end,
        mrope=_mrope(text, family, pairs=rope.dim // 2),
        tokens_per_second=fields.inside(VISION).number("tokens_per_second", default=4.0)
        if family.times_videos
        else 0.0,
    )
    if config.deepstack_levels > num_layers:
        raise fields.error(
            VISION, f"{config.deepstack_levels} deepstack_visual_indexes for {num_layers} layers of text"
        )
    return config


def vision_family(fields: Fields) -> VisionFamily | None:
    return VISION_FAMILIES.get(fields.architecture())


def _token(fields: Fields, name: str, default: int, *, vocab: int) -> int:
    if fields.get(name) is None and name == "image_token_index":
        name = "image_token_id"  # another name in transformers 5
    return fields.token_id(name, default if fields.get(name) is None else fields.get(name), vocab=vocab)


def _sizes(tower: Tower) -> dict[str, int]:
    if isinstance(tower, ClipTower):
        return {}
    return {
        "patch_size": tower.patch,
        "merge_size": tower.merge,
        "temporal_patch_size": tower.temporal_patch,
    }


def _mrope(text: Fields, family: VisionFamily, *, pairs: int) -> MropeConfig | None:
    if family.mrope is None:
        return None
    name = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    given = text.inside(name).get("mrope_section")
    sections = list(family.mrope.sections) if given is None else given
    whole = isinstance(sections, list) and all(isinstance(n, int) and n >= 0 for n in sections)
    if not whole or len(sections) != 3 or sum(sections) != pairs:
        raise text.error(
            name, f"mrope_section must be 3 numbers that make up the {pairs} pairs of RoPE, got {sections!r}"
        )
    time, rows, columns = sections
    return MropeConfig((time, rows, columns), family.mrope.interleaved)


# ---- The text configuration of a multimodal model.

TEXT = "text_config"
# Text architecture by `text_config`'s model_type.
_BY_TYPE = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_TEXT_ONLY = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}  # their vision part is ignored
_OUTSIDE = ("dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id")


def text_part(fields: Fields) -> Fields:
    """The text model's fields; text models unchanged. Raises ConfigError."""
    family, name = vision_family(fields), fields.architecture()
    if family is None and name not in _TEXT_ONLY:
        return fields
    inner = _inner(fields, name, is_flat=family is not None and family.flat)
    outside: dict[str, Any] = {key: fields.get(key) for key in _OUTSIDE if inner.get(key) is None}
    outside["tie_word_embeddings"] = _ties(fields, inner, either=family is not None and family.either_ties)
    inner = inner.with_values(**{key: value for key, value in outside.items() if value is not None})
    if family is None:
        return inner.with_values(architectures=[_TEXT_ONLY[name]])
    own = inner.with_defaults(family.text_fields).with_values(**family.fixed)
    return own.with_values(architectures=[_text_architecture(own, family)])


def _inner(fields: Fields, name: str, *, is_flat: bool) -> Fields:
    if isinstance(fields.get(TEXT), dict):
        return fields.inside(TEXT)
    if is_flat and fields.get("hidden_size") is not None:
        return fields
    raise fields.error(TEXT, f"{name} needs the fields of its text model there")


def _ties(fields: Fields, inner: Fields, *, either: bool) -> bool | None:
    flags = [
        of.flag("tie_word_embeddings", default=False)
        for of in (fields, inner)
        if of.get("tie_word_embeddings") is not None
    ]
    return (any(flags) if either else flags[0]) if flags else None


def _text_architecture(text: Fields, family: VisionFamily) -> str:
    if family.text:
        return family.text
    kind = text.text("model_type", default="llama")
    if kind not in _BY_TYPE:
        raise text.error(
            TEXT, f"model_type {kind} is not supported behind a vision tower; supported: {', '.join(_BY_TYPE)}"
        )
    return _BY_TYPE[kind]
