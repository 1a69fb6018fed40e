"""Images of prompts in the core: what shares KV, what a step encodes, when features go, and what is refused."""

import hashlib
import os
import subprocess
import sys
from array import array

import pytest

from engine.core.mem_cache.image_cache import ImageCache
from engine.core.mem_cache.page_allocator import next_keys
from engine.core.mem_cache.radix_cache import TRUNK
from engine.core.plan import Plan
from engine.images import ImageInput, key_ids
from service.kv_events import BlockStored
from tests.core.engine_in_a_test import EngineInATest, request_of
from tests.core.hash_model import expected_tokens
from tests.core.mem_cache.images import TOKEN, image, prompt_of, read_of
from tests.packages import ROOT


def right(images: tuple[ImageInput, ...], n: int, *, length: int = 20) -> list[int]:
    return expected_tokens(read_of(*images, length=length), n)


def add(engine: EngineInATest, rid: str, *images: ImageInput, length: int = 20, **asked: object) -> None:
    engine.add(rid, prompt_of(*images, length=length), images=images, max_new_tokens=3, **asked)


def encoded(plan: Plan) -> list[int]:
    return [shown.key[0] for shown in plan.encodes]


# ---- what is shared


def test_equal_images_share_kv_and_others_do_not() -> None:
    engine = EngineInATest(image_room=100)
    for rid, number in (("first", 1), ("same", 1), ("other", 2)):
        shown = (image(number, at=5),)
        add(engine, rid, *shown)
        engine.run()
        assert engine.tokens[rid] == right(shown, 3)
    cached = {rid: outputs[0].cached_tokens for rid, outputs in engine.outputs.items()}
    assert cached == {"first": 0, "same": 16, "other": 4}  # the text before the image, in whole pages


def test_a_prompt_without_images_that_has_their_token_shares_nothing_of_them() -> None:
    engine = EngineInATest(image_room=100)
    shown = image(1, at=5)
    add(engine, "sees", shown)
    engine.run()
    engine.answer("reads", prompt_of(shown), max_new_tokens=3)
    assert engine.outputs["reads"][0].cached_tokens == 4
    assert engine.tokens["reads"] == expected_tokens(prompt_of(shown), 3)


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_prompts_with_other_images_wait_for_none_of_each_other(policy: str) -> None:
    engine = EngineInATest(image_room=100, policy=policy, sibling_tokens=8, min_shared_tokens=8, chunk=64)
    add(engine, "one", image(1, at=0))
    add(engine, "two", image(2, at=0))
    plan = engine.next_plan()
    assert plan is not None and [item.rid for item in plan.items] == ["one", "two"]


# ---- page keys and events


def test_keys_of_pages_of_text_are_as_before_images_came() -> None:
    tokens, before = list(range(8)), b"seed"
    first = hashlib.sha256(before + array("q", tokens[:4]).tobytes()).digest()
    assert next_keys(before, tokens, 4) == [first, hashlib.sha256(first + array("q", tokens[4:]).tobytes()).digest()]


def test_keys_of_pages_differ_where_their_images_or_the_text_beside_them_do() -> None:
    prompts = [key_ids([shown], prompt_of(shown, length=8), 0) for shown in (image(1, at=1), image(2, at=1))]
    prompts += [[7, *prompts[0][1:]], [*prompts[0][:7], 8], prompt_of(image(1, at=1), length=8)]
    keys = [next_keys(b"", prompt, 8)[0] for prompt in prompts]
    assert len(set(keys)) == len(prompts)


def test_a_page_may_hold_an_image_beside_a_token_that_is_missing() -> None:
    """An answer whose first token was lost ends with -1."""
    shown = image(1, at=0)
    assert next_keys(b"", [*key_ids([shown], [TOKEN] * 6, 0), 3, -1], 8)


