"""Many workers: checks that are spread, sockets enough, lists in slices, and a fleet that comes to rest."""

import asyncio
import json
import resource
from itertools import pairwise
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest
from prometheus_client import generate_latest

from benchmarks import scale_balance, scale_fleet
from router.client.credentials import Credentials
from router.config import RouterConfig
from router.history.metrics import RouterMetrics
from router.http.workers_api import SLICE, describe, describe_all
from router.pool.health import BETWEEN_S, HealthMonitor, _Watch
from router.pool.worker import LoadReport
from service.process.start import allow_many_files
from service.security.keys import open_gate
from service.waiter import loop_time_s
from tests.router.dummies import table_of


def test_the_ideal_balance_is_that_of_a_small_pool_which_is_compared_whole() -> None:
    """`make scale-fleet` measures a thousand workers and more, of which 16 are drawn."""
    ideal, least, drawn = (
        scale_balance.measure(name, 64, busy=0.95, seconds=6.0, seed=1)
        for name in (scale_balance.IDEAL, "least_load", "random")
    )
    same = [key for key in ideal if key not in ("policy", "choice_us")]
    assert [ideal[key] for key in same] == [least[key] for key in same]
    assert drawn["wait_mean_ms"] > 2 * ideal["wait_mean_ms"] and ideal["requests"] > 500


def test_workers_are_asked_at_their_own_moments_of_the_interval() -> None:
    watches = [_Watch(worker, begin_s=0.0) for worker in table_of(100).workers()]
    moments = sorted(watch.next_wait_s(10.0) for watch in watches)
    assert moments[0] > 0.0 and moments[-1] <= 10.0
    assert max(other - one for one, other in pairwise([0.0, *moments])) < 2 * 10.0 / 100
    assert [watch.next_wait_s(10.0) for watch in watches] == [10.0] * 100


def test_first_checks_of_many_workers_do_not_come_at_once() -> None:
    """Each at least half a millisecond after the one before, in order."""
    asked_s: dict[str, float] = {}  # by worker, the first time

    class Session:
        def get(self, url: str, **_: Any) -> Any:
            asked_s.setdefault(urlsplit(url).netloc, loop_time_s())
            raise aiohttp.ServerDisconnectedError

    async def begin() -> float:
        table, session = table_of(200), cast(Any, Session())
        gate = open_gate(api_key=None, api_key_file=None, admin_api_key=None, admin_api_key_file=None)
        config = RouterConfig(pd_disaggregation=True)
        monitor = HealthMonitor(config=config, table=table, session=session, credentials=Credentials(api=gate.api))
        begun_s = loop_time_s()
        for worker in table.workers():
            monitor.watch(worker)
        await monitor.first_round()
        await monitor.close()
        return begun_s

    begun_s = asyncio.run(begin())
    assert len(asked_s) == 200
    assert all(at_s - begun_s > 0.9 * i * BETWEEN_S for i, at_s in enumerate(asked_s.values()))


async def test_a_check_that_fails_unforeseen_ends_neither_the_first_round_nor_later_checks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    checks, third = 0, asyncio.Event()

    class Session:
        def get(self, url: str, **_: Any) -> Any:
            nonlocal checks
            checks += 1
            if checks == 3:
                third.set()
            raise KeyError("a defect")

    table, session = table_of(1), cast(Any, Session())
    gate = open_gate(api_key=None, api_key_file=None, admin_api_key=None, admin_api_key_file=None)
    config = RouterConfig(pd_disaggregation=True, health_check_interval_s=0.001)
    monitor = HealthMonitor(config=config, table=table, session=session, credentials=Credentials(api=gate.api))
    (worker,) = table.workers()
    monitor.watch(worker)
    async with asyncio.timeout(60):
        await monitor.first_round()
        await third.wait()
    await monitor.close()
    assert worker.checks.error == "the router cannot check it: KeyError: 'a defect'"
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]  # not at each check


def test_a_process_may_open_as_many_files_as_the_system_lets_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        assert allow_many_files() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_fleet_that_dies_comes_back_and_drains_leaves_nothing_behind(seed: int) -> None:
    """`make scale-fleet` plays ten thousand workers."""
    found = scale_fleet.measure(120, seconds=12.0, rate=60.0, seed=seed)
    assert found["counts"]["answered"] > 300 and found["fullest"] >= 1.0
    assert all(found["counts"][what] for what in ("die", "die for good", "drain", "move", "retried"))


async def test_a_scrape_says_all_and_lets_other_tasks_run_meanwhile() -> None:
    metrics, others = RouterMetrics(table_of(50)), 0
    scrape = asyncio.create_task(metrics.scrape())
    while not scrape.done():
        await asyncio.sleep(0)
        others += 1
    assert await scrape == generate_latest(metrics._registry) and others > 10


@pytest.mark.parametrize("count", [0, 1, SLICE, 4 * SLICE + 1])
async def test_other_tasks_run_while_many_workers_are_listed(count: int) -> None:
    table, turns = table_of(count), 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    for worker in table.workers()[::2]:
        table.loads.on_report(worker, LoadReport(running_reqs=worker.worker_id, stages={"running": 1}))
    task = asyncio.create_task(others())
    listed: list[dict[str, Any]] = json.loads(msgspec.json.encode(await describe_all(table)))
    task.cancel()
    assert listed == json.loads(msgspec.json.encode([describe(worker, {}) for worker in table.workers()]))
    assert [worker["report"] and worker["report"]["running_reqs"] for worker in listed[:2]] == [0, None][:count]
    assert turns >= count // SLICE
