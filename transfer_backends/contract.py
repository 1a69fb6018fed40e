"""Values that roles, managers and engines exchange; ports.py has the protocols."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Flag, IntEnum
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from service.kv_layout import MAX_POOLS, Count

Clock = Callable[[], float]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Array of `num_items` rows at `base_ptr + i * item_bytes`, on the host without `device`."""

    base_ptr: Count
    num_items: Count
    item_bytes: Count
    device: int | None

    @property
    def size_bytes(self) -> int:
        return self.num_items * self.item_bytes


MAX_EXTENTS = 1 << 14  # per item on one rank

Small = Annotated[int, msgspec.Meta(ge=0, le=2**16)]


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of an item: from `begin` in the model's item, from `at` in the rank's."""

    begin: Count
    at: Count
    size: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]

    @property
    def end(self) -> int:
        return self.begin + self.size


class SideMemory(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of a `SidePool`: disjoint `extents` per item, sorted by `begin`."""

    region: Region
    extents: Annotated[tuple[Extent, ...], msgspec.Meta(min_length=1, max_length=MAX_EXTENTS)]


class RankMemory(msgspec.Struct, frozen=True, array_like=True):
    """KV memory of one rank process, by addresses there.

    Index of an item in `kv` = page id * num_units + unit - first_unit. `pools` are parts of
    `KVArgs.pools`.
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
    """Layers sent together: up to `end_layer`, which ends at `end_byte` of a full unit."""

    end_layer: int
    end_byte: int


class SidePool(msgspec.Struct, frozen=True, array_like=True):
    """Pool of extra state, which crosses whole after a prompt's last page.

    Each rank has a part of each item (`SideMemory`).
    """

    kind: Annotated[str, msgspec.Meta(max_length=256)]
    item_bytes: Count


Tail = Sequence[Sequence[int]]  # the items of a prompt, for each pool of `KVArgs.pools`


def _are_below(ids: I64, count: int) -> bool:
    return not len(ids) or bool(ids.min() >= 0 and ids.max() < count)


@dataclass(frozen=True)
class KVArgs:
    """One worker's memory for transfers, mapped while its manager lives.

    All page fields but `groups` and `ranks` must equal the peer's. A page is `kv_units` units of
    equal size (groups of KV heads); a unit is its layers in order, or one piece without
    `layer_bytes`.

    - kv: one item per unit of this process; aux: one per metadata row
    - groups: cuts of a unit for layerwise transfer
    - ranks: this process first; replicas hold the same; () is a single rank
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
        return min(rank.pools[pool].region.num_items for rank in self.ranks)

    def check_ids(self, room: object, pages: I64, row: int | None, tail: Sequence[I64]) -> None:
        """Raise ValueError for ids outside the memory."""
        if not _are_below(pages, self.num_pages):
            raise ValueError(f"room {room}: a page is outside the pool of {self.num_pages}")
        if row is not None and not 0 <= row < self.aux.num_items:
            raise ValueError(f"room {room}: metadata_row {row} is outside 0..{self.aux.num_items - 1}")
        for number, (pool, ids) in enumerate(zip(self.pools, tail, strict=False)):
            if not _are_below(ids, self.num_items(number)):
                raise ValueError(f"room {room}: an item of {pool.kind} is outside its {self.num_items(number)}")

    def written(self, layers: int) -> int:
        """Model layers that all ranks have written after `layers` own ones.

        A layer's output is a sum over the ranks: a rank that writes layer l + 1 proves layer l on
        all, and its first layer the earlier stages. The end of the step proves the last one.
        """
        if len(self.ranks) == 1:
            return layers
        return self.ranks[0].first_layer + layers - 1 if layers else 0

    def marks(self) -> list[int]:
        """Inverse of `written`: counts of own layers that release a group."""
        if len(self.ranks) == 1:
            return [group.end_layer for group in self.groups]
        own = self.ranks[0]
        ends = (max(1, group.end_layer - own.first_layer + 1) for group in self.groups)
        return sorted({end for end in ends if end <= own.num_layers})


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Timeouts are seconds; addresses and secret are from flags."""

    bootstrap_timeout_s: float = 300.0  # prefill: sender opened -> decode's page indices
    waiting_timeout_s: float = 300.0  # decode: indices sent -> first KV
    transfer_timeout_s: float = 120.0  # both: without progress while transferring
    handshake_timeout_s: float = 10.0  # decode: look-up + registration, as a peer may be starting
    heartbeat_interval_s: float = 0.34  # a freeze is noticed 1 to 1.5 s later, a shorter one never
    heartbeat_max_failures: int = 3
    transfer_retries: int = 1  # prefill: more tries after a failed write, to the same live peer
    drain_timeout_s: float = 30.0  # decode: abort -> acknowledgement; later the pages count as stuck
    control_host: str = "127.0.0.1"
    control_port: int = 0  # prefill; 0: any free port
    secret: bytes | None = field(default=None, repr=False)
    max_peers: int = 1024
    max_orphans: int = 4096  # transfer infos whose request has not arrived
    max_tombstones: int = 65536  # ended rooms remembered for late messages


class OpState(IntEnum):
    """Engine's answer: DONE if all bytes landed; after FAILED some may land until a fence."""

    PENDING = 0
    DONE = 1
    FAILED = 2


