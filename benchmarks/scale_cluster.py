"""The router's own core at work for many workers, in virtual time: everything that a request asks of it but sockets.

Production code, timed: the line at the door, the picker with table, circuits and policies, rooms, leases, the forecast; and
what workers tell: a check and a report of each, every second. Workers are a simple model (benchmarks/trace_workers.py says
which). Now and then one goes down and comes back, so whatever the router has worked out about its pools has to be computed
again. Time is CPU time of this thread; the clock's own cost is taken off.
"""

import heapq
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from benchmarks.trace_workers import REPORT_S, TraceRequest, keys_of
from router.admission.admission import Admission
from router.admission.forecast import SentPrompt
from router.admission.queue import AdmissionQueue, RequestRefused, Ticket
from router.attempts.pair_attempt import RoomMinter
from router.attempts.request import RequestContext, Slo
from router.attempts.upstream_call import CallFailed
from router.choice.chooser import make_chooser
from router.choice.policies import RoutingHints, cost_tokens
from router.config import RouterConfig
from router.pool.states import Check
from router.pool.worker import Lease, LoadReport, Role, Worker
from router.pool.workers import WorkerTable
from router.requests.picking import Picker
from service.prefix_chain import BLOCK_TOKENS

TOKENS_PER_S = 8000.0  # of a prefill worker
ITL_S = 0.03
CAPACITY_TOKENS = 1_000_000  # of a decode worker's KV
CHURN = 1000  # requests between two workers that go down
SEED = 1
TREE_BYTES = 1 << 20  # --max-tree-size: memory for a thousand workers' prefixes on a small machine
TRACE_WORKERS = 8  # that serve the trace at its own rate without a queue that only grows
ROLES = (Role.PREFILL, Role.DECODE)
_CLOCK_CALLS = 20_000

cached_keys = lru_cache(maxsize=1 << 17)(keys_of)


def repeated(trace: list[TraceRequest], count: int, *, workers: int) -> Iterator[TraceRequest]:
    """`count` requests: the trace again and again, at the rate for so many prefill workers. Each time its prompts are new ones, but

    for the first block, which nearly all share.
    """
    speed = workers / TRACE_WORKERS
    length_s = trace[-1].at_s + 1.0
    highest = 1 + max(max(request.blocks, default=0) for request in trace)
    for number in range(count):
        turn, place = divmod(number, len(trace))
        request = trace[place]
        blocks = tuple(block + turn * highest if block else block for block in request.blocks)
        at_s = (turn * length_s + request.at_s) / speed
        yield TraceRequest(at_s, request.input_tokens, request.output_tokens, blocks)


