"""The network between nodes: connections like TCP's, and what can befall them.

Within one connection bytes arrive once and in order, however late: neither ZMQ over TCP nor HTTP can lose, repeat or
reorder a message in the middle of one. Faults are those that TCP has: delay, clogged links, a partition (one way too)
that holds everything back, and a reset that loses all that was under way in both directions; each end hears of it at
its own time. Loss, repetition and reordering between messages come from reconnects, several connections and retries.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tools.simulation.world import Process, World

HANDSHAKE_TIMEOUT_S = 5.0
AGAIN_S = 0.2
RESET_S = 0.3  # at most so long until an end hears that the other is gone


@dataclass(eq=False)
class End:
    """One end of a connection, held by `process`. `on_data(value)`, `on_close()` are called at most once each a value."""

    process: Process
    on_data: Callable[[Any], None]
    on_close: Callable[[], None]
    pipe: "Pipe | None" = None
    other: "End | None" = None
    open: bool = True
    last_arrival_s: float = 0.0
    way: deque[tuple[Any, str]] = field(default_factory=deque)

    def send(self, value: Any, label: str) -> bool:
        """False when this end already knows that the connection is gone."""
        if not self.open:
            return False
        assert self.pipe is not None
        self.pipe.carry(self, value, label)
        return True

    def close(self) -> None:
        """Orderly: what was sent before still arrives."""
        if self.open:
            self.open = False
            assert self.pipe is not None
            self.pipe.carry(self, _FIN, "fin")


_FIN = object()


@dataclass
class Network:
    """`blocked`: (from, to) nodes between which nothing arrives now. `clog_s`: extra delay of a pair."""

    world: World
    delay_s: tuple[float, float]
    spiky: bool = True  # a delay is ten times as long now and then
    blocked: set[tuple[str, str]] = field(default_factory=set)
    clog_s: dict[tuple[str, str], float] = field(default_factory=dict)
    listeners: dict[str, tuple[Process, Callable[[End], None]]] = field(default_factory=dict)
    pipes: list["Pipe"] = field(default_factory=list)
    faulty_s: dict[frozenset[str], float] = field(default_factory=dict)  # pair of nodes -> when a fault was there last

    def __post_init__(self) -> None:
        self._draw = self.world.rng("network")

    def listen(self, address: str, process: Process, accept: Callable[[End], None]) -> None:
        """`accept(end)` gets the server's end of each new connection and sets its callbacks."""
        self.listeners[address] = (process, accept)
        process.on_death.append(lambda: self.unlisten(address, process))

    def unlisten(self, address: str, process: Process) -> None:
        if self.listeners.get(address, (None, None))[0] is process:
            del self.listeners[address]

    def delay(self, source: str, target: str) -> float:
        low, high = self.delay_s
        factor = 10.0 if self.spiky and self._draw.random() < 0.02 else 1.0
        return factor * self._draw.uniform(low, high) + self.clog_s.get((source, target), 0.0)

    def connect(
        self, process: Process, address: str, *, on_data: Callable[[Any], None], on_close: Callable[[], None]
    ) -> End:
        """Returns at once; data may be sent at once; `on_close` is called if nothing listens there."""
        end = End(process, on_data, on_close)
        Pipe(self, end, address)
        return end

    def block(self, ways: set[tuple[str, str]]) -> None:
        self.blocked |= ways
        self._note_fault(ways)

    def unblock(self, ways: set[tuple[str, str]]) -> None:
        self._note_fault(ways & self.blocked)
        self.blocked -= ways

    def clog(self, way: tuple[str, str], extra_s: float) -> None:
        self.clog_s[way] = extra_s
        self._note_fault({way})

    def unclog(self, way: tuple[str, str]) -> None:
        if self.clog_s.pop(way, None) is not None:
            self._note_fault({way})

    def _note_fault(self, ways: set[tuple[str, str]]) -> None:
        self.faulty_s.update((frozenset(way), self.world.now_s) for way in ways)

    def faulty_since(self, a: str, b: str, since_s: float) -> bool:
        """Whether anything was wrong between two nodes at some moment from `since_s` to now."""
        now = any(way in self.blocked or way in self.clog_s for way in ((a, b), (b, a)))
        return now or self.faulty_s.get(frozenset((a, b)), -1.0) >= since_s

    def reachable(self, source: str, target: str) -> bool:
        return (source, target) not in self.blocked and (target, source) not in self.blocked

    def reset_between(self, a: str, b: str) -> None:
        """Every connection between two nodes breaks."""
        for pipe in [pipe for pipe in self.pipes if {end.process.node for end in pipe.ends} == {a, b}]:
            pipe.cut()

    def heal(self) -> None:
        self.spiky = False
        self._note_fault(self.blocked | set(self.clog_s))
        self.blocked.clear()
        self.clog_s.clear()


