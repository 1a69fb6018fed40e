"""What the simulated model sees of prompts with images, and that it notices whoever sees something else."""

import pytest

from engine.core.plan import FeatureLand, FeatureRows, ItemImages, Plan, PlanItem
from engine.images import key_ids, rope_delta, rope_positions
from tests.core.mem_cache.images import TOKEN
from tools.simulation.workers.executor import CheckedModel
from tools.simulation.workers.images import (
    PlacedImage,
    contents,
    delta_of,
    right_tokens,
    seen_by_keys,
    seen_of,
    turns_of,
    with_placeholders,
)
from tools.simulation.world import Violation

TEXT = list(range(20))
SHOWN = (PlacedImage(2, 4), PlacedImage(8, 2), PlacedImage(14, 4))  # the first comes again
OTHERS = (PlacedImage(2, 5), PlacedImage(8, 3), PlacedImage(14, 5))  # of the same sizes
INPUTS = [placed.input() for placed in SHOWN]


def test_prompts_of_equal_tokens_have_other_answers_by_their_images() -> None:
    prompt = with_placeholders(TEXT, SHOWN)
    assert prompt == with_placeholders(TEXT, OTHERS)
    answers = [right_tokens(prompt, images, 8, eos=-1, adapter=0) for images in (SHOWN, OTHERS, (), SHOWN[:2])]
    assert len(set(map(tuple, answers))) == len(answers)


def test_a_path_in_the_radix_tree_is_seen_as_its_prompt() -> None:
    prompt = with_placeholders(TEXT, SHOWN)
    for length in (4, 9, 20):  # two of them cut an image
        assert seen_by_keys(key_ids(INPUTS, prompt, 0)[:length]) == seen_of(prompt[:length], SHOWN)
    assert seen_by_keys(prompt) == seen_of(prompt, ()) == prompt


def test_the_product_turns_as_the_oracle_does() -> None:
    assert list(zip(*rope_positions(INPUTS, 0, 25), strict=True)) == turns_of(SHOWN, 25)
    assert rope_delta(INPUTS) == delta_of(SHOWN) == -8


def _model() -> CheckedModel:
    model = CheckedModel(page_size=4, name="m")
    model.image_room = 6
    model._encode(Plan(1, extend=True, items=[], encodes=INPUTS[:1]))
    return model


def _item(rows: tuple[FeatureRows, ...] | None = None, **turned: object) -> PlanItem:
    whole = (FeatureRows(0, INPUTS[0].key, 0, 6),)
    images = ItemImages(whole if rows is None else rows, **({"rope": rope_positions(INPUTS, 2, 8)} | turned))  # type: ignore[arg-type]
    return PlanItem("r", 1, [TOKEN] * 6, 2, 0, [1, 2], sample=False, output_len=0, extend=True, images=images)


def test_rows_turns_and_images_decide_what_is_seen() -> None:
    model, prompt = _model(), with_placeholders(TEXT, SHOWN)
    right = seen_of(prompt, SHOWN)[2:8]
    assert model.seen(_item(), [TOKEN] * 6) == right
    cut = (FeatureRows(0, INPUTS[0].key, 0, 3), FeatureRows(3, INPUTS[0].key, 0, 3))
    for wrong in (_item(rope=None), _item(rope=None, rope_delta=-3), _item(()), _item(cut)):
        assert model.seen(wrong, [TOKEN] * 6) != right


def test_features_of_another_image_or_of_other_weights_or_beyond_the_bound_end_the_run() -> None:
    model = _model()
    model.arrived = lambda land: contents(INPUTS[0])
    with pytest.raises(Violation, match="as an image's whose own are"):
        model._land(FeatureLand(INPUTS[1].key, [1, 2], 6))
    with pytest.raises(AssertionError, match="more features than there is room for"):
        model._encode(Plan(2, extend=True, items=[], encodes=INPUTS[1:2]))
    model.forget()
    with pytest.raises(AssertionError, match="features of other weights"):
        model.seen(_item(), [TOKEN] * 6)


def test_a_step_reads_no_features_that_were_forgotten() -> None:
    model, plan = _model(), Plan(2, extend=True, items=[_item()])
    assert not model._lacks_features(plan)
    del model.features[INPUTS[0].key]
    with pytest.raises(AssertionError, match="features of an image are gone"):
        model._lacks_features(plan)
