"""The prefill role: a request waits for decode's pages, is computed, and leaves by chunk.

The scheduler serves those without a room. Stages: disagg/outgoing.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from disagg.outgoing import HandoverStage, PrefillHandover, PromptHandovers, Senders
from disagg.role import PeerPart, PeerRole
from engine.core.outputs import StepEffects, refusal, refused
from engine.core.plan import Plan
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.messages import FAKE_BOOTSTRAP_HOST, FinishReason, TokenOutput, TransferPath
from engine.metric_names import sums
from transfer_backends.sides import RoomInUse


class Directory(Protocol):
    """Directory of rooms' workers for decode (the bootstrap server, by its registrar)."""

    @property
    def on_room(self) -> Sequence[Callable[[int], None]]:
        """None for a server of one worker, which needs no rooms."""

    def close(self) -> None: ...


class PrefillRole(PeerRole):
    name = "prefill"

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        manager: Senders,
        prompts: PromptHandovers,
        directory: Directory,
        parts: Sequence[PeerPart] = (),
        layout: str = "",
    ) -> None:
        super().__init__(scheduler, manager, prompts.pages.metadata, parts, layout=layout)
        self._manager = manager
        self._prompts = prompts
        self._pages = prompts.pages
        self._directory = directory

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        bootstrap = request.message.bootstrap
        if bootstrap is None:  # served whole
            return super().add(request, now_s)
        if error := self._scheduler.refusal(request):
            return [refused(request, error)]
        if request.rid in self._prompts.handovers:
            return [refused(request, refusal(f"rid: a request with id {request.rid!r} is running", status=400))]
        room, fake = bootstrap.room, bootstrap.host == FAKE_BOOTSTRAP_HOST
        try:
            sender = self._manager.sender(room, fake=fake)
        except (RoomInUse, ValueError) as error:
            return [refused(request, refusal(f"bootstrap_room: {error}", status=409))]
        if not fake:
            for add_room in self._directory.on_room:
                add_room(room)
        request.times.bootstraps = True
        self._prompts.open(PrefillHandover(request, room, moves_bytes=not fake, sender=sender))
        self._scheduler.prefetch(request)
        return self._begin(request, now_s)

    def _end(self, rid: str, reason: FinishReason) -> list[TokenOutput] | None:
        handover = self._prompts.handovers.get(rid)
        return None if handover is None else self._prompts.abort(handover, reason)

    def poll(self, now_s: float) -> list[TokenOutput]:
        for wanted in self._manager.take_recompute_requests():
            self.take(wanted, now_s)
        outputs, of_prompts = super().poll(now_s), self._prompts.poll(now_s)
        for output in of_prompts if self.parts else ():
            if (reason := output.finish) is not None and reason.kind == "abort":
                for part in self.parts:
                    part.abort(output.rid, reason)
        return outputs + of_prompts

    def on_launch(self, plan: Plan, now_s: float) -> None:
        self._pages.send_launched(plan, self._prompts.handovers)

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        for request in effects.progressed if not self._pages.layerwise else ():
            if request.prefill_only:
                self._pages.send_whole_pages(self._prompts.handovers[request.rid])
        for request, output, first in effects.prefilled:
            request.times.computed_s = now_s
            handover = self._prompts.handovers[request.rid]
            handover.tail = self._scheduler.memory.tail(request, request.handed_tokens)
            self._pages.add_computed(handover, output, first)
        self._pages.send_computed(now_s)
        super().on_step(effects, now_s)

    # ---- reports

    @property
    def num_rows(self) -> int:
        return self._prompts.num_rows + super().num_rows

    def waits_for_outside(self) -> bool:
        return bool(self._prompts.handovers) or super().waits_for_outside()

    def queues(self) -> dict[str, int]:
        count = self._prompts.count()
        return {
            "bootstrap": count[HandoverStage.WAITING],
            **super().queues(),
            "inflight": count[HandoverStage.TRANSFER] + count[HandoverStage.ENDING],
        }

    def counters(self) -> Mapping[str, float]:
        return sums(self._prompts.counters, self._pages.counters, super().counters())

    def gauges(self) -> Mapping[str, float]:
        return {**self._pages.gauges.values(), **super().gauges()}

    def state(self) -> dict[str, Any]:
        return {"transfer_paths": self._transfer_paths(), **super().state()}

    def _transfer_paths(self) -> list[TransferPath]:
        return [
            TransferPath(
                peer=path.peer,
                address=path.address,
                same_machine=path.near,
                transport=path.transport,
                gb_per_s=round(path.bytes_a_s / 1e9, 3),
                measured_unix_s=round(path.at_unix_s, 3),
            )
            for path in self._manager.paths
        ]

    def close(self) -> None:
        self._directory.close()
        super().close()
