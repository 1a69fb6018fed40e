"""Control-plane messages between decode and prefill workers.

    decode  -> prefill: Register, TransferInfo, Recompute, Abort, Ping, Pong, Bye
    prefill -> decode:  Registered, Refused, Status, Nudge (`PollRequest`), Drained, Ping, Pong, Bye

A ZMQ frame is a message: msgpack of a tagged struct. Both incarnations reveal messages to an
earlier process. `retry`: the write try, from 0.
"""

from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from service.kv_events import MAX_NAMESPACE_CHARS
from service.kv_layout import MAX_POOLS, Count, Layout, Name, Text
from transfer_backends.contract import KVArgs, RankMemory, Region
from transfer_backends.liveness import ProcessMark

PROTOCOL_VERSION = 15
MAX_IMAGE_BYTES = 24 << 20  # in a Recompute
MAX_FRAME_BYTES = (8 << 20) + MAX_IMAGE_BYTES
MAX_PAGES = 1 << 20  # per transfer
MAX_ROW_BYTES = 64 << 10
MAX_RANKS = 1024

Room = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Attempt = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Retry = Annotated[int, msgspec.Meta(ge=0, le=255)]
Namespace = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=MAX_NAMESPACE_CHARS)], ...], msgspec.Meta(max_length=2)
]
SkipPages = Annotated[int, msgspec.Meta(ge=0, le=MAX_PAGES)]
PageBytes = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_PAGES)]
TailBytes = Annotated[tuple[PageBytes, ...], msgspec.Meta(max_length=MAX_POOLS)]
RowBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_ROW_BYTES)]


class MalformedFrame(ValueError):
    """The frame is not a message. Counted and dropped."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    src: Name
    dst: Name


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """For reports only."""

    machine: Name = ""
    address: Name = ""


NOWHERE = Origin()


class Register(_Message, frozen=True):
    """The first of `ranks` has `aux` and this connection."""

    layout: Layout
    ranks: Annotated[tuple[RankMemory, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
    aux: Region
    origin: Origin = NOWHERE

    @property
    def num_pages(self) -> int:
        return min(rank.num_pages for rank in self.ranks)

    def num_items(self, pool: int) -> int:
        return min(rank.pools[pool].region.num_items for rank in self.ranks)


class Registered(_Message, frozen=True):
    """`marks` of all writing processes let decode prove their death."""

    marks: Annotated[tuple[ProcessMark, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]


class Refused(_Message, frozen=True):
    """`stale`: decode may register again."""

    reason: Text
    stale: bool


class TransferInfo(_Message, frozen=True):
    """Int32 little-endian ids of pages and pool items (`tail`), and a row."""

    room: Room
    attempt: Attempt
    pages: PageBytes
    aux_idx: Count
    skip_pages: SkipPages = 0
    tail: TailBytes = ()


class Recompute(_Message, frozen=True):
    """Decode's own transfer: compute the KV of `tokens` (int32 little-endian) and write it.

    `attempt` above 0 keeps it apart from the router's rooms. For the rest see `Work`.
    """

    room: Room
    attempt: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    pages: PageBytes
    aux_idx: Count
    tokens: PageBytes
    skip_pages: SkipPages
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
    share: bool
    namespace: Namespace = ()
    tail: TailBytes = ()
    cached: bool = False
    images: Annotated[bytes, msgspec.Meta(max_length=MAX_IMAGE_BYTES)] = b""
    variant: Name = ""


class Status(_Message, frozen=True):
    """Transferring (progress), Success or Failed; `num_pages` in this try.

    `row`: the metadata row with Success, empty if the engine wrote it.
    """

    room: Room
    attempt: Attempt
    state: Annotated[int, msgspec.Meta(ge=0, le=4)]
    num_pages: Count
    reason: Text = ""
    retry: Retry = 0
    row: RowBytes = b""


class PollRequest(_Message, frozen=True, tag="Nudge"):
    """Poll your engine often for a while (`Caps.target_must_poll`)."""


class Abort(_Message, frozen=True):
    """Stop writing for this room, in any try, then send `Drained`."""

    room: Room
    attempt: Attempt
    reason: Text
    retry: Retry = 0


class Drained(_Message, frozen=True):
    """No write for this room is in flight or can start."""

    room: Room
    attempt: Attempt
    retry: Retry = 0


class Ping(_Message, frozen=True):
    seq: Count


class Pong(_Message, frozen=True):
    seq: Count


class Bye(_Message, frozen=True):
    """The sender shuts down; no write of it is in flight."""


Message = (
    Register
    | Registered
    | Refused
    | TransferInfo
    | Recompute
    | Status
    | PollRequest
    | Abort
    | Drained
    | Ping
    | Pong
    | Bye
)
_DECODER = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(frame: bytes) -> Message:
    """Raises `MalformedFrame`."""
    if len(frame) > MAX_FRAME_BYTES:
        raise MalformedFrame(f"frame of {len(frame)} bytes")
    try:
        message: Message = _DECODER.decode(frame)
        return message
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedFrame(str(error)) from None


def clip(text: str) -> str:
    return text if len(text) <= 2000 else text[:2000] + "..."


def pack_ids(ids: npt.NDArray[np.int64]) -> bytes:
    return ids.astype("<i4").tobytes()


def unpack_ids(data: bytes) -> npt.NDArray[np.int64]:
    if len(data) % 4:
        raise MalformedFrame(f"list of ids of {len(data)} bytes is not a multiple of 4")
    return np.frombuffer(data, dtype="<i4").astype(np.int64)


def layout_of(args: KVArgs, *, backend: str) -> Layout:
    return Layout(
        PROTOCOL_VERSION,
        backend,
        args.signature,
        args.page_size,
        args.dtype,
        args.kv_checksum,
        args.kv_units,
        args.layer_bytes,
        tuple((pool.kind, pool.item_bytes) for pool in args.pools),
    )
