"""Which workers a request tries next, which calls wait in vain, which result of two counts: pure, by literals."""

import asyncio
import math
from dataclasses import dataclass
from functools import partial

import pytest

from router.attempts.pair_attempt import PairAttempt
from router.attempts.upstream_call import CallFailed, FailedWorkers
from router.pool.active_calls import give_up_vain_calls, waits_at_silent
from router.pool.breaker import Check, Health
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable
from tests.router.attempts import Launched, make_request, turns
from tests.router.dummies import table_of


def pair_of(table: WorkerTable, i: int, *, server: int | None = None) -> tuple[Worker, Worker]:
    """A prefill and a decode worker, up; `server`: the port of prefill's bootstrap server."""
    prefill = table.add(f"http://p{i}:1", role=Role.PREFILL, bootstrap_port=8000 + i)
    decode = table.add(f"http://d{i}:1", role=Role.DECODE)
    if server is not None:
        prefill.bootstrap.host, prefill.bootstrap.port = "b", server
    for worker in (prefill, decode):
        table.on_check(worker, Check.OK, now_s=0.0)
    return prefill, decode


def unjoined(decode: Worker) -> CallFailed:
    return CallFailed(decode, reason="status", status=502)


def names(workers: object) -> list[str]:
    return [w.url[7:-2] for w in workers]  # type: ignore[attr-defined]


def failed_by(failure: CallFailed, workers: tuple[Worker, ...]) -> FailedWorkers:
    tried = FailedWorkers(failure)
    tried.note(failure, workers)
    return tried


def test_only_the_worker_that_failed_is_avoided_and_only_while_there_is_another() -> None:
    table = WorkerTable()
    first, second = pair_of(table, 0), pair_of(table, 1)
    tried = failed_by(CallFailed(first[1], reason="lost"), first)
    assert names(tried.best_of(table.pool(Role.PREFILL, ""))) == ["p0", "p1"]
    assert names(tried.best_of(table.pool(Role.DECODE, ""))) == ["d1"]
    tried.note(CallFailed(second[1], reason="lost"), second)
    assert names(tried.best_of(table.pool(Role.DECODE, ""))) == ["d0", "d1"]


def test_a_pair_that_could_not_be_joined_is_avoided_as_a_whole() -> None:
    table = WorkerTable()
    first, _ = pair_of(table, 0), pair_of(table, 1)
    tried = failed_by(unjoined(first[1]), first)
    assert names(tried.best_of(table.pool(Role.PREFILL, ""))) == ["p1"]
    assert names(tried.best_of(table.pool(Role.DECODE, ""))) == ["d1"]
    assert not CallFailed(first[0], reason="status", status=502).unjoined  # prefill's 502 is its own


def test_another_bootstrap_server_comes_first_and_one_gets_two_tries() -> None:
    table = WorkerTable()
    same = [pair_of(table, i, server=1) for i in range(3)]
    other = pair_of(table, 3, server=2)
    tried = failed_by(unjoined(same[0][1]), same[0])
    assert names(tried.best_of(table.pool(Role.PREFILL, ""))) == ["p3"]
    tried.note(CallFailed(other[0], reason="lost"), other)
    assert names(tried.best_of(table.pool(Role.PREFILL, ""))) == ["p1", "p2"]
    tried.note(unjoined(same[1][1]), same[1])
    assert names(tried.best_of(table.pool(Role.PREFILL, ""))) == ["p3"]
    tried.note(unjoined(other[1]), other)
    tried.note(unjoined(other[1]), other)
    assert not tried.best_of(table.pool(Role.PREFILL, ""))


@pytest.fixture
def worker() -> Worker:
    (worker,) = table_of(1).workers()
    worker.checks.good_s = 10.0
    return worker


@dataclass(eq=False)
class Waiting:
    """A call that waits; `given_up` says why no longer."""

    waits_since_s: float | None
    given_up: str = ""
    last_byte_s: float = -math.inf

    def give_up(self, why: str) -> None:
        self.given_up = why


def begin(worker: Worker, *, now_s: float | None) -> Waiting:
    call = Waiting(now_s)
    worker.calls[call] = None
    return call


def test_a_call_is_given_up_when_worker_and_call_were_silent_for_all_of_the_time(worker: Worker) -> None:
    give_up = partial(give_up_vain_calls, timeout_s=30.0)
    early, late = begin(worker, now_s=5.0), begin(worker, now_s=20.0)
    worker.health = Health.DOWN  # it was well at 10 s
    assert give_up(worker, 39.9) == 0
    assert give_up(worker, 40.0) == 1 and early.given_up and not late.given_up
    assert "--dead-worker-timeout" in early.given_up
    worker.health = Health.UP
    assert give_up(worker, 100.0) == 0
    worker.health = Health.DOWN
    assert give_up(worker, 50.0) == 1 and late.given_up and not worker.calls


