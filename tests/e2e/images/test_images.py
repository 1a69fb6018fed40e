"""Prompts with images: the same tokens whether a prompt is whole, cut in an image, cached, retracted, on ranks, or handed over."""

import hashlib
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.core.mem_cache.image_cache import ImageCache
from engine.images import ImageInput
from engine.models.draft_model import DraftEntries
from engine.models.vision.tower import NO_IMAGES, Pixels
from engine.models.vision.towers import DeepstackTower, ProjectedClip, WindowedTower
from tests.core.hash_model import NO_MEMORY
from tests.e2e.two_engines import REST_S, System, disaggregated, turning
from tests.engine.drafts.drafters import always
from tests.engine.engine_in_process import EngineInProcess
from tests.engine.ranks.dp_in_process import dp_ranks
from tests.engine.ranks.ranks_in_process import ranks
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.models.tiny_drafters import make_tiny_eagle
from tests.models.tiny_seeing import PromptMaker, make_seeing_checkpoint, with_mtp

NEW = 12
CHUNK = 64  # where prompts of a model with recurrent states may be cut, too: in the first image
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5_moe", "llava")
FLAGS: dict[str, Any] = {"page_size": 4, "max_total_tokens": 2048, "max_running_requests": 8, "num_threads": 1}

Asked = dict[str, tuple[list[int], tuple[ImageInput, ...]]]
Tokens = dict[str, list[int]]


def prompts_of(family: str) -> Asked:
    """Two images each; "other" differs from "same" in the pixels of the first alone; "text" has the same ids and no image."""
    maker = PromptMaker().text(40)
    if family == "llava":
        prompt = maker.fixed_image(32, count=16).text(20).fixed_image(32, count=16).text(50).done()
    else:
        prompt = maker.image(12, 16).text(30).image(8, 8).text(9).done()
    images = tuple(map(_keyed, prompt.images))
    first = _keyed(replace(images[0], pixels=images[0].pixels[::-1]))
    ids, short = prompt.ids, images[0].end + 20
    return {
        "same": (ids, images),
        "other": (ids, (first, *images[1:])),
        "short": (ids[:short], images[:1]),
        "text": (ids, ()),
    }


def _keyed(image: ImageInput) -> ImageInput:
    return replace(image, key=hashlib.sha256(image.pixels).digest())


def ask(engine: EngineInProcess, asked: Asked) -> Tokens:
    for rid, (prompt, images) in asked.items():
        engine.add(rid, prompt, max_new_tokens=NEW, wanted={"images": images})
    engine.run()
    return {rid: engine.tokens[rid] for rid in asked}


def ask_in_turn(engine: EngineInProcess, asked: Asked) -> Tokens:
    return {rid: tokens for one in asked for rid, tokens in ask(engine, {one: asked[one]}).items()}


def ask_pair(pair: System, asked: Asked) -> Tokens:
    for rid, (prompt, images) in asked.items():
        pair.submit(rid, prompt, new=NEW, wanted={"images": images})
    for _ in turning(pair.workers):
        pass
    decode = pair.workers[1]
    assert not decode.aborted, decode.aborted
    return {rid: decode.tokens[rid] for rid in asked}


def counters(engine: EngineInProcess) -> dict[str, float]:
    images = engine.parts.scheduler.memory.part(ImageCache)
    assert images is not None
    return images.counters()


