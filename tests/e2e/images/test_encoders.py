"""Prompts whose images an encoder worker encodes: the tokens of a worker that encodes them itself, by every engine, in every place."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.mem_cache.image_cache import ImageCache
from engine.device.step_memory import EngineUse
from engine.encoder import load_tower_alone
from engine.executor.image_pass import ImagePass
from engine.images import ImageInput
from engine.messages import FeatureSource
from engine.model_files.model_config import load_model_config
from engine.models.vision.tower import Pixels
from tests.e2e.images.encoder_in_process import EncoderInProcess
from tests.e2e.images.test_images import FLAGS, NEW, Asked, Tokens, counters, prompts_of
from tests.e2e.two_engines import System, WorkerInProcess, disaggregated, turning, unified
from tests.engine.engine_in_process import EngineInProcess
from tests.engine.ranks.dp_in_process import dp_ranks
from tests.engine.ranks.ranks_in_process import ranks
from tests.models.tiny_checkpoints import edit_tensors
from tests.models.tiny_seeing import make_seeing_checkpoint

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "llava")
CHUNK = 64

Served = tuple[str, Asked, Tokens]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A checkpoint, what it is asked, and the tokens of a worker that encodes the images itself."""
    path = make_seeing_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    asked = prompts_of(request.param)
    with EngineInProcess(path, **FLAGS) as engine:
        for rid, (prompt, images) in asked.items():
            engine.add(rid, prompt, max_new_tokens=NEW, wanted={"images": images})
        engine.run()
        return path, asked, {rid: engine.tokens[rid] for rid in asked}


ONE = pytest.mark.parametrize("served", ["qwen3_vl"], indirect=True)


@contextmanager
def encoding(
    path: str, backend: str, mode: str, *, encoder: str = "", dtype: str = "float32", **more: Any
) -> Iterator[tuple[EncoderInProcess, System]]:
    """An encoder, and beside it one worker or a pair that gets features from it. `more`: flags of disaggregation.

    `encoder`: its checkpoint, if it has another one; `dtype`: of it alone.
    """
    disagg = {"disaggregation_transfer_backend": backend, **more}
    with ExitStack() as stack:
        encodes = EncoderInProcess(encoder or path, disagg=disagg, num_threads=1, dtype=dtype)
        stack.callback(encodes.close)
        flags = {"disagg": {**disagg, "feature_fetch": True}, "chunked_prefill_size": CHUNK, **FLAGS}
        of_pair = disaggregated(path, decode={"disagg": disagg}, **flags)
        system = stack.enter_context(of_pair if mode == "pair" else unified(path, **flags))
        yield encodes, system


def ask(system: System, asked: Asked, sources: Sequence[FeatureSource | None], *others: EncoderInProcess) -> Tokens:
    """Ask all at once; `others`: encoders that turn meanwhile."""
    for rid, (prompt, images) in asked.items():
        wanted = {"images": images, "encoders": tuple(sources[: len(images)])}
        system.submit(rid, prompt, new=NEW, wanted=wanted)
    for _ in turning([*system.workers, *others]):
        pass
    last = system.workers[-1]
    assert not last.aborted, last.aborted
    return {rid: last.tokens[rid] for rid in asked}


def fetched(system: System) -> dict[str, float]:
    return system.workers[0].role.counters()


def test_the_encoder_s_features_give_the_tokens_of_the_worker_s_own(served: Served) -> None:
    path, asked, right = served
    with encoding(path, "nixl", "alone") as (encoder, system):
        assert ask(system, asked, [encoder.source] * 2, encoder) == right
        assert counters(system.workers[0])["mm_encoded_images"] == 0
        assert encoder.counters["mm_encoded_images"] == fetched(system)["features_fetched"] == 3


@ONE
@pytest.mark.parametrize("mode", ["alone", "pair"])
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_every_engine_carries_them(backend: str, mode: str, served: Served) -> None:
    path, asked, right = served
    with encoding(path, backend, mode, disaggregation_kv_checksum=True) as (encoder, system):
        assert ask(system, asked, [encoder.source] * 2, encoder) == right
        assert counters(system.workers[0])["mm_encoded_images"] == 0
        assert fetched(system)["feature_fetched_tokens"] == encoder.counters["mm_encoded_tokens"]
        assert fetched(system)["kv_checksum_verified"] == 3


@ONE
@pytest.mark.parametrize("way", [{}, {"by_groups": True}, {"mm_enable_dp_encoder": True}])
def test_all_ranks_of_a_stage_get_what_the_first_one_has_fetched(way: dict[str, Any], served: Served) -> None:
    """Joined by shared memory, or by broadcasts, as on GPUs."""
    path, asked, right = served
    disagg = {"disaggregation_transfer_backend": "nixl", "feature_fetch": True}
    with ExitStack() as stack:
        encoder = EncoderInProcess(path, num_threads=1)
        stack.callback(encoder.close)
        make = partial(WorkerInProcess, disagg=disagg)
        group = stack.enter_context(ranks(path, tp_size=2, chunked_prefill_size=CHUNK, make=make, **way, **FLAGS))
        assert isinstance(group.engine, WorkerInProcess)
        system = System(group.engine)
        assert ask(system, asked, [encoder.source] * 2, encoder) == right
        assert counters(group.engine)["mm_encoded_images"] == 0 and fetched(system)["features_fetched"] == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_features_that_have_crossed_are_bit_for_bit_those_of_the_worker_s_own_tower(dtype: str, served: Served) -> None:
    path, asked, _ = served
    flags = {**FLAGS, "dtype": dtype}
    with EngineInProcess(path, **flags) as engine:
        for rid, (prompt, images) in asked.items():
            engine.add(rid, prompt, max_new_tokens=1, wanted={"images": images})
        engine.run()
        own = features_of(engine)
    with ExitStack() as stack:
        encoder = EncoderInProcess(path, num_threads=1, dtype=dtype)
        stack.callback(encoder.close)
        worker = WorkerInProcess(path, disagg={"feature_fetch": True}, **flags)
        stack.callback(worker.close)
        ask(System(worker), asked, [encoder.source] * 2, encoder)
        crossed = features_of(worker)
    assert len(own) == 3 and own.keys() == crossed.keys()
    assert all(torch.equal(own[key], crossed[key]) and own[key].dtype == crossed[key].dtype for key in own)


