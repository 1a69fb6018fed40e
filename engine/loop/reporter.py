"""Load, gauges and self-check findings of the engine."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict

from engine.core.scheduler import Scheduler
from engine.loop.controls import Controls
from engine.loop.interval_log import IntervalLog
from engine.loop.role import EngineRole
from engine.loop.services import LoopServices
from engine.loop.timekeeper import OpenRequests
from engine.messages import StateReply

log = logging.getLogger(__name__)

CHECK_EVERY_S = 10.0


class Reporter:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        role: EngineRole,
        requests: OpenRequests,
        controls: Controls,
        intervals: IntervalLog,
        services: LoopServices,
    ) -> None:
        self._scheduler = scheduler
        self._role = role
        self._requests = requests
        self._control = controls.engine
        self._adapters = controls.adapters
        self._grammars = services.grammars
        self._intervals = intervals
        self._late_compiles = services.late_compiles
        self._memory = {f"memory_{name}_bytes": float(size) for name, size in services.memory.items()}
        self._gauges = services.gauges
        self._transfer_paths = services.transfer_paths
        self._next_check_s = 0.0
        self._problems: list[str] = []

    def state(self, call_id: str, *, check: bool) -> StateReply:
        if check:
            self._problems = self._find_problems()
        scheduler, allocator = self._scheduler, self._scheduler.memory.allocator
        unanswered_or_with_memory = self._requests.rids() | scheduler.stages.live.keys()
        return StateReply(
            call_id=call_id,
            role=self._role.name,
            running=scheduler.num_running,
            queues={
                "held": self._control.num_held,
                "grammar": len(self._grammars.rids()),
                **self._role.queues(),
            },
            num_pages=allocator.num_pages,
            page_size=allocator.page_size,
            pages=allocator.counts(),
            counters={
                **{k: float(v) for k, v in asdict(scheduler.counters).items()},
                **self._intervals.counters(),
                "late_compiles": float(self._late_compiles()),
                **self._grammars.counters(),
                **scheduler.memory.counters(),
                **self._role.counters(),
            },
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
                **self._intervals.gauges(),
                **scheduler.memory.gauges(),
                **self._role.gauges(),
            },
            problems=self._problems,
            transfer_paths=self._transfer_paths(),
            avoided_encoders=self._role.avoided_encoders(),
        )

    def check_when_due(self, now_s: float) -> None:
        """Check every owner, once in CHECK_EVERY_S."""
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + CHECK_EVERY_S
            self._problems = self._find_problems()
            for problem in self._problems:
                log.error("self-check: %s", problem)

    def _find_problems(self) -> list[str]:
        role = {f"{self._role.name} role": self._role.check}
        return problems_of({**self._scheduler.checks(), "adapters": self._adapters.check, **role})


def problems_of(checks: Mapping[str, Callable[[], None]]) -> list[str]:
    """Return findings, prefixed by owner; no failure hides another or ends the loop."""
    problems = []
    for owner, check in checks.items():
        try:
            check()
        except AssertionError as error:
            problems.append(f"{owner}: {str(error) or 'an assertion failed'}")
        except Exception as error:
            problems.append(f"{owner}: its check failed: {type(error).__name__}: {error}")
    return problems
