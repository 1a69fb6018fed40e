"""The hand-over of a request's KV between a prefill and a decode worker: its record and stages, on either side.

    prefill    WAITING (for decode's pages) --> COMPUTING --last chunk sent--> TRANSFER --Success--> ENDING --> gone
    decode     WAITING (for memory) ---------- pages offered to prefill -----> TRANSFER --Success--> running (the scheduler's)

A prefill worker's record stays, ENDING, until its sender reports that no peer reads the pages any more. A decode worker's goes
at once; memory that a peer may still write goes into quarantine.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from engine.core.request import Request
from engine.messages import TokenOutput
from service.telemetry.logs import about
from transfer_backends.contract import RecomputeRequest
from transfer_backends.ports import KVReceiver, KVSender


class HandoverStage(Enum):
    WAITING = "waiting"
    COMPUTING = "computing"
    TRANSFER = "transfer"
    ENDING = "ending"


@dataclass(slots=True, eq=False)
class Handover:
    """`moves_bytes`: the metadata row will be real (a fake transfer moves none)."""

    request: Request
    room: int
    moves_bytes: bool
    stage: HandoverStage = HandoverStage.WAITING
    metadata_row: int | None = None

    @property
    def log_fields(self) -> dict[str, dict[str, str | int | float]]:
        """For `extra=` of log lines."""
        return about(request_id=self.request.request_id, rid=self.request.rid, room=self.room)


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillHandover(Handover):
    """`recompute`: for decode, which retracted the request; no client waits for an answer. `sent_pages`: of the request's row.

    `last_pages` went with the last chunk, at `last_sent_s`. `answer`: the output to send once decode has everything.
    """

    sender: KVSender
    recompute: bool = False
    sent_pages: int = 0
    last_pages: int = 0
    last_sent_s: float = 0.0
    answer: TokenOutput | None = None

    def for_client(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        return [] if self.recompute else outputs


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeHandover(Handover):
    """`joined`: the prefill worker was found and reached."""

    receiver: KVReceiver
    joined: bool = False


class Senders(Protocol):
    """The part of the prefill manager that the role uses."""

    @property
    def counters(self) -> dict[str, int]: ...

    def sender(self, room: int, *, room_attempt: int = 0, fake: bool = False) -> KVSender: ...

    def take_recompute_requests(self) -> list[RecomputeRequest]: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class Receivers(Protocol):
    """The part of the decode manager that the role uses."""

    @property
    def counters(self) -> dict[str, int]: ...

    def receiver(self, room: int, *, bootstrap: str, room_attempt: int = 0, fake: bool = False) -> KVReceiver: ...

    def check(self) -> None: ...

    def close(self) -> bool: ...
