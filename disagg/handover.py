"""The hand-over of a request's KV: its record and stages on either side.

    sender     WAITING (for decode's pages) --> COMPUTING --last chunk sent--> TRANSFER --Success--> ENDING --> gone
    decode     WAITING (for memory) ---------- pages offered to prefill -----> TRANSFER --Success--> running (the scheduler's)

The sender is a prefill worker, or the decode worker that a request leaves. Its record stays, ENDING, until no operation reads its
pages. A receiver's goes at once; memory that a peer may still write goes into quarantine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from disagg.metadata import Checksum, FirstToken, MetadataBuffers, PendingChecksum, verified
from engine.core.request import Request
from engine.messages import TokenOutput
from service.telemetry.logs import about
from transfer_backends.contract import PeerPath, RecomputeRequest, Route, Tail
from transfer_backends.ports import KVReceiver, KVSender


class HandoverStage(Enum):
    WAITING = "waiting"
    COMPUTING = "computing"
    TRANSFER = "transfer"
    ENDING = "ending"


@dataclass(slots=True, eq=False)
class Handover:
    """`moves_bytes`: False for a fake transfer, which writes no metadata row."""

    request: Request
    room: int
    moves_bytes: bool
    stage: HandoverStage = HandoverStage.WAITING
    metadata_row: int | None = None
    tail: Tail = ()  # what goes behind the last page
    checksum: PendingChecksum | None = None  # of pages and tail, once they are computed or have landed

    @property
    def log_fields(self) -> dict[str, dict[str, str | int | float]]:
        """Return the fields of its log lines, for `extra=`."""
        return about(request_id=self.request.request_id, rid=self.request.rid, room=self.room)


class Purpose(Enum):
    """Why KV is sent. Of a PROMPT a client waits for the answer; RECOMPUTE: decode requested it; MOVE: it goes on decoding elsewhere;
    PREFIX: another prefill worker requested what is cached. FEATURES: one requested those of an image.
    """

    PROMPT = "prompt"
    RECOMPUTE = "recompute"
    MOVE = "move"
    PREFIX = "prefix"
    FEATURES = "features"


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillHandover(Handover):
    """`answer`: to send once decode has everything.

    `last_pages` went with the last chunk, at `last_sent_s`.
    """

    sender: KVSender
    purpose: Purpose = Purpose.PROMPT
    sent_pages: int = 0
    last_pages: int = 0
    last_sent_s: float = 0.0
    answer: TokenOutput | None = None

    @property
    def for_prompt(self) -> bool:
        return self.purpose is Purpose.PROMPT

    def fills(self, given: int | None, need: int) -> bool:
        """Whether `need` pages may leave for the `given` ones of the peer; None: a fake peer."""
        return given is None or (need <= given if self.purpose is Purpose.PREFIX else need == given)

    def for_client(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        return outputs if self.for_prompt else []


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeHandover(Handover):
    """`joined`: the prefill worker was found and reached."""

    receiver: KVReceiver
    joined: bool = False

    def read_row(
        self,
        rows: MetadataBuffers,
        pages: Sequence[int],
        tail: Tail,
        checksum: Checksum | None,
        *,
        num_tokens: int | None = None,
    ) -> FirstToken | None:
        """Return what has landed; None: ask again, the checksum of `pages` and `tail` is under way.

        `num_tokens`: of the request, up to the end of the last page; None: pages are filled.
        KV of other weights than this worker's stays out of its prefix cache, where later requests would read it.
        Raises MetadataCorrupt, or KVCorrupt if the bytes are not the ones that prefill sent.
        """
        assert self.metadata_row is not None
        first = rows.read(self.metadata_row, room=self.room if self.moves_bytes else None)
        if first.other_weights:
            self.request.keep_kv = False
        if checksum is not None and self.moves_bytes:
            self.checksum = self.checksum or checksum(pages, tail, num_tokens)
            return verified(first, self.checksum, num_pages=len(pages))
        return first


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


class Receivers(Protocol):
    """The part of the decode manager that the role uses."""

    @property
    def counters(self) -> dict[str, int]: ...

    def receiver(
        self, room: int, *, bootstrap: str, room_attempt: int = 0, fake: bool = False, route: Route | None = None
    ) -> KVReceiver: ...

    def check(self) -> None: ...

    def close(self) -> bool: ...
