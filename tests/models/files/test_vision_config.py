"""What config.json and the image processor's files say of the part that sees."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.model_files.model_config import ModelConfig, load_model_config
from engine.model_files.tower_config import CenterCrop, ClipTower, LearnedTower, PixelRange, WindowTower
from engine.model_files.vision_config import MropeConfig, VisionConfig
from service.flags import ConfigError
from tests.models.tiny_checkpoints import write_json

TEXT = {
    "vocab_size": 160000,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
}
QWEN2_5: dict[str, Any] = {  # as published: the text model's fields beside the others
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    **TEXT,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": {
        **TEXT,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    "vision_config": {
        "depth": 24,
        "deepstack_visual_indexes": [5, 11, 17],
        "hidden_size": 1024,
        "out_hidden_size": 2048,
    },
}
LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "text_config": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32064},
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
}


def read(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> ModelConfig:
    write_json(folder / "config.json", config)
    for name, fields in files.items():
        write_json(folder / f"{name}.json", fields)
    return load_model_config(str(folder))


def seen(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> VisionConfig:
    vision = read(folder, config, **files).vision
    assert vision is not None
    return vision


def test_qwen2_5_is_read_from_flat_fields(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN2_5)
    vision = model.vision
    assert vision is not None and model.architecture == "Qwen2ForCausalLM" and model.tie_word_embeddings
    tower = vision.tower
    assert isinstance(tower, WindowTower)
    assert (tower.depth, tower.head_dim, tower.window, tower.full_layers) == (32, 80, 4, (7, 15, 23, 31))
    assert (tower.temporal_patch, tower.patch, tower.rope_theta) == (2, 14, 10000)
    assert (vision.image_token_id, vision.video_token_id) == (151655, 151656)
    assert (vision.start_token_id, vision.end_token_id) == (151652, 151653)
    assert vision.mrope == MropeConfig((16, 24, 24), interleaved=False)
    assert vision.tokens_per_second == 2 and vision.deepstack_levels == 0
    assert vision.num_tokens((2, 8, 12)) == 48


def test_qwen3_is_read_and_interleaves(tmp_path: Path) -> None:
    vision = seen(tmp_path, QWEN3)
    tower = vision.tower
    assert isinstance(tower, LearnedTower) and tower.side == 48 and tower.deepstack_layers == (5, 11, 17)
    assert vision.mrope is not None
    dimensions = vision.mrope.dimensions()
    assert dimensions[:7] == [0, 1, 2, 0, 1, 2, 0] and dimensions[58:] == [1, 2, 0, 0, 0, 0]
    assert [dimensions.count(dimension) for dimension in range(3)] == [24, 20, 20]


def test_the_first_files_of_llava_leave_out_what_is_llamas(tmp_path: Path) -> None:
    model = read(tmp_path, LLAVA)
    assert (model.hidden_size, model.num_layers, model.max_position_embeddings) == (4096, 32, 2048)
    vision = model.vision
    assert vision is not None and vision.mrope is None and vision.video_token_id is None
    tower = vision.tower
    assert isinstance(tower, ClipTower) and (tower.side, tower.taken, tower.keeps_class) == (24, (23,), False)
    assert vision.num_tokens((1, 24, 24)) == 576
    full = seen(tmp_path, {**LLAVA, "vision_feature_select_strategy": "full", "vision_feature_layer": [-1, 0]})
    assert isinstance(full.tower, ClipTower) and full.tower.taken == (24, 0) and full.num_tokens((1, 24, 24)) == 577


def test_processing_is_read_from_any_of_its_files(tmp_path: Path) -> None:
    default = seen(tmp_path, QWEN2_5).processing
    assert default.size == PixelRange(3136, 12845056) and default.mean[0] == 0.48145466 and default.resample == 3
    own = {
        "min_pixels": 784,
        "max_pixels": 7840,
        "image_mean": [0, 0.5, 1],
        "image_std": [1, 2, 3],
        "resample": 2,
        "patch_size": 14,
    }
    found = seen(tmp_path, QWEN2_5, preprocessor_config=own).processing
    assert found.size == PixelRange(784, 7840) and found.mean == (0.0, 0.5, 1.0) and found.std == (1.0, 2.0, 3.0)
    assert found.video == PixelRange(784, 7840) and found.resample == 2 and found.rescale == pytest.approx(1 / 255)
    (tmp_path / "preprocessor_config.json").unlink()
    size = {"shortest_edge": 1024, "longest_edge": 2048}
    both = {
        "image_processor": {"size": size, "do_normalize": False},
        "video_processor": {"size": {"longest_edge": 9999}},
    }
    found = seen(tmp_path, QWEN3, processor_config=both).processing
    assert found.size == PixelRange(1024, 2048) and found.mean == (0.0, 0.0, 0.0) and found.std == (1.0, 1.0, 1.0)
    assert found.video == PixelRange(4096, 9999, over_frames=True)


def test_a_crop_is_that_of_the_tower(tmp_path: Path) -> None:
    assert seen(tmp_path, LLAVA).processing.size == CenterCrop(336, 336, 336)
    assert seen(tmp_path, LLAVA, preprocessor_config={"size": 400, "crop_size": 336}).processing.size == CenterCrop(
        400, 336, 336
    )
    whole = {"size": {"height": 336, "width": 336}, "do_center_crop": False}
    assert seen(tmp_path, LLAVA, preprocessor_config=whole).processing.size == CenterCrop(0, 336, 336)


def test_the_signature_names_what_sees(tmp_path: Path) -> None:
    base = read(tmp_path, QWEN3).signature()
    text = {name: value for name, value in QWEN3.items() if name != "vision_config"}
    assert read(tmp_path, text).signature() != base and read(tmp_path, text).vision is None
    assert read(tmp_path, QWEN3, preprocessor_config={"max_pixels": 99999}).signature() != base


def inside(name: str, **fields: Any) -> dict[str, Any]:
    return {**QWEN3, name: {**QWEN3[name], **fields}}


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "image token": ({**QWEN3, "image_token_id": 160000}, {}, r"config\.json: image_token_id: 160000 is not a token id"),
    "heads": (inside("vision_config", num_heads=3), {}, r"num_heads: 3 heads of hidden_size 1024"),
    "positions": (inside("vision_config", num_position_embeddings=7), {}, r"num_position_embeddings: 7 is no square"),
    "deepstack": (
        inside("vision_config", deepstack_visual_indexes=[24]),
        {},
        r"deepstack_visual_indexes: must name layers of the tower's 24",
    ),
    "levels": (
        inside("vision_config", deepstack_visual_indexes=[0, 1, 2, 3, 4]),
        {},
        r"vision_config: 5 deepstack_visual_indexes for 4 layers",
    ),
    "out": (
        inside("vision_config", out_hidden_size=64),
        {},
        r"out_hidden_size: 64; must be the text model's hidden_size 2048",
    ),
    "activation": (
        inside("vision_config", hidden_act="relu"),
        {},
        r"hidden_act: relu is not supported; supported: gelu, ",
    ),
    "sections": (
        inside("text_config", rope_scaling={"mrope_section": [1, 2, 3]}),
        {},
        r"rope_scaling: mrope_section must be 3 numbers that make up the 64 pairs",
    ),
    "window": (
        {**QWEN2_5, "vision_config": {**QWEN2_5["vision_config"], "window_size": 100}},
        {},
        r"window_size: 100 pixels are no multiple of 28",
    ),
    "no text": ({**QWEN3, "text_config": None}, {}, r"text_config: Qwen3VLForConditionalGeneration needs the fields"),
    "tower": (
        {**LLAVA, "vision_config": {"model_type": "siglip_vision_model"}},
        {},
        r"vision_config: model_type siglip_vision_model is not supported",
    ),
    "text": (
        {**LLAVA, "text_config": {"model_type": "gemma"}},
        {},
        r"text_config: model_type gemma is not supported behind a vision",
    ),
    "strategy": (
        {**LLAVA, "vision_feature_select_strategy": "cls"},
        {},
        r"vision_feature_select_strategy: cls is not supported",
    ),
    "layer": (
        {**LLAVA, "vision_feature_layer": 25},
        {},
        r"vision_feature_layer: must name states of the tower's 24 layers, got 25",
    ),
    "patch": (QWEN3, {"patch_size": 14}, r"preprocessor_config\.json: patch_size: 14, but config\.json has 16"),
    "range": (
        QWEN3,
        {"min_pixels": 9, "max_pixels": 8},
        r"preprocessor_config\.json: size: at least 9 and at most 8 pixels",
    ),
    "mean": (QWEN3, {"image_mean": [0.5, 0.5]}, r"image_mean: must be a list of 3 numbers"),
    "std": (QWEN3, {"image_std": [0.5, 0.5, 0]}, r"image_std: must be a list of 3 numbers above 0"),
    "rescale": (QWEN3, {"rescale_factor": 0}, r"rescale_factor: must be above 0, got 0"),
    "resample": (QWEN3, {"resample": 9}, r"resample: must be PIL's number of a filter, 0 to 5, got 9"),
    "resize": (QWEN3, {"do_resize": False}, r"do_resize: false is not supported"),
    "crop": (
        LLAVA,
        {"crop_size": 224, "size": 224},
        r"crop_size: 224 x 224 pixels, but the tower in config\.json takes 336 x 336",
    ),
    "no crop": (LLAVA, {"do_center_crop": False}, r"do_center_crop: false needs height and width in size"),
    "edge": (LLAVA, {"size": 224}, r"crop_size: 336 x 336 of an edge of 224 pixels"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named(case: str, tmp_path: Path) -> None:
    config, processing, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, config, preprocessor_config=processing)


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps([]))
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json: must be a JSON object"):
        read(tmp_path, QWEN3)
