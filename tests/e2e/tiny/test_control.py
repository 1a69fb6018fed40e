"""Control over real HTTP, unified and disaggregated: pauses, weights, profiles, stream intervals, time lines."""

import asyncio
import base64
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from safetensors.torch import load_file, save

from tests.e2e.client import (
    POLL_S,
    SETTLE_S,
    assert_all_back,
    generate,
    generate_all,
    last_event,
    post,
    session,
    state_of,
    text_of,
)
from tests.e2e.cluster import Cluster
from tests.engine.engine_in_process import tokens_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.trainers.trainer import HOST, trainer

STAGES = {
    "unified": {"queue_time", "prefill_time", "decode_time"},
    "pd": {"bootstrap_time", "queue_time", "prefill_time", "transfer_time", "decode_time"},
}


@pytest.fixture(scope="module")
def checkpoints(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The model that is served, and one of its shape."""
    return qwen3, make_tiny_checkpoint(tmp_path_factory.mktemp("second"), "qwen3", seed=2)


@pytest.fixture(scope="module", params=STAGES)
def way(request: pytest.FixtureRequest) -> tuple[str, Cluster]:
    return request.param, request.getfixturevalue(request.param)


# A pair is two workers behind a router: one alone does less.
PAIR = pytest.mark.parametrize("way", [pytest.param("unified", marks=pytest.mark.slow), "pd"], indirect=True)


@pytest.fixture(autouse=True)
def never_left_paused(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails in a pause must not stop the others."""
    yield
    if "way" in request.fixturenames:
        asyncio.run(_continue(request.getfixturevalue("way")[1]))


async def _continue(c: Cluster) -> None:
    async with session() as http:
        await post(http, f"{c.router}/continue_generation", {})


def body(start: int = 20, *, new: int = 60, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True, **more.pop("sampling", {})}
    return {"input_ids": list(range(start, start + 40)), "sampling_params": sampling, **more}


def expected(checkpoint: str, wanted: dict[str, Any]) -> list[int]:
    return tokens_of(checkpoint, [wanted])[0]


async def first_tokens(stream: aiohttp.ClientResponse) -> None:
    async for line in stream.content:
        if line.startswith(b"data: {"):
            return


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_holds_everything_and_changes_no_token(
    way: tuple[str, Cluster], checkpoints: tuple[str, str], mode: str
) -> None:
    (_, c), wanted = way, expected(checkpoints[0], body())
    async with session() as http, http.post(f"{c.router}/generate", json=body(stream=True)) as running:
        await first_tokens(running)
        status, said = await post(http, f"{c.router}/pause_generation", {"mode": mode})
        assert status == 200, said
        later = asyncio.create_task(generate(http, c.router, body(100, new=4)))
        decode = c.workers[-1].url
        before = (await state_of(decode))["counters"]
        for _ in range(10):  # each a round trip to the scheduler: it turns, and computes nothing
            assert (await state_of(decode))["counters"]["steps"] == before["steps"]
        assert not later.done()
        assert (await post(http, f"{c.router}/continue_generation", {}))[0] == 200
        last = await last_event(running)
        assert last["output_ids"] == wanted
        assert last["meta_info"]["num_retractions"] == (mode == "retract")
        assert len((await later)["output_ids"]) == 4
    await assert_all_back(c)


async def test_a_block_lets_what_runs_end_and_holds_the_rest(
    way: tuple[str, Cluster], checkpoints: tuple[str, str]
) -> None:
    """A router answers when no worker has a request, and holds the next ones itself; a worker alone has them in a queue."""
    (kind, c), wanted = way, expected(checkpoints[0], body(new=200))
    async with session() as http, http.post(f"{c.router}/generate", json=body(stream=True, new=200)) as running:
        await first_tokens(running)
        blocking = asyncio.create_task(post(http, f"{c.router}/pause_generation", {"mode": "block"}))
        assert (await last_event(running))["output_ids"] == wanted
        status, said = await blocking
        assert status == 200, said
        held = asyncio.create_task(generate(http, c.router, body(100, new=4)))
        late = await http.post(f"{c.router}/generate", json=body(), headers={"x-request-timeout": "0.05"})
        assert (late.status, (await late.json())["error"]["code"]) == (504, "deadline")
        if kind == "pd":
            await assert_all_back(c)
        else:
            assert (await state_of(c.workers[0].url))["queues"]["held"] == 1
        assert not held.done()
        assert (await post(http, f"{c.router}/continue_generation", {}))[0] == 200
        assert len((await held)["output_ids"]) == 4
    await assert_all_back(c)


async def test_a_pause_may_abort_and_its_errors_name_the_field(way: tuple[str, Cluster]) -> None:
    _, c = way
    async with session() as http:
        worker = c.workers[-1].url
        status, said = await post(http, f"{worker}/pause_generation", {"mode": "nap"})
        assert status == 400 and said["error"]["param"] == "mode"
        async with http.post(f"{c.router}/generate", json=body(stream=True, new=2000)) as running:
            await first_tokens(running)
            assert (await post(http, f"{c.router}/pause_generation", {}))[0] == 200
            assert b'"type":"abort"' in await running.read()
        held = asyncio.create_task(post(http, f"{c.router}/generate", body(rid="held")))
        while not (await state_of(worker))["queues"]["held"]:
            await asyncio.sleep(0.01)
        await post(http, f"{c.router}/abort_request", {"rid": "held"})
        assert (await held)[1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await post(http, f"{c.router}/continue_generation", {}))[0] == 200
        assert len((await generate(http, c.router, body(new=3)))["output_ids"]) == 3
    await assert_all_back(c)


async def test_memory_is_released_and_comes_again(way: tuple[str, Cluster], checkpoints: tuple[str, str]) -> None:
    """Through the router; peers have registered the KV memory, and write to it afterwards."""
    (_, c), wanted = way, expected(checkpoints[0], body(new=24))
    worker = c.workers[-1].url
    async with session() as http:
        assert (await generate(http, c.router, body(new=24)))["output_ids"] == wanted
        await assert_all_back(c)
        status, said = await post(http, f"{c.router}/release_memory_occupation", {"tags": ["weight"]})
        assert status == 400 and "tags: must be of kv_cache, weights" in str(said)
        status, said = await post(http, f"{c.router}/release_memory_occupation", {})
        assert status == 200, said
        async with http.get(f"{worker}/health") as health:
            assert (health.status, (await health.json())["released"]) == (503, ["kv_cache", "weights"])
        status, said = await post(http, f"{c.router}/generate", body(rid="early"))
        assert status == 503 and "/resume_memory_occupation" in str(said)
        status, said = await post(http, f"{c.router}/resume_memory_occupation", {})
        assert status == 200, said
        end_s = time.monotonic() + SETTLE_S
        while (answer := await post(http, f"{c.router}/generate", body(new=24)))[0] == 503:
            assert time.monotonic() < end_s, answer  # the router looks at the workers' health
            await asyncio.sleep(POLL_S)
        assert answer[1]["output_ids"] == wanted
    await assert_all_back(c)


async def test_weights_come_from_disk_without_restart(
    way: tuple[str, Cluster], checkpoints: tuple[str, str], tmp_path: Path
) -> None:
    first, second = checkpoints
    wanted = {path: expected(path, body(new=24)) for path in checkpoints}
    assert wanted[first] != wanted[second]
    misfit = make_tiny_checkpoint(tmp_path / "misfit", "llama")
    broken = make_tiny_checkpoint(tmp_path / "broken", "qwen3")
    for file in Path(broken).glob("*.safetensors"):
        file.write_bytes(b"\x08")
    await _update_weights(way[1], wanted, second, bad=[misfit, broken, "/nowhere", ""])
    await _update_back(way[1], wanted, first)
    await assert_all_back(way[1])


async def _update_weights(c: Cluster, wanted: dict[str, list[int]], second: str, *, bad: list[str]) -> None:
    first = next(path for path in wanted if path != second)
    async with session() as http:
        assert (await generate(http, c.router, body(new=24)))["output_ids"] == wanted[first]  # and is cached now
        for path in bad:
            for worker in c.workers:
                status, said = await post(http, f"{worker.url}/update_weights_from_disk", {"model_path": path})
                assert status == 400 and said["error"]["param"] == "model_path", said
        answer = await generate(http, c.router, body(new=24))
        assert (answer["output_ids"], answer["meta_info"]["weight_version"]) == (wanted[first], "default")
        asked = {"model_path": second, "weight_version": "step-7"}
        running = asyncio.create_task(generate(http, c.router, body(new=24)))
        status, said = await post(http, f"{c.router}/update_weights_from_disk", asked)
        assert status == 200, said
        answer = (await running)["output_ids"]
        assert answer in wanted.values() or (len(c.workers) > 1 and len(answer) == 24)  # each side drains on its own
        answer = await generate(http, c.router, body(new=24))
        assert (answer["output_ids"], answer["meta_info"]["weight_version"]) == (wanted[second], "step-7")
        info = json.loads(await text_of(f"{c.workers[-1].url}/model_info"))
        assert (info["model_path"], info["weight_version"]) == (second, "step-7")


async def _update_back(c: Cluster, wanted: dict[str, list[int]], first: str) -> None:
    """Paused before: nothing waits, and the pause stays."""
    async with session() as http:
        assert (await post(http, f"{c.router}/pause_generation", {"mode": "retract"}))[0] == 200
        asked = {"model_path": first, "weight_version": "default"}
        assert (await post(http, f"{c.router}/update_weights_from_disk", asked))[0] == 200
        held = asyncio.create_task(generate(http, c.router, body(new=24)))
        assert (await post(http, f"{c.router}/continue_generation", {}))[0] == 200
        assert (await held)["output_ids"] == wanted[first]


@PAIR
async def test_weights_come_as_tensors_and_from_a_trainer(
    way: tuple[str, Cluster], checkpoints: tuple[str, str]
) -> None:
    """Through the router to every worker. Tensors come in two calls; each worker is a rank of the trainer's group."""
    (kind, c), (first, second) = way, checkpoints
    wanted = {path: expected(path, body(new=24)) for path in checkpoints}
    names = sorted(load_file(Path(second) / "model.safetensors"))
    async with session() as http:
        assert (await generate(http, c.router, body(new=24)))["output_ids"] == wanted[first]
        await _ok(http, c, "pause_generation", {"mode": "block"})
        for part in (names[::2], names[1::2]):
            text = base64.b64encode(_file_of(second, part)).decode()
            await _ok(
                http, c, "update_weights_from_tensor", {"serialized_named_tensors": [text], "weight_version": "a"}
            )
        await _ok(http, c, "continue_generation", {})
        answer = await generate(http, c.router, body(new=24))
        meta = answer["meta_info"]
        assert (answer["output_ids"], meta["weight_version"], meta["cached_tokens"]) == (wanted[second], "a", 0)
        if kind == "pd":
            status, said = await post(http, f"{c.workers[0].url}/switch_role", {"role": "decode"})
            assert status == 409 and "came as tensors" in said["error"]["message"], said
        with trainer(first, ranks=len(c.workers)) as source:
            address = {"master_address": HOST, "master_port": source.port, "backend": "gloo"}
            join = {**address, "rank_offset": 1, "world_size": source.world_size}
            await _ok(http, c, "init_weights_update_group", join)
            new = source.tensors(names)
            asked = {"names": names, "dtypes": new.dtypes, "shapes": new.shapes, "weight_version": "b"}
            await _ok(http, c, "begin_weight_update", {"selector": "all"})
            source.send(names)
            await _ok(http, c, "update_weights_from_distributed", asked)
            await _ok(http, c, "end_weight_update", {})
            await _ok(http, c, "destroy_weights_update_group", {})
        answer = await generate(http, c.router, body(new=24))
        assert (answer["output_ids"], answer["meta_info"]["weight_version"]) == (wanted[first], "b")
        await _ok(http, c, "update_weight_version", {"new_version": "c"})
        assert (await generate(http, c.router, body(new=24)))["meta_info"]["weight_version"] == "c"
        await _ok(http, c, "update_weights_from_disk", {"model_path": first, "weight_version": "default"})
    await assert_all_back(c)


async def _ok(http: aiohttp.ClientSession, c: Cluster, call: str, asked: dict[str, Any]) -> None:
    status, said = await post(http, f"{c.router}/{call}", asked)
    assert status == 200 and said.get("success", said.get("status") == "ok"), said


def _file_of(checkpoint: str, names: list[str]) -> bytes:
    tensors = load_file(Path(checkpoint) / "model.safetensors")
    return save({name: tensors[name] for name in names})


@PAIR
async def test_a_profile_is_a_trace_file(way: tuple[str, Cluster], tmp_path: Path) -> None:
    _, c = way
    async with session() as http:
        for worker in c.workers:
            file = Path("/proc/nothing")
            for asked, field in (({"activities": ["TPU"]}, "activities"), ({"output_dir": str(file)}, "output_dir")):
                status, said = await post(http, f"{worker.url}/start_profile", asked)
                assert status == 400 and said["error"]["param"] == field
        status, said = await post(http, f"{c.workers[0].url}/start_expert_distribution_record", {})
        assert status == 400 and said["error"]["message"] == "the model has no experts"
        asked = {"output_dir": str(tmp_path), "activities": ["CPU", "CPU"]}
        assert (await post(http, f"{c.router}/start_profile", asked))[0] == 200
        await generate(http, c.router, body(new=4))
        assert (await post(http, f"{c.router}/stop_profile", {}))[0] == 200
    traces = list(tmp_path.iterdir())
    assert len(traces) == len(c.workers)
    for trace in traces:
        text = trace.read_bytes()
        events = json.loads(gzip.decompress(text) if trace.suffix == ".gz" else text)["traceEvents"]
        assert any("aten::" in event["name"] for event in events), trace


async def test_stream_interval_spares_messages_and_no_token(
    way: tuple[str, Cluster], checkpoints: tuple[str, str]
) -> None:
    wanted = expected(checkpoints[0], body(new=21))
    sizes = await _stream_sizes(way[1], body(new=21, stream=True, sampling={"stream_interval": 5}), wanted)
    assert set(sizes) <= {1, 6, 11, 16, 21}  # a slow reader gets several messages as one event
    sizes = await _stream_sizes(way[1], body(new=21, stream=True), wanted)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 21
    answers = await generate_all(way[1].router, [body(new=21)])
    assert answers[0]["output_ids"] == wanted


async def _stream_sizes(c: Cluster, asked: dict[str, Any], wanted: list[int]) -> list[int]:
    events = []
    async with session() as http, http.post(f"{c.router}/generate", json=asked) as stream:
        async for line in stream.content:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
    assert events[-1]["output_ids"] == wanted
    return [len(event["output_ids"]) for event in events]


async def test_the_time_line_accounts_for_the_whole_request(way: tuple[str, Cluster]) -> None:
    name, c = way
    (answer,) = await generate_all(c.router, [body(new=30)])
    meta = answer["meta_info"]
    times = {key: value for key, value in meta.items() if key.endswith("_time")}
    assert times.keys() == STAGES[name] and all(value >= 0 for value in times.values())
    assert 0 < sum(times.values()) <= meta["e2e_latency"] + 0.05  # stages do not overlap (clocks of two processes)
    assert 0 < meta["first_token_latency"] < meta["e2e_latency"]
    assert meta["decode_throughput"] > 0


@pytest.mark.parametrize("way", ["pd"], indirect=True)
async def test_a_prefill_worker_tells_how_fast_kv_goes(way: tuple[str, Cluster]) -> None:
    _, c = way
    await generate_all(c.router, [body(new=2)])
    text = await text_of(f"{c.of('prefill')[0].url}/metrics")
    values = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if "{" in line}
    assert values["sglang:kv_transfer_speed_gb_s"] > 0 and values["sglang:kv_transfer_latency_ms"] > 0
    assert 'stage="decode"' in await text_of(f"{c.of('decode')[0].url}/metrics")
