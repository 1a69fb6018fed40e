"""ZMQ sockets of the control plane: prefill listens, decode connects.

One thread uses a port; any may call `wake`. A secret turns CURVE on.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from service.security.curve import ZapAuthenticator, guard_connector, guard_listener
from service.waiter import Waker
from transfer_backends.wire import MAX_FRAME_BYTES

HIGH_WATER = 16384  # frames queued for a peer that does not read; above it the link counts as lost
LINGER_MS = 500
CONNECT_TIMEOUT_MS = 5000
MAX_FRAMES_A_POLL = 256  # so that timers run under a flood
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_MADE = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | _REFUSED


@dataclass(frozen=True)
class Frame:
    link: Any
    data: bytes


@dataclass(frozen=True)
class LinkClosed:
    """`refused`: the handshake failed: secrets differ or are missing."""

    link: Any
    refused: bool = False


@dataclass(frozen=True)
class SomeLinkClosed:
    """`send` returns False for the unidentified link."""


@dataclass(frozen=True)
class PeersRefused:
    count: int


Event = Frame | LinkClosed | SomeLinkClosed | PeersRefused


class Port(Protocol):
    """Interface of `ListenPort` and `ConnectPort`."""

    @property
    def wake(self) -> Callable[[], None]: ...
    def poll(self, timeout_s: float) -> list[Event]: ...
    def send(self, link: Any, data: bytes) -> bool: ...
    def close(self) -> None: ...


def advertised_host(host: str) -> str:
    """Peers use it for a socket bound to `host`."""
    if host not in ("0.0.0.0", "::", "*", ""):
        return host
    family, far = (socket.AF_INET6, "2001:db8::1") if host == "::" else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))  # sends nothing: looks up the source address in the routing table
        except OSError:
            return "::1" if host == "::" else "127.0.0.1"
        return str(probe.getsockname()[0])


class ListenPort:
    """ROUTER socket for peers. Links are its routing ids."""

    def __init__(self, host: str, port: int, *, secret: bytes | None = None) -> None:
        self._context = zmq.Context(1)
        self._authenticator = None if secret is None else ZapAuthenticator(self._context, secret)
        self._socket = _socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if secret is not None:
            guard_listener(self._socket, secret)
        try:
            self._socket.bind(f"tcp://{_bracket(host)}:{port or '*'}")
        except zmq.ZMQError as error:
            self._socket.close(0)
            if self._authenticator is not None:
                self._authenticator.close()
            self._context.term()
            raise OSError(f"control plane cannot listen on {host}:{port}: {error}") from None
        number = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = f"{_bracket(advertised_host(host))}:{number}"
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _REFUSED)
        self._waker = Waker()
        self.wake = self._waker.wake
        self._poller = zmq.Poller()
        for readable in (self._socket, self._monitor, self._waker):
            self._poller.register(readable, zmq.POLLIN)
        if self._authenticator is not None:
            self._poller.register(self._authenticator.socket, zmq.POLLIN)

    def poll(self, timeout_s: float) -> list[Event]:
        if not self._poller.poll(_millis(timeout_s)):
            return []
        self._waker.clear()
        if self._authenticator is not None:
            self._authenticator.answer()
        frames = islice(_received(self._socket), MAX_FRAMES_A_POLL)
        events: list[Event] = [Frame(parts[0], parts[1] if len(parts) == 2 else b"") for parts in frames]
        seen = _monitored(self._monitor)
        if refused := sum(bool(kind & _REFUSED) for kind in seen):
            events.append(PeersRefused(refused))
        if len(seen) > refused:
            events.append(SomeLinkClosed())
        return events

    def send(self, link: Any, data: bytes) -> bool:
        try:
            self._socket.send_multipart([link, data], zmq.DONTWAIT)
        except zmq.ZMQError:  # EHOSTUNREACH: gone; EAGAIN: does not read
            return False
        return True

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()
        self._waker.close()


class ConnectPort:
    """DEALER sockets, one per link, numbered by the caller. Links never reconnect."""

    def __init__(self, *, secret: bytes | None = None) -> None:
        self._secret = secret
        self._context = zmq.Context(1)
        self._links: dict[int, _Link] = {}
        self._waker = Waker()
        self.wake = self._waker.wake
        self._poller = zmq.Poller()
        self._poller.register(self._waker, zmq.POLLIN)

    def connect(self, link: int, address: str) -> bool:
        dealer = _socket(self._context, zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        if self._secret is not None:
            guard_connector(dealer, self._secret)
        monitor = dealer.get_monitor_socket(_GONE | _MADE)
        made = _Link(dealer, monitor)
        try:
            dealer.connect(f"tcp://{address}")
        except zmq.ZMQError:
            made.close()
            return False
        self._links[link] = made
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        return True

    def disconnect(self, link: int) -> None:
        gone = self._links.pop(link, None)
        if gone is not None:
            for readable in (gone.dealer, gone.monitor):
                self._poller.unregister(readable)
            gone.close()

    def poll(self, timeout_s: float) -> list[Event]:
        ready = dict(self._poller.poll(_millis(timeout_s)))
        if not ready:
            return []
        self._waker.clear()
        return [event for number, link in list(self._links.items()) for event in _link_events(number, link, ready)]

    def send(self, link: int, data: bytes) -> bool:
        known = self._links.get(link)
        if known is None:
            return False
        try:
            known.dealer.send(data, zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        for link in list(self._links):
            self.disconnect(link)
        self._context.term()
        self._waker.close()


@dataclass(slots=True)
class _Link:
    dealer: Any
    monitor: Any
    made: int = 0

    def close(self) -> None:
        self.dealer.disable_monitor()
        self.monitor.close(0)
        self.dealer.close(LINGER_MS)


def _link_events(number: int, link: _Link, ready: dict[Any, int]) -> Iterator[Event]:
    if link.dealer in ready:
        for parts in islice(_received(link.dealer), MAX_FRAMES_A_POLL):
            yield Frame(number, parts[0] if len(parts) == 1 else b"")
    if link.monitor not in ready:
        return
    seen = _monitored(link.monitor)
    for kind in seen:
        link.made |= kind & _MADE
    if any(kind & _GONE for kind in seen):  # a peer that cannot read our greeting hangs up
        yield LinkClosed(number, refused=link.made == zmq.EVENT_CONNECTED)


def _received(source: Any) -> Iterator[list[bytes]]:
    with contextlib.suppress(zmq.Again):
        while True:
            yield source.recv_multipart(zmq.DONTWAIT)


def _monitored(monitor: Any) -> list[int]:
    return [int(parse_monitor_message(parts)["event"]) for parts in _received(monitor)]


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> Any:
    made = context.socket(kind)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    made.setsockopt(zmq.SNDHWM, HIGH_WATER)
    made.setsockopt(zmq.RCVHWM, HIGH_WATER)
    made.setsockopt(zmq.LINGER, LINGER_MS)
    made.setsockopt(zmq.IPV6, 1)
    made.setsockopt(zmq.TCP_KEEPALIVE, 1)
    made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    made.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    return made


def _millis(timeout_s: float) -> int:
    return max(1, round(timeout_s * 1000))  # 0 would spin


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
