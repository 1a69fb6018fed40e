"""Blocking HTTP clients of a bootstrap server."""

import contextlib
import http.client
import logging
import math
import queue
import threading
import time
import urllib.parse
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bootstrap_server.protocol import (
    MAX_ROOMS_A_BATCH,
    ErrorDetail,
    ErrorReply,
    Registration,
    RegistrationReply,
    RoomBatch,
    RouteReply,
)
from service.http.errors import JSON_ERRORS
from service.security.keys import AUTH_HEADER, CHALLENGE_HEADER, Call, Signer

TIMEOUT_S = 3.0  # of a call
FIRST_RETRY_S = 0.1
LONGEST_PAUSE_S = 2.0  # well within decode's handshake timeout
REMEMBER_S = 120.0  # as servers do (room_ttl_s), and longer than decode looks for a room
MAX_REPLY_BYTES = 1 << 20
MAX_WAITING_ROOMS = 65536
JOIN_S = 5.0
UNPROVEN = 0
MAX_CHALLENGE_CHARS = 128

log = logging.getLogger(__name__)


class BootstrapError(Exception):
    """A failed call. `permanent`: retries are useless. `refused`: nothing listens. `of_room`:
    unknown room.
    """

    def __init__(self, message: str, *, permanent: bool = False, refused: bool = False, of_room: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.refused = refused
        self.of_room = of_room


# (server, call, signer=, timeout_s=) -> (status, body); raises BootstrapError if the server cannot be reached
Send = Callable[..., tuple[int, bytes]]


def over_http(server: str, call: Call, *, signer: Signer | None, timeout_s: float) -> tuple[int, bytes]:
    host, _, port = server.rpartition(":")
    if not (host and port.isdigit() and int(port) < 65536):
        raise BootstrapError(f"bootstrap server {server!r} is not HOST:PORT", permanent=True)
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)
    try:
        return _exchange(connection, call) if signer is None else _exchange_signed(connection, call, signer)
    except (OSError, http.client.HTTPException, ValueError) as error:
        refused = isinstance(error, ConnectionError)
        raise BootstrapError(f"bootstrap server {server} cannot be reached: {error}", refused=refused) from None
    finally:
        connection.close()


def look_up(
    server: str,
    room: int,
    *,
    any_but: Sequence[str] | None = None,
    secret: bytes | None = None,
    timeout_s: float = TIMEOUT_S,
    send: Send = over_http,
) -> RouteReply:
    """The worker of `room`, or any outside `any_but`. Raises BootstrapError."""
    others = "" if any_but is None else "&any=1&but=" + urllib.parse.quote(",".join(any_but))
    signer = None if secret is None else Signer(secret)
    call = Call("GET", f"/route?room={room}{others}", b"")
    body = _checked(server, *send(server, call, signer=signer, timeout_s=timeout_s))
    return _read(server, body, RouteReply)  # type: ignore[no-any-return]


