"""The contract between the roles, the common managers and the engines that move bytes: values and protocols only.

Layer 0: no torch, no engine imports, no I/O. Addresses are plain integers; who allocated the memory keeps it alive for
as long as the manager lives.

    role (disagg/)  --KVSender/KVReceiver-->  manager (common)  --Engine-->  nixl | mooncake | fake
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from transfer_backends.kvpoll import KVPoll

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
    """Some layers that leave together: those before `end_layer`, and not in the group before; they end at `end_byte` of a page."""

    end_layer: int
    end_byte: int


@dataclass(frozen=True)
class KVArgs:
    """The memory of one worker that takes part in transfers.

    kv:  one item is one page with all its layers (docs/architecture.md, "KV pages"); item index = page id
    aux: one item is one row of the metadata buffer
    `signature` names model and layout; `signature`, `page_size`, `dtype`, both `item_bytes` and `kv_checksum` (the name of
    the checksum that goes with the pages, or "off") must equal the peer's.
    `groups`: in order, from a page's first byte to its last; how a page is cut that leaves layer by layer. Our own affair.
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
    transfer_retries: int = 1  # prefill: times that a transfer with a failed write begins anew, to the same live peer
    drain_timeout_s: float = 30.0  # decode: abort -> acknowledgement; after it the pages count as stuck
    control_host: str = "127.0.0.1"
    control_port: int = 0  # prefill's; 0: a free one
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
    settle_s: bytes of a writer that is gone may still be applied for this long (socket buffers)
    full_window_s: it has threads of its own, and works on a full window for longer than this: until then nobody need look
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


class Engine(Protocol):
    """Moves bytes. Prefill calls from one thread at a time, mostly its sender thread; decode all but `progress` before it starts.

    Nothing here may block for longer than a copy of `caps.max_post_bytes` takes.
    """

    @property
    def caps(self) -> Caps: ...

    def register(self, regions: Sequence[Region]) -> None:
        """Whole pools, once, before `descriptor`."""

    def descriptor(self) -> bytes:
        """Opaque; what a peer's `connect` needs."""

    def connect(self, incarnation: str, descriptor: bytes) -> Any:
        """A peer handle. Raises `EngineError` for a descriptor that cannot be used."""

    def disconnect(self, peer: Any) -> None:
        """Only when none of the peer's operations is pending."""

    def post(self, peer: Any, pieces: Pieces) -> Any:
        """Start writing; an operation. Raises `EngineError` only when nothing was started."""

    def probe(self, peer: Any) -> Any:
        """An operation that is DONE when a write has reached the peer: the path works."""

    def fence(self, peer: Any) -> Any:
        """An operation that is DONE only when no earlier operation to the peer can still write, failed ones included."""

    def poll(self, op: Any) -> OpState:
        """Not to be called again for an operation that was DONE or FAILED."""

    def progress(self) -> None:
        """Drive what the engine does not drive by itself (`caps.target_must_poll`)."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Work:
    """What decode asks a prefill worker to compute: the KV of `tokens`, without a draw.

    `skip_pages`: whole pages at the front that decode has already; they are computed or cached there, and not sent.
    """

    tokens: Sequence[int]
    skip_pages: int = 0
    priority: int = 0
    share: bool = True


@dataclass(frozen=True)
class Asked:
    """`work` that a decode worker asked for in (room, attempt); its pages are known already."""

    room: int
    attempt: int
    work: Work


class Progress(NamedTuple):
    """KV of the first `layers` layers of step `step` is in memory, and all of every earlier step; they compare in order."""

    step: int
    layers: int


NOTHING_YET = Progress(-1, 0)


@dataclass(frozen=True)
class Gate:
    """What step `step` has still to do for some pages before they may leave.

    `by_layer`: it writes them, each group of layers may go when it is there. Else they are complete once it has begun.
    """

    step: int
    by_layer: bool


class LayerClock(Protocol):
    """How far the engine's stream has got. Asked by one thread at a time."""

    def progress(self) -> Progress:
        """Never goes back."""

    @property
    def ticking(self) -> bool:
        """It will go on soon without anybody being woken: ask again."""


ABORTED_BY_DECODE = "aborted by decode"  # a sender's failure that begins so is no fault of prefill: decode says why


class KVSender(Protocol):
    """Prefill's handle of one transfer. Every call returns at once; `poll` only reads."""

    @property
    def num_pages(self) -> int | None:
        """Pages decode gave, once `WaitingForInput`; None before that and for a fake sender (any number will do)."""

    @property
    def skip_pages(self) -> int:
        """Pages at the front of the prompt that decode has already: they come before those it gave. 0 until they are known."""

    def poll(self) -> KVPoll: ...

    def send(
        self,
        src_pages: Sequence[int],
        *,
        start: int,
        last: bool,
        aux_idx: int | None = None,
        gate: Gate | None = None,
    ) -> None:
        """Queue pages: `src_pages[i]` is page `start + i` of the prompt. Chunks come in order, from page 0 on, without gaps.

        Only once decode has given its pages. Those that it has already are left out.
        `last` ends the transfer and carries metadata row `aux_idx`. A no-op once the transfer has failed.
        `gate`: the pages are not complete yet (None: they are); gates come in the order of their steps, not with `last`.
        """

    def abort(self, reason: str) -> None:
        """Fail it (no-op when final); decode is told at once."""

    def failure(self) -> str | None: ...

    def released(self) -> bool:
        """True: final, and no operation reads the source pages any more; only then may they be reused."""

    def close(self) -> None:
        """Forget the room. Raises RuntimeError before `released()`."""


class KVReceiver(Protocol):
    """Decode's handle of one transfer. Every call returns at once; `poll` only reads."""

    def poll(self) -> KVPoll: ...

    def provide(self, dst_pages: Sequence[int], aux_idx: int, *, skip_pages: int = 0) -> None:
        """Once, in `WaitingForInput`: where prefill is to write. A no-op once the transfer has failed.

        `dst_pages` are those after the first `skip_pages` of the prompt, which are here already.
        """

    def ask(self, dst_pages: Sequence[int], aux_idx: int, work: Work) -> None:
        """As `provide`, of a room of an attempt above 0: no request for it goes to prefill, this is the request.

        `dst_pages` are those after `work.skip_pages`.
        """

    def abort(self, reason: str) -> None:
        """Fail it (no-op when final); prefill is told at once."""

    def failure(self) -> str | None: ...

    def retries(self) -> int:
        """Times that prefill began to write anew, because a write had failed."""

    def drained(self) -> bool:
        """True: no write to the given pages is in flight or can start. Until then they are quarantined."""

    def close(self) -> None:
        """Forget the room. Raises RuntimeError when not final or not `drained()`."""


@dataclass(frozen=True)
class Route:
    """Answer of a bootstrap look-up. `control`: "host:port" of prefill's control plane.

    `shared`: the server knows several prefill workers, so the answer holds for this room only.
    """

    control: str
    incarnation: str
    shared: bool = False


class LookupFailed(Exception):
    """`permanent`: trying again will not help (the rest is retried until the handshake times out)."""

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


Lookup = Callable[[str, int], Route]  # (bootstrap "host:port", room); blocks; raises LookupFailed; runs off-thread
# The same for a room that any prefill worker may serve: who had the room if it is there, else another one. The third
# argument names incarnations that are known to be gone.
LookupAny = Callable[[str, int, Sequence[str]], Route]
