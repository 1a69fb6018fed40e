"""The prefill role: a request waits for decode's pages, is computed, and leaves by chunk.

Stages: disagg/outgoing.py. Failed, aborted and late requests are answered at once.

Recomputations of requests retracted by decode (disagg/resumption.py) know their pages from the
start, and no client waits for them.
"""

from typing import Protocol

from disagg.feature_fetching import FeatureFetches
from disagg.outgoing import HandoverStage, LaunchedPages, Outgoing, PageSender, PrefillHandover, Purpose, Senders
from disagg.prefix_exchange import OFF, PrefixExchange
from disagg.resumption import Bounds, images_of, request_for, why_not
from engine.core.outputs import StepEffects, refusal, refused
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.images import ImageInput
from engine.loop.role import EngineRole
from engine.messages import FAKE_BOOTSTRAP_HOST, FinishReason, KVSource, TokenOutput, TransferPath
from engine.metric_names import sums
from transfer_backends.contract import Work
from transfer_backends.rooms import RoomInUse


class Directory(Protocol):
    """Directory of rooms' workers for decode (the bootstrap server, by its registrar)."""

    def add_room(self, room: int) -> None: ...

    def close(self) -> None: ...


class PrefillRole(EngineRole):
    name = "prefill"

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        manager: Senders,
        pages: PageSender,
        directory: Directory,
        bounds: Bounds,
        prefixes: PrefixExchange | None = None,
        features: FeatureFetches | None = None,
    ) -> None:
        """Without `prefixes` none are fetched or sent; without `features` it encodes all."""
        self._scheduler = scheduler
        self._manager = manager
        self._pages = pages
        self._directory = directory
        self._bounds = bounds
        self._prefixes = prefixes
        self._features = features
        self._outgoing = Outgoing(scheduler=scheduler, pages=pages, begin=self._compute, name=self.name)
        self.launched_pages = LaunchedPages(pages, self._outgoing.handovers)
        self._num_refused = 0  # recomputations
        self._closed_to_peers: str | None = None

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        if request.message.alone:  # an embedding or a score ends here: no decode worker, no transfer
            self._begin_features(request, now_s)
            return self._scheduler.add(request)
        if request.message.bootstrap is None:
            return [refused(request, refusal("bootstrap_room: a prefill worker needs one", status=400))]
        if request.message.prefix_source is not None and request.message.prefix_source.copy:
            if self._prefixes is None:
                return [refused(request, refusal(OFF, status=409))]
            return self._prefixes.copy(request, now_s)
        if error := self._scheduler.refusal(request):
            return [refused(request, error)]
        if request.rid in self._outgoing.handovers:
            return [refused(request, refusal(f"rid: a request with id {request.rid!r} is running", status=400))]
        room, fake = request.message.bootstrap.room, request.message.bootstrap.host == FAKE_BOOTSTRAP_HOST
        try:
            sender = self._manager.sender(room, fake=fake)
        except (RoomInUse, ValueError) as error:
            return [refused(request, refusal(f"bootstrap_room: {error}", status=409))]
        if not fake:
            self._directory.add_room(room)
        request.times.bootstraps = True
        self._outgoing.open(PrefillHandover(request, room, moves_bytes=not fake, sender=sender))
        self._scheduler.prefetch(request)
        if self._prefixes is not None and not fake:
            self._prefixes.begin(request, now_s)
        self._begin_features(request, now_s)
        return []

    def _begin_features(self, request: Request, now_s: float) -> None:
        if self._features is not None and request.message.encoders:
            self._features.begin(request, now_s)

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        if self._features is not None:
            self._features.leave(rid)
        handover = self._outgoing.handovers.get(rid)
        if handover is None:
            copied = [] if self._prefixes is None else self._prefixes.abort_copy(rid, reason)
            return copied or self._scheduler.abort(rid, reason)
        if self._prefixes is not None:
            self._prefixes.leave(handover.request)
        return self._outgoing.abort(handover, reason)

    def close_to_peers(self, why: str | None) -> None:
        self._closed_to_peers = why

    def end_peers_work(self, why: str) -> None:
        if self._prefixes is not None:
            self._prefixes.end_all(why)
        if self._features is not None:
            self._features.incoming.end_all(why)
        reason = FinishReason(kind="abort", message=why)
        for handover in list(self._outgoing.handovers.values()):
            if not handover.for_prompt and handover.stage is not HandoverStage.ENDING:
                self._num_refused += 1
                self._outgoing.abort(handover, reason)

    def poll(self, now_s: float) -> list[TokenOutput]:
        self._take_recompute_requests(now_s)
        copied = [] if self._prefixes is None else self._prefixes.poll(now_s)
        if self._features is not None:
            self._features.poll(now_s)
        return copied + self._outgoing.poll(now_s)

    def on_step(self, effects: StepEffects, now_s: float) -> list[TokenOutput]:
        for request in effects.progressed:
            if not request.message.alone and not self._pages.layerwise:
                self._pages.send_whole_pages(self._outgoing.handovers[request.rid])
        for request, output, first in effects.prefilled:
            request.times.computed_s = now_s
            if self._prefixes is not None:
                self._prefixes.note_computed(request, now_s)
            handover = self._outgoing.handovers[request.rid]
            handover.tail = self._scheduler.memory.tail(request, request.handed_tokens)
            self._pages.add_computed(handover, output, first)
        self._pages.send_computed(now_s)
        return effects.outputs

    # ---- moves

    def _take_recompute_requests(self, now_s: float) -> None:
        for wanted in self._manager.take_recompute_requests():
            if self._prefixes is not None and wanted.work.cached:
                self._prefixes.take(wanted, now_s, refused=self._closed_to_peers)
                continue
            images, unseen = self._images_of(wanted.work)
            request = request_for(wanted, now_s, images)
            sender = self._manager.sender(wanted.room, room_attempt=wanted.room_attempt)
            handover = PrefillHandover(request, wanted.room, moves_bytes=True, sender=sender, purpose=Purpose.RECOMPUTE)
            self._outgoing.open(handover)
            unfit = self._scheduler.refusal(request)
            error = self._closed_to_peers or unseen or why_not(wanted.work, self._bounds) or (unfit and unfit.message)
            if wanted.work.cached:
                error = OFF
            if error:
                self._num_refused += 1
                self._outgoing.refuse(handover, error)

    def _images_of(self, work: Work) -> tuple[tuple[ImageInput, ...], str]:
        """Return its images, and any error."""
        try:
            return images_of(work, self._bounds), ""
        except ValueError as error:
            return (), str(error)

    def _compute(self, handover: PrefillHandover, now_s: float) -> list[TokenOutput]:
        handover.request.times.queued_s = now_s
        return self._scheduler.add(handover.request)

    # ---- reports

    @property
    def prefix_source(self) -> KVSource | None:
        """Return this worker's address for prefixes, if it sends any."""
        return None if self._prefixes is None else self._prefixes.source

    def waits_for_outside(self) -> bool:
        exchanges = self._prefixes is not None and self._prefixes.waits_for_outside
        fetches = self._features is not None and self._features.waits_for_outside
        return bool(self._outgoing.handovers) or exchanges or fetches

    def queues(self) -> dict[str, int]:
        count = self._outgoing.count()
        return {
            "bootstrap": count[HandoverStage.WAITING],
            "waiting": self._scheduler.num_waiting,
            "inflight": count[HandoverStage.TRANSFER] + count[HandoverStage.ENDING],
            **({} if self._prefixes is None else self._prefixes.queues()),
            **({} if self._features is None else self._features.queues()),
        }

    def counters(self) -> dict[str, float]:
        own = {**self._outgoing.counters, "recompute_refused": self._num_refused}
        prefixes = {} if self._prefixes is None else self._prefixes.counters()
        features = {} if self._features is None else self._features.counters
        return sums(self._manager.counters, own, self._pages.counters, prefixes, features)

    def gauges(self) -> dict[str, float]:
        prefixes = {} if self._prefixes is None else self._prefixes.gauges()
        return {**self._pages.gauges.values(), **prefixes}

    def avoided_encoders(self) -> list[str]:
        return [] if self._features is None else self._features.avoided()

    def transfer_paths(self) -> list[TransferPath]:
        """Return paths to the newest decode workers, bounded."""
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

    def check(self) -> None:
        metadata = self._pages.metadata
        owned, used = self._outgoing.num_rows, metadata.num_used
        if self._prefixes is not None:
            owned += self._prefixes.num_rows
            self._prefixes.check()
        if self._features is not None:
            self._features.check()
        assert owned == used, f"{used} metadata rows used, {owned} owned"
        metadata.check()
        self._manager.check()

    def close(self) -> None:
        self._directory.close()
        if self._prefixes is not None:
            self._prefixes.close()
        if self._features is not None:
            self._features.close()
        self._manager.close()
