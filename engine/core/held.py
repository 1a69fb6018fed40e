"""Requests that the role holds: their KV comes from another worker, or goes to one.

    adopt --> (reserve) --> start_decoding                KV from elsewhere: decode role
    take_retracted --> resume_decoding, resume_here       lost its memory; the role decides where its KV comes from
    (Departures: a computed prompt) --> release           KV goes elsewhere: prefill role
    move --> (its last step) --> leave --> release        ... of a running request: decode role
    carry --> (reserve) --> keep                          a prefix from another prefill worker, for requests that wait
    lend --> release                                      ... to one

A held request computes nothing. Its memory stays until the role calls `release`, after `quarantine` where a peer may still
write its pages.
"""

from collections.abc import Sequence

from engine.core.departures import Departures
from engine.core.memory import Detached
from engine.core.outputs import output_of
from engine.core.plan import ItemResult
from engine.core.preemption import Preemption
from engine.core.request import Request
from engine.core.reserve import DecodeReserve
from engine.core.results import Results
from engine.core.state import SchedulerState
from engine.messages import FinishReason, TokenOutput

CARRIED = FinishReason(kind="stop")  # of what no client waits for


class HeldRequests:
    def __init__(self, state: SchedulerState, departures: Departures, results: Results, preemption: Preemption) -> None:
        self._state = state
        self._memory = state.memory
        self._stages = state.stages
        self._departures = departures
        self._results = results
        self._preemption = preemption
        self._reserve = DecodeReserve(
            floor=state.limits.reserve_floor,
            ratio=state.ratio,
            growth=state.growth,
            pages_for=state.memory.allocator.pages_for,
        )

    def __contains__(self, request: Request) -> bool:
        return request in self._stages.held

    # ---- KV from elsewhere

    def adopt(self, request: Request) -> FinishReason | None:
        """Make a request live whose KV will come from elsewhere; return why it can never run, or None."""
        if error := self._state.refusal(request):
            return error
        self._state.register(request)
        self._stages.held.append(request)
        return None

    def adapter_has_place(self, request: Request, now_s: float) -> bool:
        """Whether a batch can hold the adapter of `request` beside those in use."""
        if not request.adapter:
            return True
        return self._stages.adapter_budget(self._state.limits, now_s=now_s).has_place(request)

    def reserve(self, request: Request, *, may_preempt: bool = False) -> bool:
        """Take pages for the known tokens of a held request, unless the growth of others needs them.

        `may_preempt`: retract running requests of much lower priority, if that suffices. The answer is False until the
        last step of each is collected.
        """
        if self._memory.admit(request, reserved_pages=self._reserved_pages(request, []), lands=True):
            return True
        if not may_preempt or not self._preempt_for(request) or self._stages.retraction_pending:
            return False
        return self._memory.admit(request, reserved_pages=self._reserved_pages(request, []), lands=True)

    def _preempt_for(self, request: Request) -> list[Request]:
        return self._preemption.make_room(request, lambda gone: self._reserved_pages(request, gone), row=False)

    def _reserved_pages(self, request: Request, gone: Sequence[Request]) -> int:
        return self._reserve.pages([*(r for r in self._stages.growing() if r not in gone), request])

    def start_decoding(self, request: Request, first: ItemResult, *, cached_tokens: int) -> list[TokenOutput]:
        """Run an adopted request whose KV has landed, with `first` as its first token."""
        self._start(request, cached_tokens=cached_tokens)
        return [self._results.commit_sample(request, first)]

    def go_on_decoding(self, request: Request, *, cached_tokens: int) -> None:
        """Run an adopted request that another worker has decoded so far: its next step samples the next token."""
        self._start(request, cached_tokens=cached_tokens)

    def _start(self, request: Request, *, cached_tokens: int) -> None:
        request.hidden_launched = request.handed_tokens
        self._run(request, num_landed=request.handed_tokens)
        request.cached_tokens, request.admitted = cached_tokens, True

    def _run(self, request: Request, *, num_landed: int) -> None:
        """Pages of a window behind the last one were reserved, too, and nothing landed there: others must not find them."""
        request.computed_len = request.launched_len = num_landed
        self._memory.retire(request)
        self._stages.held.remove(request)
        self._stages.running.append(request)

    # ---- retracted requests

    def take_retracted(self) -> list[Request]:
        """Take the requests that lost their memory since the last call (`resume_elsewhere`); the role holds them now."""
        taken, self._stages.newly_retracted = self._stages.newly_retracted, []
        return taken

    def resume_decoding(self, request: Request) -> None:
        """Run a request whose pages hold the KV of all its tokens but the last."""
        self._run(request, num_landed=request.num_tokens - 1)

    def resume_here(self, request: Request) -> None:
        """Queue a request whose KV this engine computes."""
        self._memory.give_back(request)
        self._stages.held.remove(request)
        self._stages.requeue(request)
        self._stages.batch_is_full = False

    # ---- requests for other workers

    def move(self, request: Request) -> None:
        """Take a running request out of the batch: it is held once its last step is collected, unless that ends it."""
        self._departures.move(request)

    def leave(self, request: Request, reason: FinishReason) -> TokenOutput:
        """End a held request for its client here. Its memory stays until `release`."""
        assert request in self._stages.held and request.moves
        request.finish = reason
        return output_of(request, [])

    # ---- prefixes without a client

    def carry(self, carrier: Request) -> FinishReason | None:
        """Make `carrier` live, whose memory prefixes from elsewhere will fill; return why that can never be, or None."""
        if error := self._state.refusal(carrier):
            return error
        self._stages.register(carrier, serial=self._state.counters.requests)
        self._stages.held.append(carrier)
        return None

    def keep(self, carrier: Request, *, num_pages: int) -> None:
        """Give the first `num_pages` of a carrier, which have landed, to the tree, and free the rest."""
        num_tokens = num_pages * self._state.limits.page_size
        carrier.input_ids = carrier.input_ids[:num_tokens]
        carrier.launched_len = carrier.computed_len = num_tokens
        self.drop(carrier)

    def lend(self, carrier: Request) -> FinishReason | None:
        """Lock what is cached of the tokens of `carrier`, which then has these alone, until `release`. As `carry`."""
        if error := self.carry(carrier):
            return error
        num_tokens = self._memory.lend(carrier) * self._state.limits.page_size
        carrier.input_ids = carrier.input_ids[:num_tokens]
        carrier.finish = CARRIED
        return None

    def drop(self, carrier: Request) -> None:
        carrier.finish = CARRIED
        self.release(carrier)

    # ---- ends

    def end(self, request: Request, reason: FinishReason) -> TokenOutput:
        """End a held request that fails or is aborted. Its memory stays until `release`."""
        assert request in self._stages.held
        request.finish = reason
        self._state.counters.aborted += 1
        return output_of(request, [])

    def release(self, request: Request) -> None:
        """Give back the memory of an ended request. No peer may read or write its pages any more."""
        self._stages.held.remove(request)
        assert request.finish is not None, f"{request.rid} released before it ended"
        self._stages.draining.append(request)
        self._departures.settle()

    def quarantine(self, request: Request) -> Detached:
        """Detach the request's own memory, which a peer may still write, until `end_quarantine`."""
        return self._memory.quarantine(request)

    def end_quarantine(self, detached: Detached) -> None:
        """Free memory that no peer can write any more."""
        self._memory.end_quarantine(detached)
        self._stages.batch_is_full = False
