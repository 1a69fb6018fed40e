"""One run: a cluster and its faults from one seed, in two phases. First safety, then everything heals and must end."""

import logging
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tools.simulation.cluster import Cluster
from tools.simulation.faults import Faults
from tools.simulation.options import Options
from tools.simulation.rest import check_cached, counted
from tools.simulation.world import Violation, World

START_S = 3.0  # until everybody must have found everybody
SETTLE_S = 60.0  # after the faults: everything has ended, in virtual time
PROBE_S = 30.0
MORE_WITH_RETURNS = 6  # requests of the healthy cluster: most of their streams break
# Kinds of faults that production code logs as errors, and by which words.
LOGGED = {"damaged page": ("KV was corrupted", "and their bytes differ"), "failed step": ("found no device memory",)}


@dataclass
class Outcome:
    options: Options
    problem: str = ""
    details: str = ""
    trace_hash: str = ""
    num_events: int = 0
    virtual_s: float = 0.0
    real_s: float = 0.0
    settled_s: float = 0.0  # from the healing until all had ended
    longest_gap_s: float = 0.0  # between two events of a stream
    injected: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problem


class ErrorLog(logging.Handler):
    """An error that production code logs and survives is a failure here."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []
        self.found: dict[str, str] = {}  # by kind of fault: it must have been injected

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        kind = next((kind for kind, words in LOGGED.items() if any(word in text for word in words)), "")
        if kind:
            self.found[kind] = text
        else:
            self.records.append(text)


@contextmanager
def collected_errors() -> Iterator[ErrorLog]:
    """Production warnings are expected under faults, and kept off the screen."""
    root, handler = logging.getLogger(), ErrorLog()
    before, level = root.handlers[:], root.level
    root.handlers, root.level = [handler], logging.ERROR
    try:
        yield handler
    finally:
        root.handlers, root.level = before, level


class Run:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.world = World(options.seed)
        self.cluster = Cluster(self.world, options)
        self.faults = Faults(self.cluster)
        self.draw = self.world.rng("run")
        self.settled_s = 0.0

    def play(self) -> None:
        """Raises `Violation` (or what production code raised)."""
        self.world.run_until(START_S)
        self._schedule_requests()
        self.faults.begin()
        self.world.run_until(START_S + self.options.length_s)
        self.faults.heal()
        self._demand_rest()
        self._demand_service()

    def _schedule_requests(self) -> None:
        """In bursts: many at once press on memory, and faults fall between."""
        left = self.options.num_requests
        while left > 0:
            burst_s = START_S + self.draw.uniform(0, self.options.length_s)
            for _ in range(min(left, self.options.burst)):
                self.world.at(burst_s + self.draw.uniform(0, 0.1), "client asks", self._ask)
            left -= self.options.burst

    def _ask(self) -> None:
        self.cluster.clients.ask(big=self.draw.random() < 0.2, capacity=self.cluster.capacity)

    def _demand_rest(self) -> None:
        healed_s = self.world.now_s
        cluster = self.cluster
        if not self.world.run_until(
            healed_s + SETTLE_S, lambda: self.world.num_events % 64 == 0 and not cluster.leftovers()
        ):
            raise Violation(f"{SETTLE_S:g} s after the faults: {'; '.join(cluster.leftovers())}")
        self.settled_s = self.world.now_s - healed_s
        for worker in cluster.workers():
            check_cached(worker)

    def _demand_service(self) -> None:
        """The same processes serve again: new requests all succeed."""
        self.world.run_until(self.world.now_s + 6.0)  # a registrar that found no server tries again within 5 s
        count = 4 if self.options.window else 10  # a pool of windows may hold one request's
        for _ in range(count + (MORE_WITH_RETURNS if self.options.resume_window_s else 0)):
            self.cluster.clients.ask(must_succeed=True, capacity=self.cluster.capacity)
        start_s = self.world.now_s
        if not self.world.run_until(start_s + PROBE_S, lambda: not self.cluster.clients.live):
            raise Violation(f"a healthy cluster does not answer within {PROBE_S:g} s")
        self._demand_rest()


def run(options: Options) -> Outcome:
    """Never raises for what the run finds: it is in the outcome."""
    outcome = Outcome(options)
    started_s = time.perf_counter()
    with collected_errors() as errors:
        game = Run(options)
        try:
            game.play()
            for kind, text in errors.found.items():
                if not game.world.injected[kind]:
                    raise Violation(f"a false alarm of a {kind}: {text}")
            if errors.records:
                raise Violation(f"production code logged an error: {errors.records[0]}")
        except Exception as error:
            outcome.problem = f"{type(error).__name__}: {error}"
            outcome.details = traceback.format_exc() + "\n".join(errors.records[:3])
            outcome.details += "\nlast events:\n" + "\n".join(game.world.last_lines)
        game.cluster.end()
    world = game.world
    outcome.trace_hash, outcome.num_events = world.trace_hash, world.num_events
    outcome.virtual_s, outcome.real_s = world.now_s, time.perf_counter() - started_s
    outcome.settled_s = game.settled_s
    outcome.longest_gap_s = game.cluster.clients.longest_gap_s
    outcome.injected = {kind: count for kind, count in sorted(world.injected.items()) if count}
    for worker in game.cluster.all_workers:
        world.seen.update(counted(worker))
    world.seen.update(game.cluster.notices.judged)
    outcome.seen = dict(sorted(world.seen.items()))
    outcome.outcomes = dict(sorted(game.cluster.clients.outcomes.items()))
    return outcome
