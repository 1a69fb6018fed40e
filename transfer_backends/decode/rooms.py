"""Decode's side of all transfers: handshakes, what was given to whom, and when given pages are safe again. Pure.

Told of local calls, look-up results, messages, lost links and time; answers by states (`state`, `drained`, ...) and by
`effects`. Runs the same under threads and in a simulation. Knows no sockets, threads, clocks or engines.

    receiver opened --route, session LIVE--> WaitingForInput --provide, first Status--> Transferring --> Success

Prefill may write a room's pages more than once (`retry`: the try that counts, the latest that it told of). What it says of
an earlier one is late: counted and dropped, so it can neither complete the transfer nor end the exposure of its pages.

Pages given by `provide` are exposed until prefill says Success or Drained, or is proven dead (`decode/sessions`). No timer
ends that: past `drain_timeout_s` the room counts as stuck, and its pages stay quarantined.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from transfer_backends.contract import Caps, KVArgs, Region, Route, TransferConfig, Work
from transfer_backends.decode.lookup_line import LookUpLine
from transfer_backends.decode.sessions import Effects, LinkId, LookUp, Phase, Session, SessionTable
from transfer_backends.kvpoll import FINAL, IllegalTransition, KVPoll, PeerProtocolError, RoomKey, TransferMachine
from transfer_backends.liveness import Liveness
from transfer_backends.wire import (
    Abort,
    Bye,
    Drained,
    Message,
    Nudge,
    Ping,
    Pong,
    Recompute,
    Refused,
    Register,
    Registered,
    Status,
    TransferInfo,
    WireRegion,
    clip,
    layout_of,
    pack_ids,
)

V = TypeVar("V")

MAX_SERVERS = 4096  # bootstrap servers that are remembered: requests name them
MAX_FAREWELLS = 4096  # rooms that were given up here before anybody could be told; the oldest are forgotten beyond it
FIRST_RETRY_S = 0.02
SCAN_S_A_ROOM = 50e-6  # deadlines of many rooms are looked at less often, so that ticks stay cheap
LONGEST_RETRY_S = 0.5


@dataclass
class Room:
    """`exposed`: prefill may write to the given pages. `asks`: this room's request to prefill is decode's own (any prefill

    worker will do, and what fails in the handshake fails at once: decode can help itself). `error`: what the handshake waits
    for, or why its last try failed; `failure`: the latter alone.
    """

    key: RoomKey
    bootstrap: str
    deadline_s: float
    asks: bool = False
    session: Session | None = None
    looking: bool = False
    retry_at_s: float | None = None
    retry_s: float = FIRST_RETRY_S
    error: str = "the bootstrap server has not answered"
    failure: str | None = None
    num_pages: int | None = None
    retry: int = 0
    exposed: bool = False
    reason: str | None = None
    progress_at_s: float = 0.0
    stuck_at_s: float | None = None
    closed: bool = False


class DecodeRooms:
    def __init__(
        self, *, incarnation: str, kv_args: KVArgs, caps: Caps, descriptor: bytes, config: TransferConfig
    ) -> None:
        layout = layout_of(kv_args, backend=caps.name)
        kv, aux = _wire(kv_args.kv), _wire(kv_args.aux)
        self.sessions = SessionTable(
            incarnation=incarnation,
            register=lambda dst: Register(incarnation, dst, layout, kv, aux, descriptor),
            settle_s=caps.settle_s,
            config=config,
        )
        self.machine = TransferMachine()
        self.num_exposed = 0
        self._args = kv_args
        self._config = config
        self._rooms: dict[RoomKey, Room] = {}
        self._farewells: dict[RoomKey, None] = {}  # closed rooms whose prefill worker is still being sought, to tell it
        self._next_scan_s = 0.0
        self._routes: dict[str, Route] = {}  # of bootstrap servers that know one prefill worker
        self._shared: dict[str, None] = {}  # bootstrap servers that know several: one look-up a room
        self._line = LookUpLine()
        self._handlers: dict[type, Callable[[Session, Any, float], None]] = {
            Registered: self._on_registered,
            Refused: self._on_refused,
            Status: self._on_status,
            Nudge: lambda session, message, now_s: self.sessions.on_nudge(now_s),
            Drained: self._on_drained,
            Ping: self._on_ping,
            Pong: lambda session, message, now_s: None,
            Bye: self._on_bye,
        }

    @property
    def effects(self) -> Effects:
        return self.sessions.effects

    @property
    def num_rooms(self) -> int:
        """Rooms that somebody here uses."""
        return len(self._rooms) - len(self._farewells)

    @property
    def num_farewells(self) -> int:
        return len(self._farewells)

    # ---- the role's calls

    def open(self, room: int, room_attempt: int, bootstrap: str, now_s: float) -> RoomKey:
        key = (room, room_attempt)
        self.machine.open(key)
        rec = Room(key, bootstrap, deadline_s=now_s + self._config.handshake_timeout_s, asks=room_attempt > 0)
        self._rooms[key] = rec
        self._seek(rec, now_s)
        return key

    def provide(
        self,
        key: RoomKey,
        dst_pages: Sequence[int],
        metadata_row: int,
        now_s: float,
        work: Work | None = None,
        *,
        skip_pages: int = 0,
    ) -> None:
        """`work`: to be computed, in a room that asks; it says by itself what is to be skipped."""
        rec = self._rooms[key]
        assert rec.asks == (work is not None), (
            f"room {key}: attempt 0 has a request at prefill, the others ask for work"
        )
        if self.machine.state(key) is KVPoll.Failed:
            return
        if self.machine.state(key) is not KVPoll.WaitingForInput or rec.num_pages is not None:
            raise IllegalTransition(f"room {key}: provide in {self.machine.state(key).name}, or twice")
        pages = np.asarray(dst_pages, dtype=np.int64)
        if len(pages) and not (pages.min() >= 0 and pages.max() < self._args.kv.num_items):
            raise ValueError(f"room {key}: a page is outside the pool of {self._args.kv.num_items}")
        if not 0 <= metadata_row < self._args.aux.num_items:
            raise ValueError(f"room {key}: metadata_row {metadata_row} is outside 0..{self._args.aux.num_items - 1}")
        assert rec.session is not None
        rec.num_pages = len(pages)
        rec.progress_at_s = now_s
        self._expose(rec, True)
        where = (*self._to(rec.session), *key, pack_ids(pages), metadata_row)
        info = TransferInfo(*where, skip_pages) if work is None else Recompute(*where, *_wire_work(work))
        self.sessions.say(rec.session, info)

    def abort(self, key: RoomKey, reason: str, now_s: float) -> None:
        if self.machine.state(key) not in FINAL:
            self._fail(self._rooms[key], reason, now_s, tell=True)

    def failure(self, key: RoomKey) -> str | None:
        return self._rooms[key].reason

    def retries(self, key: RoomKey) -> int:
        """Times that prefill began to write anew."""
        return self._rooms[key].retry

    def drained(self, key: RoomKey) -> bool:
        return self.machine.state(key) in FINAL and not self._rooms[key].exposed

    def close(self, key: RoomKey) -> None:
        """Of a room that was aborted before its prefill worker was found a farewell is left, for the rest of the handshake's

        time: it holds no memory, and tells that worker once it is found.
        """
        if not self.drained(key):
            raise RuntimeError(f"room {key}: closed in {self.machine.state(key).name} before its pages were drained")
        rec = self._rooms[key]
        rec.closed = True
        if not rec.looking and rec.retry_at_s is None:
            self._forget(rec)
            return
        self._farewells[key] = None
        if len(self._farewells) > MAX_FAREWELLS:
            self._forget(self._rooms[next(iter(self._farewells))])

    # ---- handshake

    def _seek(self, rec: Room, now_s: float) -> None:
        """Find the prefill worker: by a known route, a look-up under way for the same server, or a new one."""
        rec.retry_at_s = None
        route = self._routes.get(rec.bootstrap)
        if route is not None:
            self._attach(rec, route, now_s)
            return
        asked = any(other.looking for other in self._seekers(rec.bootstrap, None))
        rec.looking = True
        if not asked or rec.bootstrap in self._shared:
            self._look_up(rec)

    def _look_up(self, rec: Room) -> None:
        if self._line.begin(rec.bootstrap, rec.key):
            any_but = tuple(self.sessions.gone) if rec.asks else None
            self.effects.queue.append(LookUp(rec.bootstrap, rec.key[0], any_but))

    def _next_in_line(self, bootstrap: str) -> None:
        """A look-up has been answered: another room may have its own."""
        self._line.end(bootstrap)
        while (key := self._line.take(bootstrap)) is not None:
            rec = self._rooms[key]
            if rec.looking and rec.session is None:
                self._look_up(rec)
                return

    def _attach(self, rec: Room, route: Route, now_s: float) -> None:
        rec.looking, rec.retry_at_s = False, None
        if self.sessions.is_dead(route.incarnation, now_s):
            self._on_dead_owner(rec, route, now_s)
            return
        if self.sessions.get(route.incarnation) is None and len(self.sessions) >= self._config.max_peers:
            self._give_up(rec, f"decode talks to {len(self.sessions)} prefill workers, no more fit (max_peers)", now_s)
            return
        session = self.sessions.obtain(route, now_s)
        if session.phase is Phase.LOST or session.pulse.silent:
            self._drop_routes(session.incarnation)
            self._seek_again(rec, f"prefill worker {route.control} does not answer", now_s)
            return
        rec.session = session
        rec.error = f"prefill worker {route.control} has not answered the registration"
        if rec.failure is not None:
            rec.error += f" (the try before: {rec.failure})"
        if self.machine.state(rec.key) is KVPoll.Failed:
            self._tell_abort(rec, session)
        elif session.phase is Phase.LIVE:
            self.machine.move(rec.key, KVPoll.WaitingForInput)

    def _on_dead_owner(self, rec: Room, route: Route, now_s: float) -> None:
        """A route of this room alone: its request died with that worker. Else the next life may have it, and registers soon."""
        self._drop_routes(route.incarnation)
        error = f"prefill worker {route.control} has ended"
        if route.shared:
            self._give_up(rec, error, now_s)
        else:
            self._seek_again(rec, error, now_s)

    def on_route(self, bootstrap: str, room: int, route: Route, now_s: float) -> None:
        """The answer to a look-up; each has one, this or `on_lookup_failed`."""
        self._use_route(bootstrap, room, route, now_s)
        self._next_in_line(bootstrap)

    def _use_route(self, bootstrap: str, room: int, route: Route, now_s: float) -> None:
        if not route.shared:
            self._shared.pop(bootstrap, None)
            _keep(self._routes, bootstrap, route)
            for rec in self._seekers(bootstrap, None):
                self._attach(rec, route, now_s)
            return
        waiting = [] if bootstrap in self._shared else self._seekers(bootstrap, None)
        _keep(self._shared, bootstrap, None)
        for rec in self._seekers(bootstrap, room):
            self._attach(rec, route, now_s)
        for rec in waiting:
            if rec.looking:
                self._seek(rec, now_s)

    def on_lookup_failed(self, bootstrap: str, room: int, error: str, *, permanent: bool, now_s: float) -> None:
        for rec in self._seekers(bootstrap, room if bootstrap in self._shared else None):
            self._seek_again(rec, error, now_s)
            if permanent:
                self._give_up(rec, error, now_s)
        self._next_in_line(bootstrap)

    def _seekers(self, bootstrap: str, room: int | None) -> list[Room]:
        return [
            rec
            for rec in list(self._rooms.values())
            if rec.session is None
            and rec.bootstrap == bootstrap
            and (rec.looking or rec.retry_at_s is not None)
            and room in (None, rec.key[0])
        ]

    def _give_up(self, rec: Room, reason: str, now_s: float) -> None:
        rec.looking, rec.retry_at_s = False, None
        if self.machine.state(rec.key) is not KVPoll.Failed:
            self._fail(rec, reason, now_s, tell=True)
        self._forget_if_closed(rec)

    def _on_registered(self, session: Session, message: Registered, now_s: float) -> None:
        if session.phase is not Phase.CONNECTING:
            raise PeerProtocolError("registered twice")
        aborts = self.sessions.on_registered(session, message.mark)
        for key in aborts:
            self._say_abort(session, key, "aborted before the handshake")
        for rec in self._rooms_of(session):
            if self.machine.state(rec.key) is KVPoll.Bootstrapping:
                self.machine.move(rec.key, KVPoll.WaitingForInput)
            elif rec.exposed:
                self._say_abort(session, rec.key, rec.reason or "")

    def _on_refused(self, session: Session, message: Refused, now_s: float) -> None:
        """Stale: the life we knew is over, or forgot us; a look-up finds who is there now. Else refused for good."""
        another_life = message.src != session.incarnation
        if session.mark is not None or message.stale:
            self._lose(session, message.reason, now_s)
            if another_life:  # its address belongs to another process: that is proof
                self.sessions.on_proof(session.incarnation, Liveness.DEAD, now_s)
            return
        self._drop_routes(session.incarnation)
        self.sessions.drop(session)
        for rec in self._rooms_of(session):
            if self.machine.state(rec.key) not in FINAL:
                self._fail(rec, f"prefill worker refused: {message.reason}", now_s, tell=False)

    def _seek_again(self, rec: Room, error: str, now_s: float) -> None:
        if rec.asks:
            self._give_up(rec, error, now_s)
            return
        rec.session = None
        rec.looking = False
        rec.error = rec.failure = error
        rec.retry_at_s = now_s + rec.retry_s
        rec.retry_s = min(2 * rec.retry_s, LONGEST_RETRY_S)

    def _drop_routes(self, incarnation: str) -> None:
        for bootstrap in [b for b, route in self._routes.items() if route.incarnation == incarnation]:
            del self._routes[bootstrap]

    # ---- the control plane's calls

    def on_message(self, link: LinkId, message: Message, now_s: float) -> None:
        """Raises `PeerProtocolError` (nothing changed) for what the peer may not say now."""
        session = self.sessions.by_link(link)
        if session is None:
            return
        mine = message.dst == self.sessions.incarnation
        if not mine or (message.src != session.incarnation and not isinstance(message, Refused)):
            raise PeerProtocolError(f"{type(message).__name__} from or for another life of a process")
        handler = self._handlers.get(type(message))
        if handler is None:
            raise PeerProtocolError(f"{type(message).__name__} is not for a decode worker")
        session.pulse.heard()
        handler(session, message, now_s)

    def on_link_closed(self, link: LinkId, now_s: float, *, reason: str = "the connection was lost") -> None:
        session = self.sessions.by_link(link)
        if session is not None:
            self._lose(session, reason, now_s)

    def _lose(self, session: Session, why: str, now_s: float) -> None:
        self._drop_routes(session.incarnation)
        rooms = self._rooms_of(session)
        self.sessions.lose(session, now_s)
        why = f"prefill worker {session.route.control}: {why}"
        for rec in rooms:
            state = self.machine.state(rec.key)
            if state is KVPoll.Bootstrapping:
                self._seek_again(rec, why, now_s)
            elif state not in FINAL:
                self._fail(rec, why, now_s, tell=False)
        if session.phase is Phase.LOST and not any(rec.exposed for rec in rooms):
            self.sessions.drop(session)

    def on_proof(self, incarnation: str, proof: Liveness, now_s: float) -> None:
        self.sessions.on_proof(incarnation, proof, now_s)

    def _on_bye(self, session: Session, message: Bye, now_s: float) -> None:
        """Said after the last operation of that manager was final."""
        rooms = self._rooms_of(session)
        self._lose(session, "it shut down", now_s)
        self.sessions.bury(session.incarnation, now_s)
        for rec in rooms:
            self._expose(rec, False)
        if session.phase is not Phase.DEAD:
            self.sessions.drop(session)

    def _on_ping(self, session: Session, message: Ping, now_s: float) -> None:
        self.sessions.say(session, Pong(*self._to(session), message.seq))

    def _on_status(self, session: Session, message: Status, now_s: float) -> None:
        rec = self._addressed(session, message)
        if rec is None:
            return
        to, state = KVPoll(message.state), self.machine.state(rec.key)
        if state in FINAL:
            self._on_late_status(rec, to)
        elif to is KVPoll.Failed:
            self._fail(rec, message.reason or "prefill failed", now_s, tell=False)
        elif rec.num_pages is None or to not in (KVPoll.Transferring, KVPoll.Success):
            raise PeerProtocolError(f"room {rec.key}: {to.name} in {state.name}")
        else:
            self._advance(rec, to, message.num_pages, now_s)

    def _on_late_status(self, rec: Room, to: KVPoll) -> None:
        """Crossed our abort on its way. Success means that nothing is written any more."""
        self.effects.counters["late_messages"] += 1
        if to is KVPoll.Success:
            self._expose(rec, False)

    def _advance(self, rec: Room, to: KVPoll, num_pages: int, now_s: float) -> None:
        rec.progress_at_s = now_s
        if self.machine.state(rec.key) is KVPoll.WaitingForInput:
            self.machine.move_by_peer(rec.key, KVPoll.Transferring)
        if to is not KVPoll.Success:
            return
        self._expose(rec, False)
        if num_pages != rec.num_pages:
            reason = f"prefill wrote {num_pages} pages, {rec.num_pages} were given: the two prompts differ"
            self._fail(rec, reason, now_s, tell=False)
            return
        self.machine.move_by_peer(rec.key, KVPoll.Success)
        self.effects.counters["succeeded"] += 1

    def _on_drained(self, session: Session, message: Drained, now_s: float) -> None:
        rec = self._addressed(session, message)
        if rec is None:
            return
        if self.machine.state(rec.key) not in FINAL:
            raise PeerProtocolError(f"room {rec.key}: Drained in {self.machine.state(rec.key).name}")
        self._expose(rec, False)

    def _addressed(self, session: Session, message: Status | Drained) -> Room | None:
        """The room a message is about, which now knows its try; None (counted) where it is late: the room has been closed

        or is somebody else's, or the message is about an earlier try.
        """
        rec = self._rooms.get((message.room, message.attempt))
        if rec is None or rec.session is not session or message.retry < rec.retry:
            self.effects.counters["late_messages"] += 1
            return None
        if message.retry > rec.retry and rec.num_pages is None:
            raise PeerProtocolError(f"room {rec.key}: try {message.retry} before it had pages to write")
        self.effects.counters["retried"] += message.retry - rec.retry
        rec.retry = message.retry
        return rec

    # ---- time

    def tick(self, now_s: float) -> None:
        silent, overdue, dead = self.sessions.tick(now_s)
        for session in overdue:
            self._lose(session, "it has not answered the registration", now_s)
        for session in silent:
            self._on_silent(session, now_s)
        for session in dead:
            for rec in self._rooms_of(session):
                self._expose(rec, False)
        if now_s >= self._next_scan_s:
            self._next_scan_s = now_s + SCAN_S_A_ROOM * len(self._rooms)
            for rec in list(self._rooms.values()):
                self._check_deadline(rec, now_s)

    def _on_silent(self, session: Session, now_s: float) -> None:
        """It may still live and write: fail its rooms, keep the link (its acknowledgements may yet come)."""
        for rec in self._rooms_of(session):
            if self.machine.state(rec.key) not in FINAL:
                self._fail(rec, f"prefill worker {session.route.control} does not answer", now_s, tell=True)

    def _check_deadline(self, rec: Room, now_s: float) -> None:
        state = self.machine.state(rec.key)
        if rec.retry_at_s is not None and rec.retry_at_s <= now_s < rec.deadline_s:
            self._seek(rec, now_s)
        seeking = state is KVPoll.Bootstrapping or rec.looking or rec.retry_at_s is not None
        if seeking and now_s >= rec.deadline_s:
            self._give_up(rec, f"handshake timed out after {self._config.handshake_timeout_s:g} s: {rec.error}", now_s)
        elif state is KVPoll.WaitingForInput and rec.num_pages is not None:
            self._limit(rec, self._config.waiting_timeout_s, "prefill sent nothing", now_s)
        elif state is KVPoll.Transferring:
            self._limit(rec, self._config.transfer_timeout_s, "the transfer made no progress", now_s)
        elif rec.exposed and rec.stuck_at_s is not None and now_s >= rec.stuck_at_s:
            rec.stuck_at_s = None
            self.effects.counters["stuck_rooms"] += 1

    def _limit(self, rec: Room, timeout_s: float, what: str, now_s: float) -> None:
        if now_s - rec.progress_at_s >= timeout_s:
            self._fail(rec, f"{what} for {timeout_s:g} s", now_s, tell=True)

    # ---- inside

    def _fail(self, rec: Room, reason: str, now_s: float, *, tell: bool) -> None:
        self.machine.move(rec.key, KVPoll.Failed)
        self.effects.counters["failed"] += 1
        rec.reason = reason
        rec.stuck_at_s = now_s + self._config.drain_timeout_s
        if tell and rec.session is not None:
            self._tell_abort(rec, rec.session)

    def _tell_abort(self, rec: Room, session: Session) -> None:
        if session.phase is Phase.LIVE:
            self._say_abort(session, rec.key, rec.reason or "")
        elif session.phase is Phase.CONNECTING and not rec.exposed:
            session.aborts.append(rec.key)
        self._forget_if_closed(rec)

    def _say_abort(self, session: Session, key: RoomKey, reason: str) -> None:
        rec = self._rooms.get(key)
        retry = 0 if rec is None else rec.retry
        self.sessions.say(session, Abort(*self._to(session), *key, clip(reason), retry))

    def _to(self, session: Session) -> tuple[str, str]:
        return self.sessions.incarnation, session.incarnation

    def _expose(self, rec: Room, exposed: bool) -> None:
        self.num_exposed += int(exposed) - int(rec.exposed)
        if rec.exposed != exposed:
            rec.exposed = exposed
            self.machine.touch()

    def _rooms_of(self, session: Session) -> list[Room]:
        return [rec for rec in self._rooms.values() if rec.session is session]

    def _forget_if_closed(self, rec: Room) -> None:
        if rec.closed and rec.key in self._rooms:
            self._forget(rec)

    def _forget(self, rec: Room) -> None:
        self.machine.forget(rec.key)
        del self._rooms[rec.key]
        self._farewells.pop(rec.key, None)
        self._line.leave(rec.bootstrap, rec.key)

    def check(self) -> list[str]:
        """What is inconsistent; empty when all is well."""
        problems = self.sessions.check() + self._line.check(self._rooms)
        if list(self.machine) != list(self._rooms):
            problems.append("rooms and states differ")
        if sum(rec.exposed for rec in self._rooms.values()) != self.num_exposed:
            problems.append("count of exposed rooms is off")
        if list(self._farewells) != [key for key in self._farewells if key in self._rooms and self._rooms[key].closed]:
            problems.append("a farewell of a room that is not closed")
        for rec in self._rooms.values():
            if rec.exposed and self.machine.state(rec.key) is KVPoll.Success:
                problems.append(f"room {rec.key}: Success with exposed pages")
        return problems


def _wire_work(work: Work) -> tuple[bytes, int, int, bool]:
    return pack_ids(np.asarray(work.tokens, dtype=np.int64)), work.skip_pages, work.priority, work.share


def _wire(region: Region) -> WireRegion:
    return WireRegion(region.base_ptr, region.num_items, region.item_bytes, region.device)


def _keep(table: dict[str, V], name: str, value: V) -> None:
    """The latest `MAX_SERVERS`."""
    table.pop(name, None)
    table[name] = value
    while len(table) > MAX_SERVERS:
        del table[next(iter(table))]
