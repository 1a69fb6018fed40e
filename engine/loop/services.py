"""Ports, settings and services of an event loop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.core.dp_step import UpdateAgreement
from engine.grammar.queue import GrammarQueue
from engine.loop.adapter_control import AdapterControl
from engine.loop.control import FixedKV, KVMemory, Profiler, Weights
from engine.loop.expert_record import Loads
from engine.loop.listeners import LoopListener
from engine.loop.trainer_control import Trainers
from engine.messages import ToFrontend, ToScheduler
from engine.text.incremental import MakeStops, no_stops


class Ports(Protocol):
    """Sources and sinks of messages."""

    def receive(self) -> list[ToScheduler]: ...

    def wait(self, timeout_s: float) -> None:
        """Wait for a message, `call_attention`, or the timeout."""

    def to_frontend(self, message: ToFrontend) -> None: ...

    def call_attention(self) -> None:
        """End the current or next `wait`, from any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Flags of the same names."""

    eos_ids: frozenset[int]
    stream_interval: int = 1
    log_interval: int = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopServices:
    """Services of the loop besides requests and steps.

    - late_compiles: kernels compiled while serving; memory: bytes by use; gauges: device part
    - updates: of weights on all DP attention ranks; listeners: of the strategy and of features
    """

    weights: Weights
    profiler: Profiler
    kv: KVMemory = field(default_factory=FixedKV)
    grammars: GrammarQueue = field(default_factory=lambda: GrammarQueue(None))
    stops: MakeStops = no_stops
    adapters: AdapterControl = field(default_factory=AdapterControl)
    late_compiles: Callable[[], int] = int
    memory: Mapping[str, int] = field(default_factory=dict)
    gauges: Callable[[], Mapping[str, float]] = dict
    expert_loads: Callable[[], Loads] = list
    name: str = "worker"
    updates: UpdateAgreement | None = None
    trainers: Trainers | None = None
    listeners: Sequence[LoopListener] = ()
