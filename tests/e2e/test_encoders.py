"""Prompts whose images an encoder worker encodes: the tokens of a worker that encodes them itself, by every engine, in every place."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import monotonic, sleep
from typing import Any

import pytest

from engine.messages import FeatureSource
from tests.e2e.encoder_in_process import EncoderInProcess
from tests.e2e.test_images import FLAGS, NEW, Asked, Tokens, counters, prompts_of
from tests.e2e.two_engines import REST_S, Alone, Pair, System, WorkerInProcess, disaggregated
from tests.engine.engine_in_process import EngineInProcess
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
def encoding(path: str, backend: str, mode: str, **more: Any) -> Iterator[tuple[EncoderInProcess, System]]:
    """An encoder, and beside it one worker or a pair that gets features from it. `more`: flags of disaggregation."""
    disagg = {"disaggregation_transfer_backend": backend, **more}
    with ExitStack() as stack:
        encoder = EncoderInProcess(path, disagg=disagg, num_threads=1)
        stack.callback(encoder.close)
        fetching = {**disagg, "feature_fetch": True}
        if mode == "pair":
            system: System = stack.enter_context(
                disaggregated(path, decode={"disagg": disagg}, disagg=fetching, chunked_prefill_size=CHUNK, **FLAGS)
            )
        else:
            worker = WorkerInProcess(path, disagg=fetching, chunked_prefill_size=CHUNK, **FLAGS)
            stack.callback(worker.close)
            system = Alone(worker)
        yield encoder, system


def ask(system: System, asked: Asked, sources: Sequence[FeatureSource | None], *others: EncoderInProcess) -> Tokens:
    """Ask all at once; `others`: encoders that turn meanwhile."""
    for rid, (prompt, images) in asked.items():
        wanted = {"images": images, "encoders": tuple(sources[: len(images)])}
        if isinstance(system, Pair):
            system.submit(rid, prompt, new=NEW, wanted=wanted)
        else:
            system.workers[0].submit(rid, prompt, new=NEW, meeting=None, wanted=wanted)
    everyone = [*system.workers, *others]
    deadline_s = monotonic() + REST_S
    while not all(one.at_rest for one in everyone):
        assert monotonic() < deadline_s, [worker.queues() for worker in system.workers]
        if not any([one.turn() for one in everyone]):
            sleep(0.0005)
    for one in everyone:
        one.check()
    last = system.workers[-1].outputs
    assert not last.aborted, last.aborted
    return {rid: last.tokens[rid] for rid in asked}


def fetched(system: System) -> dict[str, float]:
    peered = system.workers[0].peered
    assert peered is not None
    return peered.counters()


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
