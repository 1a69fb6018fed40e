"""Messages between machines of a group, over one permanent connection per node to node 0.

    node -> 0:   NodeHello (version, number, flags)
    0 -> node:   NodeWelcome once all are there, or NodeRefused; NodeBye at the end

End of file without NodeBye: the other machine's part has ended.
"""

import socket
from typing import Any

import msgspec

from engine.parallel.region_plan import RegionPlan
from service.process.message_stream import ChannelClosed, MessageStream


class _Frame(msgspec.Struct, frozen=True, tag=True):
    pass


class NodeHello(_Frame, frozen=True):
    """First message; nodes of higher numbers connect to `port`."""

    version: str
    node: int
    port: int
    flags: dict[str, Any]


class NodeWelcome(_Frame, frozen=True):
    """Unique group name, shared memory layout, (host, port) by node."""

    group: str
    region: RegionPlan
    addresses: tuple[tuple[str, int], ...]


class NodeRefused(_Frame, frozen=True):
    """Refusal; `text` is for the operator."""

    text: str


class NodeBye(_Frame, frozen=True):
    """Node 0 has ended in order."""


_ToRead = NodeHello | NodeWelcome | NodeRefused | NodeBye
_DECODER = msgspec.json.Decoder(_ToRead)


class Control:
    def __init__(self, connection: socket.socket) -> None:
        self.peer: str = connection.getpeername()[0]
        self.here: str = connection.getsockname()[0]
        self._end = MessageStream(connection)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, frame: _Frame) -> None:
        """Raises ChannelClosed."""
        self._end.put(msgspec.json.encode(frame))

    def receive(self, *, within_s: float | None = None) -> _ToRead:
        """Raises ChannelClosed, also on timeout."""
        try:
            frame: _ToRead = _DECODER.decode(self._end.get(within_s=within_s))
            return frame
        except msgspec.MsgspecError as error:
            raise ChannelClosed(f"no message of this version ({error})") from None

    def close(self) -> None:
        self._end.close()
