"""State of one transfer on decode. Pure."""

from dataclasses import dataclass, field

from transfer_backends.contract import Route
from transfer_backends.decode.connections import PrefillPeer
from transfer_backends.rooms import Room
from transfer_backends.timers import RetryTimer

FIRST_RETRY_S = 0.02
LONGEST_RETRY_S = 0.5


@dataclass(eq=False)
class DecodeRoom(Room):
    """Search for the prefill worker, and exposure of the pages.

    - recomputes: decode's own request: any prefill worker will do
    - partial: fewer pages than given may be written
    - error: why the handshake waits, or its last failure; failure: only the latter
    - write_try: latest reported by prefill; exposed: prefill may write to the pages
    - stuck_at_s: exposed pages count as stuck from then
    - closed: by the role, while prefill must still learn of it
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
