"""State of one side of transfers: rooms with their states, peers with their links. Pure."""

import math
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

from transfer_backends.contract import TransferConfig
from transfer_backends.wire import Message, Ping, Pong

# ---- state of a transfer

RoomKey = tuple[int, int]  # (bootstrap_room, room_attempt)


class KVPoll(IntEnum):
    """State of a transfer, and its transitions.

    Names and values are SGLang's (`disaggregation/base/conn.py`); ranks agree on the minimum.

        Bootstrapping --> WaitingForInput --> Transferring --> Success
              |                 |                  |
              +-----------------+------------------+---------> Failed
    """

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


FINAL = frozenset({KVPoll.Failed, KVPoll.Success})

TRANSITIONS: dict[KVPoll, frozenset[KVPoll]] = {
    KVPoll.Bootstrapping: frozenset({KVPoll.WaitingForInput, KVPoll.Failed}),
    KVPoll.WaitingForInput: frozenset({KVPoll.Transferring, KVPoll.Failed}),
    KVPoll.Transferring: frozenset({KVPoll.Success, KVPoll.Failed}),
    KVPoll.Success: frozenset(),
    KVPoll.Failed: frozenset(),
}


class IllegalTransition(Exception):
    """A move that is not in the table. Nothing changed."""


class PeerProtocolError(Exception):
    """A peer sent a message that is not allowed now. Counted and dropped."""


class RoomInUse(ValueError):
    """The room serves another transfer."""


# ---- rooms


@dataclass(eq=False)
class Room:
    """Transfer of either side; `reason` of its failure."""

    key: RoomKey
    _: KW_ONLY
    state: KVPoll = KVPoll.Bootstrapping
    reason: str | None = None
    progress_at_s: float = 0.0

    @property
    def final(self) -> bool:
        return self.state in FINAL


R = TypeVar("R", bound=Room)


class RoomTable(Generic[R]):
    def __init__(self) -> None:
        self.num_moves = 0  # only grows; shows that a visible state changed
        self._rooms: dict[RoomKey, R] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def __iter__(self) -> Iterator[R]:
        return iter(list(self._rooms.values()))

    def __getitem__(self, key: RoomKey) -> R:
        return self._rooms[key]

    def get(self, key: RoomKey) -> R | None:
        return self._rooms.get(key)

    def add(self, room: R) -> None:
        """Raises `RoomInUse`, and ValueError for an invalid number."""
        number, attempt = room.key
        if not 0 < number < 2**63 or attempt < 0:
            raise ValueError(f"bootstrap_room must be between 1 and 2**63-1 and attempt at least 0, got {room.key}")
        if room.key in self._rooms:
            raise RoomInUse(f"bootstrap_room {number} (attempt {attempt}) is in use on this worker")
        self._rooms[room.key] = room
        self.touch()

    def move(self, room: R, to: KVPoll) -> None:
        """Raises `IllegalTransition`."""
        if to not in TRANSITIONS[room.state]:
            raise IllegalTransition(f"room {room.key}: {room.state.name} -> {to.name}")
        room.state = to
        self.touch()

    def touch(self) -> None:
        self.num_moves += 1

    def forget(self, room: R) -> None:
        if not room.final:
            raise IllegalTransition(f"room {room.key}: forgotten in {room.state.name}")
        del self._rooms[room.key]


# ---- timers: retries, heartbeats, running time

MAX_A_TICK_S = 0.1  # counted between ticks, which are more frequent while anything waits


