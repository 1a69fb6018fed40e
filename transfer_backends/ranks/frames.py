"""Frames between a leader's `RemoteEngine` and the follower with the engine.

    follower -> leader: Hello (once), Ended
    leader -> follower: ReachPeer, LeavePeer, Post, Probe, Fence, PollOften, Close

The leader numbers peers and operations.
"""

import msgspec
import numpy as np

from transfer_backends.contract import Caps, Pieces, RankMemory
from transfer_backends.liveness import ProcessMark


class _Frame(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    pass


class Hello(_Frame, frozen=True):
    caps: Caps
    memory: RankMemory
    mark: ProcessMark


class Ended(_Frame, frozen=True):
    """Operations final since the last frame."""

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
    """Poll your engine often for a while: peers write."""


class Close(_Frame, frozen=True):
    """Close the engine; no operation is pending."""


ToFollower = ReachPeer | LeavePeer | PostPieces | Probe | Fence | PollOften | Close
ToLeader = Hello | Ended
_ENCODER = msgspec.msgpack.Encoder()
TO_FOLLOWER = msgspec.msgpack.Decoder(ToFollower)
TO_LEADER = msgspec.msgpack.Decoder(ToLeader)


def encode(frame: ToFollower | ToLeader) -> bytes:
    return _ENCODER.encode(frame)
