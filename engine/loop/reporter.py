"""What the engine says about itself: load, gauges, and what its owners find when they check themselves.

It owns the last findings. It changes nothing of what it looks at.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict

from engine.core.scheduler import Scheduler
from engine.grammar.queue import GrammarQueue
from engine.loop.adapter_control import AdapterControl
from engine.loop.control import Control
from engine.loop.interval_log import IntervalLog
from engine.loop.role import Role
from engine.loop.self_check import problems_of
from engine.messages import StateReply

log = logging.getLogger(__name__)

CHECK_EVERY_S = 10.0


class Reporter:
    """`num_live`: requests of the engine, those that only the role knows included."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        role: Role,
        control: Control,
        grammars: GrammarQueue,
        adapters: AdapterControl,
        intervals: IntervalLog,
        num_live: Callable[[], int],
    ) -> None:
        self._scheduler = scheduler
        self._role = role
        self._control = control
        self._grammars = grammars
        self._adapters = adapters
        self._intervals = intervals
        self._num_live = num_live
        self._next_check_s = 0.0
        self._problems: list[str] = []

    def state(self, call_id: str, *, check: bool) -> StateReply:
        if check:
            self._problems = self._find_problems()
        scheduler, allocator = self._scheduler, self._scheduler.memory.allocator
        counts, host = allocator.counts(), scheduler.memory.host
        used = counts["held"] + counts["quarantined"] + counts["cached"] - scheduler.memory.cache.num_evictable
        return StateReply(
            call_id=call_id,
            role=self._role.name,
            running=scheduler.num_running,
            queues=self._queues(),
            num_pages=allocator.num_pages,
            page_size=allocator.page_size,
            pages=counts,
            counters={
                **{k: float(v) for k, v in asdict(scheduler.counters).items()},
                **self._intervals.counters(),
                **self._grammars.counters(),
                **({} if host is None else {k: float(v) for k, v in host.counters.items()}),
                **self._role.counters(),
            },
            gauges={
                "used_tokens": float(used * allocator.page_size),
                "waiting_tokens": float(scheduler.waiting_tokens),
                "live": float(self._num_live()),
                "paused": float(self._control.paused),
                "new_token_ratio": scheduler.ratio.value,
                "batch_is_full": float(scheduler.stages.batch_is_full),
                **self._adapters.gauges(),
                **self._intervals.gauges(),
                **({} if host is None else host.gauges()),
                **self._role.gauges(),
            },
            problems=self._problems,
        )

    def _queues(self) -> dict[str, int]:
        queues = {"held": self._control.num_held, "grammar": len(self._grammars.rids()), **self._role.queues()}
        queues.setdefault("waiting", self._scheduler.num_waiting)  # unless the role counts these requests elsewhere
        return queues

    def check_when_due(self, now_s: float) -> None:
        """For a loop at rest: a look at every owner now and then."""
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + CHECK_EVERY_S
            self._problems = self._find_problems()
            for problem in self._problems:
                log.error("self-check: %s", problem)

    def _find_problems(self) -> list[str]:
        owners = {"adapters": self._adapters.check, f"{self._role.name} role": self._role.check}
        return problems_of({**self._scheduler.checks(), **owners})
