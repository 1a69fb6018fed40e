"""The prefill workers that a decode worker talks to: sessions, registration, heartbeats, proof of death. Pure.

A session belongs to one life of a prefill process (its incarnation); its link is the connection of now. Rooms are not
known here: `decode/rooms` reacts to what the methods return.

    CONNECTING --Registered--> LIVE --link closed--> LOST --proof of death, settled--> DEAD (dropped)
        |                                              +--alive--> CONNECTING (the same life answers again)
        +--Refused, link closed--> dropped (and knocked at: is there anybody?)

An incarnation names one life, so whoever is known to have died or said goodbye is not dialled again for as long as a
bootstrap server may still list it. Not for ever: a port that refuses may be a firewall's word, and that worker lives.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from transfer_backends.contract import Route, TransferConfig
from transfer_backends.heartbeat import Heartbeat
from transfer_backends.kvpoll import RoomKey
from transfer_backends.liveness import UNMARKED, Liveness, ProcessMark
from transfer_backends.running_time import RunningTime
from transfer_backends.wire import Message, Ping, Register

NUM_GONE = 32
MAX_DEAD = 256
DEAD_S = 60.0  # longer than the lease by which a bootstrap server lists somebody
FIRST_PROOF_S = 0.02
LONGEST_PROOF_S = 1.0
EAGER_S = 0.25  # after a nudge; the next comes sooner while it is needed
LinkId = int


class Phase(Enum):
    CONNECTING = "connecting"
    LIVE = "live"
    LOST = "lost"
    DEAD = "dead"


@dataclass
class Session:
    """`link`: the connection's number, None while there is none. `aborts`: rooms to abort once it is LIVE."""

    route: Route
    pulse: Heartbeat
    link: LinkId | None = None
    phase: Phase = Phase.CONNECTING
    mark: ProcessMark | None = None
    aborts: list[RoomKey] = field(default_factory=list)
    proof_at_s: float | None = None
    proof_s: float = FIRST_PROOF_S
    settled_at_s: float | None = None  # in running time
    deadline_s: float = 0.0  # of the registration

    @property
    def incarnation(self) -> str:
        return self.route.incarnation


@dataclass(frozen=True)
class LookUp:
    """Ask the bootstrap server off-thread; answer `on_route` or `on_lookup_failed`.

    `any_but`: the room's own prefill worker, or any other whose incarnation is not one of these. None: its own only.
    """

    bootstrap: str
    room: int
    any_but: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Connect:
    link: LinkId
    control: str


@dataclass(frozen=True)
class Disconnect:
    """After what was said on the link before it has gone out."""

    link: LinkId


@dataclass(frozen=True)
class Prove:
    """Find out off-thread whether the process lives; answer `on_proof`."""

    incarnation: str
    mark: ProcessMark
    control: str


Command = LookUp | Connect | Disconnect | Prove


@dataclass
class Effects:
    """What the shell owes. `outbox` and `commands` are one queue: a link is connected before it is spoken on."""

    queue: deque[Command | tuple[LinkId, Message]] = field(default_factory=deque)
    counters: Counter[str] = field(default_factory=Counter)