class Pipe:
    """One connection. Values of each direction arrive in order, never before one sent earlier."""

    def __init__(self, network: Network, client: End, address: str) -> None:
        self._network = network
        self._world = network.world
        self._address = address
        self._waiting: list[tuple[Any, str]] = []  # said before the handshake was done
        self.ends = [client]
        self.up = True
        client.pipe = self
        network.pipes.append(self)
        client.process.on_death.append(lambda: self._on_death(client))
        self._started_s = self._world.now_s
        delay_s = network.delay(client.process.node, address.partition(":")[0])
        self._world.after(delay_s, f"syn {client.process.node}>{address}", self._arrive)

    def _arrive(self) -> None:
        client = self.ends[0]
        if not self.up or not client.process.alive:
            return
        target = self._address.partition(":")[0]
        if not self._network.reachable(client.process.node, target):
            if self._world.now_s - self._started_s > HANDSHAKE_TIMEOUT_S:
                self.reset()
            else:
                self._world.after(0.25, f"syn again {client.process.node}>{self._address}", self._arrive)
            return
        listener = self._network.listeners.get(self._address)
        if listener is None:
            self.reset()
            return
        self._accept(client, *listener)

    def _accept(self, client: End, process: Process, accept: Callable[[End], None]) -> None:
        server = End(process, lambda value: None, lambda: None, self, client)
        client.other = server
        self.ends.append(server)
        process.on_death.append(lambda: self._on_death(server))  # the kernel closes the sockets of a dead process
        accept(server)
        waiting, self._waiting = self._waiting, []
        for value, label in waiting:
            self.carry(client, value, label)

    def carry(self, sender: End, value: Any, label: str) -> None:
        if not self.up:
            return
        if sender.other is None:
            self._waiting.append((value, label))
            return
        source, target = sender.process.node, sender.other.process.node
        arrival_s = max(self._world.now_s + self._network.delay(source, target), sender.last_arrival_s)
        sender.last_arrival_s = arrival_s
        sender.way.append((value, label))
        self._world.at(arrival_s, f"{source}>{target} {label}", self._deliver, sender)

    def _deliver(self, sender: End) -> None:
        """The oldest of what is under way arrives, unless the way is blocked: TCP sends again until it is free."""
        receiver = sender.other
        assert receiver is not None
        if not self.up or not receiver.process.alive:
            return
        source, target = sender.process.node, receiver.process.node
        if (source, target) in self._network.blocked:
            self._world.after(AGAIN_S, f"{source}>{target} again", self._deliver, sender)
            return
        value, label = sender.way.popleft()
        if value is _FIN:
            receiver.process.after(0, "closed", self._tell_closed, receiver)
        elif receiver.open:
            receiver.process.after(0, label, self._hand_over, receiver, value)

    def _hand_over(self, receiver: End, value: Any) -> None:
        if receiver.open:
            receiver.on_data(value)

    def _tell_closed(self, end: End) -> None:
        if end.open:
            end.open = False
            end.on_close()
        if self.up and not any(e.open for e in self.ends):
            self.up = False
            self._network.pipes.remove(self)

    def _on_death(self, end: End) -> None:
        if end.process.orderly and end.other is not None and end.other.open:
            end.close()
        else:
            self.reset()

    def cut(self) -> None:
        """A fault of the network, not the end of a process."""
        self._network._note_fault({(self.ends[0].process.node, self._address.partition(":")[0])})
        self.reset()

    def reset(self) -> None:
        """Everything under way is lost; each end hears of it in its own time."""
        if not self.up:
            return
        self.up = False
        self._network.pipes.remove(self)
        for end in self.ends:
            self._tell_reset(end)

    def _tell_reset(self, end: End) -> None:
        if not end.process.alive:
            return
        nodes = {e.process.node for e in self.ends}
        if len(nodes) == 2 and not self._network.reachable(*sorted(nodes)):
            self._world.after(AGAIN_S, f"{end.process.name} reset again", self._tell_reset, end)
            return
        end.process.after(self._network._draw.uniform(0, RESET_S), "reset", self._tell_closed, end)
