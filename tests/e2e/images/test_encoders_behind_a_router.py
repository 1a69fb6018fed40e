"""Encoder workers in a whole cluster of real processes: tokens are those without them, equal images share one, and its loss costs only time."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import assert_all_back, post, session, state_of
from tests.e2e.cluster import DEAD, POLL_S, SETTLE_S, Cluster, Worker, child_of, cluster
from tests.e2e.images.test_image_requests import FLAGS, seeing_checkpoint
from tests.frontend.vision import file_of, picture, url_of

NEW = 8
Answer = tuple[int, str]


@pytest.fixture(scope="module")
def epd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A router, two encoder workers, a prefill and a decode worker, as `tandem up` starts them."""
    folder = tmp_path_factory.mktemp("epd")
    secret = folder / "secret"
    secret.write_text("only this cluster knows it")
    secret.chmod(0o600)
    path = seeing_checkpoint(folder / "qwen3_vl")
    flags = ("--encode", "2", "--model-path", path, "--cluster-secret-file", str(secret), *FLAGS)
    with cluster(folder, *flags, "--disaggregation-kv-checksum", "--health-check-interval-secs", "0.2", DEAD) as c:
        yield c


def chat(*seeds: int, text: str = "what is it?") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url_of(file_of(picture(90, 64, seed=s)))}} for s in seeds]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return {"messages": messages, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}


async def ask(c: Cluster, *bodies: dict[str, Any]) -> list[Answer]:
    """All at once; what they got is an answer."""

    async def one(http: aiohttp.ClientSession, body: dict[str, Any]) -> Answer:
        status, answer = await post(http, f"{c.router}/v1/chat/completions", body)
        assert status == 200, answer
        return answer["usage"]["prompt_tokens"], answer["choices"][0]["message"]["content"]

    async with session() as http:
        return await asyncio.gather(*(one(http, body) for body in bodies))


async def without_encoders(c: Cluster, *bodies: dict[str, Any]) -> list[Answer]:
    """Nothing is cached anywhere, and the router knows no encoder worker."""
    async with session() as http:
        for worker in c.of("encode"):
            async with http.delete(f"{c.router}/workers", json={"url": worker.url}) as response:
                assert response.status == 200
        await post(http, f"{c.router}/flush_cache", {})
        before = [await encoded(worker) for worker in c.of("encode")]
        found = await ask(c, *bodies)
        assert [await encoded(worker) for worker in c.of("encode")] == before
        for worker in c.of("encode"):
            assert (await post(http, f"{c.router}/workers", {"url": worker.url, "role": "encode"}))[0] == 201
        await post(http, f"{c.router}/flush_cache", {})
    return found


async def encoded(worker: Worker) -> int:
    """How many images an encoder worker was asked for."""
    return int((await state_of(worker.url))["counters"].get("mm_cache_queries", 0))


async def fetched(c: Cluster) -> int:
    return int((await state_of(c.of("prefill")[0].url))["counters"].get("features_fetched", 0))


async def workers(c: Cluster) -> dict[str, dict[str, Any]]:
    async with session() as http, http.get(f"{c.router}/workers") as response:
        return {worker["url"]: worker for worker in (await response.json())["workers"]}


async def until(c: Cluster, is_so: Callable[[dict[str, dict[str, Any]]], bool]) -> None:
    """Wait until the router sees its workers so."""
    deadline_s = time.monotonic() + SETTLE_S
    while not is_so(shown := await workers(c)):
        assert time.monotonic() < deadline_s, shown
        await asyncio.sleep(POLL_S)


async def all_answer(c: Cluster) -> None:
    await until(c, lambda shown: all(worker["is_healthy"] for worker in shown.values()))


async def test_tokens_are_those_of_a_pair_alone(epd: Cluster) -> None:
    bodies = [chat(1), chat(2, 3), chat(3, 1, text="and these?")]
    before = await fetched(epd)
    found = await ask(epd, *bodies)
    assert await fetched(epd) - before == 3, "each image once"
    assert sum([await encoded(worker) for worker in epd.of("encode")]) >= 3
    assert found == await without_encoders(epd, *bodies)
    await all_answer(epd)


async def test_equal_images_go_to_one_encoder_worker(epd: Cluster) -> None:
    def named(shown: dict[str, dict[str, Any]]) -> list[int]:
        return [shown[worker.url]["assigned_total"] for worker in epd.of("encode")]

    before = named(await workers(epd))
    for i in range(4):
        await ask(epd, chat(7, text=f"question {i}"))
    same = named(await workers(epd))
    assert sorted(new - old for new, old in zip(same, before, strict=True)) == [0, 4]
    await ask(epd, *(chat(seed) for seed in range(100, 116)))
    assert all(new > old for new, old in zip(named(await workers(epd)), same, strict=True))


async def test_requests_are_answered_right_though_their_encoder_worker_is_killed(epd: Cluster) -> None:
    """It is stopped while it has their images, and then ends."""
    bodies = [chat(200 + i, 220 + i) for i in range(8)]
    wanted = await without_encoders(epd, *bodies)
    await all_answer(epd)
    victim, other = epd.of("encode")
    scheduler = child_of(victim.pid, "scheduler")
    scheduler.send_signal(signal.SIGSTOP)
    asked = asyncio.create_task(ask(epd, *bodies))
    await until(epd, lambda shown: shown[victim.url]["inflight_requests"] > 0)
    assert not asked.done()
    for pid in (victim.pid, scheduler.pid):
        os.kill(pid, signal.SIGKILL)
    assert await asked == wanted
    await until(epd, lambda shown: not shown[victim.url]["is_healthy"])
    before, more = await encoded(other), [chat(300 + i) for i in range(4)]
    found = await ask(epd, *more)
    assert await encoded(other) - before == len(more), "the other one takes over"
    os.kill(other.pid, signal.SIGKILL)
    await until(epd, lambda shown: not shown[other.url]["is_healthy"])
    async with session() as http:
        await post(http, f"{epd.router}/flush_cache", {})
    assert await ask(epd, *more) == found
    await assert_all_back(replace(epd, workers=(*epd.of("prefill"), *epd.of("decode"))))
