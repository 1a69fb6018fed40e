"""The event loop of an engine, the same for every role, device and depth.

One turn:   receive -> role.poll -> schedule -> launch ------> collect the oldest -> role.on_step -> send
                                                  |                  ^
                                  depth 2: the next step is launched before this one's results are read

It owns the launched steps and nothing else; decisions are the scheduler's and the role's.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Protocol

from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.executor.executor import Executor, Launch
from engine.loop.role import Role
from engine.messages import (
    AbortRequest,
    FlushCache,
    FlushReply,
    GenerateRequest,
    GetState,
    RequestOpened,
    Shutdown,
    StateReply,
    ToDetokenizer,
    ToFrontend,
    TokenBatch,
    TokenOutput,
    ToScheduler,
)

log = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
OUTSIDE_WAIT_S = 0.02
CHECK_EVERY_S = 10.0
PROMPT_TAIL_TOKENS = 8  # what incremental detokenization needs to see of the prompt


class Ports(Protocol):
    """Where messages come from and go to."""

    def receive(self) -> list[ToScheduler]: ...

    def wait(self, timeout_s: float) -> None:
        """Return when something can be received, somebody called for attention, or the time is over."""

    def to_detokenizer(self, message: ToDetokenizer) -> None: ...

    def to_frontend(self, message: ToFrontend) -> None: ...


class EngineLoop:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        role: Role,
        ports: Ports,
        depth: int,
        eos_ids: frozenset[int],
        prefill_only: bool,
        clock: Callable[[], float],
    ) -> None:
        assert depth >= 1
        self._scheduler = scheduler
        self._executor = executor
        self._role = role
        self._ports = ports
        self._depth = depth
        self._eos_ids = eos_ids
        self._prefill_only = prefill_only
        self._clock = clock
        self._launched: deque[Launch] = deque()
        self._next_check_s = 0.0
        self._problems: list[str] = []
        self.stopped = False

    def run(self) -> None:
        """Until a `Shutdown` comes or `stopped` is set from a signal handler."""
        while not self.stopped:
            if not self.turn():
                self._rest()

    def turn(self) -> bool:
        """One turn; False when there was nothing to compute."""
        now_s = self._clock()
        outputs: list[TokenOutput] = []
        for message in self._ports.receive():
            outputs += self._handle(message, now_s)
        outputs += self._role.poll(now_s)
        plan = self._scheduler.schedule(now_s)
        if plan is not None:
            while plan.wait and self._launched:
                outputs += self._collect()
            self._launched.append(self._executor.launch(plan))
        worked = bool(self._launched)
        if self._launched and (plan is None or len(self._launched) >= self._depth):
            outputs += self._collect()
        if outputs:
            self._ports.to_detokenizer(TokenBatch(outputs))
        return worked

    def _collect(self) -> list[TokenOutput]:
        launch = self._launched.popleft()
        effects = self._scheduler.collect(launch.plan, self._executor.collect(launch))
        return self._role.on_step(effects, self._clock())

    def _rest(self) -> None:
        waiting = self._role.waits_for_outside()
        if not waiting:
            self._check_when_due()
        self._ports.wait(OUTSIDE_WAIT_S if waiting else IDLE_WAIT_S)

    def _handle(self, message: ToScheduler, now_s: float) -> list[TokenOutput]:
        match message:
            case GenerateRequest():
                return self._add(message, now_s)
            case AbortRequest(rid=rid, all=everything):
                rids = self._scheduler.live_rids() if everything else [rid]
                return [output for r in rids for output in self._role.abort(r, now_s)]
            case FlushCache(call_id=call_id):
                ok = self._scheduler.flush_cache()
                text = "Cache flushed." if ok else "Requests are running; nothing was flushed."
                self._ports.to_frontend(FlushReply(call_id, ok, text))
            case GetState(call_id=call_id, check=check):
                self._ports.to_frontend(self._state(call_id, check=check))
            case Shutdown():
                self.stopped = True
        return []

    def _add(self, message: GenerateRequest, now_s: float) -> list[TokenOutput]:
        tail = message.input_ids[-PROMPT_TAIL_TOKENS:]
        sampling = message.sampling
        self._ports.to_detokenizer(RequestOpened(message.rid, tail, sampling.stop, sampling.skip_special_tokens))
        request = Request(
            rid=message.rid,
            input_ids=message.input_ids,
            sampling=sampling,
            eos_ids=self._eos_ids,
            arrived_s=now_s,
            logprobs=message.logprobs,
            bootstrap=message.bootstrap,
            prefill_only=self._prefill_only and not message.pooling,
            keep_kv=not message.skip_cache_insert,
            return_hidden_states=message.return_hidden_states,
            pooling=message.pooling,
        )
        return self._role.add(request, now_s)

    # ---- self-knowledge

    def _state(self, call_id: str, *, check: bool) -> StateReply:
        if check:
            self._problems = self._find_problems()
        scheduler, allocator = self._scheduler, self._scheduler.memory.allocator
        counts = allocator.counts()
        used = counts["held"] + counts["quarantined"] + counts["cached"] - scheduler.memory.cache.num_evictable
        return StateReply(
            call_id=call_id,
            role=self._role.name,
            running=scheduler.num_running,
            queues={"waiting": scheduler.num_waiting, **self._role.queues()},
            num_pages=allocator.num_pages,
            page_size=allocator.page_size,
            pages=counts,
            counters={**{k: float(v) for k, v in asdict(scheduler.counters).items()}, **self._role.counters()},
            gauges={
                "used_tokens": float(used * allocator.page_size),
                "waiting_tokens": float(scheduler.waiting_tokens),
                "live": float(len(scheduler.live_rids())),
            },
            problems=self._problems,
        )

    def _check_when_due(self) -> None:
        now_s = self._clock()
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + CHECK_EVERY_S
            self._problems = self._find_problems()
            for problem in self._problems:
                log.error("self-check: %s", problem)

    def _find_problems(self) -> list[str]:
        try:
            self._scheduler.check()
        except AssertionError as error:
            return [f"scheduler: {error}", *self._role.check()]
        return self._role.check()
