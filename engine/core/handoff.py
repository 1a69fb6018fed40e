"""Handoff requests of the role: their KV comes from another worker, or goes there.

  adopt --> (reserve) --> start_decoding           KV from elsewhere: decode role
  take_retracted --> resume_decoding, resume_here  preempted: the role chooses the KV's source
  (Departures: a computed prompt) --> release      KV goes elsewhere: prefill role
  move --> (its last step) --> leave --> release   running request: decode role
  carry --> (reserve) --> keep                     prefix from another prefill worker
  lend --> release                                 prefix for another one

They compute nothing. Memory stays until `release`, after `quarantine` if a peer may still write.
"""

from collections.abc import Sequence

from engine.core.adapters import budget_of
from engine.core.estimates import DecodeReserve
from engine.core.memory import Detached
from engine.core.outputs import output_of
from engine.core.plan import ItemResult
from engine.core.preemption import Preemption
from engine.core.request import Request
from engine.core.results import Departures, Results
from engine.core.state import SchedulerState
from engine.messages import FinishReason, TokenOutput

CARRIED = FinishReason(kind="stop")  # no client waits for it


class HandoffRequests:
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
        """Register a request with KV from elsewhere; return why it can never run, or None."""
        if error := self._state.refusal(request):
            return error
        self._state.register(request)
        self._stages.held.append(request)
        return None

    def adapter_has_place(self, request: Request, now_s: float) -> bool:
        if not request.adapter:
            return True
        return budget_of(self._stages, self._state.limits, now_s).has_place(request)

    def reserve(self, request: Request, *, may_preempt: bool = False) -> bool:
        """Take pages for known tokens, unless others will need them.

        `may_preempt`: retract requests of much lower priority if that suffices; False until their
        last steps are collected.
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
        """Run an adopted request after its KV landed."""
        self._start(request, cached_tokens=cached_tokens)
        return [self._results.commit_sample(request, first)]

    def go_on_decoding(self, request: Request, *, cached_tokens: int) -> None:
        """Run an adopted request moved from another decode worker."""
        self._start(request, cached_tokens=cached_tokens)

    def _start(self, request: Request, *, cached_tokens: int) -> None:
        request.unsent.hidden_launched = request.handed_tokens
        self._run(request, num_landed=request.handed_tokens)
        request.stats.cached_tokens, request.admitted = cached_tokens, True

    def _run(self, request: Request, *, num_landed: int) -> None:
        request.computed_len = request.launched_len = num_landed
        self._memory.retire(request)
        self._stages.held.remove(request)
        self._stages.running.append(request)

    # ---- retracted requests

    def take_retracted(self) -> list[Request]:
        """Take newly retracted requests (`resume_elsewhere`)."""
        taken, self._stages.newly_retracted = self._stages.newly_retracted, []
        return taken

    def resume_decoding(self, request: Request) -> None:
        """Run a request with KV of all tokens but the last."""
        self._run(request, num_landed=request.num_tokens - 1)

    def resume_here(self, request: Request) -> None:
        """Queue a request for recomputation here."""
        self._memory.give_back(request)
        self._stages.held.remove(request)
        self._stages.requeue(request)
        self._stages.batch_is_full = False

    # ---- requests for other workers

    def move(self, request: Request) -> None:
        self._departures.move(request)

    def leave(self, request: Request, reason: FinishReason) -> TokenOutput:
        """End a request for its client; `release` frees memory."""
        assert request in self._stages.held and request.moves
        request.finish = reason
        return output_of(request, [])

    # ---- prefixes without a client

    def carry(self, carrier: Request) -> FinishReason | None:
        """Register a placeholder for arriving prefixes; return why that is impossible, or None."""
        if error := self._state.refusal(carrier):
            return error
        self._stages.register(carrier, serial=self._state.counters.requests)
        self._stages.held.append(carrier)
        return None

    def keep(self, carrier: Request, *, num_pages: int) -> None:
        """Cache the first `num_pages`, which landed; free the rest."""
        num_tokens = num_pages * self._state.limits.page_size
        carrier.input_ids = carrier.input_ids[:num_tokens]
        carrier.launched_len = carrier.computed_len = num_tokens
        self.drop(carrier)

    def lend(self, carrier: Request) -> FinishReason | None:
        """Pin the placeholder's cached prefix until `release`."""
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
        """End a failed or aborted request; `release` frees memory."""
        assert request in self._stages.held
        request.finish = reason
        self._state.counters.aborted += 1
        return output_of(request, [])

    def release(self, request: Request) -> None:
        """Free an ended request; no peer may use its pages."""
        self._stages.held.remove(request)
        assert request.finish is not None, f"{request.rid} released before it ended"
        self._stages.draining.append(request)
        self._departures.settle()

    def quarantine(self, request: Request) -> Detached:
        return self._memory.quarantine(request)

    def end_quarantine(self, detached: Detached) -> None:
        self._memory.end_quarantine(detached)
        self._stages.batch_is_full = False
