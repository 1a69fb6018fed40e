"""The record of a request's hand-over at its sender. The receiver's is in disagg/incoming.py.

    WAITING (for pages) --> COMPUTING --last chunk sent--> TRANSFER --Success--> ENDING --> gone

The sender is a prefill worker, or the decode worker that a request leaves. The record stays,
ENDING, until no operation reads its pages.
"""

from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Protocol

from disagg.metadata import PendingChecksum
from engine.core.request import Request
from engine.messages import TokenOutput
from service.telemetry.logs import about
from transfer_backends.contract import PeerPath, RecomputeRequest, Tail
from transfer_backends.ports import KVSender


class HandoverStage(Enum):
    WAITING = "waiting"
    COMPUTING = "computing"
    TRANSFER = "transfer"
    ENDING = "ending"


class Purpose(Enum):
    """Why KV is sent. Of a PROMPT a client waits for the answer; RECOMPUTE: decode requested it; MOVE: it goes on decoding elsewhere;
    PREFIX: another prefill worker requested what is cached. FEATURES: one requested those of an image.
    """

    PROMPT = "prompt"
    RECOMPUTE = "recompute"
    MOVE = "move"
    PREFIX = "prefix"
    FEATURES = "features"


@dataclass(slots=True, eq=False)
class PrefillHandover:
    """One hand-over.

    `moves_bytes`: False for a fake transfer, which writes no metadata row. `answer`: to send once
    decode has everything. `last_pages` went with the last chunk, at `last_sent_s`. `tail`: what
    goes behind the last page. `checksum`: of pages and tail, once they are computed.
    """

    request: Request
    room: int
    _: KW_ONLY
    moves_bytes: bool
    sender: KVSender
    purpose: Purpose = Purpose.PROMPT
    stage: HandoverStage = HandoverStage.WAITING
    metadata_row: int | None = None
    tail: Tail = ()
    checksum: PendingChecksum | None = None
    sent_pages: int = 0
    last_pages: int = 0
    last_sent_s: float = 0.0
    answer: TokenOutput | None = None

    @property
    def log_fields(self) -> dict[str, dict[str, str | int | float]]:
        """Return the fields of its log lines, for `extra=`."""
        return about(request_id=self.request.request_id, rid=self.request.rid, room=self.room)

    @property
    def for_prompt(self) -> bool:
        return self.purpose is Purpose.PROMPT

    def fills(self, given: int | None, need: int) -> bool:
        """Whether `need` pages may leave for the `given` ones of the peer; None: a fake peer."""
        return given is None or (need <= given if self.purpose is Purpose.PREFIX else need == given)

    def for_client(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        return outputs if self.for_prompt else []


class Senders(Protocol):
    """The part of the prefill manager that a role uses."""

    @property
    def counters(self) -> dict[str, int]: ...

    @property
    def paths(self) -> list[PeerPath]: ...

    def sender(self, room: int, *, room_attempt: int = 0, fake: bool = False) -> KVSender: ...

    def take_recompute_requests(self) -> list[RecomputeRequest]: ...

    def check(self) -> None: ...

    def close(self) -> None: ...