class SessionTable:
    def __init__(
        self, *, incarnation: str, register: Callable[[str], Register], settle_s: float, config: TransferConfig
    ) -> None:
        """`register(dst)` makes the registration message for the prefill incarnation `dst`."""
        self.incarnation = incarnation
        self.effects = Effects()
        self._register = register
        self._settle_s = settle_s
        self._ran = RunningTime()
        self._config = config
        self._sessions: dict[str, Session] = {}
        self._by_link: dict[LinkId, Session] = {}
        self._next_link: LinkId = 1
        self.gone: deque[str] = deque(
            maxlen=NUM_GONE
        )  # incarnations that a recompute need not be sent to, the last ones
        self._eager_until_s = 0.0
        self._dead: dict[str, float] = {}  # incarnations that are proven to have ended, until when that is remembered

    def get(self, incarnation: str) -> Session | None:
        return self._sessions.get(incarnation)

    def is_dead(self, incarnation: str, now_s: float) -> bool:
        return now_s < self._dead.get(incarnation, now_s)

    def bury(self, incarnation: str, now_s: float) -> None:
        """It has ended for good."""
        self._dead.pop(incarnation, None)
        self._dead[incarnation] = now_s + DEAD_S
        while self._dead and (len(self._dead) > MAX_DEAD or next(iter(self._dead.values())) <= now_s):
            del self._dead[next(iter(self._dead))]

    def by_link(self, link: LinkId) -> Session | None:
        return self._by_link.get(link)

    def __len__(self) -> int:
        return len(self._sessions)

    def eager(self, now_s: float) -> bool:
        """The engine is to be driven often: a path is tried out, or a prefill worker waits for its writes to end.

        Not whenever something may be written: within a machine and over RDMA writes end without us, and each look at the
        engine interrupts a decode step.
        """
        return now_s < self._eager_until_s or any(s.phase is Phase.CONNECTING for s in self._sessions.values())

    def on_nudge(self, now_s: float) -> None:
        self._eager_until_s = now_s + EAGER_S

    def live(self) -> list[Session]:
        return [s for s in self._sessions.values() if s.phase is Phase.LIVE]

    def say(self, session: Session, message: Message) -> None:
        if session.link is not None:
            self.effects.queue.append((session.link, message))

    def obtain(self, route: Route, now_s: float) -> Session:
        session = self._sessions.get(route.incarnation)
        if session is None:
            pulse = Heartbeat(
                interval_s=self._config.heartbeat_interval_s,
                max_failures=self._config.heartbeat_max_failures,
                now_s=now_s,
            )
            session = Session(route, pulse)
            self._sessions[route.incarnation] = session
            self._connect(session, now_s)
        return session

    def _connect(self, session: Session, now_s: float) -> None:
        session.deadline_s = now_s + self._config.handshake_timeout_s
        session.link = self._next_link
        session.phase = Phase.CONNECTING
        self._next_link += 1
        self._by_link[session.link] = session
        self.effects.queue.append(Connect(session.link, session.route.control))
        self.say(session, self._register(session.incarnation))

    def _unlink(self, session: Session) -> None:
        if session.link is not None:
            del self._by_link[session.link]
            self.effects.queue.append(Disconnect(session.link))
            session.link = None

    def on_registered(self, session: Session, mark: ProcessMark) -> list[RoomKey]:
        """Returns the rooms whose abort was waiting for the session."""
        session.phase = Phase.LIVE
        self._dead.pop(session.incarnation, None)
        session.mark = mark
        session.proof_s = FIRST_PROOF_S
        session.pulse.heard()
        aborts, session.aborts = session.aborts, []
        return aborts

    def drop(self, session: Session) -> None:
        """Forget the session (refused, never registered, or dead)."""
        self._unlink(session)
        session.phase = Phase.DEAD
        del self._sessions[session.incarnation]
        self.gone.append(session.incarnation)

    def lose(self, session: Session, now_s: float) -> None:
        """The link closed. A session that never lived is dropped; the other needs proof of what became of the peer."""
        self.effects.counters["sessions_lost"] += 1
        if session.mark is None:
            self.drop(session)
            self.effects.queue.append(Prove(session.incarnation, UNMARKED, session.route.control))
            return
        self._unlink(session)
        session.phase = Phase.LOST
        session.proof_at_s = now_s + session.proof_s
        session.proof_s = min(2 * session.proof_s, LONGEST_PROOF_S)

    def on_proof(self, incarnation: str, proof: Liveness, now_s: float) -> None:
        session = self._sessions.get(incarnation)
        if proof is Liveness.DEAD and (session is None or session.phase is not Phase.LIVE):  # else it has come late
            self.bury(incarnation, now_s)
        if session is None or session.phase is not Phase.LOST or session.settled_at_s is not None:
            return
        if proof is Liveness.DEAD:
            session.settled_at_s = self._ran.at(now_s) + self._settle_s
        elif proof is Liveness.ALIVE:
            self._connect(session, now_s)
        else:
            session.proof_at_s = now_s + session.proof_s
            session.proof_s = min(2 * session.proof_s, LONGEST_PROOF_S)

    def tick(self, now_s: float) -> tuple[list[Session], list[Session], list[Session]]:
        """Sessions (whose peer does not answer, whose registration is overdue, that became DEAD and are dropped)."""
        self._ran.tick(now_s)
        silent, overdue, dead = [], [], []
        for session in list(self._sessions.values()):
            if session.phase is Phase.LIVE and session.pulse.due(now_s):
                self.say(session, Ping(self.incarnation, session.incarnation, session.pulse.seq))
                if session.pulse.silent:
                    silent.append(session)
            elif session.phase is Phase.CONNECTING and now_s >= session.deadline_s:
                overdue.append(session)
            elif session.phase is Phase.LOST and self._is_dead(session, now_s):
                self.drop(session)
                dead.append(session)
        return silent, overdue, dead

    def _is_dead(self, session: Session, now_s: float) -> bool:
        if session.settled_at_s is not None:
            return self._ran.at(now_s) >= session.settled_at_s
        if session.proof_at_s is not None and now_s >= session.proof_at_s:
            assert session.mark is not None
            session.proof_at_s = None
            self.effects.queue.append(Prove(session.incarnation, session.mark, session.route.control))
        return False

    def check(self) -> list[str]:
        return [
            f"session {s.incarnation}: link table is off"
            for s in self._sessions.values()
            if (s.link is None) != (s.phase is Phase.LOST)
            or (s.link is not None and self._by_link.get(s.link) is not s)
        ]
