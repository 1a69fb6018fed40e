"""Heartbeat thread of the scheduler process, alive during steps.

Kernels and device waits release the GIL, so silence means a frozen or dead process.
"""

import logging
import os
import select
import threading
import time
from collections.abc import Callable

from engine.ipc import IpcPaths
from engine.loop.turn_clock import TurnClock
from engine.messages import GetStep
from engine.pull_socket import PullSocket
from engine.push_socket import PeerStalled, PushSocket
from engine.stamps import Stamp
from service.http.heartbeats import EVERY_S, STAMPS, wait_s

log = logging.getLogger(__name__)


class HeartbeatResponder:
    """Stamps every EVERY_S, and answers `GetStep`, until the loop ends."""

    def __init__(
        self, ipc: IpcPaths, turns: TurnClock, *, name: str = "scheduler", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._turns = turns
        self._clock = clock
        self._inbox: PullSocket[GetStep] = PullSocket(ipc.to_heartbeat, GetStep)
        self._frontend = PushSocket(ipc.to_frontend)
        self._stamp = Stamp(ipc.dir, name)
        self._closed = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            os.eventfd_write(self._closed, 1)
            self._thread.join()
        for socket in (self._inbox, self._frontend):
            socket.close()
        os.close(self._closed)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._inbox.fd, select.POLLIN)
        poll.register(self._closed, select.POLLIN)
        while not any(source == self._closed for source, _ in poll.poll(_pause_ms())):
            self._turns.stamp(self._stamp, self._clock())
            for request in self._inbox.recv_all_nowait():
                self._answer(request)

    def _answer(self, request: GetStep) -> None:
        reply = self._turns.answer(request.call_id, self._clock())
        if reply is None:
            return
        try:
            self._frontend.send(reply)
        except PeerStalled as error:
            log.error("heartbeat: %s", error)


def _pause_ms() -> int:
    return round(1000 * wait_s(time.monotonic(), EVERY_S, phase=STAMPS))
