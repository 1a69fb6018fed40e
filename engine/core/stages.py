"""Live requests and the stage that each is in: the only place where a request moves from one to another.

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
    """`batch_is_full`: the last waiting request found no room, and nothing has become free since: judge none again."""

    def __init__(self) -> None:
        self.live: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}  # in order of arrival
        self.chunked: Request | None = None  # the one whose prompt is computed in parts
        self.running: list[Request] = []
        self.draining: list[Request] = []  # ended or retracted, a step in flight
        self.leaving: list[Request] = []  # for another worker, a step in flight
        self.held: list[Request] = []  # by the role: KV is being handed over, or comes from elsewhere
        self.newly_retracted: list[Request] = []  # of the held ones: the role does not know yet
        self.batch_is_full = False

    def register(self, request: Request, *, serial: int) -> None:
        assert request.rid not in self.live
        self.live[request.rid] = request
        request.serial = serial

    def unstage(self, request: Request) -> None:
        """Take a request that ends out of its stage."""
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
        """Queue a request again, at its old place in line."""
        self.waiting = {r.rid: r for r in sorted([request, *self.waiting.values()], key=lambda r: r.serial)}

    def take_computing(self) -> list[Request]:
        """Take out every request that computes, except a prompt that is being handed over: a peer reads it."""
        taken, self.running = self.running, []
        if self.chunked is not None and not self.chunked.prefill_only:
            taken.append(self.chunked)
            self.chunked = None
        return taken

    def take_settled(self) -> list[Request]:
        """Take out the ended and retracted requests whose last step has been collected."""
        settled = [r for r in self.draining if r.inflight == 0]
        self.draining = [r for r in self.draining if r.inflight > 0]
        return settled

    def take_departed(self) -> list[Request]:
        """Take out the requests for other workers whose last step has been collected."""
        departed = [r for r in self.leaving if r.inflight == 0]
        self.leaving = [r for r in self.leaving if r.inflight > 0]
        return departed

    def growing(self) -> list[Request]:
        """Return the requests that may need more pages than they have."""
        chunked = [self.chunked] if self.chunked is not None else []
        coming = [r for r in self.held if not r.prefill_only and not r.moves and r.pages and r.finish is None]
        return self.running + chunked + coming

    def adapter_budget(self, limits: Limits, *, now_s: float) -> AdapterBudget:
        """Return the budget of the next step, or of the next request that reserves memory."""
        if limits.max_loras_per_batch == 0:
            return AdapterBudget(limits, growing=(), waiting=())
        waiting = chain(self.waiting.values(), (r for r in self.held if not r.pages and r.finish is None))
        return AdapterBudget(limits, growing=self.growing(), waiting=waiting, now_s=now_s)

    @property
    def retraction_pending(self) -> bool:
        """Whether the next collect returns memory of a retracted request."""
        return any(r.finish is None for r in self.draining)

    def retracted(self) -> list[Request]:
        """Return the requests that lost their memory and wait to resume, without those that the role has taken."""
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
