"""What is said of the loop while it computes: the turn clock with literals, the loop that tells it, the thread that reads it, its stamps."""

from pathlib import Path
from typing import Any

import pytest

from engine.core.plan import Plan, PlanItem
from engine.ipc import IpcPaths, PullSocket, PushSocket
from engine.loop.heartbeat import HeartbeatResponder, IterationClock
from engine.messages import GenerateRequest, GetStep, StepInfo, StepReply, ToFrontend
from engine.sampling_params import SamplingParams
from engine.stamps import Stamp, Stamped, Stamps, stamping
from tests.core.engine_in_a_test import plan_item
from tests.frontend.conftest import wait_for
from tests.loop.loop_in_a_test import LoopInATest


def test_a_turn_clock_says_what_the_loop_does_and_since_when() -> None:
    turns = IterationClock(limit_s=5.0, now_s=1.0)
    assert turns.answer("", 4.0) == StepReply("", busy_s=3.0, loading=True)
    assert turns.stalled_s(1e6) is None  # a load may last
    turns.loaded()
    assert turns.answer("", 5.0) == StepReply("", busy_s=None)
    turns.turning(10.0)
    assert turns.answer("", 11.0) == StepReply("", busy_s=1.0)
    turns.computing(Plan(seq=3, extend=True, items=[plan_item(extend=True), plan_item(extend=False)]))
    step = StepInfo(seq=3, kind="mixed", num_reqs=2, num_tokens=2)
    assert turns.answer("", 12.0) == StepReply("", busy_s=2.0, step=step)
    assert turns.answer("", 16.0) == StepReply("", busy_s=6.0, step=step, stalled=True)
    turns.resting()
    assert turns.answer("", 30.0) == StepReply("", busy_s=None)
    turns.turning(31.0)
    assert turns.stalled_s(36.0) is None and turns.stalled_s(37.0) == 6.0
    turns.turning(37.0)
    assert turns.stalled_s(37.0) is None
    turns.end()
    assert turns.answer("", 32.0) is None and turns.stalled_s(1e6) is None


@pytest.mark.parametrize(
    ("items", "kind"), [([plan_item(extend=True)], "prefill"), ([plan_item(extend=False)], "decode"), ([], "copy")]
)
def test_a_step_has_a_kind(items: list[PlanItem], kind: str) -> None:
    turns = IterationClock(limit_s=0.0)
    turns.loaded()
    turns.turning(20.0)
    turns.computing(Plan(seq=4, extend=kind == "prefill", items=items))
    step = StepInfo(seq=4, kind=kind, num_reqs=len(items), num_tokens=len(items))
    assert turns.answer("", 20.0) == StepReply("", busy_s=0.0, step=step)
    assert turns.stalled_s(1e9) is None  # without a limit


def test_the_loop_tells_its_step_and_its_end_by_an_error() -> None:
    rig, seen = LoopInATest(), []

    def compute(plan: Plan) -> Any:
        rig.now_s += 30.0
        seen.append(rig.turn_clock.answer("", rig.now_s))
        raise RuntimeError("the kernel failed")

    rig.turn_clock.loaded()
    rig.engine.model.run = compute  # type: ignore[method-assign]
    rig.ports.inbox.append(GenerateRequest(rid="a", input_ids=[1, 2, 3], sampling=SamplingParams(max_new_tokens=1)))
    with pytest.raises(RuntimeError, match="the kernel failed"):
        rig.loop.run()
    assert seen == [StepReply("", busy_s=30.0, step=StepInfo(seq=1, kind="prefill", num_reqs=1, num_tokens=3))]
    assert rig.turn_clock.answer("", rig.now_s) is None


def test_the_heartbeat_answers_by_itself_until_the_loop_has_ended(tmp_path: Path) -> None:
    """By real sockets; no loop runs here, so nothing else could answer."""
    ipc = IpcPaths(str(tmp_path))
    pull: PullSocket[Any] = PullSocket(ipc.to_frontend, ToFrontend)
    ask, turns = PushSocket(ipc.to_heartbeat), IterationClock(limit_s=0.0)
    now_s, stamps = [7.0], Stamps(str(tmp_path))
    assert stamps.read() == []
    heartbeat = HeartbeatResponder(ipc, turns, name="decode scheduler", clock=lambda: now_s[0])
    heartbeat.start()
    try:
        turns.loaded()
        turns.turning(5.0)
        turns.computing(Plan(seq=1, extend=False, items=[plan_item(extend=False)]))
        ask.send(GetStep("a"))
        step = StepInfo(seq=1, kind="decode", num_reqs=1, num_tokens=1)
        assert pull.recv(10.0) == [StepReply(call_id="a", busy_s=2.0, step=step)]
        assert stamps.read() == [Stamped("decode scheduler", at_s=7.0, busy_since_s=5.0, num_steps=1)]
        turns.resting()
        now_s[0] = 8.0
        wait_for(lambda: stamps.read() == [Stamped("decode scheduler", at_s=8.0, busy_since_s=None, num_steps=1)])
        assert stamps.frozen(8.5, after_s=0.5) is None and stamps.frozen(8.6, after_s=0.5) == stamps.read()[0]
        turns.end()
        now_s[0] = 9.0
        ask.send(GetStep("b"))
    finally:
        heartbeat.close()
        assert pull.recv(0.1) == []
        assert stamps.read()[0].at_s == 8.0
        for socket in (pull, ask):
            socket.close()


def test_the_oldest_stamp_of_a_worker_s_processes_counts(tmp_path: Path) -> None:
    processes = {name: Stamp(str(tmp_path), name) for name in ("scheduler", "rank 1", "frontend 1")}
    for at_s, stamp in enumerate(processes.values(), start=10):
        stamp.write(float(at_s))
    stamps = Stamps(str(tmp_path))
    assert stamps.frozen(12.5, after_s=3.0) is None
    found = stamps.frozen(12.5, after_s=1.0)
    assert found is not None and found.name == "scheduler"
    processes["scheduler"].write(13.0)
    found = stamps.frozen(13.5, after_s=1.0)
    assert found is not None and found.name == "rank 1"


def test_a_thread_stamps_until_its_block_ends(tmp_path: Path) -> None:
    with stamping(str(tmp_path), "rank 1"):
        stamps = Stamps(str(tmp_path))
        first = stamps.read()[0].at_s
        wait_for(lambda: stamps.read()[0].at_s > first)
