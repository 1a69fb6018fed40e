"""Requests whose time is over, or whose step finds no memory, end where they are: the real loop with the hash model, no clock."""

import logging
from collections.abc import Callable

import pytest

from engine.loop.listeners import SOON_S, SPARE, Deadlines
from engine.loop.loop import IDLE_WAIT_S, OUTSIDE_WAIT_S
from engine.messages import (
    ContinueGeneration,
    Drain,
    FinishReason,
    GenerateBatch,
    GenerateRequest,
    MoveOut,
    PauseGeneration,
    TokenOutput,
)
from engine.sampling_params import SamplingParams
from tests.core.hash_model import NO_MEMORY, expected_tokens
from tests.loop.loop_in_a_test import LoopInATest


def ask(rid: str, timeout_s: float | None, new: int = 40) -> GenerateRequest:
    return GenerateRequest(rid, [1, 2, 3], SamplingParams(max_new_tokens=new), timeout_s=timeout_s)


@pytest.mark.parametrize("depth", [1, 2])
def test_running_and_waiting_requests_end_at_their_deadline(depth: int) -> None:
    rig = LoopInATest(depth)
    rig.tell(GenerateBatch([ask("runs", 5.0), ask("waits", 3.0), ask("patient", None)]))
    rig.turns(4)
    assert 0 < len(rig.engine.tokens["runs"]) < 40
    rig.now_s += 3.0
    rig.loop.turn()
    rig.assert_ended("waits", 3.0)
    assert "runs" not in rig.engine.finish and rig.engine.tokens["waits"] == []
    rig.now_s += 2.0
    rig.loop.turn()
    rig.assert_ended("runs", 5.0)
    got = rig.engine.tokens["runs"]
    assert got == expected_tokens([1, 2, 3], 40)[: len(got)]
    rig.turns(60)
    assert rig.engine.tokens["patient"] == expected_tokens([1, 2, 3], 40)
    rig.assert_all_back()


def test_time_goes_on_while_a_request_is_held_back() -> None:
    rig = LoopInATest()
    rig.tell(PauseGeneration("p", "in_place"))
    rig.tell(ask("held", 2.0), ask("later", 9.0, new=2))
    rig.now_s += 2.0
    assert rig.rest() == SOON_S
    rig.loop.turn()
    rig.assert_ended("held", 2.0)
    rig.tell(ContinueGeneration("c"))
    rig.turns(5)
    assert rig.engine.finish["later"].kind == "length"
    rig.assert_all_back()


def test_a_rest_ends_with_the_next_deadline() -> None:
    rig = LoopInATest()
    assert rig.rest() == IDLE_WAIT_S
    rig.tell(PauseGeneration("p", "in_place"))
    rig.tell(ask("a", 0.3), ask("b", 0.7))
    assert rig.rest() == pytest.approx(0.3)
    rig.now_s += 0.4
    rig.loop.turn()
    assert rig.rest() == pytest.approx(0.3)
    rig.now_s += 0.4
    rig.loop.turn()
    assert rig.rest() == IDLE_WAIT_S and set(rig.engine.finish) == {"a", "b"}


def test_only_a_role_that_waits_for_its_peers_is_woken_often() -> None:
    rig = LoopInATest()
    assert rig.rest() == IDLE_WAIT_S
    rig.role.waits = True
    assert rig.rest() == OUTSIDE_WAIT_S < IDLE_WAIT_S / 10


def test_ended_requests_leave_no_deadline_behind() -> None:
    deadlines = Deadlines()
    for number in range(10 * SPARE):
        rid = f"r{number % 7}"  # names come back
        deadlines.on_received(ask(rid, 1e9 - number), 0.0)
        last = TokenOutput(rid=rid, new_ids=[], finish=FinishReason(kind="stop"))
        deadlines.on_outputs([TokenOutput(rid=rid, new_ids=[1]), last], 0.0)
        assert len(deadlines._order) <= SPARE + 2
    assert len(deadlines) == 0 and list(deadlines.due(1e9)) == [] and deadlines.shorten(1.0, 0.0) == 1.0
    deadlines.on_received(ask("again", 5.0), 0.0)
    deadlines.on_received(ask("again", 8.0), 1.0)  # the first has ended unheard
    assert list(deadlines.due(5.0)) == [] and [rid for rid, _ in deadlines.due(9.0)] == ["again"]


@pytest.mark.parametrize(
    ("tell", "why"),
    [
        (lambda rig: rig.tell(PauseGeneration("p", "abort")), "generation is paused"),
        (lambda rig: rig.tell(PauseGeneration("p", "in_place")), "generation is paused"),
        (lambda rig: rig.tell(Drain()), "the worker is draining"),
    ],
)
def test_who_is_paused_or_drains_takes_no_work_of_peers(tell: Callable[[LoopInATest], None], why: str) -> None:
    rig = LoopInATest()
    rig.loop.turn()
    assert rig.role.closed is None
    tell(rig)
    assert rig.role.closed == why
    rig.tell(ContinueGeneration("c"))
    rig.loop.turn()
    assert rig.role.closed == (why if "draining" in why else None)


def test_who_drains_lets_requests_go() -> None:
    rig = LoopInATest()
    rig.tell(Drain())
    rig.tell(MoveOut("r", 7))
    assert rig.role.moved == (("r", 7),)


def test_a_pause_that_aborts_ends_what_peers_asked_for() -> None:
    rig = LoopInATest()
    rig.tell(PauseGeneration("p", "in_place"))
    assert rig.role.ended_work == ()
    rig.tell(ContinueGeneration("c"))
    rig.tell(PauseGeneration("q", "abort"))
    assert len(rig.role.ended_work) == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_of_a_step_without_memory_are_answered_and_the_next_one_runs(
    depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    rig = LoopInATest(depth)
    rig.engine.model.fails = lambda plan: plan.seq == 5
    rig.tell(GenerateBatch([ask("runs", None), ask("waits", None)]))
    rig.turns(100)
    reason = rig.engine.finish["runs"]
    assert (reason.kind, reason.status) == ("abort", 503)
    assert "no memory for a step" in reason.message and "--mem-fraction-static" in reason.message
    assert rig.engine.tokens["runs"] == expected_tokens([1, 2, 3], 40)[:4]
    assert rig.engine.tokens["waits"] == expected_tokens([1, 2, 3], 40)
    assert [r.getMessage() for r in caplog.records if NO_MEMORY in r.getMessage()] == [
        f"a step of 1 requests found no device memory, and they were aborted: {NO_MEMORY}"
    ]
    rig.assert_all_back()
