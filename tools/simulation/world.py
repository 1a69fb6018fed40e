"""Virtual time: one queue of events in one thread, a trace hash over all of them, and processes that can die or freeze.

An event belongs to a process. A dead process's events vanish; a frozen one's wait, in order, until it is thawed, as a
kernel keeps what came for a stopped process. Nothing here knows what the processes do.
"""

import hashlib
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from planner.world import Activity, TimedEvent, Timeline

Act = Callable[..., Any]


class Violation(AssertionError):
    """Something that must always hold does not."""


class Event(TimedEvent):
    __slots__ = ("args", "label", "process")

    def __init__(self, time_s: float, label: str, process: "Process | None", act: Act, args: tuple[Any, ...]) -> None:
        super().__init__(time_s, act)
        self.label, self.process, self.args = label, process, args


class World(Timeline):
    """`rng(name)`: a stream of its own for each concern, so that a change in one leaves the draws of others alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.num_events = 0
        self.injected: Counter[str] = Counter()  # faults, by kind
        self.seen: Counter[str] = Counter()  # what became of things: says whether a run tested anything
        self.after_event: list[Callable[[Event], None]] = []
        self._trace = hashlib.blake2b(digest_size=8)
        self.last_lines: deque[str] = deque(maxlen=40)

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    def at(  # type: ignore[override]
        self, time_s: float, label: str, act: Act, *args: Any, process: "Process | None" = None
    ) -> Event:
        return self._add(Event(max(time_s, self.now_s), label, process, act, args))

    def after(self, delay_s: float, label: str, act: Act, *args: Any) -> Event:
        return self.at(self.now_s + delay_s, label, act, *args)

    def note(self, text: str) -> None:
        """Into the trace: part of the hash, and of what a failure prints."""
        line = f"{self.now_s:.6f} {text}"
        self._trace.update(line.encode())
        self.last_lines.append(line)

    def step(self) -> None:
        """One event, if one is left that can happen."""
        while self._queue:
            event = heapq.heappop(self._queue)[2]
            if event.cancelled or (event.process is not None and not event.process.alive):
                continue
            self.now_s = event.time_s
            if event.process is not None and event.process.frozen:
                event.process.backlog.append(event)
                continue
            return self._run(event)

    def _run(self, event: Event) -> None:
        self.num_events += 1
        self.note(event.label)
        event.act(*event.args)
        for check in self.after_event:
            check(event)

    @property
    def trace_hash(self) -> str:
        return self._trace.hexdigest()


class Process:
    """One life of one process on a node. `skew_s`: its monotonic clock is ahead of the world's by so much."""

    def __init__(self, world: World, *, node: str, life: int, skew_s: float) -> None:
        self.world = world
        self.node = node
        self.life = life
        self.alive = True
        self.frozen = False
        self.born_s = world.now_s
        self.thawed_s = -1.0  # when it was thawed last
        self.orderly = False  # it ended by itself: what it has sent still arrives
        self.skew_s = skew_s
        self.backlog: deque[Event] = deque()
        self.on_death: list[Callable[[], None]] = []

    @property
    def name(self) -> str:
        return f"{self.node}.{self.life}"

    def clock(self) -> float:
        return self.world.now_s + self.skew_s

    def at(self, label: str, time_s: float, act: Act, *args: Any) -> Event:
        return self.world.at(time_s, f"{self.name} {label}", act, *args, process=self)

    def after(self, delay_s: float, label: str, act: Act, *args: Any) -> Event:
        return self.at(label, self.world.now_s + delay_s, act, *args)

    def hold(self, check: Callable[[], None]) -> None:
        """What `check` finds is a violation here."""
        try:
            check()
        except AssertionError as error:
            raise Violation(f"{self.name}: {error}") from error

    def kill(self) -> None:
        self.alive = False
        self.backlog.clear()
        for act in self.on_death:
            act()

    def exit(self) -> None:
        """It ends by itself."""
        self.orderly = True
        self.kill()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        """What waited happens now, in the order it came."""
        self.frozen = False
        self.thawed_s = self.world.now_s
        waited, self.backlog = self.backlog, deque()
        for event in waited:
            if not event.cancelled:
                self.world.at(self.world.now_s, event.label, event.act, *event.args, process=self)


class Threads:
    """Those of `process`, by name. A wake-up takes a moment, `clock_s` at most."""

    def __init__(self, process: Process, draw: random.Random, *, clock_s: float) -> None:
        self._process, self._draw, self._clock_s = process, draw, clock_s
        self._named: dict[str, Activity] = {}

    def add(self, name: str, act: Callable[[], float | None]) -> Activity:
        process = self._process
        at = partial(process.at, name)
        self._named[name] = thread = Activity(act, now_s=lambda: process.world.now_s, at=at, lag_s=self.lag_s)
        return thread

    def wake(self, name: str) -> None:
        """Wake a thread, if it has begun."""
        if name in self._named:
            self._named[name].wake()

    def lag_s(self) -> float:
        return self._draw.uniform(0.00002, self._clock_s)


class Flag:
    """Stands in for the `threading.Event` that a production thread waits on."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.set = wake

    def clear(self) -> None:
        """A wake-up is never lost here."""
