"""The values that roles, managers and engines exchange. The protocols are in ports.py.

No torch, no engine imports, no I/O. Addresses are plain integers. The memory's owner keeps it mapped while the manager lives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Clock = Callable[[], float]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Region:
    """`num_items` rows of `item_bytes` bytes, row i at `base_ptr + i * item_bytes`. `device`: CUDA ordinal, None: host."""

    base_ptr: int
    num_items: int
    item_bytes: int
    device: int | None = None

    @property
    def size_bytes(self) -> int:
        return self.num_items * self.item_bytes


@dataclass(frozen=True)
class LayerGroup:
    """Layers that leave together: from the end of the previous group up to `end_layer`, which ends at `end_byte` of a page."""

    end_layer: int
    end_byte: int


@dataclass(frozen=True)
class KVArgs:
    """The memory of one worker that takes part in transfers.

    kv:  one item is one page with all its layers (docs/architecture.md, "KV pages"); item index = page id
    aux: one item is one row of the metadata buffer
    `signature` names model and layout. `signature`, `page_size`, `dtype`, both `item_bytes` and `kv_checksum` (the name of
    the checksum sent with the pages, or "off") must equal the peer's.
    `groups`: how a page that leaves layer by layer is cut, from its first byte to its last. The peer need not agree.
    """

    kv: Region
    aux: Region
    signature: str
    page_size: int
    dtype: str
    kv_checksum: str = "off"
    groups: tuple[LayerGroup, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Timeouts (seconds) and limits of a manager. `disagg/config.py` maps the flags."""

    bootstrap_timeout_s: float = 300.0  # prefill: sender opened -> decode's page indices
    waiting_timeout_s: float = 300.0  # decode: indices sent -> first KV
    transfer_timeout_s: float = 120.0  # both: without progress while transferring
    handshake_timeout_s: float = 10.0  # decode: look-up + registration
    heartbeat_interval_s: float = 1.0
    heartbeat_max_failures: int = 3
    transfer_retries: int = 1  # prefill: further tries after a failed write, to the same live peer
    drain_timeout_s: float = 30.0  # decode: abort -> acknowledgement; the pages count as stuck after it
    control_host: str = "127.0.0.1"
    control_port: int = 0  # prefill; 0: any free port
    secret: bytes | None = field(default=None, repr=False)
    max_peers: int = 1024
    max_orphans: int = 4096  # transfer infos whose request has not arrived
    max_tombstones: int = 65536  # ended rooms remembered for late messages


class OpState(IntEnum):
    """DONE and FAILED are final: the operation will never write again."""

    PENDING = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, kw_only=True)
class Caps:
    """What an engine is and needs.

    max_inflight, max_inflight_bytes: pieces posted and not final, over all peers (bounds how long an abort takes)
    max_post_pieces, max_post_bytes: of one `post`    max_piece_bytes: longest piece
    target_must_poll: decode has to call `progress()`
    settle_s: the bytes of a dead writer may still land for this long (socket buffers)
    full_window_s: least time in which the engine's own threads work off a full window; polling sooner is useless
    """

    name: str
    max_inflight: int
    max_inflight_bytes: int
    max_post_pieces: int
    max_post_bytes: int
    max_piece_bytes: int
    target_must_poll: bool
    settle_s: float
    full_window_s: float = 0.0


@dataclass(frozen=True)
class Pieces:
    """n copies: `lengths[i]` bytes from local address `src[i]` to the peer's address `dst[i]`. All u64[n]."""

    src: U64
    dst: U64
    lengths: U64
    src_device: int | None = None
    dst_device: int | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def size_bytes(self) -> int:
        return int(self.lengths.sum())


class EngineError(Exception):
    """An engine refused or lost a peer. The text goes to the user."""


class BackendUnavailable(Exception):
    """The library of a backend is missing: one line that says what and how to install it."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What decode asks a prefill worker to compute: the KV of `tokens`, without sampling.

    `skip_pages`: whole pages at the front that decode has already and prefill does not send.
    """

    tokens: Sequence[int]
    skip_pages: int = 0
    priority: int = 0
    share: bool = True


@dataclass(frozen=True)
class RecomputeRequest:
    """`work` that a decode worker requested in (room, room_attempt). The request carries decode's pages."""

    room: int
    room_attempt: int
    work: Work


class Progress(NamedTuple):
    """The first `layers` layers of step `step`, and every earlier step, have written their KV. Values are ordered."""

    step: int
    layers: int


NOTHING_YET = Progress(-1, 0)


@dataclass(frozen=True)
class Gate:
    """What step `step` must do before some pages may leave.

    `by_layer`: the step writes the pages; each group of layers may leave once it is written. Otherwise the pages are complete
    once the step has begun.
    """

    step: int
    by_layer: bool


ABORTED_BY_DECODE = "aborted by decode"  # prefix of a sender's failure that is not prefill's fault


@dataclass(frozen=True)
class Route:
    """Answer to a bootstrap look-up. `control`: "host:port" of prefill's control plane.

    `shared`: the server knows several prefill workers, so the route is valid for this room only.
    """

    control: str
    incarnation: str
    shared: bool = False


class LookupFailed(Exception):
    """`permanent`: do not retry. Other failures are retried until the handshake times out."""

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent
