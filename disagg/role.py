"""Roles of parts: each part is a feature that exchanges something with peers.

A role calls its parts in the order of the tuple, each hook before its own work. Between parts
there is no other order.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from disagg.incoming import Incoming, IncomingTransfer, Receivers, check_quarantine
from disagg.metadata import MetadataBuffers
from disagg.outgoing import Outgoing, Senders
from engine.core.outputs import StepEffects
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.loop.role import RolePart, UnifiedRole
from engine.messages import MOVED, FinishReason, TokenOutput
from engine.metric_names import sums
from transfer_backends.contract import RecomputeRequest

HAS_MOVED = FinishReason(kind=MOVED)


class PeerPart(RolePart):
    """A feature of a role. Hooks that it does not need do nothing."""

    def begin(self, request: Request, now_s: float) -> None:
        """The role has accepted a request."""

    def take(self, wanted: RecomputeRequest, now_s: float) -> bool:
        """Take a peer's request; False: it is another part's."""
        return False

    def move_out(self, rid: str, room: int) -> list[TokenOutput] | None:
        """Hand a running request over to the worker that continues it; None: end it."""
        return None

    def abort(self, rid: str, reason: FinishReason) -> list[TokenOutput] | None:
        """End a request of this part; None: it is not, or the role ends it, too."""
        return None

    @property
    def num_rows(self) -> int:
        """Metadata rows that it owns of the role's."""
        return 0

    @property
    def quarantined(self) -> Sequence[IncomingTransfer]:
        """Failed transfers whose peers may still write the scheduler's memory."""
        return ()


class SendingPart(PeerPart):
    """A part whose requests leave by an `Outgoing`; no client waits for them here."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._num_refused = 0
        self._closed: str | None = None

    def close_to_peers(self, why: str | None) -> None:
        self._closed = why

    def end_peers_work(self, why: str) -> None:
        self._outgoing.end_all(why)

    def poll(self, now_s: float) -> list[TokenOutput]:
        self._outgoing.poll(now_s)
        return []

    @property
    def num_rows(self) -> int:
        return self._outgoing.num_rows

    def waits_for_outside(self) -> bool:
        return bool(self._outgoing.handovers)


class ReceivingPart(PeerPart):
    """A part whose transfers arrive through an `Incoming`, into the role's memory and rows."""

    incoming: Incoming[Any]

    @property
    def num_rows(self) -> int:
        return self.incoming.num_rows

    @property
    def quarantined(self) -> Sequence[IncomingTransfer]:
        return self.incoming.quarantined

    def waits_for_outside(self) -> bool:
        return bool(self.incoming.transfers)


class ManagerOfParts(PeerPart):
    """Counts, checks and closes a manager that parts share, and not the role."""

    def __init__(self, manager: Senders | Receivers) -> None:
        self._manager = manager

    def counters(self) -> Mapping[str, float]:
        return self._manager.counters

    def check(self) -> None:
        self._manager.check()

    def close(self) -> None:
        self._manager.close()


class PartedRole(UnifiedRole):
    """A unified role with parts, and the base of roles whose requests' KV crosses workers."""

    def __init__(self, scheduler: Scheduler, parts: Sequence[PeerPart] = ()) -> None:
        super().__init__(scheduler)
        self.parts = parts

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        refused = super().add(request, now_s)
        return refused or self._begin(request, now_s)

    def _begin(self, request: Request, now_s: float) -> list[TokenOutput]:
        for part in self.parts:
            part.begin(request, now_s)
        return []

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        for end in (*(part.abort for part in self.parts), self._end):
            if (outputs := end(rid, reason)) is not None:
                return outputs
        return self._scheduler.abort(rid, reason)

    def _end(self, rid: str, reason: FinishReason) -> list[TokenOutput] | None:
        return None

    def poll(self, now_s: float) -> list[TokenOutput]:
        return [output for part in self.parts for output in part.poll(now_s)]

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        for part in self.parts:
            part.on_step(effects, now_s)

    def close_to_peers(self, why: str | None) -> None:
        for part in self.parts:
            part.close_to_peers(why)

    def end_peers_work(self, why: str) -> None:
        for part in self.parts:
            part.end_peers_work(why)

    def close(self) -> None:
        for part in self.parts:
            part.close()

    # ---- reports

    def waits_for_outside(self) -> bool:
        return any(part.waits_for_outside() for part in self.parts)

    def queues(self) -> dict[str, int]:
        return super().queues() | _joined(part.queues() for part in self.parts)

    def counters(self) -> Mapping[str, float]:
        return sums(*(part.counters() for part in self.parts))

    def gauges(self) -> Mapping[str, float]:
        return _joined(part.gauges() for part in self.parts)

    def info(self) -> dict[str, Any]:
        return _joined(part.info() for part in self.parts)

    def state(self) -> dict[str, Any]:
        return _joined(part.state() for part in self.parts)

    def check(self) -> None:
        for part in self.parts:
            part.check()


class PeerRole(PartedRole):
    """A role whose requests' KV crosses workers: through a manager, with metadata rows.

    `layout`: service/kv_layout.py.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        manager: Senders | Receivers,
        metadata: MetadataBuffers,
        parts: Sequence[PeerPart],
        *,
        layout: str = "",
    ) -> None:
        super().__init__(scheduler, (*parts, ManagerOfParts(manager)))
        self._rows = metadata
        self._layout = layout

    def take(self, wanted: RecomputeRequest, now_s: float) -> None:
        """Give a peer's request to the first part that takes it."""
        taken = any(part.take(wanted, now_s) for part in self.parts)
        assert taken, f"room {wanted.room}: no part takes requests of peers"

    # ---- reports

    def info(self) -> dict[str, Any]:
        return ({"kv_layout": self._layout} if self._layout else {}) | super().info()

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @property
    def quarantined(self) -> Sequence[IncomingTransfer]:
        return [transfer for part in self.parts for transfer in part.quarantined]

    def waits_for_outside(self) -> bool:
        return bool(self.quarantined) or super().waits_for_outside()

    def check(self) -> None:
        owned, used = self.num_rows, self._rows.num_used
        assert owned == used, f"{used} metadata rows used, {owned} owned"
        check_quarantine(self._scheduler.memory, self.quarantined)
        self._rows.check()
        super().check()


def _joined(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for report in reports for name, value in report.items()}
