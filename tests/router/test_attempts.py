"""Whom a request tries next, and which legs wait in vain: pure, by literals."""

import math
from dataclasses import dataclass

import pytest

from router.pool.lifelines import Lifelines
from router.pool.states import Check, Health
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable
from router.requests.attempts import Attempts
from router.requests.legs import LegError


def pair_of(table: WorkerTable, i: int, *, server: int | None = None) -> tuple[Worker, Worker]:
    """A prefill and a decode worker, up; `server`: the port of prefill's bootstrap server."""
    prefill = table.add(f"http://p{i}:1", role=Role.PREFILL, bootstrap_port=8000 + i)
    decode = table.add(f"http://d{i}:1", role=Role.DECODE)
    if server is not None:
        table.on_bootstrap(prefill, host="b", port=server)
    for worker in (prefill, decode):
        table.on_check(worker, Check.OK, now_s=0.0)
    return prefill, decode


def unjoined(decode: Worker) -> LegError:
    return LegError(decode, reason="status", status=502)


def names(workers: object) -> list[str]:
    return [w.url[7:-2] for w in workers]  # type: ignore[attr-defined]


def test_only_the_leg_that_failed_is_avoided_and_only_while_there_is_another() -> None:
    table, tried = WorkerTable(), Attempts()
    first, second = pair_of(table, 0), pair_of(table, 1)
    assert names(tried.candidates(table.alive(Role.DECODE))) == ["d0", "d1"]
    tried.note(LegError(first[1], reason="lost"), first)
    assert names(tried.candidates(table.alive(Role.PREFILL))) == ["p0", "p1"]
    assert names(tried.candidates(table.alive(Role.DECODE))) == ["d1"]
    tried.note(LegError(second[1], reason="lost"), second)
    assert names(tried.candidates(table.alive(Role.DECODE))) == ["d0", "d1"]


def test_a_pair_that_could_not_be_joined_is_avoided_as_a_whole() -> None:
    table, tried = WorkerTable(), Attempts()
    first, _ = pair_of(table, 0), pair_of(table, 1)
    tried.note(unjoined(first[1]), first)
    assert names(tried.candidates(table.alive(Role.PREFILL))) == ["p1"]
    assert names(tried.candidates(table.alive(Role.DECODE))) == ["d1"]
    assert not LegError(first[0], reason="status", status=502).unjoined  # prefill's 502 is its own


def test_another_bootstrap_server_comes_first_and_one_gets_two_tries() -> None:
    table, tried = WorkerTable(), Attempts()
    same = [pair_of(table, i, server=1) for i in range(3)]
    other = pair_of(table, 3, server=2)
    tried.note(unjoined(same[0][1]), same[0])
    assert names(tried.candidates(table.alive(Role.PREFILL))) == ["p3"]
    tried.note(LegError(other[0], reason="lost"), other)
    assert names(tried.candidates(table.alive(Role.PREFILL))) == ["p1", "p2"]
    tried.note(unjoined(same[1][1]), same[1])
    assert names(tried.candidates(table.alive(Role.PREFILL))) == ["p3"]
    tried.note(unjoined(other[1]), other)
    tried.note(unjoined(other[1]), other)
    assert tried.candidates(table.alive(Role.PREFILL)) == []


@pytest.fixture
def worker() -> Worker:
    table = WorkerTable()
    worker = table.add("http://h:1", role=Role.DECODE)
    table.on_check(worker, Check.OK, now_s=10.0)
    return worker


@dataclass(eq=False)
class Line:
    """A leg that waits; `given_up` says why no longer."""

    worker: Worker
    waits_since_s: float | None
    given_up: str = ""
    heard_s: float = -math.inf

    def give_up(self, why: str) -> None:
        self.given_up = why


def begin(lines: Lifelines, worker: Worker, *, now_s: float | None) -> Line:
    line = Line(worker, now_s)
    lines.begin(line)
    return line


def test_a_leg_is_given_up_when_worker_and_leg_were_silent_for_all_of_the_time(worker: Worker) -> None:
    lines = Lifelines(timeout_s=30.0)
    early, late = begin(lines, worker, now_s=5.0), begin(lines, worker, now_s=20.0)
    worker.health = Health.DOWN  # it was well at 10 s
    assert lines.give_up(worker, 39.9) == 0
    assert lines.give_up(worker, 40.0) == 1 and early.given_up and not late.given_up
    assert "--dead-worker-timeout" in early.given_up
    worker.health = Health.UP
    assert lines.give_up(worker, 100.0) == 0
    worker.health = Health.DOWN
    assert lines.give_up(worker, 50.0) == 1 and late.given_up and len(lines) == 0


def test_a_leg_that_does_not_read_is_never_given_up_and_0_means_never(worker: Worker) -> None:
    lines, never = Lifelines(timeout_s=1.0), Lifelines(timeout_s=0.0)
    worker.health = Health.DOWN
    line = begin(lines, worker, now_s=None)
    begin(never, worker, now_s=0.0)
    assert lines.give_up(worker, 1e6) == never.give_up(worker, 1e6) == 0
    assert lines.is_waited_for(worker)
    lines.over(line)
    lines.over(line)
    assert not lines.is_waited_for(worker)


def test_legs_of_a_former_life_are_given_up_at_once() -> None:
    table, lines = WorkerTable(), Lifelines(timeout_s=30.0)
    worker = table.add("http://h:1", role=Role.DECODE)
    table.on_check(worker, Check.OK, now_s=0.0)
    for incarnation, asked_s in (("a", 1.0), ("", 1.5), ("a", 2.0)):
        table.on_incarnation(worker, incarnation, asked_s=asked_s)
    of_a, unknown = begin(lines, worker, now_s=1.9), begin(lines, worker, now_s=2.1)
    assert lines.give_up(worker, 2.5) == 0
    table.on_incarnation(worker, "b", asked_s=3.0)
    of_b = begin(lines, worker, now_s=3.1)
    assert lines.give_up(worker, 3.2) == 1 and "another one answers" in of_a.given_up
    assert not unknown.given_up and not of_b.given_up  # between two checks: it may be b's


def test_several_processes_behind_one_url_are_no_lives_one_after_the_other() -> None:
    table, lines = WorkerTable(), Lifelines(timeout_s=30.0)
    worker = table.add("http://service:1", role=Role.DECODE)
    table.on_check(worker, Check.OK, now_s=0.0)
    for asked_s, incarnation in enumerate(("a", "b", "a")):
        table.on_incarnation(worker, incarnation, asked_s=float(asked_s))
    begin(lines, worker, now_s=0.5)
    for asked_s in range(3, 40):
        table.on_incarnation(worker, "ab"[asked_s % 2], asked_s=float(asked_s))
        assert lines.give_up(worker, float(asked_s)) == 0
    assert len(worker.former_lives) <= 16
