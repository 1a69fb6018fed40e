"""Thread of one side's control plane, and the lock around its core."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

from transfer_backends.contract import Clock
from transfer_backends.control_port import Event, Frame, LinkClosed, PeersRefused, Port
from transfer_backends.sides import Effects, Link, PeerProtocolError, PeerTable, RoomTable, Send
from transfer_backends.wire import MalformedFrame, Message, decode, encode

TICK_S = 0.02
REST_S = 5.0  # longest pause while nothing but heartbeats is due
LOG_EVERY_S = 5.0
CLOSE_S = 5.0  # for each part of the shutdown
FAULTS = ("control_errors", "refused_connections", "junk_frames", "protocol_errors")  # counted

log = logging.getLogger(__name__)


class Core(Protocol):
    """One side of all transfers."""

    @property
    def rooms(self) -> RoomTable[Any]: ...
    @property
    def effects(self) -> Effects: ...
    @property
    def peers(self) -> PeerTable[Any]: ...
    @property
    def gauges(self) -> dict[str, int]: ...
    @property
    def is_quiet(self) -> bool: ...
    @property
    def rests(self) -> bool: ...
    def on_message(self, link: Any, message: Message, now_s: float) -> None: ...
    def on_link_closed(self, link: Any, now_s: float, *, refused: bool = False) -> None: ...
    def tick(self, now_s: float) -> None: ...
    def abort_all(self, reason: str, now_s: float) -> None: ...
    def send_bye(self) -> None: ...
    def check(self) -> None: ...


@dataclass(eq=False)
class ControlThread:
    """Loop that feeds messages to a core, ticks it and sends its effects.

    `execute` returns a command's link if lost. `pause_s`: maximum wait.
    """

    core: Core
    port: Port
    _: KW_ONLY
    name: str
    clock: Clock
    execute: Callable[[Any], Link | None] = lambda command: None
    on_turn: Callable[[], None] = lambda: None
    pause_s: Callable[[], float] = lambda: TICK_S

    def __post_init__(self) -> None:
        self.wakeup: Callable[[], None] = lambda: None  # called when a state has changed; from any thread
        self.faults = dict.fromkeys(FAULTS, 0)
        self.lock = threading.Lock()  # for reads; `locked` for calls that may change something
        self._stop = threading.Event()
        self._closed = False
        self._rests = False  # in a long pause
        self._next_tick_s = 0.0
        self._next_log_s = 0.0
        self._num_unlogged = 0
        self._thread = threading.Thread(target=self._run, name=f"{self.name}-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @contextlib.contextmanager
    def locked(self) -> Iterator[float]:
        """Yield the time; then wake this thread and the role if needed."""
        rooms = self.core.rooms
        with self.lock:
            before = rooms.num_moves
            try:
                yield self.clock()
            finally:
                changed = rooms.num_moves != before
                pending = self.has_effects or (self._rests and not self.core.rests)
                self._rests = self._rests and not pending
        if pending and threading.current_thread() is not self._thread:
            self.port.wake()
        if changed:
            self.wakeup()

    @property
    def has_effects(self) -> bool:
        return bool(self.core.effects.queue)

    def turn(self, timeout_s: float) -> None:
        events = self.port.poll(timeout_s)
        with self.locked() as now_s:
            for event in events:
                self._on_event(event, now_s)
            if now_s >= self._next_tick_s:
                self._next_tick_s = now_s + TICK_S
                self.core.tick(now_s)
        self._flush()
        self.on_turn()

    def check(self) -> None:
        with self.lock:
            self.core.check()
        errors = self.faults["control_errors"]
        assert not errors, f"{errors} internal errors of the control thread, see the log"

    @property
    def counters(self) -> dict[str, int]:
        with self.lock:
            return {**self.core.effects.counters, **self.faults, **self.core.gauges}

    # ---- the end

    def first_close(self) -> bool:
        with self.lock:
            first, self._closed = not self._closed, True
        return first

    def abort_all(self) -> None:
        with self.locked() as now_s:
            self.core.abort_all(f"the {self.name} worker is shutting down", now_s)

    @property
    def is_quiet(self) -> bool:
        with self.lock:
            return self.core.is_quiet

    def drain(self) -> bool:
        """True if writes end within `CLOSE_S`."""
        deadline_s = time.monotonic() + CLOSE_S
        while not self.is_quiet and time.monotonic() < deadline_s:
            time.sleep(0.001)
        return self.is_quiet

    def send_bye(self) -> None:
        """Send `Bye`: no write is in flight. Without it peers need proof of death."""
        with self.locked():
            self.core.send_bye()

    def close(self) -> None:
        self._stop.set()
        self.port.wake()
        if self._thread.ident is None:
            self.port.close()
        else:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.turn(self._wait_s())
            except Exception:  # our own bug must not end the control plane of all other rooms
                self._fault("control_errors", "control thread: an error was survived", exc_info=True)
        with contextlib.suppress(Exception):
            self._flush()
        self.port.close()

    def _wait_s(self) -> float:
        pause_s = self.pause_s()
        return pause_s if pause_s < TICK_S else max(pause_s, self._rest_s())

    def _rest_s(self) -> float:
        """Time until something is due, or 0; `locked` ends the pause."""
        with self.lock:
            self._rests = self.core.rests and not self.has_effects
            due_s = self.core.peers.next_ping_s - self.clock()
            return max(0.0, min(due_s, REST_S)) if self._rests else 0.0

    def _on_event(self, event: Event, now_s: float) -> None:
        if isinstance(event, Frame):
            self._read(event, now_s)
        elif isinstance(event, LinkClosed):
            self.core.on_link_closed(event.link, now_s, refused=event.refused)
        elif isinstance(event, PeersRefused):
            text = "a stranger at the control plane was refused (do all workers have the same --cluster-secret-file?)"
            self._fault("refused_connections", text, count=event.count)
        else:
            self.core.peers.on_some_link_closed()

    def _read(self, frame: Frame, now_s: float) -> None:
        try:
            self.core.on_message(frame.link, decode(frame.data), now_s)
        except MalformedFrame as error:
            self._fault("junk_frames", f"a malformed control frame was dropped: {error}")
        except PeerProtocolError as error:
            self._fault("protocol_errors", f"a control message was dropped: {error}")

    def _flush(self) -> None:
        while effects := self._take_effects():
            lost = [link for effect in effects if (link := self._do(effect)) is not None]
            if lost:
                with self.locked() as now_s:
                    for link in lost:
                        self.core.on_link_closed(link, now_s)

    def _take_effects(self) -> list[Any]:
        with self.lock:
            taken = list(self.core.effects.queue)
            self.core.effects.queue.clear()
        return taken

    def _do(self, effect: Any) -> Link | None:
        if not isinstance(effect, Send):
            return self.execute(effect)
        return None if self.port.send(effect.link, encode(effect.message)) else effect.link

    def _fault(self, counter: str, text: str, *, count: int = 1, exc_info: bool = False) -> None:
        self.faults[counter] += count
        self._num_unlogged += count
        now_s = self.clock()
        if now_s >= self._next_log_s:
            self._next_log_s = now_s + LOG_EVERY_S
            log.warning("%s: %s (%d since the last such line)", self.name, text, self._num_unlogged, exc_info=exc_info)
            self._num_unlogged = 0


class Manager:
    """One side of all transfers, by its control thread."""

    control: ControlThread

    def start(self) -> None:
        self.control.start()

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """`wakeup` is called in any thread, and must not block."""
        self.control.wakeup = wakeup

    def check(self) -> None:
        self.control.check()

    @property
    def counters(self) -> dict[str, int]:
        return self.control.counters
