"""A planned worker: production loop, scheduler and role with virtual device, network and clients.

An iteration is an event at its start time. While it waits for the device, the worker's clock is
ahead of the timeline: outputs carry its time; new messages wait for the next iteration.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from disagg.assembly import RoleAssembly
from disagg.config import DisaggConfig
from disagg.metadata import MetadataBuffers
from engine.assembly.core import CoreConfig, build_core
from engine.assembly.worker import Clock, VirtualPorts, WorkerWire, assemble_worker, computing
from engine.config import EngineConfig
from engine.core.decode_planning import DecodePlanner
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.flags.resolve import depth, limits, ratio_rule
from engine.loop.role import EngineRole, UnifiedRole
from engine.loop.services import LoopServices, LoopSettings
from engine.messages import GenerateRequest, StateReply, ToFrontend, TokenBatch, TokenOutput, ToScheduler
from engine.sampling_params import SamplingParams
from planner.executor import Host, Speculation, Threads, TimedExecutor, Timeline, WorkerClock
from planner.step_time import Beside, StepTime
from planner.transfer import End, Link, Network, PlannedReceivers, PlannedSenders

OnOutputs = Callable[[list[TokenOutput], float], None]  # (outputs, time in seconds)
NO_SLOWER = Beside()
NEVER_S = 1e12  # no timeout of a role applies in a plan: the SLOs judge what is late


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker with a resolved `engine`, a `role` ("unified" | "prefill" | "decode") and KV pages.

    `threads`: cores of a step on a shared host, slowed by `beside`. No `speculation`: no drafts.
    """

    role: str
    engine: EngineConfig
    num_pages: int
    page_bytes: int
    link_bytes_per_s: float
    step_time: StepTime
    threads: int = 1
    beside: Beside = NO_SLOWER
    speculation: Speculation | None = None


class PlanWorker:
    def __init__(
        self, spec: WorkerSpec, *, timeline: Timeline, network: Network, host: Host, on_outputs: OnOutputs
    ) -> None:
        self.spec = spec
        self.clock = WorkerClock()
        home = host.home(self) if spec.role != "unified" else None
        self.executor = _executor(spec, self.clock, host, home)
        self.scheduler = _scheduler(spec)
        self._timeline = timeline
        self._turning = False
        self._num_requests = 0
        self._on_drained: Callable[[], None] | None = None
        self.state: StateReply | None = None
        self._on_outputs = on_outputs
        self._ports = VirtualPorts(self._on_message, self._wake)
        most = self.scheduler.limits.max_running_requests
        self._metadata = MetadataBuffers(2 * most if spec.role != "unified" else 1)
        link = Link(bytes_per_s=spec.link_bytes_per_s)
        self._end = End(link=link, metadata=self._metadata, now=lambda: self.clock.now_s, wake=self._wake, home=home)
        self.role = self._role(network)
        nothing: Any = None  # no weights are updated, no profile is taken
        services = LoopServices(weights=nothing, profiler=nothing)
        self._loop = assemble_worker(
            LoopSettings(eos_ids=frozenset()),
            WorkerWire(ports=self._ports, role=self.role),
            Clock(now_s=lambda: self.clock.now_s),
            computing(self.scheduler, self.executor, services, depth=depth(spec.engine)),
        )

    def receive(self, message: ToScheduler) -> None:
        self._ports.deliver(message)

    def begin(self) -> None:
        """Count a request in flight, as routers do, until `end`."""
        self._num_requests += 1

    def end(self) -> None:
        self._num_requests -= 1
        self._check_drained()

    def drain(self, on_drained: Callable[[], None]) -> None:
        """Call `on_drained` once no request is left; no new one may come."""
        self._on_drained = on_drained
        self._check_drained()

    def remember(self, tokens: list[int]) -> None:
        """Cache the prefix `tokens`, before the first iteration only."""
        memory = self.scheduler.memory
        request = Request(
            message=GenerateRequest("history", tokens, SamplingParams(max_new_tokens=0)),
            arrived_s=0.0,
        )
        if memory.admit(request, reserved_pages=0):
            request.launched_len = request.computed_len = len(tokens)
            memory.give_back(request)

    # ---- inside

    def _on_message(self, message: ToFrontend) -> None:
        if isinstance(message, TokenBatch):
            self._on_outputs(message.outputs, self.clock.now_s)
        elif isinstance(message, StateReply):
            self.state = message

    def _check_drained(self) -> None:
        if self._on_drained is not None and not self._num_requests:
            on_drained, self._on_drained = self._on_drained, None
            on_drained()

    def _role(self, network: Network) -> EngineRole:
        if self.spec.role == "unified":
            return UnifiedRole(self.scheduler)
        role = RoleAssembly(
            scheduler=self.scheduler,
            metadata=self._metadata,
            page_size=self.spec.engine.page_size,
            page_bytes=self.spec.page_bytes,
        )
        if self.spec.role == "decode":
            return role.decode(PlannedReceivers(network, self._end), prealloc_timeout_s=NEVER_S)
        senders = PlannedSenders(network, self._end)
        return role.prefill(senders, senders)

    def _wake(self) -> None:
        """Schedule an iteration now, or after the current one."""
        if not self._turning:
            self._turning = True
            self._timeline.at(max(self._timeline.now_s, self.clock.now_s), self._turn)

    def _turn(self) -> None:
        self.clock.now_s = max(self.clock.now_s, self._timeline.now_s)
        worked = self._loop.turn()
        self._turning = False
        if worked:
            self._wake()


def _executor(spec: WorkerSpec, clock: WorkerClock, host: Host, home: Hashable) -> TimedExecutor:
    threads = Threads(spec.threads, home)
    if (speculation := spec.speculation) is None:
        return TimedExecutor(spec.step_time, clock, host=host, threads=threads, beside=spec.beside)
    return TimedExecutor(
        spec.step_time,
        clock,
        host=host,
        threads=threads,
        beside=spec.beside,
        drafter=speculation.time,
        is_right=speculation.draws(),
    )


def _scheduler(spec: WorkerSpec) -> Scheduler:
    config = spec.engine
    speculation = None if spec.role == "prefill" else spec.speculation
    core = CoreConfig(
        limits=replace(limits(config), reserve_floor=DisaggConfig().num_reserved_decode_tokens),
        num_pages=spec.num_pages,
        radix=not config.disable_radix_cache,
        ratio=ratio_rule(config),
        decode=DecodePlanner if speculation is None else speculation.decode(),
    )
    scheduler, _ = build_core(core)
    return scheduler
