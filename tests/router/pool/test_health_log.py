"""What the log says of workers: each change once."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from router.pool.reports import HealthReport, parse_health
from tests.router.behaviours import hang
from tests.router.dummies import CHAT, STREAM, Cluster, cluster, until


@pytest.fixture(autouse=True)
def all_lines(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO):
        yield


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if text in record.getMessage()]


async def checks(c: Cluster, count: int = 6) -> None:
    """Wait for so many more checks of each worker."""
    rounds = {w.url: 0.0 for w in c.router.table.workers()}
    for _ in range(count):
        for worker in c.router.table.workers():
            watch = c.router.monitor._watches[worker.worker_id]
            rounds[worker.url] = watch.checked_s
        await until(
            lambda: all(
                c.router.monitor._watches[w.worker_id].checked_s > rounds[w.url] for w in c.router.table.workers()
            )
        )


async def test_a_worker_that_was_never_reached_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster() as c:
        url = c.decodes[0].url
        assert lines(caplog, url) == [("INFO", f"decode worker {url} is up")]
        await c.remove(c.decodes[0])
        await c.decodes[0].stop()
        caplog.clear()
        assert (await c.post("/workers", {"url": url, "role": "decode"}))[0] == 201
        await until(lambda: lines(caplog, url))
        await checks(c)
        assert lines(caplog, url) == [("WARNING", f"decode worker {url} cannot be reached: Connection refused")]
        await c.decodes[0].start()
        await until(lambda: c.state(c.decodes[0]).answers)
        assert lines(caplog, url)[1:] == [("INFO", f"decode worker {url} is up")]


async def test_a_worker_that_never_answers_is_named_with_the_time_it_had(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(health_check_timeout_s=0.05) as c:
        await c.remove(c.decodes[0])
        c.decodes[0].frozen, url = True, c.decodes[0].url
        caplog.clear()
        assert (await c.post("/workers", {"url": url, "role": "decode"}))[0] == 201
        await until(lambda: lines(caplog, "cannot be reached: /health: no answer in 0.05 s"))
        await checks(c, 2)
        assert len(lines(caplog, url)) == 1


async def test_a_worker_that_loads_is_reached_and_its_reason_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster() as c:
        await c.remove(c.decodes[0])
        c.decodes[0].healthy = False
        c.decodes[0].health_says = {"error": {"message": "the model is still loading"}}
        caplog.clear()
        assert (await c.post("/workers", {"url": c.decodes[0].url, "role": "decode"}))[0] == 201
        await checks(c)
        assert not lines(caplog, c.decodes[0].url)
        (shown,) = [w for w in (await c.get("/workers"))[1]["workers"] if w["role"] == "decode"]
        assert shown["last_error"] == "/health answers 503: the model is still loading"


async def test_a_worker_that_dies_with_requests_has_one_line_and_each_request_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(retry_max=0, dead_worker_timeout_s=0.2) as c:
        worker = c.decodes[0]
        worker.behave = hang
        running = [await c.begin(CHAT, worker) for _ in range(3)]
        caplog.clear()
        await worker.stop()
        assert [(await one)[0] for one in running] == [502] * 3
        await until(lambda: not c.state(worker).answers)
        await checks(c)
        warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        down = [text for text in warned if "ends with an error" not in text]
        assert down == [f"decode worker {worker.url} is down: Connection refused"] and len(warned) == 4
        assert all(worker.url in text for text in warned)


async def test_a_refused_request_is_the_worker_s_line(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(decode=2, health_check_interval_s=3600.0, retry_backoff_s=0.0) as c:
        for worker in c.decodes:
            c.router.table.retire(worker.url) if worker is c.decodes[1] else await worker.stop()
        c.router.table.find(c.decodes[1].url).leaving = False
        caplog.clear()
        for _ in range(4):
            assert (await c.post("/v1/chat/completions", CHAT))[0] == 200
        (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert line.startswith(f"decode worker {c.decodes[0].url} is down: ") and "Connect" in line


async def test_a_pause_is_shown_everywhere_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster() as c:
        worker = c.decodes[0]
        worker.incarnation = "one"
        worker.health_says = {"paused": "retract"}
        assert (await c.post("/continue_generation", {}))[0] in (200, 404)  # looks at every worker
        await until(lambda: c.state(worker).process.paused)
        status, health = await c.get("/health")
        assert (status, health["status"], health["paused"]) == (200, "ready", [worker.url])
        shown = {w["url"]: w["paused"] for w in (await c.get("/workers"))[1]["workers"]}
        assert shown == {c.prefills[0].url: None, worker.url: "retract"}
        assert [w["health"] for w in (await c.get("/dashboard/state"))[1]["workers"]] == ["up", "paused"]
        await checks(c)
        assert [level for level, _ in lines(caplog, "is paused (retract)")] == ["WARNING"]
        worker.health_says = {}
        c.router.monitor.refresh()
        await until(lambda: not c.state(worker).process.paused)
        assert "paused" not in (await c.get("/health"))[1]
        assert [level for level, _ in lines(caplog, "no longer paused")] == ["INFO"]


async def test_a_block_of_the_router_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster() as c:
        await c.router.live.block()
        waiting = asyncio.create_task(c.post("/v1/chat/completions", STREAM))
        await until(lambda: c.router.live.num_blocked)
        status, health = await c.get("/health")
        assert (status, health["blocked"], health["num_blocked_reqs"]) == (200, True, 1)
        assert (await c.get("/dashboard/state"))[1]["router"]["blocked"]
        c.router.live.unblock()
        c.router.live.unblock()
        assert (await waiting)[0] == 200
        assert [level for level, _ in lines(caplog, "blocked")] == ["WARNING", "INFO"]
        assert "blocked" not in (await c.get("/health"))[1]


@pytest.mark.parametrize(
    ("body", "report"),
    [
        (b'{"incarnation": "a", "busy_s": 2, "paused": "abort"}', HealthReport("a", 2.0, "abort")),
        (b'{"paused": true, "busy_s": -1, "incarnation": 7}', HealthReport()),
        (b"OK", HealthReport()),
    ],
)
def test_reports_are_read_with_doubt(body: bytes, report: HealthReport) -> None:
    assert parse_health(body) == report
