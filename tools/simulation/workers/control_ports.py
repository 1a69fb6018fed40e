"""The control plane's sockets over the simulated network: what `ListenPort` and `ConnectPort` are over ZMQ."""

from collections import deque
from collections.abc import Callable
from typing import Any

from tools.simulation.network import End, Network
from tools.simulation.world import Process
from transfer_backends.control_port import Event, Frame, LinkClosed, SomeLinkClosed

MAX_EVENTS_A_POLL = 256


class _Port:
    """`on_event`: something can be polled now."""

    def __init__(self, network: Network, process: Process, on_event: Callable[[], None]) -> None:
        self._network = network
        self._process = process
        self._on_event = on_event
        self._events: deque[Event] = deque()
        self._ends: dict[Any, End] = {}
        self.wake: Callable[[], None] = on_event

    def _push(self, event: Event) -> None:
        self._events.append(event)
        self._on_event()

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def poll(self, timeout_s: float) -> list[Event]:
        return [self._events.popleft() for _ in range(min(len(self._events), MAX_EVENTS_A_POLL))]

    def send(self, link: Any, data: bytes) -> bool:
        end = self._ends.get(link)
        return end is not None and end.send(data, f"frame {len(data)}")

    def close(self) -> None:
        for end in self._ends.values():
            end.close()
        self._ends.clear()


class SimListenPort(_Port):
    def __init__(
        self, network: Network, process: Process, on_event: Callable[[], None], *, address: str, secret: bytes | None
    ) -> None:
        super().__init__(network, process, on_event)
        self.address = address
        self._secret = secret
        self._num_links = 0
        network.listen(address, process, self._accept)

    def _accept(self, end: End) -> None:
        if self._secret is not None and end.other is not None and end.other.process.node == "x0":
            end.close()  # CURVE: who does not know the secret gets no connection
            return
        self._num_links += 1
        link = self._num_links.to_bytes(5, "big")
        self._ends[link] = end
        end.on_data = lambda data: self._push(Frame(link, data))
        end.on_close = lambda: self._lose(link)

    def _lose(self, link: bytes) -> None:
        self._ends.pop(link, None)
        self._push(SomeLinkClosed())


class SimConnectPort(_Port):
    def connect(self, link: int, address: str) -> bool:
        self._ends[link] = self._network.connect(
            self._process,
            address,
            on_data=lambda data: self._push(Frame(link, data)),
            on_close=lambda: self._push(LinkClosed(link)),
        )
        return True

    def disconnect(self, link: int) -> None:
        end = self._ends.pop(link, None)
        if end is not None:
            end.close()
