"""What both managers share: one lock around the pure core, the control thread, wake-ups, and what to do with junk.

The scheduler's calls take the lock for microseconds; sockets belong to the control thread alone. Subclasses say what
frames and links mean to their core.
"""

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from transfer_backends.contract import Clock, TransferConfig
from transfer_backends.control_port import Event
from transfer_backends.kvpoll import PeerProtocolError, TransferMachine
from transfer_backends.wire import MalformedFrame, Message, decode

TICK_S = 0.02
LOG_EVERY_S = 5.0
JOIN_S = 5.0

log = logging.getLogger(__name__)


class Port(Protocol):
    """A `ListenPort` or a `ConnectPort`."""

    @property
    def wake(self) -> Callable[[], None]: ...
    def poll(self, timeout_s: float) -> list[Event]: ...
    def close(self) -> None: ...


class Shell:
    """Runs a core under real time. `name` goes into thread names and log lines."""

    def __init__(
        self, *, name: str, port: Port, machine: TransferMachine, config: TransferConfig, clock: Clock
    ) -> None:
        self._name = name
        self._port = port
        self._machine = machine
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._wakeup: Callable[[], None] = lambda: None
        self._stop = threading.Event()
        self._closed = False
        self._next_tick_s = 0.0
        self._next_log_s = 0.0
        self._num_unlogged = 0
        self._faults: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name=f"{name}-control", daemon=True)

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """`wakeup` is called (from any thread, must not block) whenever a state that `poll` shows has changed."""
        self._wakeup = wakeup

    @contextlib.contextmanager
    def core(self) -> Iterator[float]:
        """The core, locked; yields the time. Tells those who wait when something changed."""
        with self._lock:
            before = self._machine.num_moves
            try:
                yield self._clock()
            finally:
                changed = self._machine.num_moves != before
                pending = self._has_effects()
        if pending and threading.current_thread() is not self._thread:
            self._port.wake()
        if changed:
            self._wakeup()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.turn(self._pause_s())
            except Exception:  # a bug of ours must not end the control plane of all other rooms
                self._fault("control_errors", "control thread: an error was survived", exc_info=True)
        with contextlib.suppress(Exception):
            self._flush()
        self._port.close()

    def turn(self, timeout_s: float) -> None:
        """One turn of the control thread: wait for events, handle all that came, tick when due, send what is owed."""
        events = self._port.poll(timeout_s)
        with self.core() as now_s:
            for event in events:
                self._on_event(event, now_s)
            if now_s >= self._next_tick_s:
                self._next_tick_s = now_s + TICK_S
                self._tick(now_s)
        self._flush()

    def _read(self, data: bytes, take: Callable[[Message], None]) -> None:
        """Decode a frame and hand it on; junk and protocol errors are counted and dropped."""
        try:
            take(decode(data))
        except MalformedFrame as error:
            self._fault("junk_frames", f"a malformed control frame was dropped: {error}")
        except PeerProtocolError as error:
            self._fault("protocol_errors", f"a control message was dropped: {error}")

    def _fault(self, counter: str, text: str, *, count: int = 1, exc_info: bool = False) -> None:
        self._faults[counter] += count
        self._num_unlogged += count
        now_s = self._clock()
        if now_s >= self._next_log_s:
            self._next_log_s = now_s + LOG_EVERY_S
            log.warning("%s: %s (%d since the last such line)", self._name, text, self._num_unlogged, exc_info=exc_info)
            self._num_unlogged = 0

    def _first_close(self) -> bool:
        with self._lock:
            first, self._closed = not self._closed, True
        return first

    def _end(self) -> None:
        """Stop and join the control thread; it closes the port."""
        self._stop.set()
        self._port.wake()
        if self._thread.ident is None:
            self._port.close()
        else:
            self._thread.join(JOIN_S)

    # ---- what a side has to say

    def _has_effects(self) -> bool:
        raise NotImplementedError

    def _pause_s(self) -> float:
        raise NotImplementedError

    def _on_event(self, event: Event, now_s: float) -> None:
        raise NotImplementedError

    def _tick(self, now_s: float) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        raise NotImplementedError
