"""Assembly of a worker from four things, each of which may be virtual.

config    settings of its loop
wire      ports to the frontend, and the role toward peers
clock     time, and the iterations that a watchdog checks
executor  scheduler, pipeline of steps, and the services of what computes
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from engine.core.scheduler import Scheduler
from engine.loop.heartbeat import IterationClock
from engine.loop.loop import EngineLoop
from engine.loop.pipeline import L, MakePipeline, Pipeline, StepLauncher, StepStrategy
from engine.loop.role import EngineRole
from engine.loop.services import LoopServices, LoopSettings, Ports
from engine.messages import ToFrontend, ToScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerWire:
    ports: Ports
    role: EngineRole


@dataclass(slots=True)
class VirtualPorts:
    """Ports of a loop in the thread of its frontend. `wake`: lets the loop turn.

    Messages wait in `inbox`. `wait_s`: how long the loop was last ready to rest.
    """

    on_message: Callable[[ToFrontend], None]
    wake: Callable[[], None] = lambda: None
    inbox: list[ToScheduler] = field(default_factory=list)
    wait_s: float = 0.0

    def deliver(self, message: ToScheduler) -> None:
        self.inbox.append(message)
        self.wake()

    def receive(self) -> list[ToScheduler]:
        messages, self.inbox = self.inbox, []
        return messages

    def wait(self, timeout_s: float) -> None:
        self.wait_s = timeout_s

    def to_frontend(self, message: ToFrontend) -> None:
        self.on_message(message)

    def call_attention(self) -> None:
        self.wake()


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """`now_s`: seconds of any origin. `turns`: by default without a limit."""

    now_s: Callable[[], float] = time.monotonic
    turns: IterationClock = field(default_factory=lambda: IterationClock(limit_s=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    scheduler: Scheduler
    pipeline: MakePipeline
    services: LoopServices


def computing(
    scheduler: Scheduler,
    executor: StepLauncher[L],
    services: LoopServices,
    *,
    depth: int = 1,
    strategy: StepStrategy | None = None,
    ended: Callable[[L], bool] | None = None,
    streams: int = 1,
) -> Computing:
    pipeline = partial(
        Pipeline[L],
        strategy=strategy or StepStrategy(scheduler),
        executor=executor,
        depth=depth,
        ended=ended,
        streams=streams,
    )
    return Computing(scheduler=scheduler, pipeline=pipeline, services=services)


def assemble_worker(config: LoopSettings, wire: WorkerWire, clock: Clock, executor: Computing) -> EngineLoop:
    return EngineLoop(
        scheduler=executor.scheduler,
        pipeline=executor.pipeline,
        role=wire.role,
        ports=wire.ports,
        services=executor.services,
        turns=clock.turns,
        settings=config,
        clock=clock.now_s,
    )
