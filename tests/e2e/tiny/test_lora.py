"""LoRA adapters through real processes and a transfer: tokens are those of merged weights, and a load changes no other request."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import assert_all_back, generate, last_event, post, session, text_of
from tests.e2e.cluster import Cluster
from tests.engine.engine_in_process import tokens_of
from tests.lora.tiny_adapters import merge

PROMPT = list(range(20, 100))
NAMES = ("", "one", "two", "three")  # the model alone, and three adapters
NEW = 24


@dataclass(frozen=True)
class Files:
    base: str
    adapters: dict[str, str]
    answers: dict[str, list[int]]  # of merged weights


@pytest.fixture(scope="module")
def files(qwen3: str, adapters: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("merged")
    merged = {name: merge(folder / name, qwen3, "qwen3", path, {"": 2.0}) for name, path in adapters.items()}
    answers = {name: tokens_of(merged.get(name, qwen3), [body()])[0] for name in NAMES}
    assert len({tuple(tokens) for tokens in answers.values()}) == len(NAMES)
    return Files(qwen3, adapters, answers)


def body(lora: str = "", *, new: int = NEW, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": sampling, "lora_path": lora or None, **more}


async def load(http: aiohttp.ClientSession, url: str, name: str, path: str) -> tuple[int, dict[str, Any]]:
    return await post(http, f"{url}/load_lora_adapter", {"lora_name": name, "lora_path": path})


async def unload(http: aiohttp.ClientSession, url: str, name: str) -> tuple[int, dict[str, Any]]:
    return await post(http, f"{url}/unload_lora_adapter", {"lora_name": name})


async def test_adapters_come_and_go_while_requests_run(pd: Cluster, files: Files) -> None:
    await _mixed(pd, files)
    await _unload_under_a_stream(pd, files)
    await assert_all_back(pd)


async def _mixed(c: Cluster, files: Files) -> None:
    """Four kinds at once, twice (computed, then cached), while two of the adapters are being loaded."""
    async with session() as http:
        running = asyncio.create_task(generate(http, c.router, body("one")))
        for name in ("two", "three"):
            status, said = await load(http, c.router, name, files.adapters[name])
            assert status == 200, said
        assert (await running)["output_ids"] == files.answers["one"]
        for _ in range(2):
            answers = await asyncio.gather(*(generate(http, c.router, body(name)) for name in (*NAMES, *NAMES)))
            for name, answer in zip((*NAMES, *NAMES), answers, strict=True):
                assert answer["output_ids"] == files.answers[name], name
                assert answer["meta_info"].get("lora_path", "") == name
        assert all(a["meta_info"]["cached_tokens"] == 64 for a in answers)
        await _as_models(http, c, files, text=answers[2]["text"])
        await _as_embeddings(http, c)
        for worker in c.workers:
            assert "tandem_num_loaded_loras{" in (found := await text_of(f"{worker.url}/metrics")) and "} 3.0" in found


async def _as_models(http: aiohttp.ClientSession, c: Cluster, files: Files, *, text: str) -> None:
    cards = json.loads(await text_of(f"{c.router}/v1/models"))["data"]
    base = cards[0]["id"]
    assert {card["id"]: (card["root"], card["parent"]) for card in cards[1:]} == {
        name: (path, base) for name, path in files.adapters.items()
    }
    asked = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    for how in ({"model": "two"}, {"model": f"{base}:two"}, {"model": base, "lora_path": "two"}):
        status, answer = await post(http, f"{c.router}/v1/completions", {**asked, **how})
        assert (status, answer["model"], answer["choices"][0]["text"]) == (200, "two", text), answer


async def _as_embeddings(http: aiohttp.ClientSession, c: Cluster) -> None:
    vectors = []
    for model in ("one", "three", "one"):
        status, said = await post(http, f"{c.router}/v1/embeddings", {"input": PROMPT, "model": model})
        assert (status, said["model"]) == (200, model), said
        vectors.append(said["data"][0]["embedding"])
    assert vectors[0] == vectors[2] != vectors[1]


async def _unload_under_a_stream(c: Cluster, files: Files) -> None:
    """It waits for the stream, new requests are refused; then other weights come under the same name."""
    async with session() as http, http.post(f"{c.router}/generate", json=body("two", new=400, stream=True)) as stream:
        await stream.content.readline()
        leaving = asyncio.create_task(unload(http, c.router, "two"))
        while (refused := await post(http, f"{c.router}/generate", body("two", new=1)))[0] == 200:
            await asyncio.sleep(0)
        assert refused[0] == 400 and refused[1]["error"]["param"] == "lora_path", refused
        assert not leaving.done()
        assert (await generate(http, c.router, body("three")))["output_ids"] == files.answers["three"]
        last = await last_event(stream)
        assert last["output_ids"][:NEW] == files.answers["two"] and len(last["output_ids"]) == 400
        assert (await leaving)[0] == 200
        assert (await unload(http, c.router, "three"))[0] == 200
        assert (await load(http, c.router, "two", files.adapters["three"]))[0] == 200
        answer = await generate(http, c.router, body("two"))
        assert answer["output_ids"] == files.answers["three"] and answer["meta_info"]["cached_tokens"] == 0
        assert (await unload(http, c.router, "two"))[0] == 200


async def test_what_cannot_be_is_a_clear_error_and_changes_nothing(pd: Cluster, files: Files) -> None:
    await _bad_values(pd, files)
    await _one_side_only(pd, files)
    await assert_all_back(pd)


async def _bad_values(c: Cluster, files: Files) -> None:
    async with session() as http:
        running = asyncio.create_task(generate(http, c.router, body("one")))
        for asked, field in (
            (body("nobody"), "lora_path"),
            (body() | {"lora_path": 7}, "lora_path"),
            (body() | {"lora_path": ["one", "one"]}, "lora_path"),
        ):
            status, said = await post(http, f"{c.router}/generate", asked)
            assert (status, said["error"]["param"]) == (400, field), said
        for model, lora, status_wanted in (("nobody", None, 404), ("one:one", None, 404), ("one", "two", 400)):
            asked = {"prompt": "a", "model": model, "lora_path": lora}
            status, said = await post(http, f"{c.router}/v1/completions", asked)
            assert status == status_wanted, said
        worker, one = c.workers[0].url, files.adapters["one"]
        base = json.loads(await text_of(f"{worker}/v1/models"))["data"][0]["id"]
        for name, path, field in (
            ("one", one, "lora_name"),
            ("", one, "lora_name"),
            (base, one, "lora_name"),
            ("x", "", "lora_path"),
            ("x", "/nowhere", "lora_path"),
            ("x", files.base, "lora_path"),
        ):
            status, said = await load(http, worker, name, path)
            assert (status, said["error"]["param"]) == (400, field), said
        assert (await unload(http, worker, "x"))[1]["error"]["param"] == "lora_name"
        assert (await running)["output_ids"] == files.answers["one"]


async def _one_side_only(c: Cluster, files: Files) -> None:
    """A pair of which one has not heard of an adapter: 400, and the other half lets go."""
    async with session() as http:
        for worker in c.workers:
            assert (await load(http, worker.url, "half", files.adapters["two"]))[0] == 200
            status, said = await post(http, f"{c.router}/generate", body("half"))
            assert (status, said["error"]["param"]) == (400, "lora_path"), said
            assert (await unload(http, worker.url, "half"))[0] == 200
        assert (await generate(http, c.router, body("one")))["output_ids"] == files.answers["one"]