Served = tuple[str, Asked, Tokens]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A checkpoint, what it is asked, and the tokens of an engine that computes each prompt whole and caches nothing."""
    path = make_seeing_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    asked = prompts_of(request.param)
    with EngineInProcess(path, chunked_prefill_size=-1, disable_radix_cache=True, **FLAGS) as engine:
        right = ask_in_turn(engine, asked)
    assert right["same"] != right["other"] != right["text"], "the images make no difference"
    return path, asked, right


def test_where_a_chunk_cuts_an_image_makes_no_difference(served: Served) -> None:
    path, asked, right = served
    with EngineInProcess(path, chunked_prefill_size=CHUNK, disable_radix_cache=True, **FLAGS) as engine:
        assert ask(engine, asked) == right
        assert counters(engine)["mm_encoded_images"] == 3, "images come again in other prompts"


def test_a_cached_prefix_has_its_images(served: Served) -> None:
    path, asked, right = served
    with EngineInProcess(path, chunked_prefill_size=CHUNK, **FLAGS) as engine:
        assert ask_in_turn(engine, asked) == right
        first = asked["same"][1][0]
        assert engine.cached["other"] <= first.start and engine.cached["text"] <= first.start
        again = {f"again {rid}": body for rid, body in asked.items()}
        encoded = counters(engine)["mm_encoded_images"]
        assert list(ask_in_turn(engine, again).values()) == list(right.values())
        assert engine.cached["again same"] >= CHUNK and counters(engine)["mm_encoded_images"] == encoded


def test_a_retracted_request_sees_again_what_it_saw(served: Served) -> None:
    path, asked, right = served
    with EngineInProcess(path, chunked_prefill_size=CHUNK, test_retract=2, disable_radix_cache=True, **FLAGS) as engine:
        assert ask(engine, asked) == right
        assert engine.parts.scheduler.counters.retractions


PAIRED = pytest.mark.parametrize("served", ["qwen3_vl", "qwen3_5_moe"], indirect=True)
ONE = pytest.mark.parametrize("served", ["qwen3_vl"], indirect=True)


@PAIRED
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_a_pair_gives_the_tokens_of_one_engine(backend: str, served: Served) -> None:
    path, asked, right = served
    disagg = {"disaggregation_transfer_backend": backend}
    with disaggregated(path, decode={}, disagg=disagg, chunked_prefill_size=CHUNK, **FLAGS) as pair:
        assert ask_pair(pair, asked) == right
        assert counters(pair.workers[1])["mm_encoded_images"] == 0


@PAIRED
@pytest.mark.parametrize("backup", ["prefill", "recompute", "host"])
def test_retracted_requests_of_a_pair_give_the_same_tokens(backup: str, served: Served) -> None:
    """Computed again by prefill, which gets the images, or by decode, which has them; or copied."""
    path, asked, right = served
    decode = {"test_retract": 3}
    disagg = {"disaggregation_decode_retraction_backup": backup}
    with disaggregated(path, decode=decode, disagg=disagg, disable_radix_cache=True, **FLAGS) as pair:
        assert ask_pair(pair, asked) == right
        role, scheduler = pair.workers[1].role.counters(), pair.workers[1].parts.scheduler  # type: ignore[union-attr]
        assert scheduler.counters.retractions
        if backup == "prefill":
            assert role["resumed_through_prefill"] and not role.get("recompute_failed")
        if backup == "recompute":
            assert counters(pair.workers[1])["mm_encoded_images"]


@ONE
@pytest.mark.parametrize("way", [{"tp_size": 2}, {"pp_size": 2}])
def test_ranks_give_the_tokens_of_one(way: dict[str, int], served: Served) -> None:
    path, asked, right = served
    with ranks(path, chunked_prefill_size=CHUNK, **way, **FLAGS) as group:
        assert ask(group.engine, asked) == right


@pytest.fixture
def encoders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For each image that a tower encodes, the thread of its rank."""
    found = list[str]()
    for tower in (DeepstackTower, WindowedTower, ProjectedClip):

        def noted(self: Any, image: Pixels, encode: Any = tower.encode) -> torch.Tensor:
            found.append(threading.current_thread().name)
            return encode(self, image)  # type: ignore[no-any-return]

        monkeypatch.setattr(tower, "encode", noted)
    return found


DIVIDED: dict[str, Any] = {"mm_enable_dp_encoder": True, "disable_radix_cache": True}


def test_ranks_that_divide_images_give_the_tokens_of_one(served: Served, encoders: list[str]) -> None:
    """Whole prompts, whose images are of different sizes; then a request that alone has one image."""
    path, asked, right = served
    with ranks(path, tp_size=2, chunked_prefill_size=-1, **DIVIDED, **FLAGS) as group:
        encoders.clear()
        assert ask(group.engine, asked) == right
        assert len(encoders) == counters(group.engine)["mm_encoded_images"] == 3
        assert len(set(encoders)) == 2, "one rank encodes all"
        prompt, (image,) = asked["short"]
        again = replace(image, key=bytes(32))  # as another file
        assert ask(group.engine, {"again": (prompt, (again,))}) == {"again": right["short"]}
        assert len(encoders) == counters(group.engine)["mm_encoded_images"] == 4


@ONE
@pytest.mark.parametrize("way", [{"pp_size": 2}, {"by_groups": True}, {"nnodes": 2}])
def test_however_ranks_are_joined_they_divide_images(way: dict[str, Any], served: Served, encoders: list[str]) -> None:
    """With a second stage, which sees none; with broadcasts, as GPUs; over TCP."""
    path, asked, right = served
    flags = {**FLAGS, **DIVIDED, **({"dist_init_addr": "127.0.0.1:1"} if "nnodes" in way else {})}
    with ranks(path, tp_size=2, chunked_prefill_size=CHUNK, **way, **flags) as group:
        encoders.clear()
        assert ask(group.engine, asked) == right
        assert len(encoders) == counters(group.engine)["mm_encoded_images"]


@ONE
def test_a_dp_rank_s_own_ranks_divide_its_images(served: Served, encoders: list[str]) -> None:
    path, asked, right = served
    with dp_ranks(path, tp_size=4, dp_size=2, chunked_prefill_size=CHUNK, **DIVIDED, **FLAGS) as dp:
        encoders.clear()
        for engine in dp.engines:
            for rid, (prompt, images) in asked.items():
                engine.add(rid, prompt, max_new_tokens=NEW, wanted={"images": images})
        dp.run()
        assert [{rid: engine.tokens[rid] for rid in asked} for engine in dp.engines] == [right, right]
        assert len(encoders) == sum(counters(engine)["mm_encoded_images"] for engine in dp.engines)


@ONE
def test_drafts_turn_as_the_tokens_that_they_guess(served: Served) -> None:
    path, asked, right = served
    with EngineInProcess(path, speculative_algorithm="NGRAM", speculative_num_draft_tokens=4, **FLAGS) as engine:
        assert ask(engine, asked) == right


