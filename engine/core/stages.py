"""Live requests by stage, the only place of stage changes.

add ---> waiting ---> chunked / running ---> (ended) ---> draining ---> gone
            ^                |                               |
            +--- retracted --+              held: the role decides when its memory goes
                                leaving: a step in flight --+
"""

from itertools import chain

from engine.core.adapter_budget import AdapterBudget
from engine.core.limits import Limits
from engine.core.request import Request


class Stages:
    """`batch_is_full`: the last waiting request had no room, and nothing was freed since."""

    def __init__(self) -> None:
        self.live: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}  # in order of arrival
        self.chunked: Request | None = None  # the prompt in chunks
        self.running: list[Request] = []
        self.draining: list[Request] = []  # finished or retracted, a step in flight
        self.leaving: list[Request] = []  # for another worker, a step in flight
        self.held: list[Request] = []  # by the role: KV is handed over, or comes from elsewhere
        self.newly_retracted: list[Request] = []  # held ones that the role has not taken
        self.batch_is_full = False

    def register(self, request: Request, *, serial: int) -> None:
        assert request.rid not in self.live
        self.live[request.rid] = request
        request.serial = serial

    def unstage(self, request: Request) -> None:
        if request is self.chunked:
            self.chunked = None
            return
        if self.waiting.pop(request.rid, None) is not None:
            return
        for stage in (self.running, self.draining, self.leaving):
            if request in stage:
                stage.remove(request)
                return
        raise AssertionError(f"{request.rid} is in no stage")

    def requeue(self, request: Request) -> None:
        self.waiting = {r.rid: r for r in sorted([request, *self.waiting.values()], key=lambda r: r.serial)}

    def take_computing(self) -> list[Request]:
        """Remove computing requests, except a prompt in handover: a peer reads it."""
        taken, self.running = self.running, []
        if self.chunked is not None and not self.chunked.prefill_only:
            taken.append(self.chunked)
            self.chunked = None
        return taken

    def take_settled(self) -> list[Request]:
        """Remove finished and retracted requests after their last step."""
        settled = [r for r in self.draining if r.inflight == 0]
        self.draining = [r for r in self.draining if r.inflight > 0]
        return settled

    def take_departed(self) -> list[Request]:
        """Remove moved requests after their last step."""
        departed = [r for r in self.leaving if r.inflight == 0]
        self.leaving = [r for r in self.leaving if r.inflight > 0]
        return departed

    def growing(self) -> list[Request]:
        chunked = [self.chunked] if self.chunked is not None else []
        coming = [r for r in self.held if not r.prefill_only and not r.moves and r.pages and r.finish is None]
        return self.running + chunked + coming

    def adapter_budget(self, limits: Limits, *, now_s: float) -> AdapterBudget:
        if limits.max_loras_per_batch == 0:
            return AdapterBudget(limits, growing=(), waiting=())
        waiting = chain(self.waiting.values(), (r for r in self.held if not r.pages and r.finish is None))
        return AdapterBudget(limits, growing=self.growing(), waiting=waiting, now_s=now_s)

    @property
    def retraction_pending(self) -> bool:
        """The next collected step frees a retracted request."""
        return any(r.finish is None for r in self.draining)

    def retracted(self) -> list[Request]:
        """Retracted requests that wait to resume, except the role's."""
        waiting = [r for r in self.waiting.values() if r.retractions > 0]
        return [*waiting, *(r for r in self.draining if r.finish is None), *self.newly_retracted]

    def all(self) -> list[Request]:
        chunked = [self.chunked] if self.chunked is not None else []
        return [*self.waiting.values(), *self.running, *self.draining, *self.leaving, *self.held, *chunked]

    def check(self) -> None:
        assert sorted(r.rid for r in self.all()) == sorted(self.live), "a live request is in no stage, or in two"
        for request in self.all():
            assert 0 <= request.pending <= request.inflight
            assert request.computed_len <= request.launched_len