def test_events_tell_text_as_ever_and_of_images_ids_that_no_token_has() -> None:
    found = list[list[int]]()
    for number in (1, 2):
        engine = EngineInATest(image_room=100, chunk=64)
        add(engine, "r", image(number, at=9))
        engine.run()
        (event,) = (event for event in engine.events.take() if isinstance(event, BlockStored))
        found.append(event.token_ids)
    first, second = found
    assert first[:9] == second[:9] == list(range(9)) and first[15:] == second[15:] == [15, 16, 17, 18, 19]
    assert all(1 << 31 <= token < 1 << 32 for token in (*first[9:15], *second[9:15]))
    assert len({*first[9:15], *second[9:15]}) == 12


# ---- what a step encodes, and when features go


def test_an_image_that_a_chunk_cuts_is_encoded_once_and_whole() -> None:
    engine = EngineInATest(image_room=100, chunk=4)
    shown = image(1, at=6)  # chunks of 4: [4, 8) and [8, 12) have parts of it
    add(engine, "r", shown)
    engine.run()
    assert [encoded(plan) for plan in engine.plans if plan.encodes] == [[1]]
    parts = [
        (item.start, part.at, part.first, part.count)
        for p in engine.plans
        for i in [p.items]
        for item in i
        if item.images
        for part in item.images.rows
    ]
    assert parts == [(4, 2, 0, 2), (8, 0, 2, 4)]
    assert engine.tokens["r"] == right((shown,), 3)


def test_an_image_twice_in_a_batch_and_in_a_prompt_is_encoded_once() -> None:
    engine = EngineInATest(image_room=100, chunk=64)
    twice = (image(1, at=2), image(1, at=10))
    add(engine, "a", *twice)
    add(engine, "b", image(1, at=0))
    engine.turn()
    assert encoded(engine.plans[0]) == [1] and len(engine.plans[0].items) == 2
    engine.run()
    assert engine.tokens["a"] == right(twice, 3) and engine.tokens["b"] == right((image(1, at=0),), 3)


def test_features_are_kept_for_later_prompts_until_others_need_the_room() -> None:
    engine = EngineInATest(image_room=12, radix=False, chunk=64)
    for rid, number in enumerate([1, 2, 1, 3, 1, 2]):
        add(engine, f"r{rid}", image(number, at=3))
        engine.run()
    seen = [(encoded(plan), [key[0] for key in plan.forgets]) for plan in engine.plans if plan.encodes or plan.forgets]
    assert seen == [([1], []), ([2], []), ([3], [2]), ([2], [3])]  # 1 was needed last, both times
    images = engine.scheduler.memory.part(ImageCache)
    assert images is not None
    assert (images.counters()["mm_cache_hits"], images.counters()["mm_cache_queries"]) == (2, 6)
    assert images.gauges() == {"mm_cache_used_bytes": 12.0, "mm_cache_total_bytes": 12.0, "mm_cache_hit_rate": 2 / 6}


def test_features_are_in_use_until_the_last_token_of_their_image_is_computed() -> None:
    cache = ImageCache(max_bytes=6, token_bytes=1)
    request = request_of(prompt_of(image(1, at=4), image(2, at=12)), images=(image(1, at=4), image(2, at=12)))
    cache.use(request, 0, 8)
    for computed, has_room in ((8, False), (9, False), (10, True)):
        request.computed_len = computed
        cache.retire(request)
        assert cache.has_room(request, part=1) is has_room


def test_a_step_encodes_no_more_than_its_budget_has_room_for() -> None:
    """Twenty images of a prompt that the step could compute; to encode one takes as many tokens as it has."""
    images = tuple(image(number, at=number * 8, rows=2, columns=3) for number in range(20))
    engine = EngineInATest(image_room=1000, num_pages=100, chunk=40, max_prefill_tokens=1000)
    add(engine, "r", *images, length=170)
    engine.run()
    prompts = [plan for plan in engine.plans if plan.extend]
    for plan in prompts:
        taken = sum(item.q_len for item in plan.items) + sum(shown.num_tokens for shown in plan.encodes)
        assert taken <= 40 + 6  # an image that the first page touches is encoded in any case
    assert max(len(plan.encodes) for plan in prompts) == 3 and sum(len(plan.encodes) for plan in prompts) == 20
    assert engine.tokens["r"] == right(images, 3, length=170)