@ONE
def test_recorded_steps_give_the_tokens_of_others(served: Served) -> None:
    """On a CPU decode steps of bf16 are tapes, which take RoPE positions."""
    path, asked, _ = served
    flags = {**FLAGS, "dtype": "bfloat16"}
    with EngineInProcess(path, disable_cuda_graph=True, **flags) as engine:
        right = ask(engine, asked)
    with EngineInProcess(path, **flags) as engine:
        assert ask(engine, asked) == right


@ONE
@pytest.mark.parametrize("stream", ["inline", "threaded"])
def test_a_tower_without_memory_fails_its_step_alone(
    stream: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps in flight behind it, which count on its features."""
    path, asked, right = served
    with EngineInProcess(path, chunked_prefill_size=CHUNK, stream=stream, **FLAGS) as engine:
        tower = engine.parts.device.executor.runner.running.model.vision
        assert tower is not None
        encode, errors = tower.encode, [torch.OutOfMemoryError(NO_MEMORY)]

        def fails_once(image: Pixels) -> torch.Tensor:
            if errors:
                raise errors.pop()
            return encode(image)

        monkeypatch.setattr(tower, "encode", fails_once)
        ask(engine, asked)
        assert engine.finish["same"].status == 503 and NO_MEMORY in engine.finish["same"].message
        again = {f"again {rid}": body for rid, body in asked.items()}
        assert list(ask(engine, again).values()) == list(right.values())


@ONE
def test_files_of_an_earlier_process_have_images_too(served: Served, tmp_path: Path) -> None:
    path, asked, right = served
    flags = {
        **FLAGS,
        "enable_hierarchical_cache": True,
        "hicache_storage_dir": str(tmp_path),
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    for run in ("first", "second"):
        with EngineInProcess(path, **flags) as engine:
            for rid, (prompt, images) in asked.items():
                engine.add(rid, prompt, max_new_tokens=NEW, wanted={"images": images})
                finish(engine, rid)
            assert engine.tokens == right
            first = asked["same"][1][0]
            assert (engine.cached["same"] > first.end) == (run == "second")


def finish(engine: EngineInProcess, rid: str) -> None:
    """Until it has ended, and no file is read or written."""
    deadline_s = monotonic() + REST_S
    while rid not in engine.finish or (engine.parts.storage is not None and engine.parts.storage.waits_for_outside()):
        assert monotonic() < deadline_s
        engine.turn()


def seen_by(drafter: Any) -> list[bool]:
    """For each of its passes from now on, whether it has rows of images."""
    seen, forward = list[bool](), drafter.forward

    def noted(entries: DraftEntries, attend: Any) -> Any:
        seen.append(entries.images != NO_IMAGES)
        return forward(entries, attend)

    drafter.forward = noted
    return seen


@pytest.mark.parametrize("algorithm", ["NEXTN", "STANDALONE", "EAGLE", "EAGLE3"])
def test_drafts_of_models_change_no_answer(algorithm: str, tmp_path: Path) -> None:
    """Alone and over a pair. Layers of the checkpoint turn as it does; what has its own sees no image, and goes by the same positions."""
    path, asked = with_mtp(tmp_path / "sees", "qwen3_5"), prompts_of("qwen3_5")
    flags: dict[str, Any] = {"speculative_algorithm": algorithm, "speculative_num_steps": 2, **FLAGS}
    if algorithm == "STANDALONE":
        flags["speculative_draft_model_path"] = make_tiny_checkpoint(tmp_path / "drafts", "qwen3", num_hidden_layers=1)
    elif algorithm != "NEXTN":
        flags["speculative_draft_model_path"] = make_tiny_eagle(tmp_path / "drafts", algorithm)
    with EngineInProcess(path, **FLAGS) as engine:
        right = ask(engine, asked)
    with EngineInProcess(path, chunked_prefill_size=CHUNK, **flags) as engine:
        always(engine.parts.scheduler)
        seen = seen_by(engine.parts.device.executor.runner.running.model.drafter)
        assert ask(engine, asked) == right
        assert engine.parts.scheduler.counters.drafts
        assert seen.count(True) >= 3 and not all(seen)
    disagg = {"disaggregation_transfer_backend": "nixl"}
    with disaggregated(path, decode={}, disagg=disagg, chunked_prefill_size=CHUNK, **flags) as pair:
        always(pair.workers[1].parts.scheduler)
        assert ask_pair(pair, asked) == right
        assert pair.workers[1].parts.scheduler.counters.drafts


@ONE
def test_the_fake_backend_rehearses_images(served: Served) -> None:
    """No byte crosses, so tokens say nothing; each answer has its length, all memory is back, and decode encodes nothing."""
    path, asked, _ = served
    disagg = {"disaggregation_transfer_backend": "fake"}
    with disaggregated(path, decode={}, disagg=disagg, chunked_prefill_size=CHUNK, **FLAGS) as pair:
        assert {len(tokens) for tokens in ask_pair(pair, asked).values()} == {NEW}
        assert [counters(worker)["mm_encoded_images"] for worker in pair.workers] == [3, 0]
