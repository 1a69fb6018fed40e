"""Recent engine activity: a log line per interval, and metrics."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.plan import Plan
from engine.core.scheduler import Scheduler
from engine.loop.listener import LoopListener


@dataclass(slots=True)
class _Sums:
    start_s: float
    prefill_steps: int = 0
    decode_steps: int = 0
    new_tokens: int = 0
    new_requests: int = 0
    known_rows: int = 0  # rows of decode steps without drafts


class IntervalLog(LoopListener):
    """Log every `steps`, and when idle, then at most once in `QUIET_S`."""

    QUIET_S = 1.0

    def __init__(self, scheduler: Scheduler, *, steps: int, write: Callable[[str], None]) -> None:
        self._scheduler = scheduler
        self._write = write
        self._steps = steps
        self._sums: _Sums | None = None
        self._last_line_s = float("-inf")
        self._cached_before = self._generated_before = 0  # counters at the end of the last interval
        self._drafts_before = self._accepted_before = 0
        self.busy_s = 0.0  # since start, in iterations with work
        self.gen_throughput = 0.0  # tokens per second in the last interval; 0 when idle
        self.cache_hit_rate: float | None = None  # of the last interval with prefill
        self.accepted: dict[str, float] = {}  # of the last interval with decodes; the rate of the last one with drafts
        if scheduler.drafting is not None:
            self.accepted = {"spec_accept_length": 1.0, "spec_accept_rate": 0.0}

    def on_launch(self, plan: Plan, now_s: float) -> None:
        if plan.only_drafts:  # part of the decode step after it
            return
        sums = self._sums = self._sums or _Sums(now_s)
        sums.prefill_steps += plan.extend
        sums.decode_steps += not plan.extend
        sums.new_tokens += sum(item.q_len for item in plan.items if item.extend)
        sums.new_requests += len(plan.opens) if plan.extend else 0
        if self._scheduler.drafting is not None:
            sums.known_rows += sum(not item.draft and not item.extend for item in plan.items)
        if sums.prefill_steps + sums.decode_steps >= self._steps:
            self._end(now_s)

    def on_worked(self, taken_s: float) -> None:
        self.busy_s += taken_s

    def on_rest(self, now_s: float) -> None:
        if self._sums is not None and now_s - self._last_line_s >= self.QUIET_S:
            self._end(now_s)
        self.gen_throughput = 0.0

    def counters(self) -> dict[str, float]:
        return {"busy_s": self.busy_s}

    def gauges(self) -> dict[str, float]:
        hit = {} if self.cache_hit_rate is None else {"cache_hit_rate": self.cache_hit_rate}
        return {"gen_throughput": self.gen_throughput, **hit, **self.accepted}

    def _end(self, now_s: float) -> None:
        assert self._sums is not None
        sums, self._sums = self._sums, None
        self._last_line_s = now_s
        counters = self._scheduler.counters
        elapsed_s = max(now_s - sums.start_s, 1e-9)
        self.gen_throughput = (counters.generation_tokens - self._generated_before) / elapsed_s
        if sums.prefill_steps:
            self._write(self._prefill_line(sums, counters.cached_tokens - self._cached_before))
        self._cached_before, self._generated_before = counters.cached_tokens, counters.generation_tokens
        drafts, accepted = counters.drafts - self._drafts_before, counters.accepted_drafts - self._accepted_before
        self._drafts_before, self._accepted_before = counters.drafts, counters.accepted_drafts
        if sums.known_rows:
            self.accepted["spec_accept_length"] = 1 + accepted / sums.known_rows
        if drafts:
            self.accepted["spec_accept_rate"] = accepted / drafts
        if sums.decode_steps:
            self._write(self._decode_line(sums))

    def _prefill_line(self, sums: _Sums, cached: int) -> str:
        known = sums.new_tokens + cached
        self.cache_hit_rate = cached / known if known else 0.0
        return (
            f"prefill: {sums.prefill_steps} steps, {sums.new_requests} new requests, {sums.new_tokens} new tokens, "
            f"{cached} cached ({self.cache_hit_rate:.0%}), {self._load()}"
        )

    def _decode_line(self, sums: _Sums) -> str:
        length = self.accepted.get("spec_accept_length", 1.0)
        drafted = "" if length == 1 else f"{length:.2f} tokens a step and request, "
        return f"decode: {sums.decode_steps} steps, {self.gen_throughput:.1f} tokens/s, {drafted}{self._load()}"

    def _load(self) -> str:
        scheduler = self._scheduler
        num_pages = scheduler.memory.allocator.num_pages
        usage = (num_pages - scheduler.memory.available) / num_pages
        return f"{scheduler.num_running} running, {scheduler.num_waiting} waiting, usage {usage:.0%}"
