"""One transfer of decode: the search for its prefill worker, and whether its pages are exposed. Pure."""

from dataclasses import dataclass, field

from transfer_backends.contract import Route
from transfer_backends.decode.connections import PrefillPeer
from transfer_backends.rooms import Room
from transfer_backends.timers import RetryTimer

FIRST_RETRY_S = 0.02
LONGEST_RETRY_S = 0.5


@dataclass(eq=False)
class DecodeRoom(Room):
    """route: the worker that has the room, where the request names it; no server is asked
    recomputes: decode's own request: any prefill worker will do, and a failed handshake is final
    partial: fewer pages than were given may be written; written_pages: how many were, in Success

    looking: by a look-up    retry: when to look again
    error: what the handshake waits for, or why its last try failed; failure: the latter alone
    write_try: the latest that prefill reported    exposed: prefill may write to the given pages
    stuck_at_s: the pages count as stuck if exposed then    closed: by the role, and prefill must still learn of it
    """

    bootstrap: str
    deadline_s: float
    recomputes: bool = False
    route: Route | None = None
    peer: PrefillPeer | None = None
    looking: bool = False
    retry: RetryTimer = field(default_factory=lambda: RetryTimer(FIRST_RETRY_S, LONGEST_RETRY_S))
    error: str = "the bootstrap server has not answered"
    failure: str | None = None
    num_pages: int | None = None
    partial: bool = False
    written_pages: int = 0
    metadata_row: int = 0
    write_try: int = 0
    exposed: bool = False
    stuck_at_s: float | None = None
    closed: bool = False

    @property
    def drained(self) -> bool:
        return self.final and not self.exposed

    @property
    def seeking(self) -> bool:
        return self.looking or self.retry.at_s is not None

    def end_search(self) -> None:
        self.looking, self.retry.at_s = False, None
