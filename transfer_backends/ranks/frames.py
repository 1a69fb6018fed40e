"""Frames between a leader's `RemoteEngine` and the follower that serves its engine: a message each (service/process/message_stream.py).

    follower -> leader: Hello (once), Ended
    leader -> follower: ReachPeer, LeavePeer, Post, Probe, Fence, PollOften, Close

Numbers of peers and operations are the leader's.
"""

import msgspec
import numpy as np

from transfer_backends.contract import Caps, Pieces, RankMemory
from transfer_backends.liveness import ProcessMark


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
