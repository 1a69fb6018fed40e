"""How requests leave the batch: ended, or retracted to wait again.

    finish ----+                                  ended: its memory back, gone
               +--> draining --settle (inflight 0)--<
    retract ---+                                  retracted: its KV copied to the host (Backups), memory back, waiting (or the role's)

Memory rule: a request's pages are released only when no launched step touches them (`inflight == 0`), because a page
that leaves the engine may next be written by a transfer peer, who does not wait for our stream.
"""

from engine.core.backups import Backups
from engine.core.counters import Counters
from engine.core.growth import MeasuredGrowth
from engine.core.memory import Memory
from engine.core.outputs import output_of
from engine.core.request import Request
from engine.core.request_table import RequestTable
from engine.core.stages import Stages
from engine.messages import FinishReason, TokenOutput


class Departures:
    def __init__(
        self,
        *,
        stages: Stages,
        memory: Memory,
        table: RequestTable,
        backups: Backups,
        growth: MeasuredGrowth | None,
        counters: Counters,
        resume_elsewhere: bool,
    ) -> None:
        self._stages = stages
        self._memory = memory
        self._table = table
        self._backups = backups
        self._growth = growth
        self._counters = counters
        self._resume_elsewhere = resume_elsewhere

    def finish(self, request: Request, reason: FinishReason, new_ids: list[int] | None = None) -> TokenOutput:
        """Final state, said once. A prefill-only request is the role's from here; others go when nothing is in flight."""
        request.finish = reason
        self._counters.aborted += reason.kind == "abort"
        if self._growth is not None and reason.kind != "abort":
            self._growth.note_end(len(request.output_ids))
        output = output_of(request, new_ids or [])
        if not request.prefill_only:
            self._stages.draining.append(request)
            self.settle()
        elif request not in self._stages.kept:
            self._stages.kept.append(request)
        return output

    def retract(self, victim: Request) -> None:
        """A running request waits again; its memory is free now, or once its step in flight has been collected."""
        self._stages.running.remove(victim)
        self._stages.draining.append(victim)
        self.settle()

    def retract_all(self) -> int:
        """As `Scheduler.retract_all`: no copy is made or kept."""
        self._backups.forget_all(self._stages.live.values())
        victims = self._stages.take_computing()
        self._stages.draining += victims
        self.settle(copy=False)
        return len(victims)

    def settle(self, *, copy: bool = True) -> None:
        """Ended and retracted requests whose last step has been collected give their memory back.

        Without `copy` retracted ones are computed again by this engine, whatever else is usual.
        """
        for request in self._stages.take_settled():
            if request.finish is None and copy and self._backups.begin(request):
                self._stages.draining.append(request)  # until its copy is made
            elif request.finish is None:
                # What asks a prefill worker for KV names no adapter: those resume here.
                self._requeue(request, elsewhere=copy and self._resume_elsewhere and not request.adapter)
            else:
                self._backups.drop(request)
                self._give_back(request)
                del self._stages.live[request.rid]

    def _requeue(self, request: Request, *, elsewhere: bool) -> None:
        """Give memory back (what is computed stays findable) and wait again; generated tokens are known tokens now."""
        self._give_back(request)
        request.input_logprobs.clear()  # not said yet: of a part of the prompt, which is computed again
        request.retractions += 1
        self._counters.retractions += 1
        if elsewhere:
            self._stages.kept.append(request)
            self._stages.untaken.append(request)
        else:
            self._stages.requeue(request)

    def _give_back(self, request: Request) -> None:
        self._stages.batch_is_full = False
        self._memory.give_back(request)
        if request.slot is not None:
            self._table.close(request)
