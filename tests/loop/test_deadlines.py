"""Requests whose time is over end where they are, and their memory is back: the real loop with the hash model, no clock."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.assembly.worker import Clock, VirtualPorts, WorkerWire, assemble_worker, computing
from engine.loop.heartbeat import IterationClock
from engine.loop.listeners import SOON_S, SPARE, Deadlines, too_late
from engine.loop.loop import IDLE_WAIT_S, OUTSIDE_WAIT_S
from engine.loop.role import UnifiedRole
from engine.loop.services import LoopServices, LoopSettings
from engine.messages import (
    ContinueGeneration,
    Drain,
    FinishReason,
    GenerateBatch,
    GenerateRequest,
    MoveOut,
    PauseGeneration,
    TokenBatch,
    TokenOutput,
)
from engine.sampling_params import SamplingParams
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens
from tests.loop.test_control import FakeProfiler, FakeWeights
from tests.loop.test_pipeline import Recorder


class NotedRole(UnifiedRole):
    """A unified role that notes what it hears about peers, which it does not have."""

    closed: str | None = None
    waits: bool = False
    ended: tuple[str, ...] = ()
    moved: tuple[tuple[str, int], ...] = ()

    def close_to_peers(self, why: str | None) -> None:
        self.closed = why

    def end_peers_work(self, why: str) -> None:
        self.ended += (why,)

    def move_out(self, rid: str, room: int, now_s: float) -> list[TokenOutput]:
        self.moved += ((rid, room),)
        return []

    def waits_for_outside(self) -> bool:
        return self.waits

    def queues(self) -> dict[str, int]:
        return {}

    def counters(self) -> dict[str, float]:
        return {}

    def check(self) -> None:
        """It has no state."""


class Rig:
    """One request may run at a time. `tell` and `turn` are all there is; time is `now_s`."""

    def __init__(self, depth: int = 1, **engine: Any) -> None:
        self.engine = EngineInATest(max_running=1, **engine)
        self.ports = VirtualPorts(self._on_message)
        self.now_s = 100.0
        self.role = NotedRole(self.engine.scheduler)
        self.turn_clock = IterationClock(limit_s=300.0)
        services = LoopServices(weights=FakeWeights(), profiler=FakeProfiler())
        self.loop = assemble_worker(
            LoopSettings(eos_ids=frozenset()),
            WorkerWire(ports=self.ports, role=self.role),
            Clock(now_s=lambda: self.now_s, turns=self.turn_clock),
            computing(self.engine.scheduler, Recorder(self.engine.model), services, depth=depth),
        )

    def _on_message(self, message: Any) -> None:
        if isinstance(message, TokenBatch):
            self.engine.say(message.outputs)

    def tell(self, *messages: Any) -> None:
        self.ports.inbox += messages
        self.loop.turn()

    def turns(self, n: int) -> None:
        for _ in range(n):
            self.loop.turn()

    def rest(self) -> float:
        self.loop._rest()
        return self.ports.wait_s

    def assert_ended(self, rid: str, timeout_s: float) -> None:
        assert self.engine.finish[rid] == too_late(timeout_s) and self.engine.finish[rid].status == 504

    def assert_all_back(self) -> None:
        self.engine.scheduler.check()
        assert self.engine.scheduler.memory.allocator.counts()["held"] == 0 and not self.engine.scheduler.stages.live
        assert len(self.loop._deadlines) == 0


def ask(rid: str, timeout_s: float | None, new: int = 40) -> GenerateRequest:
    return GenerateRequest(rid, [1, 2, 3], SamplingParams(max_new_tokens=new), timeout_s=timeout_s)


@pytest.mark.parametrize("depth", [1, 2])
def test_running_and_waiting_requests_end_at_their_deadline(depth: int) -> None:
    rig = Rig(depth)
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
    rig = Rig()
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
    rig = Rig()
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
    rig = Rig()
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
def test_who_is_paused_or_drains_takes_no_work_of_peers(tell: Callable[[Rig], None], why: str) -> None:
    rig = Rig()
    rig.loop.turn()
    assert rig.role.closed is None
    tell(rig)
    assert rig.role.closed == why
    rig.tell(ContinueGeneration("c"))
    rig.loop.turn()
    assert rig.role.closed == (why if "draining" in why else None)


def test_who_drains_lets_requests_go() -> None:
    rig = Rig()
    rig.tell(Drain())
    rig.tell(MoveOut("r", 7))
    assert rig.role.moved == (("r", 7),)


def test_a_pause_that_aborts_ends_what_peers_asked_for() -> None:
    rig = Rig()
    rig.tell(PauseGeneration("p", "in_place"))
    assert rig.role.ended == ()
    rig.tell(ContinueGeneration("c"))
    rig.tell(PauseGeneration("q", "abort"))
    assert len(rig.role.ended) == 1