class RetryTimer:
    """Exponential backoff; `at_s` is the next try."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self.at_s: float | None = None
        self._first_s = self._wait_s = first_s
        self._longest_s = longest_s

    def plan(self, now_s: float) -> None:
        self.at_s = now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, self._longest_s)

    def due(self, now_s: float) -> bool:
        return self.at_s is not None and now_s >= self.at_s

    def reset(self) -> None:
        self._wait_s = self._first_s


class Heartbeat:
    """Misses are counted per ping, not by the clock: a stall of our own process costs one."""

    def __init__(self, *, interval_s: float, max_failures: int, now_s: float) -> None:
        self._interval_s = interval_s
        self._max_failures = max_failures
        self.next_s = now_s + interval_s
        self._misses = 0
        self.seq = 0
        self.message_at_s = now_s

    @property
    def silent(self) -> bool:
        return self._misses > self._max_failures

    def on_message(self, now_s: float) -> None:
        self._misses, self.message_at_s = 0, now_s

    def due(self, now_s: float) -> bool:
        """A ping is due. Call once per interval, after reading all messages."""
        if now_s < self.next_s:
            return False
        self.next_s = now_s + self._interval_s
        self._misses += 1
        self.seq += 1
        return True


class RunningTime:
    """Time in which this process ran: between ticks, up to `MAX_A_TICK_S` each.

    The clock also runs while a machine sleeps, when no bytes move.
    """

    def __init__(self) -> None:
        self._counted_s = 0.0
        self._ticked_s: float | None = None

    def tick(self, now_s: float) -> None:
        self._counted_s, self._ticked_s = self.at(now_s), now_s

    def at(self, now_s: float) -> float:
        if self._ticked_s is None:
            return self._counted_s
        return self._counted_s + min(max(0.0, now_s - self._ticked_s), MAX_A_TICK_S)


# ---- peers, the workers of the other side
#
# A peer is one incarnation of a process; its link is its current connection.
#
#     CONNECTING --registered--> LIVE --link closed--> LOST --new link--> CONNECTING or LIVE

Link = Hashable
NUM_LINK_CHECKS = 3  # pings on every link after one closed: a send to the closed one fails


class Send(NamedTuple):
    link: Link
    message: Message


# Counters of either side. Others are a KeyError: each needs a metric.
COUNTERS = (
    *("succeeded", "failed", "retried", "late_messages", "stuck_rooms", "sessions_lost"),  # decode's first
    *("posts", "posts_of_followers", "failed_posts", "bytes", "late_completions", "fence_failures", "nudges"),
    *("peers_lost", "orphans_expired", "refused", "connect_failures"),
)


@dataclass
class Effects:
    queue: deque[Any] = field(default_factory=deque)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))


@dataclass(eq=False)
class Peer:
    """Peer of either side, to register by `deadline_s`."""

    incarnation: str
    heartbeat: Heartbeat
    deadline_s: float
    link: Link | None = None
    registered: bool = False

    @property
    def lost(self) -> bool:
        return self.link is None

    @property
    def live(self) -> bool:
        return self.registered and not self.lost

    @property
    def answers(self) -> bool:
        return not self.lost and not self.heartbeat.silent


P = TypeVar("P", bound=Peer)


class PeerTable(Generic[P]):
    def __init__(self, *, incarnation: str, config: TransferConfig) -> None:
        self.incarnation = incarnation
        self.effects = Effects()
        self._config = config
        self._peers: dict[str, P] = {}
        self._by_link: dict[Link, P] = {}
        self._link_checks = 0

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[P]:
        return iter(list(self._peers.values()))

    def __contains__(self, peer: P) -> bool:
        return self._peers.get(peer.incarnation) is peer

    def get(self, incarnation: str) -> P | None:
        return self._peers.get(incarnation)

    def by_link(self, link: Link) -> P | None:
        return self._by_link.get(link)

    def linked(self) -> list[P]:
        """Peers that are not lost, in the order of their links."""
        return list(self._by_link.values())

    @property
    def is_full(self) -> bool:
        return len(self._peers) >= self._config.max_peers

    def heartbeat(self, now_s: float) -> Heartbeat:
        config = self._config
        return Heartbeat(
            interval_s=config.heartbeat_interval_s, max_failures=config.heartbeat_max_failures, now_s=now_s
        )

    def add(self, peer: P) -> None:
        self._peers[peer.incarnation] = peer

    def join(self, peer: P, link: Link) -> None:
        self.part(peer)
        peer.link = link
        self._by_link[link] = peer

    def part(self, peer: P) -> None:
        if peer.link is not None:
            del self._by_link[peer.link]
            peer.link = None

    def drop(self, peer: P) -> None:
        self.part(peer)
        del self._peers[peer.incarnation]

    def send(self, peer: P, message: Message) -> None:
        if peer.link is not None:
            self.effects.queue.append(Send(peer.link, message))

    def on_ping(self, peer: P, message: Ping, now_s: float) -> None:
        self.send(peer, Pong(*self.address(peer), message.seq))

    def address(self, peer: P) -> tuple[str, str]:
        return self.incarnation, peer.incarnation

    def beat(self, now_s: float) -> list[P]:
        """Ping the peers that are due; return the silent ones."""
        silent = []
        for peer in self:
            if peer.live and peer.heartbeat.due(now_s):
                self.send(peer, Ping(*self.address(peer), peer.heartbeat.seq))
                if peer.heartbeat.silent:
                    silent.append(peer)
        return silent

    @property
    def next_ping_s(self) -> float:
        return min((peer.heartbeat.next_s for peer in self._peers.values() if peer.live), default=math.inf)

    @property
    def rests(self) -> bool:
        """Only pings are due."""
        return not self._link_checks and all(peer.live for peer in self._peers.values())

    def on_some_link_closed(self) -> None:
        """Ping every link, since the closed one is unknown."""
        self._link_checks = NUM_LINK_CHECKS

    def check_links(self) -> None:
        if self._link_checks:
            self._link_checks -= 1
            for peer in self.linked():
                self.send(peer, Ping(*self.address(peer), 0))

    def check(self) -> None:
        linked = {peer.link: peer for peer in self._peers.values() if peer.link is not None}
        assert linked == self._by_link, "the table of links and the table of peers differ"
