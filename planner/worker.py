"""A planned worker: production loop, scheduler and role with virtual device, network and clients.

An iteration is an event at its start time. While it waits for the device, the worker's clock is
ahead: outputs carry its time; new messages wait for the next iteration.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from disagg.assembly import RoleAssembly
from disagg.config import DisaggConfig
from disagg.features.prefix_fetching import MAX_FETCHES
from disagg.features.prefix_serving import MAX_SERVED, PrefixRequests
from disagg.metadata import MetadataBuffers
from disagg.role import PeerPart
from engine.assembly.core import CoreConfig, build_core, conversation_listeners
from engine.assembly.worker import Clock, computing
from engine.config import EngineConfig
from engine.core.decode_planning import DecodePlanner
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.flags.resolve import depth, limits, ratio_rule
from engine.loop.role import EngineRole, UnifiedRole
from engine.loop.services import LoopServices
from engine.messages import GenerateRequest, KVSource, StateReply, ToFrontend, TokenBatch, TokenOutput, ToScheduler
from engine.sampling_params import SamplingParams
from planner.executor import Host, Speculation, Threads, TimedExecutor, WorkerClock
from planner.step_time import Beside, StepTime
from planner.transfer import End, Link, Network, PlannedReceivers, PlannedSenders
from planner.world import Activity, Timeline, VirtualWorker

OnOutputs = Callable[[list[TokenOutput], float], None]  # (outputs, time in seconds)
NO_SLOWER = Beside()
NEVER_S = 1e12  # no timeout of a role applies in a plan: the SLOs judge what is late


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker with a resolved `engine`, a `role` ("unified" | "prefill" | "decode") and KV pages.

    `threads`: cores of a step on a shared host, slowed by `beside`.
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
    prefix_fetch: bool = False


class PlanWorker(VirtualWorker):
    def __init__(
        self, spec: WorkerSpec, *, timeline: Timeline, network: Network, host: Host, on_outputs: OnOutputs
    ) -> None:
        self.spec = spec
        self.clock = WorkerClock()
        self.state: StateReply | None = None
        self._timeline = timeline
        self._on_outputs = on_outputs
        home = host.home(self) if spec.role != "unified" else None
        drafts = spec.speculation
        self.executor = TimedExecutor(
            spec.step_time,
            self.clock,
            host=host,
            threads=Threads(spec.threads, home),
            beside=spec.beside,
            drafter=None if drafts is None else drafts.time,
            is_right=(lambda: True) if drafts is None else drafts.draws(),
        )
        scheduler = _scheduler(spec)
        wake = Activity(self._turn, now_s=lambda: max(timeline.now_s, self.clock.now_s), at=timeline.at).wake
        most = scheduler.limits.max_running_requests
        end = End(
            link=Link(bytes_per_s=spec.link_bytes_per_s),
            metadata=MetadataBuffers(2 * most + MAX_FETCHES + MAX_SERVED if spec.role != "unified" else 1),
            now=lambda: self.clock.now_s,
            wake=wake,
            home=home,
        )
        self.address = f"planned-{len(network.ends)}"
        network.ends[self.address] = end
        nothing: Any = None  # no weights are updated, no profile is taken
        services = LoopServices(weights=nothing, profiler=nothing, listeners=conversation_listeners(scheduler))
        super().__init__(
            computing(scheduler, self.executor, services, depth=depth(spec.engine)),
            _role(spec, scheduler, network, end, self.address),
            Clock(now_s=lambda: self.clock.now_s),
            wake=wake,
        )

    def receive(self, message: ToScheduler) -> None:
        self.ports.deliver(message)

    def remember(self, tokens: list[int]) -> None:
        """Before the first iteration only."""
        memory = self.scheduler.memory
        message = GenerateRequest("history", tokens, SamplingParams(max_new_tokens=0))
        request = Request(message=message, arrived_s=0.0)
        if memory.admit(request, reserved_pages=0):
            request.launched_len = request.computed_len = len(tokens)
            memory.give_back(request)

    # ---- inside

    def on_message(self, message: ToFrontend) -> None:
        if isinstance(message, TokenBatch):
            self._on_outputs(message.outputs, self.clock.now_s)
        elif isinstance(message, StateReply):
            self.state = message

    def _turn(self) -> float | None:
        self.clock.now_s = max(self.clock.now_s, self._timeline.now_s)
        return 0.0 if self.loop.turn() else None


def _role(spec: WorkerSpec, scheduler: Scheduler, network: Network, end: End, address: str) -> EngineRole:
    if spec.role == "unified":
        return UnifiedRole(scheduler)
    role = RoleAssembly(
        scheduler=scheduler, metadata=end.metadata, page_size=spec.engine.page_size, page_bytes=spec.page_bytes
    )
    receivers, senders = PlannedReceivers(network, end), PlannedSenders(network, end)
    parts: Sequence[PeerPart] = ()
    if spec.prefix_fetch:
        token_bytes = spec.page_bytes // spec.engine.page_size
        parts = fetches, server = role.prefixes(senders, receivers, KVSource(address, address), token_bytes=token_bytes)
        if spec.role == "decode":
            parts = fetches, server, PrefixRequests(senders, server)
    if spec.role == "decode":
        return role.decode(receivers, parts, prealloc_timeout_s=NEVER_S)
    return role.prefill(senders, senders, parts)


def _scheduler(spec: WorkerSpec) -> Scheduler:
    config = spec.engine
    speculation = None if spec.role == "prefill" else spec.speculation
    core = CoreConfig(
        limits=replace(limits(config), reserve_floor=DisaggConfig().num_reserved_decode_tokens),
        num_pages=spec.num_pages,
        radix=not config.disable_radix_cache,
        ratio=ratio_rule(config),
        decode=DecodePlanner if speculation is None else speculation.decode(overlaps=depth(spec.engine) > 1),
    )
    scheduler, _ = build_core(core)
    return scheduler
