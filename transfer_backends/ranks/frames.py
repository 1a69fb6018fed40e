"""Frames between a leader's `RemoteEngine` and the follower that serves its engine: one SEQPACKET message each.

    follower -> leader: Hello (once), Ended
    leader -> follower: ReachPeer, LeavePeer, Post, Probe, Fence, PollOften, Close

Numbers of peers and operations are the leader's.
"""

import socket
from typing import Any

import msgspec
import numpy as np

from transfer_backends.contract import Caps, Pieces, RankMemory
from transfer_backends.liveness import ProcessMark

SEND_BUFFER_BYTES = 4 << 20  # asked for; the kernel gives up to net.core.wmem_max
MAX_FRAME_BYTES = 4 << 20
OVERHEAD_BYTES = 32  # of a message, that Linux keeps free in a send buffer (unix_dgram_sendmsg)


class _Frame(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    pass


class Hello(_Frame, frozen=True):
    """`memory`: registered, with the engine's descriptor. `mark`: of the follower's process."""

    caps: Caps
    memory: RankMemory
    mark: ProcessMark


class Ended(_Frame, frozen=True):
    """Operations that are final since the last such frame. `error`: why the first failed one did, if it is known."""

    done: tuple[int, ...]
    failed: tuple[int, ...]
    error: str = ""


class ReachPeer(_Frame, frozen=True):
    peer: int
    incarnation: str
    descriptor: bytes


class LeavePeer(_Frame, frozen=True):
    peer: int


class PostPieces(_Frame, frozen=True, tag="Post"):
    """`src`, `dst`, `lengths`: u64 of this machine, as `Pieces` has them."""

    op: int
    peer: int
    src: bytes
    dst: bytes
    lengths: bytes
    src_device: int | None
    dst_device: int | None

    @classmethod
    def of(cls, op: int, peer: int, pieces: Pieces) -> "PostPieces":
        src, dst, lengths = pieces.src.tobytes(), pieces.dst.tobytes(), pieces.lengths.tobytes()
        return cls(op, peer, src, dst, lengths, pieces.src_device, pieces.dst_device)

    @property
    def pieces(self) -> Pieces:
        src, dst, lengths = (np.frombuffer(data, np.uint64) for data in (self.src, self.dst, self.lengths))
        return Pieces(src, dst, lengths, self.src_device, self.dst_device)


class Probe(_Frame, frozen=True):
    op: int
    peer: int


class Fence(_Frame, frozen=True):
    op: int
    peer: int


class PollOften(_Frame, frozen=True):
    """Poll your engine often for a while: peers write, and it does not drive itself."""


class Close(_Frame, frozen=True):
    """No operation is pending: close the engine."""


ToFollower = ReachPeer | LeavePeer | PostPieces | Probe | Fence | PollOften | Close
ToLeader = Hello | Ended
_ENCODER = msgspec.msgpack.Encoder()
TO_FOLLOWER = msgspec.msgpack.Decoder(ToFollower)
TO_LEADER = msgspec.msgpack.Decoder(ToLeader)


def encode(frame: ToFollower | ToLeader) -> bytes:
    return _ENCODER.encode(frame)


class FrameSocket:
    """One end of the connection, used by one thread. Owns the socket."""

    def __init__(self, sock: socket.socket, decoder: Any) -> None:
        """`decoder`: of the frames that come."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.setblocking(True)
        self.socket = sock
        given_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self.longest_bytes = min(MAX_FRAME_BYTES, given_bytes - OVERHEAD_BYTES)
        self._decoder = decoder
        self._buffer = memoryview(bytearray(MAX_FRAME_BYTES))

    def send(self, data: bytes, *, wait: bool) -> bool:
        """Return False if the socket is full. Raises `OSError` if the other end is gone."""
        try:
            self.socket.send(data, socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False
        return True

    def receive(self) -> list[Any] | None:
        """Return the frames that are there, without waiting; None: the other end is gone."""
        frames: list[Any] = []
        while True:
            try:
                size = self.socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return frames
            except ConnectionResetError:  # it has left frames of ours unread; its own come behind this error
                continue
            except OSError:
                size = 0
            if not size:
                return frames or None  # what came before the end counts; the next call finds the end
            frames.append(self._decoder.decode(self._buffer[:size]))
