"""The warning that memory ran out: how many requests were retracted, and which flag makes that rarer. Pure.

It is told the time; it reads the scheduler's counters and writes no log itself.
"""

from engine.core.scheduler import Scheduler

REMEDY = "--schedule-conservativeness or --mem-fraction-static"
DECODE_REMEDY = "--num-reserved-decode-tokens or --mem-fraction-static"  # its reserve decides which requests come in


class RetractionLog:
    """At most one line in `EVERY_S`; the next one tells what happened in between."""

    EVERY_S = 5.0

    def __init__(self, scheduler: Scheduler, *, remedy: str) -> None:
        self._scheduler = scheduler
        self._remedy = remedy
        self._told_requests = self._told_tokens = 0
        self._last_line_s = float("-inf")

    def lines(self, now_s: float) -> list[str]:
        """What to write now, as warnings. Preemptions and pauses retract requests too; those are not reported."""
        counters = self._scheduler.counters
        requests, tokens = (
            counters.out_of_memory - self._told_requests,
            counters.out_of_memory_tokens - self._told_tokens,
        )
        if requests == 0 or now_s - self._last_line_s < self.EVERY_S:
            return []
        self._told_requests, self._told_tokens = counters.out_of_memory, counters.out_of_memory_tokens
        self._last_line_s = now_s
        return [
            f"KV memory is full: retracted {requests} request{'s' * (requests > 1)} that held {tokens} tokens; "
            f"{self._scheduler.num_running} running, new-token ratio {self._scheduler.ratio.value:.2f}. "
            f"If this happens often, raise {self._remedy}"
        ]


def remedy_of(role: str) -> str:
    return DECODE_REMEDY if role == "decode" else REMEDY