TCP_RESEND_S = 120.0  # Linux gives up a closed connection after 8 tries from 200 ms (tcp_orphan_retries): 102 s


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Limits of an engine.

    - max_inflight, max_inflight_bytes: over all answering peers; they bound the time of an abort
    - target_must_poll: decode has to call `progress()`
    - settle_s: bytes of a dead writer may land for this long (socket buffers)
    - resend_s: the network may deliver bytes of a closed connection for this long after it stalled
    - full_window_s: shortest time for a full window; earlier polls are useless
    - carries_host_memory: if not, metadata rows cross the control plane
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
        beside = [pool.region for pool in args.ranks[0].pools]
        return [args.kv, args.aux, *beside] if self.carries_host_memory else [args.kv, *beside]


@dataclass(frozen=True, kw_only=True)
class PeerPath:
    """Result of a trial write; `near`: the peer is on this machine, if known."""

    peer: str
    address: str
    near: bool | None
    transport: str
    bytes_a_s: float
    at_unix_s: float


@dataclass(frozen=True)
class Pieces:
    """Copies of `lengths[i]` bytes from address `src[i]` to the peer's `dst[i]`, all u64[n].

    Ranks index `KVArgs.ranks`.
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
    """An engine refused or lost a peer."""


class BackendUnavailable(Exception):
    """The library of a backend is missing; the text has the install command."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Prompt that prefill computes without sampling; with `share`, `namespace` may reuse the KV.

    With `cached`, prefill sends only cached KV, of the `variant` (an adapter's digest).
    `images`: `ImageInput`s in msgpack.
    """

    tokens: Sequence[int]
    priority: int = 0
    share: bool = True
    namespace: tuple[str, ...] = ()
    cached: bool = False
    images: bytes = b""
    variant: str = ""


@dataclass(frozen=True)
class RecomputeRequest:
    """`work` for a decode worker, or, if cached, another prefill worker."""

    room: int
    room_attempt: int
    work: Work


class Progress(NamedTuple):
    """KV written so far: steps before `step`, and `layers` layers of it."""

    step: int
    layers: int


NOTHING_YET = Progress(-1, 0)


@dataclass(frozen=True)
class Gate:
    """Condition for sending pages: step `step` has written their layers, or begins."""

    step: int
    by_layer: bool


@dataclass(frozen=True)
class SourcePages:
    """Pages of a prompt from page `start`, sent once `gate` opens; gates come in order of steps.

    `metadata_row` and `tail` come last, without a gate, and end the transfer.
    """

    pages: Sequence[int]
    start: int = 0
    metadata_row: int | None = None
    gate: Gate | None = None
    tail: Tail = ()


@dataclass(frozen=True)
class TargetPages:
    """Pages after `skip_pages`, a metadata row, and in `tail` all items of each pool.

    Room attempts above 0 bring `work`.
    """

    pages: Sequence[int]
    metadata_row: int
    skip_pages: int = 0
    work: Work | None = None
    tail: Tail = ()


ABORTED_BY_DECODE = "aborted by decode"  # prefix of a sender's failure that prefill did not cause
NO_PREFIXES = "this worker sends no prefixes (--prefix-fetch)"


class PeerWork(Flag):
    """Requests of peers that a role takes: prompts to compute, cached prefixes."""

    NONE = 0
    PROMPTS = 1
    PREFIXES = 2
    ANY = 3


@dataclass(frozen=True)
class Route:
    """Answer to a bootstrap look-up; `control` is "host:port".

    If not `shared`, it holds for every room whose number mod `dp_size` is `dp_rank`.
    """

    control: str
    incarnation: str
    shared: bool = False
    dp_size: int = 1
    dp_rank: int = 0

    def has(self, number: int) -> bool:
        return number % self.dp_size == self.dp_rank


class LookupFailed(Exception):
    """Look-up error, retried unless `permanent`; `of_room`: the room is unknown."""

    def __init__(self, message: str, *, permanent: bool = False, of_room: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.of_room = of_room


# ---- Engine that moves no bytes.


class FakeEngine:
    def __init__(self) -> None:
        self.caps = Caps(
            name="fake",
            max_inflight=1024,
            max_inflight_bytes=1 << 30,
            max_post_pieces=256,
            max_post_bytes=64 << 20,
            max_piece_bytes=64 << 20,
            target_must_poll=False,
            settle_s=0.0,
            resend_s=0.0,
        )

    def register(self, regions: Sequence[Region]) -> None:
        pass

    def descriptor(self) -> bytes:
        return b"fake"

    def connect(self, incarnation: str, descriptor: bytes) -> Any:
        return incarnation

    def disconnect(self, peer: Any) -> None:
        pass

    def post(self, peer: Any, pieces: Pieces) -> OpState:
        return OpState.DONE

    def probe(self, peer: Any) -> OpState:
        return OpState.DONE

    def trial(self, peer: Any) -> None:
        """Nothing to measure."""

    def fence(self, peer: Any) -> OpState:
        return OpState.DONE

    def poll(self, op: OpState) -> OpState:
        return op

    def progress(self, *, eager: bool = False) -> None:
        pass

    def close(self) -> None:
        pass