def test_a_call_that_does_not_read_is_never_given_up_and_0_means_never(worker: Worker) -> None:
    worker.health = Health.DOWN
    begin(worker, now_s=None)
    assert give_up_vain_calls(worker, 1e6, timeout_s=1.0) == 0
    begin(worker, now_s=0.0)
    assert give_up_vain_calls(worker, 1e6, timeout_s=0.0) == 0


def test_what_waits_for_a_silent_worker_has_waited_for_one_silence_itself_and_the_worker_is_silent_for_two(
    worker: Worker,
) -> None:
    worker.checks.heard_s = 10.0
    early, late, _ = begin(worker, now_s=5.0), begin(worker, now_s=11.5), begin(worker, now_s=None)
    waits = [waits_at_silent(worker, now_s, silence_s=1.0) for now_s in (11.9, 12.0, 12.5)]
    assert waits == [[], [early], [early, late]]
    early.last_byte_s = 12.0  # it speaks
    assert waits_at_silent(worker, 12.5, silence_s=1.0) == []


def test_calls_of_a_former_incarnation_are_given_up_at_once() -> None:
    table, give_up = table_of(1), partial(give_up_vain_calls, timeout_s=30.0)
    (worker,) = table.workers()
    for incarnation, checked_s in (("a", 1.0), ("", 1.5), ("a", 2.0)):
        table.on_incarnation(worker, incarnation, checked_s=checked_s)
    of_a, unknown = begin(worker, now_s=1.9), begin(worker, now_s=2.1)
    assert give_up(worker, 2.5) == 0
    table.on_incarnation(worker, "b", checked_s=3.0)
    of_b = begin(worker, now_s=3.1)
    assert give_up(worker, 3.2) == 1 and "another one answers" in of_a.given_up
    assert not unknown.given_up and not of_b.given_up  # between two checks: it may be b's


def test_several_processes_behind_one_url_are_no_lives_one_after_the_other() -> None:
    table = table_of(1)
    (worker,) = table.workers()
    for checked_s, incarnation in enumerate(("a", "b", "a")):
        table.on_incarnation(worker, incarnation, checked_s=float(checked_s))
    begin(worker, now_s=0.5)
    for checked_s in range(3, 40):
        table.on_incarnation(worker, "ab"[checked_s % 2], checked_s=float(checked_s))
        assert give_up_vain_calls(worker, float(checked_s), timeout_s=30.0) == 0
    assert len(worker.process.former) <= 16


async def begun(attempt: PairAttempt) -> PairAttempt:
    await attempt.launcher.until_started(make_request(), attempt)
    return attempt


@pytest.mark.parametrize("statuses", [(500, 400), (400, 500)])
async def test_of_two_failures_at_once_the_final_one_counts(statuses: tuple[int, int]) -> None:
    attempt, prefill, decode = Launched().pair()
    prefill.answer(statuses[0])
    decode.answer(statuses[1])
    with pytest.raises(CallFailed) as caught:
        await begun(attempt)
    assert caught.value.status == 400 and caught.value.body == b"x"


async def test_a_worker_that_is_gone_is_blamed_before_the_one_that_says_it_lost_its_peer() -> None:
    attempt, prefill, decode = Launched().pair()
    prefill.answer(500)
    decode.close()
    with pytest.raises(CallFailed) as caught:
        await begun(attempt)
    assert caught.value.reason == "lost"


async def test_an_answer_that_came_together_with_a_failure_is_closed() -> None:
    attempt, prefill, decode = Launched().pair()
    prefill.answer(400)
    decode.answer(200, events=True, complete=False)
    with pytest.raises(CallFailed):
        await begun(attempt)
    attempt.end()
    assert decode.closed


async def test_a_stream_begins_with_its_first_bytes_and_another_answer_with_its_last() -> None:
    for events in (True, False):
        attempt, _, decode = Launched().pair()
        answer = asyncio.create_task(begun(attempt))
        decode.answer(200, b"", events=events, complete=False)
        await turns(1)
        assert not answer.done()
        decode.answer(200, events=events, complete=False)
        await turns()
        assert answer.done() is events
        decode.answer(200, events=events)
        assert (await answer).answering.reply.take() == b"x"


async def test_a_prefill_call_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.attempts.pair_attempt.TAIL_S", 0.01)

    launched = Launched()
    attempt, prefill, decode = launched.pair()
    decode.answer(200)
    await begun(attempt)
    attempt.complete()
    attempt.end()
    async with asyncio.timeout(10):
        while launched.launcher.tails:
            await asyncio.sleep(0.001)
    assert prefill.closed
    launched.check()
