"""The values that roles, managers and engines exchange; the protocols are in ports.py. Addresses are plain integers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Clock = Callable[[], float]
U64 = npt.NDArray[np.uint64]


Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Region(msgspec.Struct, frozen=True, array_like=True):
    """`num_items` rows of `item_bytes` bytes, row i at `base_ptr + i * item_bytes`. `device`: CUDA ordinal, None: host."""

    base_ptr: Count
    num_items: Count
    item_bytes: Count
    device: int | None

    @property
    def size_bytes(self) -> int:
        return self.num_items * self.item_bytes


MAX_POOLS = 8
MAX_EXTENTS = 1 << 14  # of an item on one rank

Small = Annotated[int, msgspec.Meta(ge=0, le=2**16)]


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """`size` bytes of an item: from byte `begin` of the model's, which a rank has from byte `at` of its own."""

    begin: Count
    at: Count
    size: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]

    @property
    def end(self) -> int:
        """Of the model's bytes."""
        return self.begin + self.size


class SideMemory(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of a `SidePool`: of each item its `extents`, in the order of `begin`, none over another."""

    region: Region
    extents: Annotated[tuple[Extent, ...], msgspec.Meta(min_length=1, max_length=MAX_EXTENTS)]


class RankMemory(msgspec.Struct, frozen=True, array_like=True):
    """KV of one rank process: of each page `num_units` of the model's units, of each unit `num_layers` of its layers.

    `kv`: one item per unit, index = page id * num_units + unit - first_unit; addresses are of that process
    `descriptor`: of the engine there; prefill needs none
    `pools`: its part of each of `KVArgs.pools`
    """

    kv: Region
    first_unit: Small
    num_units: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    first_layer: Small
    num_layers: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    descriptor: Annotated[bytes, msgspec.Meta(max_length=1 << 20)] = b""
    pools: Annotated[tuple[SideMemory, ...], msgspec.Meta(max_length=MAX_POOLS)] = ()

    @property
    def units(self) -> range:
        return range(self.first_unit, self.first_unit + self.num_units)

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def num_pages(self) -> int:
        return self.kv.num_items // self.num_units


@dataclass(frozen=True)
class LayerGroup:
    """Layers that leave together: from the previous group up to `end_layer`, which ends at `end_byte` of a unit with all layers."""

    end_layer: int
    end_byte: int


class SidePool(msgspec.Struct, frozen=True, array_like=True):
    """Memory beside pages of which a prompt has some items: they cross once, whole, behind its last page.

    `kind`: names what the bytes of an item mean. `item_bytes`: of the model's item, of which each rank has a part (`SideMemory`).
    """

    kind: Annotated[str, msgspec.Meta(max_length=256)]
    item_bytes: Count


Tail = Sequence[Sequence[int]]  # of each pool of `KVArgs.pools`, the items of a prompt


@dataclass(frozen=True)
class KVArgs:
    """One worker's memory for transfers, mapped while its manager lives. Of its pages all but `groups` and `ranks` must equal the peer's.

    A page is `kv_units` units of equal size (groups of KV heads), a unit its layers one behind the other.

    kv: this process's part: one item per unit (per page where there is one unit)    aux: one item per metadata row
    signature: model and layout    kv_checksum: name of the pages' checksum, or "off"
    groups: how a unit that leaves layer by layer is cut, from its first byte to its last
    layer_bytes: of each of the model's layers in a unit; (): a unit is one piece
    ranks: what each process of the worker holds, this one first; together everything, a replica all that another one has;
    (): this process holds all
    pools: beside pages; `ranks` say where
    """

    kv: Region
    aux: Region
    signature: str
    page_size: int
    dtype: str
    kv_checksum: str = "off"
    groups: tuple[LayerGroup, ...] = ()
    kv_units: int = 1
    layer_bytes: tuple[int, ...] = ()
    ranks: tuple[RankMemory, ...] = ()
    pools: tuple[SidePool, ...] = ()

    def __post_init__(self) -> None:
        if not self.layer_bytes:
            object.__setattr__(self, "layer_bytes", (self.kv.item_bytes,))
        if not self.ranks:
            alone = RankMemory(self.kv, 0, self.kv_units, 0, len(self.layer_bytes))
            object.__setattr__(self, "ranks", (alone,))
        assert self.ranks[0].kv == self.kv, "this process's rank is the first"

    @property
    def num_pages(self) -> int:
        return min(rank.num_pages for rank in self.ranks)

    def num_items(self, pool: int) -> int:
        """Return how many items of `pools[pool]` every rank has."""
        return min(rank.pools[pool].region.num_items for rank in self.ranks)

    def written(self, layers: int) -> int:
        """Return how many of the model's layers all ranks have written once this one has written `layers` of its own.

        A layer's output is a sum over the ranks, so a rank that writes layer l + 1 proves layer l of all, and its first layer
        the stages before it. The end of the step proves the last one.
        """
        if len(self.ranks) == 1:
            return layers
        return self.ranks[0].first_layer + layers - 1 if layers else 0

    def marks(self) -> list[int]:
        """Return the numbers of own layers at which a group of `groups` may leave: the inverse of `written`."""
        if len(self.ranks) == 1:
            return [group.end_layer for group in self.groups]
        own = self.ranks[0]
        ends = (max(1, group.end_layer - own.first_layer + 1) for group in self.groups)
        return sorted({end for end in ends if end <= own.num_layers})


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Timeouts (seconds) and limits of a manager. `disagg/transfer_engine.py` maps the flags."""

    bootstrap_timeout_s: float = 300.0  # prefill: sender opened -> decode's page indices
    waiting_timeout_s: float = 300.0  # decode: indices sent -> first KV
    transfer_timeout_s: float = 120.0  # both: without progress while transferring
    handshake_timeout_s: float = 10.0  # decode: look-up + registration
    heartbeat_interval_s: float = 0.34  # a freeze is noticed 1 to 1.5 s later, and a shorter one never
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
    """DONE: all bytes have landed. FAILED: it has ended; bytes on their way may still land until a fence holds."""

    PENDING = 0
    DONE = 1
    FAILED = 2


TCP_RESEND_S = 120.0  # Linux gives up a closed connection after 8 tries from 200 ms (tcp_orphan_retries): 102 s


@dataclass(frozen=True, kw_only=True)
class Caps:
    """An engine's limits.

    max_inflight, max_inflight_bytes: pieces posted and not final, over all peers that answer (bounds how long an abort takes)
    target_must_poll: decode has to call `progress()`
    settle_s: bytes of a dead writer may still land for this long (socket buffers)
    resend_s: the network may deliver bytes of a closed connection this long after it took none of them
    full_window_s: least time in which the engine's threads work off a full window; polling sooner is useless
    inside_machine: transport inside one machine if neither TCP nor RDMA carries a write; "unknown": there are several
    longest_nap_s: between two polls while bytes are in flight and end; a window must not run dry meanwhile
    carries_host_memory: else pages alone are registered, and metadata rows cross the control plane
    """

    name: str
    max_inflight: int
    max_inflight_bytes: int
    max_post_pieces: int
    max_post_bytes: int
    max_piece_bytes: int
    target_must_poll: bool
    settle_s: float
    resend_s: float
    full_window_s: float = 0.0
    longest_nap_s: float = 0.002
    inside_machine: str = "unknown"
    carries_host_memory: bool = True

    def carried(self, args: KVArgs) -> list[Region]:
        """Return the memory that the engine has to reach."""
        beside = [pool.region for pool in args.ranks[0].pools]
        return [args.kv, args.aux, *beside] if self.carries_host_memory else [args.kv, *beside]


@dataclass(frozen=True, kw_only=True)
class PeerPath:
    """The result of a trial write to a peer. `near`: on this machine (None: unknown). `transport`: its name or "unknown"."""

    peer: str
    address: str
    near: bool | None
    transport: str
    bytes_a_s: float
    at_unix_s: float


@dataclass(frozen=True)
class Pieces:
    """n copies: `lengths[i]` bytes from local address `src[i]` to the peer's address `dst[i]`. All u64[n].

    `src_rank`, `dst_rank`: whose addresses, by their places in `KVArgs.ranks` of both workers.
    """

    src: U64
    dst: U64
    lengths: U64
    src_device: int | None = None
    dst_device: int | None = None
    src_rank: int = 0
    dst_rank: int = 0

    @classmethod
    def one(cls, src: int, dst: int, length: int) -> "Pieces":
        return cls(np.array([src], np.uint64), np.array([dst], np.uint64), np.array([length], np.uint64))

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
    """KV of `tokens` that prefill computes without sampling. `share`: with other requests of `namespace`.

    `cached`: nothing is computed. What is cached of them is sent, which may be fewer pages than were given.
    `images`: parts of the tokens, as a frontend of the other side has made them (`ImageInput` in msgpack); b"": there are none.
    """

    tokens: Sequence[int]
    priority: int = 0
    share: bool = True
    namespace: tuple[str, ...] = ()
    cached: bool = False
    images: bytes = b""


@dataclass(frozen=True)
class RecomputeRequest:
    """`work` that a peer requested in (room, room_attempt): a decode worker, or for what is cached another prefill worker."""

    room: int
    room_attempt: int
    work: Work


class Progress(NamedTuple):
    """Every step before `step`, and the first `layers` layers of it, have written their KV."""

    step: int
    layers: int


NOTHING_YET = Progress(-1, 0)


@dataclass(frozen=True)
class Gate:
    """`by_layer`: step `step` writes the pages, and each group of layers may leave once written. Else they leave when it begins."""

    step: int
    by_layer: bool


ABORTED_BY_DECODE = "aborted by decode"  # prefix of a sender's failure that is not prefill's fault


@dataclass(frozen=True)
class Route:
    """Answer to a bootstrap look-up. `control`: "host:port" of prefill's control plane. `shared`: valid for this room only; else for
    all rooms of its DP rank, which are `dp_rank` mod `dp_size`.
    """

    control: str
    incarnation: str
    shared: bool = False
    dp_size: int = 1
    dp_rank: int = 0

    def has(self, number: int) -> bool:
        """Whether the room of this bootstrap_room is the rank's."""
        return number % self.dp_size == self.dp_rank


class LookupFailed(Exception):
    """Retried until the handshake times out, unless it is `permanent`. `of_room`: the server does not know this room."""

    def __init__(self, message: str, *, permanent: bool = False, of_room: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.of_room = of_room
