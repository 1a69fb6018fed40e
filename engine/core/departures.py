"""Exits of requests from the batch: finished, retracted, or moved.

  finish ----+                              finished: memory freed
             +--> draining --settle (inflight 0)--<
  retract ---+                              retracted: KV saved (Backups), waiting, or the role's
  move ---------> leaving ---settle (inflight 0)---> held by the role, which sends its KV

No launched step may touch released pages: a transfer peer may write them without waiting for our
stream.
"""

from engine.core.outputs import output_of
from engine.core.request import Request
from engine.core.state import SchedulerState
from engine.messages import MOVED, FinishReason, TokenOutput


class Departures:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._stages = state.stages

    def finish(self, request: Request, reason: FinishReason, new_ids: list[int] | None = None) -> TokenOutput:
        """End a request and return its last output."""
        request.finish = reason
        self._state.counters.aborted += reason.kind == "abort"
        if reason.kind not in ("abort", MOVED):
            self._state.growth.note_end(len(request.output_ids))
        output = output_of(request, new_ids or [])
        if not request.prefill_only:
            self._stages.draining.append(request)
            self.settle()
        elif request not in self._stages.held:
            self._stages.held.append(request)
        return output

    def retract(self, victim: Request) -> None:
        """Requeue a running request; memory is freed after its step in flight."""
        self._stages.running.remove(victim)
        self._stages.draining.append(victim)
        self.settle()

    def move(self, request: Request) -> None:
        """Remove a running request for another worker; its last step may finish it."""
        self._stages.running.remove(request)
        self._stages.leaving.append(request)
        request.moves = True
        self.settle()

    def retract_all(self) -> int:
        self._state.backups.forget_copies()
        victims = self._stages.take_computing()
        self._stages.draining += victims
        self.settle(copy=False)
        return len(victims)

    def settle(self, *, copy: bool = True) -> None:
        """Free finished and retracted requests after their last step.

        Without `copy` this engine recomputes retracted ones.
        """
        backups = self._state.backups
        for request in self._stages.take_departed():
            if request.slot is not None:
                self._state.table.close(request)  # its pages are still read, its row is not
            self._stages.held.append(request)
        for request in self._stages.take_settled():
            if request.finish is None and copy and backups.begin(request):
                self._stages.draining.append(request)  # until its copy is made
            elif request.finish is None:
                # A recompute request to prefill has no adapter: such requests resume here.
                self._requeue(request, elsewhere=copy and self._state.limits.resume_elsewhere and not request.adapter)
            else:
                self._give_back(request)
                del self._stages.live[request.rid]

    def _requeue(self, request: Request, *, elsewhere: bool) -> None:
        self._give_back(request)
        request.unsent.input_logprobs.clear()  # partial: the prompt is recomputed
        request.stats.retractions += 1
        self._state.counters.retractions += 1
        if elsewhere:
            self._stages.held.append(request)
            self._stages.newly_retracted.append(request)
        else:
            self._stages.requeue(request)

    def _give_back(self, request: Request) -> None:
        self._stages.batch_is_full = False
        self._state.memory.give_back(request)
        if request.slot is not None:
            self._state.table.close(request)
