"""Protocols between roles, managers and engines; contract.py has their values.

role (disagg/)  --KVSender/KVReceiver-->  manager (prefill/, decode/)
    --Engine-->  nixl | mooncake | fake
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from transfer_backends.contract import Caps, OpState, Pieces, Progress, Region, Route, SourcePages, TargetPages
from transfer_backends.sides import KVPoll


class Engine(Protocol):
    """Mover of bytes, called by prefill's sender thread; decode only polls `progress`.

    No call may block longer than a copy of `caps.max_post_bytes`.
    """

    @property
    def caps(self) -> Caps: ...

    def register(self, regions: Sequence[Region]) -> None:
        """Register whole pools, once."""

    def descriptor(self) -> bytes:
        """Opaque bytes for a peer's `connect`."""

    def connect(self, incarnation: str, descriptor: bytes) -> Any:
        """Raises `EngineError` for a bad descriptor."""

    def disconnect(self, peer: Any) -> None:
        """Forget a peer without pending operations."""

    def post(self, peer: Any, pieces: Pieces) -> Any:
        """Return the operation. Raises `EngineError` only if nothing started."""

    def probe(self, peer: Any) -> Any:
        """An operation that is DONE after a write reached the peer."""

    def trial(self, peer: Any) -> tuple[Any, int] | None:
        """Write scratch memory of the pool's kind; return operation and bytes, if any move."""

    def fence(self, peer: Any) -> Any:
        """An operation that is DONE once no earlier one to the peer can write."""

    def poll(self, op: Any) -> OpState:
        """Never called after DONE or FAILED."""

    def progress(self, *, eager: bool = False) -> None:
        """Drive an engine with `caps.target_must_poll`; `eager`: a peer waits."""

    def close(self) -> None: ...


class LayerClock(Protocol):
    """Progress of the engine's stream, read by one thread."""

    def progress(self) -> Progress:
        """Never decreases."""

    @property
    def ticking(self) -> bool:
        """Progress comes without wake-ups: poll again soon."""


class KVTransfer(Protocol):
    """One side's transfer. No call blocks; `poll` only reads."""

    def poll(self) -> KVPoll: ...

    def abort(self, reason: str) -> None:
        """Fail the transfer and notify the peer; a no-op when final."""

    def failure(self) -> str | None: ...

    def close(self) -> None:
        """Forget the room. Raises RuntimeError before `released()` or `drained()`."""


class KVSender(KVTransfer, Protocol):
    """Prefill's handle."""

    @property
    def num_pages(self) -> int | None:
        """Pages that decode gave, None before `WaitingForInput`."""

    @property
    def skip_pages(self) -> int:
        """Leading pages that decode already has."""

    def send(self, source: SourcePages) -> None:
        """Queue pages, in order without gaps, after `WaitingForInput`; a no-op after a failure."""

    def released(self) -> bool:
        """The state is final and no operation reads the pages."""


class KVReceiver(KVTransfer, Protocol):
    """Decode's handle."""

    def provide(self, target: TargetPages) -> None:
        """Send it to prefill, once, in `WaitingForInput`; a no-op after a failure."""

    def retries(self) -> int:
        """Number of prefill's restarts."""

    def written_pages(self) -> int:
        """Pages landed, once in `Success`: fewer only for cached work."""

    def drained(self) -> bool:
        """The state is final and no write to the pages can happen."""


# (bootstrap "host:port", room, any_but); blocks, off-thread; raises LookupFailed
Lookup = Callable[[str, int, Sequence[str] | None], Route]
