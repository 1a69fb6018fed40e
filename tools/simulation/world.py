"""Virtual time: one queue of events in one thread, a trace hash over all of them, and processes that can die or freeze.

An event belongs to a process. A dead process's events vanish; a frozen one's wait, in order, until it is thawed, as a
kernel keeps what came for a stopped process. Nothing here knows what the processes do.
"""

import hashlib
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

Act = Callable[..., Any]


class Violation(AssertionError):
    """Something that must always hold does not."""


class Event:
    __slots__ = ("act", "args", "cancelled", "label", "process", "time_s")

    def __init__(self, time_s: float, label: str, process: "Process | None", act: Act, args: tuple[Any, ...]) -> None:
        self.time_s, self.label = time_s, label
        self.process, self.act, self.args, self.cancelled = process, act, args, False

    def cancel(self) -> None:
        self.cancelled = True


class World:
    """`rng(name)`: a stream of its own for each concern, so that a change in one leaves the draws of others alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_s = 0.0
        self.num_events = 0
        self.injected: Counter[str] = Counter()  # faults, by kind
        self.seen: Counter[str] = Counter()  # what became of things: says whether a run tested anything
        self.after_event: list[Callable[[Event], None]] = []
        self._queue: list[tuple[float, int, Event]] = []
        self._serial = 0
        self._trace = hashlib.blake2b(digest_size=8)
        self._tail: deque[str] = deque(maxlen=400)

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    def at(self, time_s: float, label: str, act: Act, *args: Any, process: "Process | None" = None) -> Event:
        self._serial += 1
        event = Event(max(time_s, self.now_s), label, process, act, args)
        heapq.heappush(self._queue, (event.time_s, self._serial, event))
        return event

    def after(self, delay_s: float, label: str, act: Act, *args: Any) -> Event:
        return self.at(self.now_s + delay_s, label, act, *args)

    def note(self, text: str) -> None:
        """Into the trace: part of the hash, and of what a failure prints."""
        line = f"{self.now_s:.6f} {text}"
        self._trace.update(line.encode())
        self._tail.append(line)

    def step(self) -> bool:
        """One event; False when none is left."""
        while self._queue:
            event = heapq.heappop(self._queue)[2]
            if event.cancelled or (event.process is not None and not event.process.alive):
                continue
            self.now_s = event.time_s
            if event.process is not None and event.process.frozen:
                event.process.backlog.append(event)
                continue
            self._run(event)
            return True
        return False

    def _run(self, event: Event) -> None:
        self.num_events += 1
        self.note(event.label)
        event.act(*event.args)
        for check in self.after_event:
            check(event)

    def run_until(self, time_s: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Until `done` (True) or `time_s` (False)."""
        while not done():
            while self._queue and self._queue[0][2].cancelled:
                heapq.heappop(self._queue)
            if not self._queue or self._queue[0][0] > time_s:
                self.now_s = max(self.now_s, time_s)
                return done()
            self.step()
        return True

    @property
    def trace_hash(self) -> str:
        return self._trace.hexdigest()

    def last_lines(self, count: int) -> list[str]:
        return list(self._tail)[-count:]


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

    def after(self, delay_s: float, label: str, act: Act, *args: Any) -> Event:
        return self.world.at(self.world.now_s + delay_s, f"{self.name} {label}", act, *args, process=self)

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
