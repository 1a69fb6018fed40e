"""Load, gauges and self-check findings of the engine, and a warning about retractions."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import InitVar, asdict, dataclass

from engine.core.scheduler import Scheduler
from engine.loop.controls import Controls
from engine.loop.listeners import IntervalLog, LoopListener, OpenRequests
from engine.loop.role import EngineRole
from engine.loop.services import LoopServices
from engine.messages import StateReply
from engine.metric_names import check_exported

# ---- Warning about retractions for lack of memory, with the flag that helps.

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


log = logging.getLogger(__name__)

CHECK_EVERY_S = 10.0


@dataclass(eq=False, kw_only=True)
class Reporter:
    """Raises ValueError at start for a counter or queue without a metric."""

    scheduler: Scheduler
    role: EngineRole
    requests: OpenRequests
    controls: InitVar[Controls]
    intervals: IntervalLog
    services: InitVar[LoopServices]

    def __post_init__(self, controls: Controls, services: LoopServices) -> None:
        self._control = controls.engine
        self._adapters = controls.adapters
        self._grammars = services.grammars
        self._late_compiles = services.late_compiles
        self._memory = {f"memory_{name}_bytes": float(size) for name, size in services.memory.items()}
        self._gauges = services.gauges
        self._next_check_s = 0.0
        self._problems: list[str] = []
        check_exported(self._counters(), self._queues())

    def _queues(self) -> dict[str, int]:
        return {"held": self._control.num_held, "grammar": len(self._grammars.rids()), **self.role.queues()}

    def _counters(self) -> dict[str, float]:
        return {
            **{k: float(v) for k, v in asdict(self.scheduler.counters).items()},
            **self.intervals.counters(),
            "late_compiles": float(self._late_compiles()),
            **self._grammars.counters(),
            **self.scheduler.memory.counters(),
            **self.role.counters(),
        }

    def state(self, call_id: str, *, check: bool) -> StateReply:
        if check:
            self._problems = self._find_problems()
        scheduler, allocator = self.scheduler, self.scheduler.memory.allocator
        unanswered_or_with_memory = self.requests.rids() | scheduler.stages.live.keys()
        return StateReply(
            call_id=call_id,
            role=self.role.name,
            running=scheduler.num_running,
            queues=self._queues(),
            num_pages=allocator.num_pages,
            page_size=allocator.page_size,
            pages=allocator.counts(),
            counters=self._counters(),
            gauges={
                "used_tokens": float((allocator.num_pages - scheduler.memory.available) * allocator.page_size),
                "waiting_tokens": float(scheduler.waiting_tokens),
                "live": float(len(unanswered_or_with_memory)),
                "paused": float(self._control.paused),
                "new_token_ratio": scheduler.ratio.value,
                "batch_is_full": float(scheduler.stages.batch_is_full),
                **self._adapters.gauges(),
                **self._memory,
                **self._gauges(),
                **self.intervals.gauges(),
                **scheduler.memory.gauges(),
                **self.role.gauges(),
            },
            problems=self._problems,
            variants=dict(self._adapters.digests),
            **self.role.state(),
        )

    def check_when_due(self, now_s: float) -> None:
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + CHECK_EVERY_S
            self._problems = self._find_problems()
            for problem in self._problems:
                log.error("self-check: %s", problem)

    def _find_problems(self) -> list[str]:
        role = {f"{self.role.name} role": self.role.check}
        return problems_of({**self.scheduler.checks(), "adapters": self._adapters.check, **role})


def problems_of(checks: Mapping[str, Callable[[], None]]) -> list[str]:
    """Findings, prefixed by owner; no failure hides another or ends the loop."""
    problems = []
    for owner, check in checks.items():
        try:
            check()
        except AssertionError as error:
            problems.append(f"{owner}: {str(error) or 'an assertion failed'}")
        except Exception as error:
            problems.append(f"{owner}: its check failed: {type(error).__name__}: {error}")
    return problems
