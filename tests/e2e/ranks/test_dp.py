"""Workers of two DP ranks (--dp-size 2): one worker for its clients, the tokens of one rank, and an end that leaves nothing."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import assert_all_back, generate, generate_all, post, session, state_of, wait_for_state
from tests.e2e.cluster import DEAD, Cluster, Worker, cluster, wait_until
from tests.e2e.settings import settings
from tests.e2e.workload import mixed_bodies
from tests.engine.engine_in_process import tokens_of
from tools.family import family, lives

TWO = ("--dp-size", "2", "--max-total-tokens", "65536", "--chunked-prefill-size", "128")
OVERLAP = ("--stream", "threaded")
DELAY = {"stream_delay_s": 0.004}
# Every rank of decode gives requests back to ranks of prefill, and has nothing of them left.
RETRACTED = ("--disaggregation-decode-retraction-backup", "prefill", "--disable-radix-cache")
SEEDED = {"temperature": 1.0, "seed": 7, "max_new_tokens": 16, "ignore_eos": True}
ENDED_S = 60.0
DONE = {"unified": "steps", "prefill": "recomputed", "decode": "resumed_through_prefill"}  # by each rank, counted


@pytest.fixture(scope="module")
def started(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Cluster]]:
    """A unified worker, and a pair. The last tests end them."""
    folder = tmp_path_factory.mktemp("dp")

    def logs(name: str) -> tuple[str, str]:
        return "--run-dir", str(folder / name / "logs")

    ways = {
        "unified": (("--unified", "--tokenizer-worker-num", "2"), settings(**DELAY)),
        "pd": (("--transfer-backend", "nixl", *RETRACTED), settings(**DELAY, test_retract=6)),
    }
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        found = {
            name: threads.submit(
                stack.enter_context,
                cluster(folder / name, *way, *logs(name), "--model-path", qwen3, *TWO, *OVERLAP, DEAD, env=env),
            )
            for name, (way, env) in ways.items()
        }
        yield {name: future.result() for name, future in found.items()}


@pytest.fixture(scope="module")
def reference(qwen3: str) -> list[list[int]]:
    """One engine, one rank."""
    return tokens_of(qwen3, mixed_bodies(seed=1, count=24), depth=1, max_total_tokens=65536)


@pytest.mark.parametrize("way", ["unified", "pd"])
async def test_tokens_are_those_of_one_rank_and_every_rank_serves(
    way: str, started: dict[str, Cluster], reference: list[list[int]]
) -> None:
    workers = {worker.role: worker.url for worker in started[way].workers}
    for round_ in range(8):  # which rank a request meets, and when decode retracts it, is chance
        answers = await generate_all(started[way].router, mixed_bodies(seed=1, count=24))
        assert [answer["output_ids"] for answer in answers] == reference
        states = {role: await state_of(url) for role, url in workers.items()}
        ranks = [(role, rank["counters"]) for role, state in states.items() for rank in state["ranks"]]
        served = all(counters["prompt_tokens"] > 100 and counters[DONE[role]] > 0 for role, counters in ranks)
        if round_ and served:
            break
    await assert_all_back(started[way])
    assert served and len(ranks) == 2 * len(workers), states
    assert not any(counters.get("recompute_failed") for _, counters in ranks)


async def test_a_seed_gives_the_same_tokens_on_every_rank(started: dict[str, Cluster]) -> None:
    body: dict[str, Any] = {"input_ids": list(range(20, 60)), "sampling_params": SEEDED}
    url = started["unified"].router
    first, second = await generate_all(url, [{**body, "routed_dp_rank": rank} for rank in range(2)])
    assert first["output_ids"] == second["output_ids"] and len(set(first["output_ids"])) > 8


async def test_control_reaches_every_rank(started: dict[str, Cluster], qwen3: str, tmp_path: Path) -> None:
    """A pause holds both, an abort ends the request of either, and weights change at both or at none."""
    url = started["unified"].router
    long = {"input_ids": list(range(20, 90)), "sampling_params": {**SEEDED, "max_new_tokens": 2000}}
    async with session() as http:
        tasks = [
            asyncio.create_task(generate(http, url, {**long, "routed_dp_rank": rank, "rid": f"long-{rank}"}))
            for rank in range(2)
        ]
        await wait_for_state(url, lambda state: _running(state) == [1, 1])
        assert (await post(http, f"{url}/pause_generation", {"mode": "in_place"}))[0] == 200
        paused = await state_of(url)
        assert [rank["gauges"]["paused"] for rank in paused["ranks"]] == [1.0, 1.0]
        again = await state_of(url)
        steps = [[rank["counters"]["steps"] for rank in state["ranks"]] for state in (paused, again)]
        assert steps[0] == steps[1]
        assert (await post(http, f"{url}/continue_generation", {}))[0] == 200
        await post(http, f"{url}/abort_request", {"rid": "long-1"})
        assert (await tasks[1])["meta_info"]["finish_reason"]["type"] == "abort"
        await wait_for_state(url, lambda state: _running(state) == [1, 0])
        await post(http, f"{url}/abort_request", {"rid": "long-0"})
        assert (await tasks[0])["meta_info"]["finish_reason"]["type"] == "abort"
        (tmp_path / "config.json").write_text("{}")
        status, answer = await post(http, f"{url}/update_weights_from_disk", {"model_path": str(tmp_path)})
        assert status == 400 and answer["error"]["param"] == "model_path"
        update = {"model_path": qwen3, "weight_version": "v2"}
        assert (await post(http, f"{url}/update_weights_from_disk", update))[0] == 200
        versions = [
            (await generate(http, url, {**long, "sampling_params": SEEDED, "routed_dp_rank": rank}))["meta_info"]
            for rank in range(2)
        ]
        assert [meta["weight_version"] for meta in versions] == ["v2", "v2"]
        assert [meta["cached_tokens"] for meta in versions] == [0, 0], "the prefixes of the old weights are gone"


async def test_a_rank_that_a_client_names_at_the_router_serves_at_both_workers(started: dict[str, Cluster]) -> None:
    before = [await state_of(worker.url) for worker in started["pd"].workers]
    body = {"input_ids": list(range(20, 60)), "sampling_params": SEEDED, "routed_dp_rank": 1}
    await generate_all(started["pd"].router, [body] * 3)
    for worker, was in zip(started["pd"].workers, before, strict=True):
        ranks = zip((await state_of(worker.url))["ranks"], was["ranks"], strict=True)
        more = [now["counters"]["prompt_tokens"] - then["counters"]["prompt_tokens"] for now, then in ranks]
        assert more[0] == 0 and more[1] > 0, (worker.role, more)


def _running(state: dict[str, Any]) -> list[int]:
    return [rank["running"] for rank in state["ranks"]]


@pytest.mark.parametrize("way", ["unified", "pd"])
def test_the_death_of_a_rank_ends_the_worker_by_name(way: str, started: dict[str, Cluster]) -> None:
    """The last test: nothing of the worker is left."""
    worker: Worker = started[way].workers[0]
    members = family(worker.pid)
    schedulers = [p for p in members if "disagg.processes.scheduler_process" in p.cmdline()]
    assert len(schedulers) == 2
    schedulers[1].kill()
    wait_until(lambda: not any(map(lives, members)), within_s=ENDED_S, what="all of it ends")
    logs = "".join(log.read_text() for log in (started[way].log.parent / "logs").glob("*.log"))
    assert "tandem serve: error: the DP rank 1 scheduler process ended (status -9)" in logs
