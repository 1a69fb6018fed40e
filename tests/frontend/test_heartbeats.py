"""Heartbeats of a worker as a router reads them: a line while every process of the worker runs, none while one does not."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.frontend.apis.admin.health import HeartbeatLines
from engine.frontend.app import level_of
from engine.stamps import Stamped
from service.http.heartbeats import ASK, IDLE, PATH, TYPE
from tests.frontend.conftest import Worker, start_worker, wait_for


def test_a_line_comes_when_every_process_has_stamped_since_the_last() -> None:
    lines = HeartbeatLines()
    for scheduler_s, frontend_s, now_s, line in (
        (1.0, 1.1, 1.2, IDLE), (1.0, 1.1, 1.4, b""), (1.25, 1.1, 1.5, b""), (1.25, 1.3, 1.5, IDLE), (1.5, 1.3, 1.6, b""),
    ):  # fmt: skip
        stamps = [Stamped("s", scheduler_s, None, 0), Stamped("f", frontend_s, None, 0)]
        assert lines.next(stamps, now_s=now_s, num_live=0, fine=True) == line


def test_a_line_says_what_runs_and_for_how_long() -> None:
    lines = HeartbeatLines()
    told = [
        lines.next([Stamped("s", now_s, since_s, steps)], now_s=now_s, num_live=live, fine=fine)
        for now_s, since_s, steps, live, fine in (
            (1.0, None, 7, 0, True),  # it has run before
            (2.0, None, 7, 0, True),
            (3.0, None, 8, 0, True),  # and ended
            (4.0, None, 8, 1, True),  # waits for its KV
            (5.0, 4.9, 9, 1, True),
            (95.0, 4.9, 9, 1, True),  # long, not frozen
            (96.0, 4.9, 9, 1, False),
        )
    ]
    assert told == [b"live\n", IDLE, b"live\n", b"live\n", b"live\n", b"live 90.1\n", ASK]


@contextmanager
def listening(worker: Worker) -> Iterator[Iterator[str]]:
    with worker.http.stream("GET", PATH) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith(TYPE)
        yield response.iter_lines()


def test_a_worker_says_that_it_rests_runs_and_drains(tmp_path: Path) -> None:
    with start_worker(tmp_path, drain_s=60.0) as w, listening(w) as lines:
        assert next(lines) == "every 0.25" and "idle" in (next(lines), next(lines))
        with w.stream("SLOW"):
            assert next(line for line in lines if line != "idle") == "live"
            w.process.send_signal(15)
            assert next(line for line in lines if line != "live") == "ask"
            w.process.send_signal(15)  # at once
        assert list(lines)[-1:] in ([], ["ask"])  # the stream ends with the session


def test_a_worker_names_the_process_that_is_frozen_and_its_lines_go_on_after_it(tmp_path: Path) -> None:
    with start_worker(tmp_path) as w, listening(w) as lines:
        assert next(lines) == "every 0.25" and next(lines) == "idle"
        w.scheduler.silent = True
        wait_for(lambda: "the scheduler 0 process has not run for" in w.http.get("/health").text)
        w.scheduler.silent = False
        wait_for(lambda: w.http.get("/health").status_code == 200)
        assert [next(lines) for _ in range(4)] == ["idle"] * 4


@pytest.mark.parametrize("every", ["0", "-1", "soon", "nan", "61"])
def test_a_wrong_interval_is_named(worker: Worker, every: str) -> None:
    answer = worker.http.get(PATH, params={"every": every})
    assert answer.status_code == 400 and "every: must be seconds" in answer.text and every in answer.text


def test_a_paused_worker_says_so_until_it_goes_on(tmp_path: Path) -> None:
    """Its status stays 200: it lives, and a probe must not restart it."""
    with start_worker(tmp_path) as w, listening(w) as lines:
        assert next(lines) == "every 0.25" and next(lines) == "idle"
        assert w.post("/pause_generation", {"mode": "retract"}).status_code == 200
        health = w.http.get("/health")
        assert (health.status_code, health.json()["status"], health.json()["paused"]) == (200, "ok", "retract")
        assert w.http.get("/server_info").json()["paused"] == "retract"
        assert next(line for line in lines if line != "idle") == "ask", "routers look at /health"
        assert w.post("/continue_generation", {}).status_code == 200
        assert "paused" not in w.http.get("/health").json() and w.http.get("/server_info").json()["paused"] is None
        assert next(line for line in lines if line != "ask") == "idle"


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [
        ("/health", 200, logging.DEBUG),
        ("/health", 503, logging.DEBUG),
        (PATH, 499, logging.DEBUG),
        ("/metrics", 200, logging.DEBUG),
        ("/server_info", 401, logging.INFO),
        ("/health", 500, logging.INFO),
        ("/generate", 200, logging.INFO),
        ("/generate", 503, logging.INFO),
    ],
)
def test_probes_have_no_line_at_the_usual_level(path: str, status: int, level: int) -> None:
    assert level_of(path, status) == level
