"""One life of a worker: the production loop, scheduler, role, managers and registrar over simulated surroundings.

Its threads are activities: scheduler loop, heartbeat (it answers with each message), control threads (decode: of the receiver and of the
sender of requests that move), sender thread, registrar (prefill), HTTP frontend.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from engine.assembly.worker import Clock
from engine.loop.heartbeat import IterationClock
from engine.loop.services import LoopServices
from engine.messages import (
    GenerateBatch,
    GenerateRequest,
    GetStep,
    PrefixSource,
    ToFrontend,
    TokenBatch,
    ToScheduler,
)
from engine.ranks.followers import GroupEnded
from planner.world import VirtualWorker
from tools.simulation.http import serve
from tools.simulation.options import EngineBehaviour
from tools.simulation.surroundings import Surroundings
from tools.simulation.workers.computing import Computer, LanguageComputer
from tools.simulation.workers.exchange import BOOTSTRAP_PORT, Exchange
from tools.simulation.workers.frontend import Frontend
from tools.simulation.workers.managers import LOOP, Managers
from tools.simulation.workers.weights import OWN, SimWeights
from tools.simulation.world import Process, Threads, Violation

EOS = 7
NAMED_RATE = 0.7  # of requests, whose router knows of another worker that may have their prefix
HTTP_PORT = 80


class Worker(VirtualWorker):
    """`role_name`: "prefill" | "decode" | "encode" (encoder.py)."""

    def __init__(self, around: Surroundings, process: Process, role_name: str) -> None:
        self.around, self.process, self.role_name = around, process, role_name
        self.draw = around.world.rng(f"worker/{process.name}")
        self.threads = Threads(process, self.draw, clock_s=around.options.clock_s)
        self._arrivals: dict[str, float] = {}  # of the last message on each way
        self.said: dict[str, int] = {}
        self.most_quarantined = 0
        self._num_idle = 0
        self.on_stopped: Callable[[], None] = lambda: None  # the loop has ended
        self.weights = SimWeights(process, lambda: self.computer.forget(), self.draw, model_path=self._first_weights())
        self.computer = self._computer()
        self.memory = self.computer.memory
        self.managers = Managers(around, process, self.draw, self.threads, self._behaviour())
        self.computer.faulty = lambda: self.managers.faulty
        self.exchange = Exchange(around, process, self.threads, self.computer, self.managers, self.weights, role_name)
        self.turns = IterationClock(limit_s=0)
        self.turns.loaded()
        wake = partial(self.threads.wake, LOOP)
        nothing: Any = None
        super().__init__(
            self.computer.computing(LoopServices(weights=self.weights, profiler=nothing), attention=wake),
            self.exchange.role,
            Clock(now_s=process.clock, turns=self.turns),
            wake=wake,
            eos_ids=frozenset({EOS}),
        )
        self._start_frontend()
        self.threads.add(LOOP, self._turn).wake()
        for name in self.managers.by_thread:
            self.threads.wake(name)

    # ---- parts

    def _computer(self) -> Computer:
        return LanguageComputer(self.around, self.process, self.draw, decodes=self.role_name == "decode")

    def _first_weights(self) -> str:
        return OWN

    def _behaviour(self) -> EngineBehaviour:
        return self.around.options.engine

    def _info(self) -> dict[str, Any]:
        """What /server_info says."""
        info: dict[str, Any] = {
            "disaggregation_bootstrap_port": BOOTSTRAP_PORT,
            "feature_fetch": self.exchange.arrivals is not None,
        }
        if self.around.shared_bootstrap is not None:
            info["disaggregation_bootstrap_server"] = self.around.shared_bootstrap
        return info

    def _start_frontend(self) -> None:
        self.frontend = Frontend(
            process=self.process,
            role=self.role_name,
            options=self.around.options,
            send=self.to_scheduler,
            info={"disaggregation_mode": self.role_name, **self._info()},
        )
        address = f"{self.process.node}:{HTTP_PORT}"
        serve(self.around.network, self.process, address, self.frontend.handle)

    # ---- threads

    def to_scheduler(self, message: ToScheduler | GetStep) -> None:
        if isinstance(message, GetStep):
            self._pass_on("to heartbeat", "GetStep", self._beat, message)
        else:
            if self.around.options.prefix_fetch:  # without `prefixes_of_decode` decode has no part that listens
                message = self._naming_sources(message)
            for one in message.requests if isinstance(message, GenerateBatch) else [message]:
                if isinstance(one, GenerateRequest) and one.output_ids:
                    self.said[one.rid] = len(one.output_ids)  # by another worker
            self._pass_on("to scheduler", type(message).__name__, self.ports.deliver, message)

    def _naming_sources(self, message: ToScheduler) -> ToScheduler:
        if isinstance(message, GenerateBatch):
            return GenerateBatch([self._naming_a_source(one) for one in message.requests])
        return self._naming_a_source(message) if isinstance(message, GenerateRequest) else message

    def _naming_a_source(self, message: GenerateRequest) -> GenerateRequest:
        """What a router may believe: that another worker, dead ones too, has more or less of a prompt that this one computes."""
        others = [source for node, source in sorted(self.around.prefix_sources.items()) if node != self.process.node]
        is_half = self.role_name == "decode" and message.bootstrap is not None
        if not others or is_half or self.draw.random() >= NAMED_RATE:
            return message
        at, num_tokens = self.draw.choice(others), self.draw.randint(1, len(message.input_ids) + 4)
        source = PrefixSource(at.control, at.incarnation, num_tokens)
        return msgspec.structs.replace(message, prefix_source=source)

    def _beat(self, message: GetStep) -> None:
        """As engine/loop/heartbeat.py."""
        if (reply := self.turns.answer(message.call_id, self.process.clock())) is not None:
            self._pass_on("from heartbeat", "StepReply", self.frontend.on_message, reply)

    def _pass_on(self, way: str, label: str, act: Callable[[Any], None], message: Any) -> None:
        """Between processes of the worker, over a socket that keeps the order."""
        arrival_s = max(self.around.world.now_s + self.threads.lag_s(), self._arrivals.get(way, 0.0))
        self._arrivals[way] = arrival_s
        self.process.after(arrival_s - self.around.world.now_s, label, act, message)

    def _turn(self) -> float | None:
        try:
            worked = self.loop.turn()
        except GroupEnded:
            return None
        if self.loop.stopped:
            self.turns.end()
            self.check()
            self.on_stopped()
            return None
        self._num_idle = 0 if worked else self._num_idle + 1
        if self._num_idle <= 2 or self._num_idle % 8 == 0:  # a turn that finds nothing changes nothing
            self.check()
        clock_s = self.around.options.clock_s
        if not worked:
            self.loop._rest()
            return max(self.ports.wait_s, 0.05)
        pause_s = self.draw.uniform(clock_s, 4 * clock_s)
        for _ in range(self.computer.executor.stages):
            self.process.after(self.draw.uniform(0, pause_s), "compute", self._compute)
        return pause_s

    def _compute(self) -> None:
        with contextlib.suppress(GroupEnded):
            self.computer.executor.compute_one()

    # ---- outputs

    def on_message(self, message: ToFrontend) -> None:
        """DESIGN.md 5.2, at the scheduler's door: tokens in order, none twice, nothing after the end."""
        for output in message.outputs if isinstance(message, TokenBatch) else ():
            before = self.said.get(output.rid, 0)
            if before < 0:
                raise Violation(f"{self.process.name}: {output.rid} speaks after its end")
            if output.new_ids and output.completion_tokens != before + len(output.new_ids):
                raise Violation(f"{self.process.name}: {output.rid} skips or repeats tokens")
            self.around.world.note(f"{output.rid} says {output.new_ids} {output.finish and output.finish.kind}")
            self.said[output.rid] = before + len(output.new_ids) if output.finish is None else -1
        self._pass_on("to frontend", type(message).__name__, self.frontend.on_message, message)

    # ---- checks

    def check(self) -> None:
        self.scheduler.check()
        quarantined = self.scheduler.memory.allocator.counts()["quarantined"]
        self.most_quarantined = max(self.most_quarantined, quarantined)
        self.process.hold(self.role.check)
        for fetch in self.exchange.fetches():
            if gone := [rid for rid in fetch.waiting if self.said.get(rid, 0) < 0]:
                raise Violation(f"{self.process.name} fetches for requests that have ended: {gone}")
