"""What a step makes of images: RoPE positions, graphs that leave it alone, room for features, and a blank one for steps without requests."""

import dataclasses
from math import prod
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.core.mem_cache.image_cache import MEGABYTE
from engine.core.plan import FeatureRows, ItemImages, PlanItem
from engine.executor.image_pass import deal, rope_positions
from engine.executor.warm_up import WarmUp
from engine.flags.images import blank_image, cache_bytes, image_cache, max_image_tokens
from engine.flags.resolve import resolve
from engine.model_files.model_config import DEFAULT_MODEL_PATH, ModelConfig, load_model_config
from engine.model_files.tower_config import ClipTower
from engine.model_files.vision_config import VisionConfig
from service.flags import ConfigError
from tests.core.engine_in_a_test import plan_item
from tests.core.mem_cache.images import CLIP, SEES


def sees(vision: VisionConfig = SEES) -> ModelConfig:
    return dataclasses.replace(load_model_config(DEFAULT_MODEL_PATH), vision=vision)


def config_of(model: ModelConfig, **flags: Any) -> EngineConfig:
    return resolve(EngineConfig(model_path=DEFAULT_MODEL_PATH, **flags), model, cuda=False)


# ---- RoPE positions


def items_of(*images: ItemImages | None) -> list[PlanItem]:
    return [replace(plan_item(3, start=10 * n, extend=True), images=own) for n, own in enumerate(images)]


def test_text_has_its_places_themselves() -> None:
    places = torch.arange(6)
    assert rope_positions(items_of(None, None), places) is places


def test_tokens_behind_images_are_as_much_nearer() -> None:
    found = rope_positions(items_of(None, ItemImages(rope_delta=-4)), torch.arange(6))
    assert found.tolist() == [0, 1, 2, 6, 7, 8]


def test_a_step_with_an_image_has_three_dimensions_for_all() -> None:
    turns = [1, 1, 1], [1, 2, 3], [4, 5, 6]
    found = rope_positions(items_of(ItemImages(rope=turns), ItemImages(rope_delta=-4), None), torch.arange(9))
    assert found.tolist() == [[*own, 6, 7, 8, 20, 21, 22] for own in turns]


# ---- room for features


def test_a_model_without_a_tower_has_no_room_for_features() -> None:
    model = load_model_config(DEFAULT_MODEL_PATH)
    config = config_of(model)
    assert config.vlm_cache_size_mb is None and cache_bytes(config) == 0 and image_cache(config, model) is None
    with pytest.raises(ConfigError, match=r"^--vlm-cache-size-mb 7: the model sees no images"):
        config_of(model, vlm_cache_size_mb=7)


@pytest.mark.parametrize(("most", "megabytes"), [(400, 100), (40_000_000, 4)])
def test_the_largest_image_has_room(most: int, megabytes: int) -> None:
    """Or 100 MB. The context bounds what one prompt may need."""
    processing = dataclasses.replace(SEES.processing, size=dataclasses.replace(SEES.processing.size, most=most))
    model = sees(dataclasses.replace(SEES, processing=processing))
    config = config_of(model)
    cache = image_cache(config, model)
    assert cache is not None and config.context_length is not None
    tokens = min(config.context_length, most // 4)
    assert cache.token_bytes == model.hidden_size * (4 if config.dtype == "float32" else 2)
    assert cache.max_bytes == max(100, -(-tokens * cache.token_bytes // MEGABYTE)) * MEGABYTE >= megabytes * MEGABYTE
    assert cache_bytes(config_of(model, vlm_cache_size_mb=7)) == 7 * MEGABYTE


# ---- steps without requests


@pytest.mark.parametrize("vision", [SEES, dataclasses.replace(SEES, tower=CLIP)])
def test_a_blank_image_is_whole(vision: VisionConfig) -> None:
    image = blank_image(vision, max_image_tokens(vision))
    frames, height, width = image.size
    assert len(image.pixels) == frames * height * width * 3
    assert image.num_tokens == vision.num_tokens(image.grid) <= max_image_tokens(vision)
    assert image.span == image.num_tokens if isinstance(vision.tower, ClipTower) else image.span < image.num_tokens


def test_ranks_that_divide_images_need_a_model_that_sees() -> None:
    with pytest.raises(ConfigError, match=r"^--mm-enable-dp-encoder: the model sees no images; leave the flag out"):
        config_of(load_model_config(DEFAULT_MODEL_PATH), mm_enable_dp_encoder=True)
    assert config_of(sees(), mm_enable_dp_encoder=True).mm_enable_dp_encoder


def test_each_rank_that_divides_images_encodes_one_in_a_warm_up() -> None:
    image = blank_image(SEES, 100)
    steps = WarmUp(
        prompt_tokens=64,
        rows=4,
        positions=100,
        page_size=16,
        vocab_size=100,
        mixed=True,
        image=image,
        encoders=3,
    )
    (plan, after) = [plan for plan in steps.plans() if plan.encodes or plan.forgets]
    assert [replace(other, key=image.key) for other in plan.encodes] == [image] * 3
    assert deal([prod(other.grid) for other in plan.encodes], 3) == [0, 1, 2]
    assert len({other.key for other in plan.encodes}) == 3 and after.forgets == [other.key for other in plan.encodes]


def test_a_warm_up_encodes_the_largest_image_and_forgets_it() -> None:
    image = blank_image(SEES, 100)
    steps = WarmUp(prompt_tokens=64, rows=4, positions=100, page_size=16, vocab_size=100, mixed=True, image=image)
    for plans in (steps.plans(), steps.largest()):
        (number,) = [i for i, plan in enumerate(plans) if plan.encodes]
        assert plans[number].encodes == [image] and plans[number + 1].forgets == [image.key]
        assert plans[number].items[0].images == ItemImages((FeatureRows(0, image.key, 0, 1),), ([0], [0], [0]))
