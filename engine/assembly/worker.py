"""Assembly of a worker from four things, each of which may be virtual, and of its core.

config    settings of its loop
wire      ports to the frontend, and the role toward peers
clock     time, and the iterations that a watchdog checks
executor  scheduler, pipeline of steps, and the services of what computes
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.core.decode_planning import DecodePlanner
from engine.core.estimates import NewTokenRatio, RatioRule, StepBudget
from engine.core.mem_cache.backups import NOTHING, CopySize
from engine.core.mem_cache.cache_events import PrefixEvents, events_of_tree
from engine.core.mem_cache.match_rules import ByState, ByWindow
from engine.core.mem_cache.memory_part import MemoryPart, part_of
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.mem_cache.radix_cache import MatchRule, RadixCache, by_pages
from engine.core.mem_cache.radix_node import TreePart
from engine.core.mem_cache.state_slots import StateSlots
from engine.core.mem_cache.window_pages import WindowPages
from engine.core.memory import Memory
from engine.core.policy import Limits, Uniform
from engine.core.scheduler import MakeDecodeStrategy, OneStream, Scheduler
from engine.core.state import SchedulerState
from engine.loop.heartbeat import IterationClock
from engine.loop.loop import EngineLoop
from engine.loop.pipeline import L, MakePipeline, Pipeline, StepLauncher, StepStrategy
from engine.loop.role import EngineRole
from engine.loop.services import LoopServices, LoopSettings, Ports
from engine.messages import ToFrontend, ToScheduler
from engine.pdmux.phases import TwoStreams


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Sizes and rules of an engine's bookkeeping. `radix`, `eviction_policy`: as in RadixCache.

    `publishes`: events of the prefix cache. `backup_room`: for copies of retracted requests.
    `decode`: strategy of decode steps. `uniform`: as in Scheduler.
    """

    limits: Limits
    num_pages: int
    radix: bool = True
    eviction_policy: str = "lru"
    publishes: bool = False
    ratio: RatioRule = field(default_factory=RatioRule)
    backup_room: CopySize = NOTHING
    step_budget: StepBudget | None = None
    decode: MakeDecodeStrategy = DecodePlanner
    uniform: Uniform = lambda: 0.0


def build_core(core: CoreConfig, parts: Sequence[MemoryPart | None] = ()) -> tuple[Scheduler, PrefixEvents | None]:
    """Return the scheduler with its memory, and the prefix cache's events if it publishes them.

    `parts`: of memory, in the order of engine/core/mem_cache/memory_part.py; None is none.
    """
    present = [part for part in parts if part is not None]
    states, windows = part_of(StateSlots, present), part_of(WindowPages, present)
    allocator = PageAllocator(num_pages=core.num_pages, page_size=core.limits.page_size)
    events = events_of_tree(allocator.page_size, states=states, windows=windows) if core.publishes else None
    following = [part for part in (*present, events) if isinstance(part, TreePart)]
    tree = RadixCache(
        allocator,
        enabled=core.radix,
        policy=core.eviction_policy,
        parts=following,
        rule=_match_rule(states, windows),
    )
    state = SchedulerState(
        limits=core.limits,
        memory=Memory(allocator, tree, present, rank=core.limits.priorities.rank),
        ratio=NewTokenRatio(core.ratio),
        backup_room=core.backup_room,
    )
    streams = TwoStreams if core.limits.multiplexed else OneStream
    scheduler = Scheduler(
        state, uniform=core.uniform, step_budget=core.step_budget, decode=core.decode, streams=streams
    )
    return scheduler, events


def _match_rule(states: StateSlots | None, windows: WindowPages | None) -> MatchRule:
    """Return the rule for prefixes that a request can start from."""
    if states is not None:
        return ByState(states) if windows is None else ByState(states, whole=windows.is_whole)
    return by_pages if windows is None else ByWindow(windows)


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
    """Let `executor` run the steps of `scheduler`, up to `depth` at once in each of its `streams`.

    `strategy`: if not one step after the other. `ended`: of an executor whose ends are watched.
    """
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
