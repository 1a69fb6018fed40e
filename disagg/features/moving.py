"""Requests of a decode worker that continue at another one, with their KV.

  running --begin--> (its last step) --> held; its stream ends with the KV's address
      --> Outgoing, as a prompt of prefill

The receiver gets KV of all tokens but the last, and samples the next. After a failure the router
resumes through prefill.
"""

from disagg.outgoing import Outgoing, PageSender, PrefillHandover, Purpose, Senders
from disagg.role import HAS_MOVED, SendingPart
from engine.core.outputs import output_of
from engine.core.plan import ItemResult
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.messages import FinishReason, KVSource, TokenOutput
from transfer_backends.sides import RoomInUse


class Moves(SendingPart):
    """Owner of moving requests until their memory is free."""

    def __init__(
        self, *, scheduler: Scheduler, manager: Senders, pages: PageSender, source: KVSource, moves_bytes: bool
    ) -> None:
        super().__init__(Outgoing(scheduler=scheduler, pages=pages, begin=self._send, name="move"))
        self._scheduler = scheduler
        self._manager = manager
        self._pages = pages
        self._source = source
        self._moves_bytes = moves_bytes
        self._leaving: dict[str, tuple[Request, int]] = {}  # with its room; a step may be in flight
        self._num_moved = 0

    def move_out(self, rid: str, room: int) -> list[TokenOutput] | None:
        request = self._scheduler.stages.live.get(rid)
        if request is None:
            return None
        if request in self._scheduler.stages.running:
            self._scheduler.held.move(request)  # its last step may still finish it
            self._leaving[request.rid] = request, room
            return self._part()
        return [] if request.moves else None

    def abort(self, rid: str, reason: FinishReason) -> list[TokenOutput] | None:
        """End a request with collected steps and an open stream, if present."""
        request, _ = self._leaving.get(rid, (None, 0))
        if request is None or request not in self._scheduler.held:
            return None
        del self._leaving[rid]
        output = self._scheduler.held.end(request, reason)
        self._scheduler.held.release(request)
        return [output]

    def poll(self, now_s: float) -> list[TokenOutput]:
        return self._part() + super().poll(now_s)

    def _part(self) -> list[TokenOutput]:
        outputs = list[TokenOutput]()
        for rid, (request, room) in list(self._leaving.items()):
            if request.finish is not None:
                del self._leaving[rid]
            elif request in self._scheduler.held:
                del self._leaving[rid]
                outputs.append(self._open(request, room))
        return outputs

    def _open(self, request: Request, room: int) -> TokenOutput:
        output = self._scheduler.held.leave(request, HAS_MOVED)
        try:
            sender = self._manager.sender(room)
        except (RoomInUse, ValueError):  # from another maker's router
            self._scheduler.held.release(request)
            return output
        self._outgoing.open(
            PrefillHandover(request, room, moves_bytes=self._moves_bytes, sender=sender, purpose=Purpose.MOVE)
        )
        self._num_moved += 1
        output.source = self._source
        return output

    def _send(self, handover: PrefillHandover, now_s: float) -> list[TokenOutput]:
        request = handover.request
        handover.tail = self._scheduler.memory.tail(request, request.handed_tokens)
        self._pages.add_computed(handover, output_of(request, []), ItemResult(token=None))
        return []

    # ---- reports

    def waits_for_outside(self) -> bool:
        return bool(self._leaving) or super().waits_for_outside()

    def queues(self) -> dict[str, int]:
        return {"moving": len(self._leaving) + len(self._outgoing.handovers)}

    def counters(self) -> dict[str, float]:
        """Failed moves are not failed arrivals."""
        failed = sum(self._outgoing.counters.values())
        return {**self._pages.counters, "moved_out": self._num_moved, "moves_failed": failed}
