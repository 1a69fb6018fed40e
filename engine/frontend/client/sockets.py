"""A frontend's sockets to a DP rank's scheduler and heartbeat, and back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from engine.ipc import MAIN_FRONTEND, IpcPaths
from engine.messages import GetStep, Shutdown, ToFrontend, ToScheduler
from engine.pull_socket import PullSocket
from engine.push_socket import PeerStalled, PushSocket
from service.http.errors import ApiError

Send = Callable[[ToScheduler | GetStep], None]


@contextmanager
def open_sockets(ipc: IpcPaths, *, row: int = MAIN_FRONTEND) -> Iterator[tuple[Send, PullSocket[ToFrontend]]]:
    """`send` raises ApiError(503). Closing the main frontend's sockets sends `Shutdown`."""
    push, heartbeat = PushSocket(ipc.to_scheduler), PushSocket(ipc.to_heartbeat)
    pull: PullSocket[ToFrontend] = PullSocket(ipc.to_frontend_of(row), ToFrontend)

    def send(message: ToScheduler | GetStep) -> None:
        try:
            (heartbeat if isinstance(message, GetStep) else push).send(message)
        except PeerStalled as e:
            raise ApiError(503, str(e), code="engine_stalled", retry_after_s=1) from None

    try:
        yield send, pull
    finally:
        if row == MAIN_FRONTEND:
            with suppress(PeerStalled):
                push.send(Shutdown())
        for socket in (push, heartbeat, pull):
            socket.close()
