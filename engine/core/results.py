"""Results of steps and exits of requests from the batch: finished, retracted, or moved.

  finish ----+                              finished: memory freed
             +--> draining --settle (inflight 0)--<
  retract ---+                              retracted: KV saved (Backups), waiting, or the role's
  move ---------> leaving ---settle (inflight 0)---> held by the role, which sends its KV

No launched step may touch released pages: a transfer peer may write them without waiting for our
stream.
"""

from typing import Protocol

from engine.core.outputs import StepEffects, check_finish, joined, output_of, refusal
from engine.core.outputs import take as take_hidden
from engine.core.plan import ItemResult, Plan, PlanItem, StepResult
from engine.core.request import Request
from engine.core.state import SchedulerState
from engine.messages import MOVED, FinishReason, TokenOutput

# ---- Exits of requests from the batch: finished, retracted, or moved.


class Departures:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._stages = state.stages

    def finish(self, request: Request, reason: FinishReason, new_ids: list[int] | None = None) -> TokenOutput:
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
        """Free ended and retracted requests; without `copy` this engine recomputes the latter."""
        backups = self._state.backups
        for request in self._stages.take_departed():
            self._close_row(request)  # its pages are still read, its row is not
            self._stages.held.append(request)
        for request in self._stages.take_settled():
            if request.ended:
                self._give_back(request)
                del self._stages.live[request.rid]
            elif copy and backups.begin(request):
                self._stages.draining.append(request)  # until its copy is made
            else:
                # A recompute request to prefill has no adapter: such requests resume here.
                self._requeue(
                    request, elsewhere=copy and self._state.limits.resume_elsewhere and not request.variant.number
                )

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
        self._close_row(request)

    def _close_row(self, request: Request) -> None:
        if request.slot is not None:
            self._state.table.close(request)


# ---- Handling of step results: tokens, sharing, finish checks, memory.

NO_TOKEN = -1  # a peer's missing first token


class RowRule(Protocol):
    """Rule for collected rows of requests with parts: the strategy of decode steps."""

    def on_row(self, request: Request, item: PlanItem, result: ItemResult) -> None:
        """Note a collected row before it is applied."""

    def accepts(self, request: Request, item: PlanItem, number: int) -> bool:
        """Return whether row `number` of a collected step counts; else it has no effect."""


class Results:
    def __init__(self, state: SchedulerState, departures: Departures, decode: RowRule) -> None:
        self._state = state
        self._departures = departures
        self._decode = decode
        self._step_ends = state.step_ends
        self._vocab_size = state.limits.vocab_size
        self._share = 1 / state.limits.micro_batches

    def collect(self, plan: Plan, result: StepResult) -> StepEffects:
        assert result.seq == plan.seq and len(result.items) == len(plan.items)
        effects, live = StepEffects(failure=result.failure, phase=plan.phase), self._state.stages.live
        memory, step_ends = self._state.memory, self._step_ends
        self._state.micro_batches.on_collected(plan)
        memory.on_collected(plan, failed=bool(result.failure))
        for i, (item, item_result) in enumerate(zip(plan.items, result.items, strict=True)):
            request = live[item.rid]
            request.inflight -= 1
            request.pending -= item.sample
            if request.parts:
                self._decode.on_row(request, item, item_result)
            if plan.skips_model:
                continue
            goes_on = request.finish is None
            if result.failure:
                self._lose(request, effects, goes_on=goes_on)
                for ends in step_ends:
                    ends.keep(request, item.kv_len, memory)
                continue
            if request.parts and not self._decode.accepts(request, item, i):
                continue
            if (kv_len := item.kv_len) > request.computed_len:
                request.computed_len = kv_len
            for ends in step_ends:
                ends.keep(request, kv_len, memory)
            if goes_on:
                self._apply(request, item, item_result, effects)
            else:
                self._state.counters.wasted_samples += item.sample
            memory.retire(request)
        self._state.counters.failed_steps += bool(result.failure)
        self._departures.settle()
        if not plan.skips_model and not all(item.extend for item in plan.items):
            self._state.ratio.decay(self._share)
        if not live:
            self._state.ratio.reset()
        return effects

    def _lose(self, request: Request, effects: StepEffects, *, goes_on: bool) -> None:
        """Steps behind a failed one read unwritten KV: keep their results private."""
        request.keep_kv = False
        if goes_on:
            effects.lost.append(request.rid)

    def _apply(self, request: Request, item: PlanItem, result: ItemResult, effects: StepEffects) -> None:
        request.unsent.input_logprobs += result.input_logprobs
        if item.hidden_from is not None:
            take_hidden(request, item, result.hidden)
        if item.extend:
            self._state.memory.share(request)
            effects.progressed.append(request)
        if not item.sample:
            return
        output = self.commit_sample(request, result)
        if request.prefill_only:
            self._state.table.close(request)  # its pages are still read, its row is not
            effects.prefilled.append((request, output, result))
        elif item.behind:  # one output for all rows of a request
            effects.outputs[-1] = joined(effects.outputs[-1], output)
        else:
            effects.outputs.append(output)

    def commit_sample(self, request: Request, result: ItemResult) -> TokenOutput:
        """Append the sampled token, run finish checks, and return the output."""
        new_ids = []
        if request.max_new_tokens > 0:  # 0: only prompt logprobs were requested
            token = NO_TOKEN if result.token is None else result.token
            request.output_ids.append(token)
            self._state.counters.generation_tokens += 1
            if 0 <= token < self._vocab_size:
                new_ids = [token]
                if result.logprob is not None:
                    request.unsent.logprobs.append(result.logprob)
                if request.grammar is not None and not result.bad and not request.grammar.accept(token):
                    # Its mask left only this token, so the client's own grammar is at its end: no fault of the worker.
                    request.abort = refusal(f"grammar: {request.grammar.problem}", status=400)
        reason = check_finish(request, bad=result.bad, vocab_size=self._vocab_size)
        if reason is None:
            return output_of(request, new_ids)
        if not request.prefill_only:
            self._state.stages.unstage(request)
        return self._departures.finish(request, reason, new_ids)