class Stopwatch:
    """CPU time of what runs between `start` and `stop`, by name."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = {}
        self.count: dict[str, int] = {}
        begun = time.thread_time_ns()
        for _ in range(_CLOCK_CALLS):
            time.thread_time_ns()
        self._own_ns = (time.thread_time_ns() - begun) / _CLOCK_CALLS

    def add(self, name: str, begun_ns: int) -> None:
        """It took from `begun_ns` (of `time.thread_time_ns`) until now."""
        self.ns[name] = self.ns.get(name, 0) + time.thread_time_ns() - begun_ns
        self.count[name] = self.count.get(name, 0) + 1

    def us(self, name: str) -> float:
        """Microseconds each."""
        count = self.count.get(name, 0)
        return max(0.0, self.ns[name] / count - self._own_ns) / 1000 if count else 0.0


@dataclass(slots=True)
class _Running:
    """A request that was sent to its workers."""

    request: RequestContext
    ticket: Ticket
    leases: list[Lease]
    prompt: SentPrompt
    rooms: tuple[int, ...]


class Cluster:
    """`workers` of both roles together behind one router with this policy for prefill and, where that is sensible, decode.

    `retried`: each request is sent twice: its first decode worker has failed it.
    """

    def __init__(self, policy: str, workers: int, *, slo: Slo | None = None, retried: bool = False) -> None:
        self.policy = policy
        self.workers = workers
        self.slo = slo
        self.retried = retried
        self.watch = Stopwatch()
        self.now_s = 0.0
        self.served = self.refused = self.computed = self.cached_tokens = 0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._reports = True
        self._build()

    def _build(self) -> None:
        decode = "least_load" if self.policy == "cache_aware" else self.policy
        config = RouterConfig(
            pd_disaggregation=True, prefill_policy=self.policy, decode_policy=decode, max_tree_size=TREE_BYTES
        )
        chooser = make_chooser(config, draw=random.Random(SEED).randrange)
        self.table = WorkerTable(on_gone=chooser.forget)
        self.admission = Admission(config)
        self.queue = AdmissionQueue(config)
        self.rooms = RoomMinter()
        self.picker = Picker(
            table=self.table,
            policies=chooser.policies,
            admission=self.admission,
            wait_s=0.0,
            silence_s=0.0,
            clock=lambda: self.now_s,
        )
        for i in range(self.workers):
            worker = self.table.add(f"http://10.{i >> 8}.{i & 255}.1:30000", role=ROLES[i % 2])
            self.table.on_check(worker, Check.OK, now_s=0.0)
        self._busy_until_s = [0.0] * self.workers
        self._held = [0] * self.workers
        self._all = self.table.workers()

    def run(self, requests: Iterator[TraceRequest], *, tell: Callable[[], object] = lambda: None) -> None:
        """All of them, to their ends. `tell` is called after each."""
        for worker in self._all:  # each at its own moment of the second
            self._at(worker.worker_id / self.workers * REPORT_S, self._hear_of(worker))
        for number, request in enumerate(requests, 1):
            self._run_until(request.at_s)
            self._serve(request)
            if number % CHURN == 0:
                self.table.on_check(self._all[number // CHURN % self.workers], Check.REFUSED, now_s=self.now_s)
            tell()
        self._reports = False  # the rest of the answers ends in time that nothing is measured in
        while self.table.loads.num_leases:
            self._run_until(self._later[0][0])

    def _serve(self, request: TraceRequest) -> None:
        keys = [key for block in request.blocks for key in cached_keys(block)][: request.input_tokens // BLOCK_TOKENS]
        session = str(request.blocks[:2][-1]) if request.blocks else ""
        hints = RoutingHints(
            prompt_tokens=request.input_tokens, output_tokens=request.output_tokens, keys=keys, session=session
        )
        routed = _request(hints, self.slo)
        begun_ns = time.thread_time_ns()
        try:
            running = self._begin(routed)
        except RequestRefused:
            self.watch.add("refused", begun_ns)
            self.refused += 1
            return
        self.watch.add("begin", begun_ns)
        if self.retried:
            begun_ns = time.thread_time_ns()
            self._pick_again(running)
            self.watch.add("again", begun_ns)
        prefill, decode = running.leases
        self.cached_tokens += request.input_tokens - prefill.tokens
        self._busy_until_s[prefill.worker.worker_id] = done_s = (
            max(self.now_s, self._busy_until_s[prefill.worker.worker_id]) + prefill.tokens / TOKENS_PER_S
        )
        self._held[prefill.worker.worker_id] += prefill.tokens
        self._held[decode.worker.worker_id] += decode.tokens
        self._at(done_s, lambda: self._begun(running))
        self._at(done_s + request.output_tokens * ITL_S, lambda: self._end(running))

    def _begin(self, request: RequestContext) -> _Running:
        """What the dispatcher does with a request before it is sent."""
        ticket, _ = self.queue.arrive("", priority=0, now_s=self.now_s)
        try:
            chosen = self.picker.pick(request)
        except RequestRefused:
            self.queue.leave(ticket)
            raise
        assert chosen is not None
        tokens = [cost_tokens(choice, request.hints) for choice in chosen]
        leases = [self.table.loads.charge(choice.worker, cost) for choice, cost in zip(chosen, tokens, strict=True)]
        prompt = self.admission.forecast.expect(chosen[0].worker, tokens[0], now_s=self.now_s)
        return _Running(request, ticket, leases, prompt, self.rooms.mint(1))

    def _pick_again(self, running: _Running) -> None:
        """What a retry asks of the router's core before it is sent; it ends at once."""
        request, workers = running.request, [lease.worker for lease in running.leases]
        request.note_failed(CallFailed(workers[1], reason="lost"), workers)
        for choice in self.picker.pick(request) or ():
            cost = cost_tokens(choice, request.hints)
            self.table.loads.release(self.table.loads.charge(choice.worker, cost))

    def _begun(self, running: _Running) -> None:
        lease = running.leases[0]
        self._held[lease.worker.worker_id] -= lease.tokens
        self.computed += lease.tokens
        begun_ns = time.thread_time_ns()
        self.admission.forecast.learn_ttft(running.prompt, now_s=self.now_s)
        self.table.loads.release(lease)
        self.watch.add("first token", begun_ns)

    def _end(self, running: _Running) -> None:
        lease = running.leases[1]
        self._held[lease.worker.worker_id] -= lease.tokens
        self.served += 1
        begun_ns = time.thread_time_ns()
        self.table.loads.release(lease)
        self.rooms.release(running.rooms)
        self.queue.leave(running.ticket)
        self.watch.add("end", begun_ns)

    def _hear_of(self, worker: Worker) -> Callable[[], None]:
        """Its health check and its load, and again after a second."""

        def hear() -> None:
            held = self._held[worker.worker_id]
            if worker.role is Role.PREFILL:
                report = LoadReport(waiting_tokens=held)
            else:
                report = LoadReport(used_tokens=held, capacity_tokens=CAPACITY_TOKENS)
            begun_ns = time.thread_time_ns()
            self.table.on_incarnation(worker, "1", checked_s=self.now_s)
            self.table.on_silence(worker, False)
            self.table.on_check(worker, Check.OK, now_s=self.now_s)
            self.table.loads.on_report(worker, report)
            self.watch.add("report", begun_ns)
            if self._reports:
                self._at(self.now_s + REPORT_S, hear)

        return hear

    def _at(self, when_s: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._later, (when_s, self._order, act))

    def _run_until(self, now_s: float) -> None:
        while self._later and self._later[0][0] <= now_s:
            self.now_s, _, act = heapq.heappop(self._later)
            act()
        self.now_s = now_s


def _request(hints: RoutingHints, slo: Slo | None) -> RequestContext:
    """Only what the picker reads of it is there."""
    absent: Any = None
    return RequestContext(
        http=absent, task=absent, request_id="", path="", started_s=0.0, hints=hints, slo=slo, ways=(ROLES,)
    )
