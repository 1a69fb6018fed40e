"""The protocols between roles, managers and engines; their values are in contract.py.

role (disagg/)  --KVSender/KVReceiver-->  manager (prefill/, decode/)  --Engine-->  nixl | mooncake | fake
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from transfer_backends.contract import Caps, Gate, OpState, Pieces, Progress, Region, Route, Tail, Work
from transfer_backends.kvpoll import KVPoll


class Engine(Protocol):
    """Moves bytes. Prefill calls it from its sender thread. Decode calls all but `progress` before it starts.

    No call may block for longer than a copy of `caps.max_post_bytes` takes.
    """

    @property
    def caps(self) -> Caps: ...

    def register(self, regions: Sequence[Region]) -> None:
        """Register whole pools: once, before `descriptor`."""

    def descriptor(self) -> bytes:
        """Return the opaque bytes that a peer's `connect` needs."""

    def connect(self, incarnation: str, descriptor: bytes) -> Any:
        """Return a handle of the peer. Raises `EngineError` for a descriptor that cannot be used."""

    def disconnect(self, peer: Any) -> None:
        """Forget the peer. None of its operations may be pending."""

    def post(self, peer: Any, pieces: Pieces) -> Any:
        """Start to write; return the operation. Raises `EngineError` only if nothing was started."""

    def probe(self, peer: Any) -> Any:
        """Return an operation that is DONE once a write has reached the peer."""

    def trial(self, peer: Any) -> tuple[Any, int] | None:
        """Write scratch memory of the pool's own kind; return the operation and its bytes. None: this engine moves none."""

    def fence(self, peer: Any) -> Any:
        """Return an operation that is DONE once no earlier operation to the peer, failed or not, can still write."""

    def poll(self, op: Any) -> OpState:
        """Return the state. Never called again after DONE or FAILED."""

    def progress(self, *, eager: bool = False) -> None:
        """Drive an engine that does not drive itself (`caps.target_must_poll`). `eager`: a peer waits for that; the next call is near."""

    def close(self) -> None: ...


class LayerClock(Protocol):
    """The progress of the engine's stream. Read by one thread at a time."""

    def progress(self) -> Progress:
        """Never decreases."""

    @property
    def ticking(self) -> bool:
        """True while progress comes without a wake-up: poll again soon."""


class KVTransfer(Protocol):
    """One side's handle of a transfer. No call blocks; `poll` only reads."""

    def poll(self) -> KVPoll: ...

    def abort(self, reason: str) -> None:
        """Fail the transfer and notify the peer. A no-op when final."""

    def failure(self) -> str | None: ...

    def close(self) -> None:
        """Forget the room. Raises RuntimeError before `released()` or `drained()`."""


class KVSender(KVTransfer, Protocol):
    """Prefill's handle."""

    @property
    def num_pages(self) -> int | None:
        """Pages that decode gave; None before `WaitingForInput`, and for a fake sender."""

    @property
    def skip_pages(self) -> int:
        """Pages at the front that decode has already; 0 before `WaitingForInput`."""

    def send(
        self,
        src_pages: Sequence[int],
        *,
        start: int,
        metadata_row: int | None = None,
        gate: Gate | None = None,
        tail: Tail = (),
    ) -> None:
        """Queue pages: `src_pages[i]` is page `start + i` of the prompt. Chunks come in order, from page 0, without gaps.

        Not before `WaitingForInput`; a no-op after a failure. `metadata_row`: of decode's, sent last; it ends the transfer.
        `gate`: opens when the pages are complete; gates come in the order of steps, never with the row.
        `tail`: with the row; it leaves behind the pages.
        """

    def released(self) -> bool:
        """True once the state is final and no operation reads the source pages, which may then be reused."""


class KVReceiver(KVTransfer, Protocol):
    """Decode's handle."""

    def provide(
        self,
        dst_pages: Sequence[int],
        metadata_row: int,
        *,
        skip_pages: int = 0,
        work: Work | None = None,
        tail: Tail = (),
    ) -> None:
        """Send prefill the pages of the prompt after its first `skip_pages`: once, in `WaitingForInput`. A no-op after a failure.

        `work`: what prefill has to compute for a room attempt above 0; attempt 0 has a request there.
        `tail`: as many items of each pool as prefill sends; none is left out by `skip_pages`.
        """

    def retries(self) -> int:
        """Times that prefill started over after a failed write."""

    def written_pages(self) -> int:
        """Return how many of the given pages have landed, from the first; known in `Success`. Only cached work may fill fewer."""

    def drained(self) -> bool:
        """True once the state is final and no write to the given pages is in flight or can start."""


# (bootstrap "host:port", room, any_but: LookUp's); blocks; raises LookupFailed; runs off-thread
Lookup = Callable[[str, int, Sequence[str] | None], Route]
