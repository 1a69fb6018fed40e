"""Circuit breakers: the table, the counts, and in a real router whom they blame."""

import itertools
from typing import Any

import pytest

from router.attempts.upstream_call import CallFailed
from router.config import BreakerFlags
from router.pool.breaker import TRANSITIONS, Circuit, Event, State
from router.pool.worker import Role
from router.pool.workers import WorkerTable
from tests.router.dummies import always, answer_ok, cluster

FLAGS = BreakerFlags(
    cb_failure_threshold=3, cb_success_threshold=2, cb_timeout_duration_s=10.0, cb_window_duration_s=60.0
)


def opened(at_s: float = 0.0) -> Circuit:
    circuit = Circuit(FLAGS)
    for _ in range(3):
        circuit.record(Event.FAULT, at_s)
    assert circuit.state is State.OPEN
    return circuit


def test_every_cell_of_the_table_is_there() -> None:
    assert set(TRANSITIONS) == set(itertools.product(State, Event))


def test_faults_in_a_row_open_it_and_a_good_answer_forgets_them() -> None:
    circuit = Circuit(FLAGS)
    for event in (Event.FAULT, Event.FAULT, Event.WELL, Event.FAULT, Event.FAULT):
        circuit.record(event, 0.0)
    assert circuit.state is State.CLOSED
    circuit.record(Event.BEGUN, 0.0)  # may break yet: forgets nothing
    circuit.record(Event.FAULT, 0.0)
    assert circuit.state is State.OPEN and not circuit.takes(9.9)


def test_faults_older_than_the_window_do_not_count() -> None:
    circuit = Circuit(FLAGS)
    for now_s in (0.0, 1.0, 60.5, 61.5):
        circuit.record(Event.FAULT, now_s)
    assert circuit.state is State.CLOSED
    circuit.record(Event.FAULT, 62.0)
    assert circuit.state is State.OPEN


def test_after_the_timeout_a_few_try_it_and_their_answers_close_it() -> None:
    circuit = opened()
    assert circuit.takes(10.0) and circuit.send(10.0)
    assert circuit.takes(10.0) and circuit.send(10.0)
    assert not circuit.takes(11.0), "as many trials at a time as it takes to close it"
    circuit.end_trial()  # cancelled: says nothing
    assert circuit.takes(11.0) and circuit.send(11.0)
    circuit.record(Event.BEGUN, 12.0)
    assert circuit.state is State.HALF_OPEN
    circuit.record(Event.BEGUN, 12.0)
    assert circuit.state is State.CLOSED and circuit.takes(12.0)


def test_one_fault_of_a_trial_opens_it_for_another_timeout() -> None:
    circuit = opened()
    assert circuit.takes(10.0) and circuit.send(10.0)
    circuit.end_trial()
    circuit.record(Event.FAULT, 11.0)
    assert circuit.state is State.OPEN and not circuit.takes(20.9) and circuit.takes(21.0)


def test_another_life_starts_with_a_closed_circuit() -> None:
    circuit = opened()
    circuit.reset()
    assert circuit.takes(0.0)


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({"reason": "refused"}, True),
        ({"reason": "lost"}, True),
        ({"reason": "timeout"}, True),
        ({"reason": "down"}, False),
        ({"status": 500}, True),
        ({"status": 502}, True),
        ({"status": 502, "role": Role.DECODE}, False),
        ({"status": 503}, True),
        ({"status": 503, "headers": {"retry-after": "1"}}, False),
        ({"status": 503, "body": b'{"status": "draining"}'}, False),
        ({"status": 504}, False),
        *(({"status": status}, False) for status in (400, 404, 408, 409, 422, 429)),
    ],
)
def test_only_what_a_worker_itself_did_is_its_fault(said: dict[str, Any], fault: bool) -> None:
    worker = WorkerTable().add("http://h:1", role=said.pop("role", Role.PREFILL))
    assert CallFailed(worker, **{"reason": "status", **said}).is_fault is fault


def states(c: Any) -> list[str]:
    return [worker.circuit.state.value for worker in c.router.table.workers()]


async def test_a_decode_failure_opens_its_own_circuit_and_never_that_of_the_prefill() -> None:
    async with cluster(prefill=1, decode=2, policy="round_robin", cb_failure_threshold=3) as c:
        bad = c.decodes[0]
        bad.behave = always(500, {"error": {"message": "broken"}})
        for _ in range(12):
            assert (await c.post("/generate", {"text": "a"}))[0] == 200
        assert states(c) == ["closed", "open", "closed"]
        assert len(bad.seen) == 3, "then it was left out, although it was its turn"
        assert (await c.get("/workers"))[1]["workers"][1]["circuit"] == "open"


async def test_a_worker_that_is_well_again_is_tried_and_taken_back() -> None:
    flags: dict[str, Any] = {"cb_failure_threshold": 2, "cb_success_threshold": 2, "cb_timeout_duration_s": 0}
    async with cluster(prefill=1, decode=2, policy="round_robin", **flags) as c:
        c.decodes[0].behave = always(500, {"error": {"message": "broken"}})
        while states(c)[1] != "open":
            assert (await c.post("/generate", {"text": "a"}))[0] == 200
        c.decodes[0].behave = answer_ok
        while states(c)[1] != "closed":
            assert (await c.post("/generate", {"text": "a"}))[0] == 200


@pytest.mark.parametrize("flags", [{}, {"disable_circuit_breaker": True}])
async def test_where_every_circuit_is_open_the_worker_is_tried_all_the_same(flags: dict[str, Any]) -> None:
    async with cluster(cb_failure_threshold=1, retry_max=0, **flags) as c:
        c.prefills[0].behave = always(500, {"error": {"message": "broken"}})
        assert (await c.post("/generate", {"text": "a"}))[0] == 500
        assert states(c) == ["closed" if flags else "open", "closed"]
        c.prefills[0].behave = answer_ok
        assert (await c.post("/generate", {"text": "a"}))[0] == 200
