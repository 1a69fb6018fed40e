"""Warning about retractions for lack of memory, with the flag that helps."""

from collections.abc import Callable

from engine.core.scheduler import Scheduler
from engine.loop.listener import LoopListener

REMEDY = "--schedule-conservativeness or --mem-fraction-static"
DECODE_REMEDY = "--num-reserved-decode-tokens or --mem-fraction-static"  # its reserve limits new requests


class RetractionLog(LoopListener):
    """Writes at most one line in `EVERY_S`, for all retractions since."""

    EVERY_S = 5.0

    def __init__(self, scheduler: Scheduler, *, role: str, write: Callable[[str], None]) -> None:
        self._scheduler = scheduler
        self._write = write
        self._remedy = DECODE_REMEDY if role == "decode" else REMEDY
        self._reported_requests = self._reported_tokens = 0
        self._last_line_s = float("-inf")

    def on_planned(self, now_s: float) -> None:
        counters = self._scheduler.counters
        requests = counters.out_of_memory - self._reported_requests
        tokens = counters.out_of_memory_tokens - self._reported_tokens
        if requests == 0 or now_s - self._last_line_s < self.EVERY_S:
            return
        self._reported_requests, self._reported_tokens = counters.out_of_memory, counters.out_of_memory_tokens
        self._last_line_s = now_s
        self._write(
            f"KV memory is full: retracted {requests} request{'s' * (requests > 1)} that held {tokens} tokens; "
            f"{self._scheduler.num_running} running, new-token ratio {self._scheduler.ratio.value:.2f}. "
            f"If this happens often, raise {self._remedy}"
        )
