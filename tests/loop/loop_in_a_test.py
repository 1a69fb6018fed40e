"""The production loop and pipeline over an engine of a test: an executor, ports and services in one thread, whose clock is a number."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from engine.assembly.worker import Clock, VirtualPorts, WorkerWire, assemble_worker, computing
from engine.core.outputs import StepEffects
from engine.core.plan import Plan, StepResult
from engine.core.scheduler import Scheduler
from engine.loop.control import EngineControl, FixedKV, KVMemory
from engine.loop.heartbeat import IterationClock
from engine.loop.listeners import too_late
from engine.loop.loop import EngineLoop
from engine.loop.pipeline import Pipeline, StepStrategy
from engine.loop.role import EngineRole, UnifiedRole
from engine.loop.services import LoopServices, LoopSettings, Ports
from engine.loop.trainer_control import Trainers
from engine.messages import ControlReply, GenerateRequest, NewTensors, TokenBatch, TokenOutput
from engine.sampling_params import SamplingParams
from service.flags import ConfigError
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import HashModel


class FakeWeights:
    model_path, version, released, source = "old", "v1", False, "checkpoint"

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self.taken: list[object] = []
        self.discarded: list[object] = []
        self.asked: list[tuple[str, NewTensors | None]] = []

    def read(
        self, model_path: str, *, when_done: Callable[[], None], tensors: NewTensors | None = None
    ) -> "Future[Any]":
        self.asked.append((model_path, tensors))
        self.future = Future()
        return self.future

    def take(self, model: object, *, model_path: str, version: str | None) -> None:
        self.taken.append(model)
        self.released = False
        self.model_path, self.version = model_path, version or self.version

    def discard(self, model: object) -> None:
        self.discarded.append(model)

    def release(self) -> None:
        self.released = True


class FakeProfiler:
    running = False

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, asked: object) -> str:
        if self.running:
            raise ConfigError("a profile is running")
        self.running = True
        self.calls.append("start")
        return "/trace"

    def stop(self) -> str:
        if not self.running:
            raise ConfigError("no profile is running")
        self.running = False
        self.calls.append("stop")
        return "/trace"


@dataclass(eq=False)
class Launched:
    plan: Plan
    result: StepResult | None = None


class Recorder:
    """The executor's side; a deferred step runs when its sampling is launched.

    `watched`: the end of each step is watched, and comes when the test says so.
    """

    def __init__(self, model: HashModel, *, watched: bool = False) -> None:
        self._model = model
        self._watched = watched
        self.ended_steps: set[int] = set()
        self.calls: list[tuple[str, int]] = []

    @property
    def said(self) -> str:
        return ", ".join(f"{what} {seq}" for what, seq in self.calls)

    def launch(self, plan: Plan) -> Launched:
        self.calls.append(("launch", plan.seq))
        return Launched(plan, self._model.run(plan))

    def launch_forward(self, plan: Plan) -> Launched:
        self.calls.append(("forward", plan.seq))
        assert plan.masks == {}
        return Launched(plan)

    def launch_sampling(self, launched: Launched) -> None:
        self.calls.append(("sample", launched.plan.seq))
        launched.result = self._model.run(launched.plan)

    def ended(self, launched: Launched) -> bool:
        return not self._watched or launched.plan.seq in self.ended_steps

    def collect(self, launched: Launched) -> StepResult:
        self.calls.append(("collect", launched.plan.seq))
        assert self.ended(launched), "the loop waits for a step"
        assert launched.result is not None
        return launched.result


class PipelineInATest(EngineInATest):
    """Its steps go through the production pipeline, and none of the loop. `strategy` of its scheduler; `watched`: as `Recorder`."""

    def __init__(
        self,
        depth: int = 1,
        *,
        watched: bool = False,
        strategy: Callable[[Scheduler], StepStrategy] = StepStrategy,
        streams: int = 1,
        **limits: Any,
    ) -> None:
        super().__init__(**limits)
        self.executor = Recorder(self.model, watched=watched)
        self.pipeline = Pipeline(
            self.collected,
            strategy=strategy(self.scheduler),
            executor=self.executor,
            depth=depth,
            ended=self.executor.ended if watched else None,
            streams=streams,
        )

    def collected(self, effects: StepEffects) -> list[TokenOutput]:
        return effects.outputs

    def move(self, now_s: float | None = None) -> Plan | None:
        """One turn; the plan that it made."""
        self.now_s = self.now_s if now_s is None else now_s
        plan = self.pipeline.next_plan(self.now_s, paused=False)
        self.plans += [] if plan is None else [plan]
        self.say(self.pipeline.advance(plan))
        self.scheduler.check()
        return plan

    def turn(self) -> bool:
        self.move()
        return self.pipeline.worked

    def end(self, *seqs: int) -> None:
        self.executor.ended_steps |= set(seqs)
        self.say(self.pipeline.advance(None))


class NotedRole(UnifiedRole):
    """A unified role that notes what it hears about peers, which it does not have."""

    closed: str | None = None
    waits: bool = False
    ended_work: tuple[str, ...] = ()
    moved: tuple[tuple[str, int], ...] = ()

    def close_to_peers(self, why: str | None) -> None:
        self.closed = why

    def end_peers_work(self, why: str) -> None:
        self.ended_work += (why,)

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


def loop_of(
    scheduler: Scheduler,
    executor: Any,
    ports: Ports,
    clock: Clock,
    *,
    role: EngineRole | None = None,
    services: LoopServices | None = None,
    **steps: Any,
) -> EngineLoop:
    """`steps`: of `computing`."""
    services = services or services_of()
    wire = WorkerWire(ports=ports, role=role or UnifiedRole(scheduler))
    return assemble_worker(
        LoopSettings(eos_ids=frozenset()), wire, clock, computing(scheduler, executor, services, **steps)
    )


def services_of(**own: Any) -> LoopServices:
    return LoopServices(**{"weights": FakeWeights(), "profiler": FakeProfiler(), **own})


class RunningLoop(VirtualPorts):
    """A loop that runs by itself, and its ports: only its rests take time. `until`: asked after each. `steps`: of `loop_of`."""

    def __init__(
        self,
        engine: EngineInATest,
        executor: Recorder,
        *,
        until: Callable[["RunningLoop"], bool],
        limit_s: float,
        **steps: Any,
    ) -> None:
        self.now_s = 0.0
        self.stalls: list[float | None] = []  # for each rest, what the watchdog sees then
        self.engine = engine
        self._turns, self._until = IterationClock(limit_s=limit_s), until
        super().__init__(self._say)
        clock = Clock(now_s=lambda: self.now_s, turns=self._turns)
        self.loop = loop_of(engine.scheduler, executor, self, clock, ended=executor.ended, **steps)

    def run(self, requests: Mapping[str, list[int]], *, new: int) -> None:
        sampling = SamplingParams(max_new_tokens=new)
        self.inbox += [GenerateRequest(rid, ids, sampling, stream=True) for rid, ids in requests.items()]
        self.loop.run()

    def wait(self, timeout_s: float) -> None:
        self.now_s += timeout_s
        self.stalls.append(self._turns.stalled_s(self.now_s))
        assert len(self.stalls) < 200
        self.loop.stopped = self._until(self)

    def _say(self, message: object) -> None:
        self.engine.say(message.outputs if isinstance(message, TokenBatch) else [])


class LoopInATest:
    """A worker's loop: `tell` and `ask` bring messages, `turns`, `settle` and `rest` let it turn. Time is `now_s`.

    `engine`: of EngineInATest; by default one request runs at a time.
    """

    def __init__(
        self, depth: int = 1, *, kv: KVMemory | None = None, trainers: Trainers | None = None, **engine: Any
    ) -> None:
        self.engine = EngineInATest(**{"max_running": 1, **engine})
        self.scheduler = self.engine.scheduler
        self.ports = VirtualPorts(self._on_message)
        self.now_s = 100.0
        self.role = NotedRole(self.scheduler)
        self.turn_clock = IterationClock(limit_s=300.0)
        self.weights, self.profiler = FakeWeights(), FakeProfiler()
        self.replies: dict[str, ControlReply] = {}
        self.loop = loop_of(
            self.scheduler,
            Recorder(self.engine.model),
            self.ports,
            Clock(now_s=lambda: self.now_s, turns=self.turn_clock),
            role=self.role,
            services=services_of(
                weights=self.weights,
                profiler=self.profiler,
                kv=kv or FixedKV(),
                trainers=trainers,
                **self.more_services(),
            ),
            depth=depth,
        )

    def more_services(self) -> dict[str, Any]:
        """Fields of `LoopServices`."""
        return {}

    @property
    def control(self) -> EngineControl:
        return self.loop._controls.engine

    def _on_message(self, message: Any) -> None:
        if isinstance(message, TokenBatch):
            self.engine.say(message.outputs)
        elif isinstance(message, ControlReply):
            self.replies[message.call_id] = message

    def tell(self, *messages: Any) -> None:
        self.ports.inbox += messages
        self.loop.turn()

    def ask(self, rid: str, prompt: Sequence[int], new: int = 8, **wishes: Any) -> None:
        """Ask for a stream: each token comes at the end of its step."""
        self.tell(GenerateRequest(rid, list(prompt), SamplingParams(max_new_tokens=new), stream=True, **wishes))

    def turns(self, n: int) -> None:
        for _ in range(n):
            self.loop.turn()

    def settle(self) -> None:
        while self.loop.turn():
            pass
        self.loop.turn()

    def rest(self) -> float:
        self.loop._rest()
        return self.ports.wait_s

    def assert_ended(self, rid: str, timeout_s: float) -> None:
        assert self.engine.finish[rid] == too_late(timeout_s) and self.engine.finish[rid].status == 504

    def assert_all_back(self) -> None:
        self.scheduler.check()
        assert self.scheduler.memory.allocator.counts()["held"] == 0 and not self.scheduler.stages.live
        assert len(self.loop._deadlines) == 0
