"""Vision configuration: tower, image tokens, positions."""

from dataclasses import dataclass
from pathlib import Path

from engine.model_files.fields import Fields
from engine.model_files.image_processing import ImageProcessing, read_processing
from engine.model_files.rope_config import RopeConfig
from engine.model_files.tower_config import VISION, ClipTower, LearnedTower, Tower
from engine.model_files.vision_families import VISION_FAMILIES, MropeConfig, VisionFamily


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
    """Read config.json's `fields`; None without a supported tower. Raises ConfigError.

    `text`: fields of the text model.
    """
    family = seeing_family(fields)
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


def seeing_family(fields: Fields) -> VisionFamily | None:
    names = fields.get("architectures")
    return VISION_FAMILIES.get(names[0]) if isinstance(names, list) and names and isinstance(names[0], str) else None


def _token(fields: Fields, name: str, default: int, *, vocab: int) -> int:
    if fields.get(name) is None and name == "image_token_index":
        name = "image_token_id"  # another name in transformers 5
    token = fields.get(name, default)
    token = default if token is None else token
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
        raise fields.error(name, f"{token!r} is not a token id (0 to {vocab - 1})")
    return token


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
