"""Loop's sockets to other processes, and wake-ups from threads.

Each frontend gets its requests' outputs, and the main one all replies.
"""

import os
import select
from collections import defaultdict
from contextlib import suppress

from engine.ipc import MAIN_FRONTEND, IpcPaths, PullSocket, PushSocket, row_of
from engine.messages import SchedulerReady, ToFrontend, TokenBatch, TokenOutput, ToScheduler

EVENTFD_ONE = 1
CLOSED = -1


class SocketPorts:
    def __init__(self, ipc: IpcPaths, *, num_frontends: int = 1, attention: int | None = None) -> None:
        """`attention`: an eventfd that other processes also write; closed here."""
        self._inbox: PullSocket[ToScheduler] = PullSocket(ipc.to_scheduler, ToScheduler)
        self._frontends = [PushSocket(ipc.to_frontend_of(row)) for row in range(num_frontends)]
        self._main = self._frontends[MAIN_FRONTEND]
        self._attention = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if attention is None else attention
        self._poll = select.poll()
        self._poll.register(self._inbox.fd, select.POLLIN)
        self._poll.register(self._attention, select.POLLIN)

    def receive(self) -> list[ToScheduler]:
        return self._inbox.recv_all_nowait()

    def wait(self, timeout_s: float) -> None:
        for source, _ in self._poll.poll(int(timeout_s * 1000)):
            if source == self._attention:
                os.eventfd_read(self._attention)

    def call_attention(self) -> None:
        """End the current or next `wait`; safe in threads and signal handlers, even when closed."""
        if (attention := self._attention) != CLOSED:
            with suppress(OSError):  # closed by the loop's thread since the line above
                os.eventfd_write(attention, EVENTFD_ONE)

    def to_frontend(self, message: ToFrontend) -> None:
        if len(self._frontends) > 1 and isinstance(message, TokenBatch):
            self._send_each_its_own(message)
        elif isinstance(message, SchedulerReady):
            for frontend in self._frontends:
                frontend.send(message)
        else:
            self._main.send(message)

    def _send_each_its_own(self, batch: TokenBatch) -> None:
        parts: defaultdict[int, list[TokenOutput]] = defaultdict(list)
        for output in batch.outputs:
            parts[row_of(output.rid)].append(output)
        for row, outputs in parts.items():
            self._frontends[row].send(TokenBatch(outputs))

    def close(self) -> None:
        self._inbox.close()
        for frontend in self._frontends:
            frontend.close()
        attention, self._attention = self._attention, CLOSED
        os.close(attention)