def features_of(engine: EngineInProcess) -> dict[bytes, torch.Tensor]:
    """By key, those that its steps have."""
    parts = engine.parts.device.executor.runner.forward_pass.parts
    (images,) = (part for part in parts if isinstance(part, ImagePass))
    return {key: features.clone() for key, features in images._features.items()}


def test_an_encoder_reads_the_tensors_of_its_tower_alone(served: Served, tmp_path: Path) -> None:
    """Of a checkpoint whose others are of other sizes."""
    path, asked, _ = served
    shutil.copytree(path, tmp_path / "tower")
    edit_tensors(tmp_path / "tower" / "model.safetensors", spoil_the_rest)
    assert weights_of(tmp_path / "tower") < weights_of(Path(path))
    tower = load_tower_alone(
        str(tmp_path / "tower"), load_model_config(path), dtype="float32", device="cpu", progress=False
    )
    with EngineInProcess(path, **FLAGS) as engine:
        model = engine.parts.device.executor.runner.running.model
        assert model.vision is not None
        pixels = [pixels_of(image) for image in asked["same"][1]]
        assert all(map(torch.equal, map(tower.vision.encode, pixels), map(model.vision.encode, pixels)))


def spoil_the_rest(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if not any(part in name for part in ("visual", "vision_tower", "projector")):
            tensors[name] = torch.zeros(1)


def weights_of(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


def pixels_of(image: ImageInput) -> Pixels:
    return Pixels(torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(*image.size, 3), image.grid)


@ONE
def test_an_encoder_of_other_weights_is_not_used(served: Served, tmp_path: Path) -> None:
    """Of the same shapes: the hand-shake does not show it, the row does."""
    path, asked, right = served
    other = make_seeing_checkpoint(tmp_path / "other", "qwen3_vl", seed=1)
    with encoding(path, "nixl", "alone", encoder=other) as (encoder, system):
        assert ask(system, asked, [encoder.source] * 2, encoder) == right
        assert fetched(system)["feature_fetches_refused"] == 3
        assert counters(system.workers[0])["mm_encoded_images"] == 3


@ONE
def test_an_encoder_of_another_type_is_refused_by_name(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    path, asked, right = served
    caplog.set_level("DEBUG", logger="disagg.features.feature_fetching")
    with encoding(path, "nixl", "alone", dtype="bfloat16") as (encoder, system):
        assert ask(system, asked, [encoder.source] * 2, encoder) == right
        assert fetched(system)["feature_fetches_refused"] >= 1
    assert "dtype differs" in caplog.text and "start both workers with one --dtype" in caplog.text


@ONE
def test_an_encoder_that_went_away_costs_no_prompt(served: Served) -> None:
    """Behind a hand-shake: then its features were on their way."""
    path, asked, right = served
    with encoding(path, "nixl", "alone") as (encoder, system):
        first = {"other": asked["other"]}
        assert ask(system, first, [encoder.source] * 2, encoder) == {"other": right["other"]}
        source = encoder.source
        encoder.role.close()
        rest = {rid: body for rid, body in asked.items() if rid != "other"}
        assert ask(system, rest, [source] * 2) == {rid: right[rid] for rid in rest}
        assert counters(system.workers[0])["mm_encoded_images"] == 1, "the second image came before"


@ONE
def test_features_land_at_each_dp_rank_for_itself(served: Served) -> None:
    """With DP attention, whose ranks step together: of one alone, too, which has nothing else to do."""
    path, asked, right = served
    with EngineInProcess(path, **FLAGS) as engine:
        for rid, (prompt, images) in asked.items():
            engine.add(rid, prompt, max_new_tokens=1, wanted={"images": images})
        engine.run()
        own = features_of(engine)
    flags = {"chunked_prefill_size": CHUNK, "use": EngineUse(receives_features=True), **FLAGS}
    with dp_ranks(path, tp_size=4, dp_size=2, **flags) as dp:
        for engine in dp.engines:
            put_in_arrivals(engine, asked, own)
            dp.run()
            assert len(engine.parts.scheduler.memory.part(ImageCache).take_copied()) == 3  # type: ignore[union-attr]
        for engine in dp.engines:
            for rid, (prompt, images) in asked.items():
                engine.add(rid, prompt, max_new_tokens=NEW, wanted={"images": images})
        dp.run()
        assert [{rid: engine.tokens[rid] for rid in asked} for engine in dp.engines] == [right, right]
        assert [counters(engine)["mm_encoded_images"] for engine in dp.engines] == [0, 0]


def put_in_arrivals(engine: EngineInProcess, asked: Asked, own: dict[bytes, torch.Tensor]) -> None:
    """As an encoder writes them, one image behind the other."""
    pool, images, first = engine.parts.arrivals, engine.parts.scheduler.memory.part(ImageCache), 1
    assert pool is not None and images is not None
    for image in {image.key: image for _, shown in asked.values() for image in shown}.values():
        pages = list(range(first, first + -(-image.num_tokens // pool.page_size)))
        for row, features in enumerate(own[image.key]):
            pool.k(0)[pages[row // pool.page_size], row % pool.page_size, 0] = features
        assert images.land(image, pages)
        first = pages[-1] + 1