class Registrar:
    """Registers `worker`, its lease and, on a shared server, its rooms, retrying forever.

    A restarted server gets the rooms of the last `REMEMBER_S`. `is_own`: the server ends with the
    worker, so only the lease needs renewal. `on_room` takes each room; empty for a server of one
    worker.
    """

    def __init__(
        self,
        server: str,
        worker: Registration,
        *,
        secret: bytes | None = None,
        is_own: bool = False,
        clock: Callable[[], float] = time.monotonic,
        send: Send = over_http,
    ) -> None:
        self.registered = threading.Event()
        self.error: str | None = None  # of the last attempt
        self._server = server
        self._worker = worker
        self._signer = None if secret is None else Signer(secret)
        self._longest_pause_s = math.inf if is_own else LONGEST_PAUSE_S
        self._clock = clock
        self._send = send
        self._shared = False
        self.on_room: tuple[Callable[[int], None], ...] = () if is_own and worker.dp_size == 1 else (self.add_room,)
        self._rooms: queue.Queue[int] = queue.Queue(MAX_WAITING_ROOMS)
        self._server_id = ""
        self._known: OrderedDict[int, float] = OrderedDict()  # room -> time sent, oldest first
        self._wake = threading.Event()
        self._stop = False
        self._renew_at_s, self._retry_s = clock(), FIRST_RETRY_S
        self._thread = threading.Thread(target=self._run, name="bootstrap-registrar", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add_room(self, room: int) -> None:
        if self._shared or not self.registered.is_set():
            try:
                self._rooms.put_nowait(room)
            except queue.Full:
                log.warning("bootstrap server %s is behind: room %d was not registered", self._server, room)
            self._wake.set()

    def close(self) -> None:
        self._stop = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        if self.registered.is_set():
            incarnation = urllib.parse.quote(self._worker.incarnation)
            with contextlib.suppress(BootstrapError):
                self._request("DELETE", f"/route?incarnation={incarnation}", None)

    def _run(self) -> None:
        while not self._stop:
            self._wake.clear()
            self._wake.wait(self.turn())

    def turn(self) -> float:
        """Register, renew and send rooms as due; return the pause."""
        try:
            if self._clock() >= self._renew_at_s:
                lease = self._register()
                self._renew_at_s = self._clock() + min(lease.lease_s / 3, self._longest_pause_s)
            self._register_rooms()
        except BootstrapError as error:
            self._complain(str(error))
            pause_s, self._retry_s = self._retry_s, min(2 * self._retry_s, LONGEST_PAUSE_S)
            self._renew_at_s = self._clock() + pause_s
            return pause_s
        self._retry_s = FIRST_RETRY_S
        return max(self._renew_at_s - self._clock(), 0.0)

    def _register(self) -> RegistrationReply:
        body = self._request("PUT", "/route", self._worker)
        lease: RegistrationReply = _read(self._server, body, RegistrationReply)
        self._shared = lease.shared
        if lease.server != self._server_id:
            self._server_id = lease.server
            self._put_back(list(self._known))
        self.error = None
        self.registered.set()
        return lease

    def _register_rooms(self) -> None:
        while self.registered.is_set():
            rooms = self._take()
            if not rooms:
                return
            if self._shared:
                try:
                    self._request("POST", "/rooms", RoomBatch(self._worker.incarnation, rooms))
                except BootstrapError:
                    self._put_back(rooms)  # retried after a new registration
                    raise
                self._remember(rooms)

    def _put_back(self, rooms: Sequence[int]) -> None:
        for room in rooms:
            with contextlib.suppress(queue.Full):
                self._rooms.put_nowait(room)

    def _remember(self, rooms: Sequence[int]) -> None:
        now_s = self._clock()
        for room in rooms:
            self._known.pop(room, None)
            self._known[room] = now_s
        while self._known and (
            len(self._known) > MAX_WAITING_ROOMS or next(iter(self._known.values())) <= now_s - REMEMBER_S
        ):
            self._known.popitem(last=False)

    def _take(self) -> list[int]:
        rooms: list[int] = []
        with contextlib.suppress(queue.Empty):
            while len(rooms) < MAX_ROOMS_A_BATCH:
                rooms.append(self._rooms.get_nowait())
        return rooms

    def _complain(self, error: str) -> None:
        if error != self.error:
            remedy = "trying again; --disaggregation-bootstrap-server of prefill workers names it"
            log.warning("bootstrap server %s: %s (%s)", self._server, error, remedy)
        self.error = error

    def _request(self, method: str, path: str, value: Any) -> bytes:
        call = Call(method, path, b"" if value is None else msgspec.json.encode(value))
        sent = self._send(self._server, call, signer=self._signer, timeout_s=TIMEOUT_S)
        return _checked(self._server, *sent)


def _checked(server: str, status: int, body: bytes) -> bytes:
    """Raises BootstrapError."""
    if status == UNPROVEN:
        message = f"bootstrap server {server} did not show that it knows the secret of --cluster-secret-file"
        raise BootstrapError(message, permanent=True)
    if status != 200:
        raise _refusal(server, status, body)
    return body


def _exchange(connection: http.client.HTTPConnection, call: Call) -> tuple[int, bytes]:
    connection.request(call.method, call.path, call.body or None, _headers(call))
    response = connection.getresponse()
    return response.status, response.read(MAX_REPLY_BYTES)


def _headers(call: Call) -> dict[str, str]:
    return {"Content-Type": "application/json"} if call.body else {}


def _exchange_signed(connection: http.client.HTTPConnection, call: Call, signer: Signer) -> tuple[int, bytes]:
    """`UNPROVEN` without signature; once more after a 401."""
    for _ in range(2):
        header, nonce = signer.sign(call)
        connection.request(call.method, call.path, call.body or None, {AUTH_HEADER: header, **_headers(call)})
        response = connection.getresponse()
        status, body = response.status, response.read(MAX_REPLY_BYTES)
        if signer.is_answer(response.headers.get(AUTH_HEADER, ""), nonce, status=status, body=body):
            return status, body
        challenge = response.headers.get(CHALLENGE_HEADER, "")
        if status != 401 or not challenge:
            return UNPROVEN, b""
        signer.challenge = challenge[:MAX_CHALLENGE_CHARS]
    return status, body


def _refusal(server: str, status: int, body: bytes) -> BootstrapError:
    try:
        error = msgspec.json.decode(body, type=ErrorReply).error
    except JSON_ERRORS:
        error = ErrorDetail("the answer is not ours: is this a bootstrap server?")
    message = f"bootstrap server {server} answered {status}: {error.message}"
    of_room = status == 404 and error.param == "room"
    return BootstrapError(message, permanent=status in (400, 401, 413), of_room=of_room)


def _read(server: str, body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except JSON_ERRORS as error:
        message = f"bootstrap server {server} sent an answer that is not ours: {error}"
        raise BootstrapError(message, permanent=True) from None