def test_a_large_image_is_encoded_by_a_step_whose_budget_is_smaller() -> None:
    shown = image(1, at=1, rows=6, columns=5)
    engine = EngineInATest(image_room=30, num_pages=100, chunk=8)
    add(engine, "r", shown, length=40)
    engine.run()
    assert engine.tokens["r"] == right((shown,), 3, length=40)


# ---- ends


def test_a_retracted_request_has_its_images_encoded_again_if_they_went() -> None:
    engine = EngineInATest(image_room=6, radix=False, chunk=64)
    add(engine, "r", image(1, at=3))
    engine.turns(2)
    engine.scheduler.retract_all()
    add(engine, "other", image(2, at=3))
    engine.run()
    assert engine.tokens["r"] == right((image(1, at=3),), 3) and engine.tokens["other"] == right((image(2, at=3),), 3)


def test_an_aborted_prompt_leaves_its_features_to_others() -> None:
    engine = EngineInATest(image_room=12, chunk=4)
    add(engine, "gone", image(1, at=1), length=20)
    engine.turn()
    engine.abort("gone")
    engine.run()
    engine.scheduler.memory.cache.flush()
    add(engine, "r", image(1, at=1))
    engine.run()
    assert sum(len(plan.encodes) for plan in engine.plans) == 1


def test_a_flush_forgets_features_with_a_step_of_its_own() -> None:
    engine = EngineInATest(image_room=12)
    add(engine, "r", image(1, at=1))
    engine.run()
    assert engine.scheduler.flush_cache()
    engine.run()
    assert not engine.plans[-1].items and [key[0] for key in engine.plans[-1].forgets] == [1]
    assert engine.model.features == {}


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("failing", range(1, 8))
def test_images_of_a_step_without_memory_are_encoded_again(depth: int, lag: bool, failing: int) -> None:
    """Whatever counted on them in flight fails, too; nothing else does."""
    engine = EngineInATest(image_room=12, depth=depth, lag=lag, chunk=8)
    engine.model.fails = lambda plan: plan.seq == failing
    shown = (image(1, at=2), image(2, at=11))
    for rid in ("a", "b"):
        add(engine, rid, *shown)
    engine.run()
    assert any(reason.status == 503 for reason in engine.finish.values())
    for rid in ("again", "and again"):
        add(engine, rid, *shown)
    engine.run()
    assert engine.tokens["again"] == engine.tokens["and again"] == right(shown, 3)


# ---- refusals


def test_images_that_never_fit_are_refused() -> None:
    engine = EngineInATest(image_room=9)
    add(engine, "large", image(1, at=1, rows=2, columns=5))
    add(engine, "close", image(1, at=1), image(2, at=8))  # a page may touch both
    add(engine, "same", image(1, at=1), image(1, at=8))
    add(engine, "apart", image(1, at=1), image(2, at=11))
    engine.run()
    assert {rid: finish.status for rid, finish in engine.finish.items()} == {
        "large": 400,
        "close": 400,
        "same": 0,
        "apart": 0,
    }
    assert "--vlm-cache-size-mb" in engine.finish["large"].message and engine.finish["large"].message.startswith(
        "images: "
    )


def test_a_model_that_sees_nothing_refuses_images() -> None:
    engine = EngineInATest()
    add(engine, "r", image(1, at=1))
    assert engine.finish["r"].status == 400 and engine.finish["r"].message.startswith("images: the model")


def test_keys_of_tokens_go_on_behind_a_prompt_with_images() -> None:
    shown = image(1, at=1)
    request = request_of(prompt_of(shown, length=8), images=(shown,))
    request.output_ids += [5, 6]
    keys = key_ids([shown], prompt_of(shown, length=8), 0)
    assert request.key_tokens(0, 10) == [*keys, 5, 6] and request.key_tokens(3, 9) == [*keys[3:], 5]
    assert request.key_tokens(8, 10) == [5, 6] and request.tokens(0, 8) == prompt_of(shown, length=8)
    assert request.branch == TRUNK


def test_key_ids_are_the_same_in_every_process() -> None:
    """Python salts its own hashes."""
    code = "from tests.core.mem_cache.images import image, read_of; print(read_of(image(1, at=5)))"
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert said == {f"{read_of(image(1, at=5))}\n"}
