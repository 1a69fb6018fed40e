"""A loop whose steps are watched: it rests while they run, and its watchdog counts the wait. (In time: tests/simulation/test_stages.py.)"""

from engine.assembly.worker import Clock, VirtualPorts, WorkerWire, assemble_worker, computing
from engine.core.plan import Plan, StepResult
from engine.loop.heartbeat import IterationClock
from engine.loop.pipeline import Pipeline, StepStrategy
from engine.loop.role import UnifiedRole
from engine.loop.services import LoopServices, LoopSettings
from engine.messages import GenerateRequest
from engine.sampling_params import SamplingParams
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import HashModel, expected_tokens
from tests.grammar.fixed import Fixed
from tests.loop.test_control import FakeProfiler, FakeWeights
from tests.loop.test_pipeline import Launched, Recorder


class Watched(Recorder):
    """Steps end when the test says so."""

    def __init__(self, model: HashModel) -> None:
        super().__init__(model)
        self.num_ended = 0

    def ended(self, launched: Launched) -> bool:
        return launched.plan.seq <= self.num_ended

    def collect(self, launched: Launched) -> StepResult:
        assert self.ended(launched), "the loop waits for a step"
        return super().collect(launched)


class Rig(EngineInATest):
    def __init__(self, depth: int, **limits: object) -> None:
        super().__init__(**limits)  # type: ignore[arg-type]
        self.executor = Watched(self.model)
        self.pipeline = Pipeline(
            lambda effects: effects.outputs,
            strategy=StepStrategy(self.scheduler),
            executor=self.executor,
            depth=depth,
            ended=self.executor.ended,
        )

    def move(self) -> Plan | None:
        """One turn; the plan that it made."""
        plan = self.pipeline.next_plan(0.0, paused=False)
        self.say(self.pipeline.advance(plan))
        self.scheduler.check()
        return plan

    def end(self, seq: int) -> None:
        self.executor.num_ended = seq
        self.move()

    @property
    def calls(self) -> str:
        return ", ".join(f"{what} {seq}" for what, seq in self.executor.calls)


def test_depth_bounds_the_steps_in_flight_and_a_turn_waits_for_none() -> None:
    rig = Rig(depth=2, chunk=8, radix=False)
    rig.add("r", list(range(40)), max_new_tokens=1)
    assert [rig.move() is not None for _ in range(4)] == [True, True, False, False]
    assert rig.calls == "launch 1, launch 2" and not rig.pipeline.worked
    rig.end(1)
    assert rig.pipeline.worked and rig.move() is not None
    assert rig.calls == "launch 1, launch 2, collect 1, launch 3"


def test_a_step_whose_masks_follow_from_one_in_flight_is_sampled_when_that_has_ended() -> None:
    rig = Rig(depth=2)
    grammar = rig.add("r", [1, 2, 3], max_new_tokens=3).grammar = Fixed(9)
    rig.move(), rig.move(), rig.move()
    assert rig.calls == "launch 1, forward 2" and grammar.masks == 1
    rig.end(1)
    assert rig.calls == "launch 1, forward 2, collect 1, sample 2"
    rig.end(2)
    rig.end(3)
    rig.end(3)
    assert rig.tokens["r"] == expected_tokens([1, 2, 3], 3)


def test_the_watchdog_counts_the_wait_for_a_step_and_no_rest() -> None:
    """Else a rank that hangs would never be noticed: the loop of its leader turns."""
    engine = EngineInATest(pp_size=2)
    executor, turns = Watched(engine.model), IterationClock(limit_s=3.0)

    class Ports(VirtualPorts):
        now_s = 0.0
        stalls: list[float | None] = []

        def wait(self, timeout_s: float) -> None:
            self.now_s += timeout_s
            self.stalls.append(turns.stalled_s(self.now_s))
            executor.num_ended = int(len(self.stalls) >= 5)
            loop.stopped = len(self.stalls) == 12

    ports = Ports(lambda message: None)
    ports.deliver(GenerateRequest("r", [1, 2, 3], SamplingParams(max_new_tokens=1)))
    services = LoopServices(weights=FakeWeights(), profiler=FakeProfiler())
    loop = assemble_worker(
        LoopSettings(eos_ids=frozenset()),
        WorkerWire(ports=ports, role=UnifiedRole(engine.scheduler)),
        Clock(now_s=lambda: ports.now_s, turns=turns),
        computing(engine.scheduler, executor, services, depth=2, ended=executor.ended),
    )
    loop.run()
    assert ports.stalls == [None, None, None, 4.0, 5.0, *[None] * 7]
