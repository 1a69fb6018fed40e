"""Sender's record of a request's hand-over; the receiver's is in disagg/incoming.py.

    WAITING (for pages) --> COMPUTING --last chunk sent--> TRANSFER --Success--> ENDING --> gone

A record stays ENDING until no operation reads its pages.
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
    """Reason to send KV.

    PROMPT: a client waits; RECOMPUTE: for decode; MOVE: decoding continues elsewhere; PREFIX,
    FEATURES: for another worker.
    """

    PROMPT = "prompt"
    RECOMPUTE = "recompute"
    MOVE = "move"
    PREFIX = "prefix"
    FEATURES = "features"


@dataclass(slots=True, eq=False)
class PrefillHandover:
    """One hand-over.

    - moves_bytes: False for a fake transfer, without metadata row
    - last_pages: sent with the last chunk, at `last_sent_s`
    - tail: extra state after the last page; checksum: of pages and tail
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
        return about(request_id=self.request.request_id, rid=self.request.rid, room=self.room)

    @property
    def for_prompt(self) -> bool:
        return self.purpose is Purpose.PROMPT

    def fills(self, given: int | None, need: int) -> bool:
        """Return True if `need` pages fit those `given` by the peer."""
        return given is None or (need <= given if self.purpose is Purpose.PREFIX else need == given)

    def for_client(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        return outputs if self.for_prompt else []


class Senders(Protocol):
    @property
    def counters(self) -> dict[str, int]: ...

    @property
    def paths(self) -> list[PeerPath]: ...

    def sender(self, room: int, *, room_attempt: int = 0, fake: bool = False) -> KVSender: ...

    def take_recompute_requests(self) -> list[RecomputeRequest]: ...

    def check(self) -> None: ...

    def close(self) -> None: ...
