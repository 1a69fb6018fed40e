"""Ordered messages between a leader and one follower, with end of file at either's end."""

import socket
from typing import Generic, TypeVar

import msgspec

from engine.ranks.messages import ToFollower, ToLeader
from service.process.message_stream import LONGEST_BYTES, MessageStream

M = TypeVar("M")


class Channel(Generic[M]):
    """Channel end: any thread sends, one receives messages of type `receives`."""

    def __init__(self, end: socket.socket, receives: type[M], *, most_unsent_bytes: int | None = None) -> None:
        self._end = MessageStream(end, most_unsent_bytes=most_unsent_bytes)
        self._decoder = msgspec.msgpack.Decoder(receives)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: ToFollower | ToLeader) -> None:
        """Never blocks. Raises ChannelFull and ChannelClosed."""
        self._end.put(msgspec.msgpack.encode(message))

    def receive(self) -> M:
        """Raises ChannelClosed."""
        return self._decoder.decode(self._end.get())

    def shut(self) -> None:
        """End both sides: a waiting `receive` raises ChannelClosed."""
        self._end.shut()

    def close(self) -> None:
        self._end.close()


def leader_end(end: socket.socket, *, sees: bool = False) -> Channel[ToLeader]:
    """`sees`: several steps with image pixels may queue."""
    most = LONGEST_BYTES if sees else None
    return Channel(end, ToLeader, most_unsent_bytes=most)  # type: ignore[arg-type]


def follower_end(descriptor: int) -> Channel[ToFollower]:
    return Channel(socket.socket(fileno=descriptor), ToFollower)  # type: ignore[arg-type]
