"""A leader and one follower: messages in order, and an end of file when either process ends."""

import socket
from typing import Generic, TypeVar

import msgspec

from engine.ranks.messages import ToFollower, ToLeader
from service.process.message_stream import LONGEST_BYTES, MessageStream

M = TypeVar("M")


class Channel(Generic[M]):
    """Sends come from any thread, `receive` from one. `receives`: the type of the messages that arrive. `most_unsent_bytes`: as of MessageStream."""

    def __init__(self, end: socket.socket, receives: type[M], *, most_unsent_bytes: int | None = None) -> None:
        self._end = MessageStream(end, most_unsent_bytes=most_unsent_bytes)
        self._decoder = msgspec.msgpack.Decoder(receives)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: ToFollower | ToLeader) -> None:
        """Never blocks. Raises ChannelFull and ChannelClosed."""
        self._end.put(msgspec.msgpack.encode(message))

    def receive(self) -> M:
        """Wait for the next message. Raises ChannelClosed."""
        return self._decoder.decode(self._end.get())

    def shut(self) -> None:
        """End it for both sides: a waiting `receive` raises ChannelClosed."""
        self._end.shut()

    def close(self) -> None:
        self._end.close()


def leader_end(end: socket.socket, *, sees: bool = False) -> Channel[ToLeader]:
    """`sees`: steps may bring pixels of images, and others may follow before these are sent."""
    most = LONGEST_BYTES if sees else None
    return Channel(end, ToLeader, most_unsent_bytes=most)  # type: ignore[arg-type]


def follower_end(descriptor: int) -> Channel[ToFollower]:
    return Channel(socket.socket(fileno=descriptor), ToFollower)  # type: ignore[arg-type]
