"""One run: the workers of a layout serve the requests of a workload at one rate; the time of each token is recorded.

The router's own policies route the requests (planner/routing.py). A worker may change its role during the run
(planner/role_moves.py): it drains, is away for a while, and comes back with an empty cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from deploy.bench.stats import RequestRecord
from engine.messages import AbortRequest, Bootstrap, GenerateRequest, TokenOutput
from engine.sampling_params import SamplingParams
from planner.host import Host
from planner.layout import ClusterLayout
from planner.pooled import PooledWorker
from planner.role_moves import AutoSpec, RoleMoves
from planner.routing import Routing
from planner.timeline import Timeline
from planner.transfer import Network
from planner.worker import PlanWorker, WorkerSpec
from planner.workload import PlannedRequest
from router.pool.worker import Lease

LATE = "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """`workers`: by role. `outside_s`: time of a request in HTTP and tokenizer before it reaches a scheduler.

    `cores`: of the host that all workers share (None: each has its own). `host_request_s`, `host_token_s`: CPU seconds of
    that host per request and per output token, beside the steps.
    """

    layout: ClusterLayout
    workers: dict[str, WorkerSpec]
    control_s: float
    latency_s: float
    outside_s: float
    cores: float | None = None
    host_request_s: float = 0.0
    host_token_s: float = 0.0
    policy: str = "least_load"


class _LiveRequest:
    """A request in flight. `used`: its workers, decode last. `open_workers`: those that have not ended it."""

    def __init__(
        self, request: PlannedRequest, record: RequestRecord, used: list[PooledWorker], leases: list[Lease]
    ) -> None:
        self.request = request
        self.record = record
        self.used = used
        self.leases = leases
        self.open_workers = list(used)
        self.last_s = 0.0


class PlannedCluster:
    def __init__(self, spec: ClusterSpec, *, auto: AutoSpec | None = None) -> None:
        """`auto`: the router's controller moves workers between roles."""
        self._spec = spec
        self._timeline = Timeline()
        self._host = Host(spec.cores)
        self._routing = Routing[PooledWorker](spec.policy)
        page_bytes = next(iter(spec.workers.values())).page_bytes
        self._network = Network(
            self._timeline,
            page_bytes=page_bytes,
            control_s=spec.control_s,
            latency_s=spec.latency_s,
            host=self._host,
        )
        self._all: list[PlanWorker] = []
        self._pools: dict[str, list[PooledWorker]] = {}
        for role in spec.layout.roles:
            self.join(role)
        self.moves = None if auto is None else RoleMoves(spec=auto, fleet=self, timeline=self._timeline)
        self._live: dict[str, _LiveRequest] = {}
        self._num_left = 0

    def run(self, requests: Sequence[PlannedRequest], *, rate: float, until_s: float) -> list[RequestRecord]:
        """Send `requests` at `rate` per second to the whole cluster. A request without an answer at `until_s` fails as "late"."""
        records = [
            RequestRecord(idx=i, sent_s=request.at / rate, prompt_tokens=request.input_len, error=LATE)
            for i, request in enumerate(requests)
        ]
        self._num_left = len(records)
        if self.moves is not None:
            self.moves.start()
        for request, record in zip(requests, records, strict=True):
            self._timeline.at(record.sent_s + self._spec.outside_s, partial(self._send, request, record))
        self._timeline.run_until(until_s, done=lambda: self._num_left == 0)
        return records

    def warm(self, history: Sequence[PlannedRequest]) -> None:
        """Put the prefixes of earlier requests into the caches of the workers that compute prompts."""
        role, pool = next(iter(self._pools.items()))
        for request in history:
            pooled, lease = self._routing.choose(role, pool, request)
            pooled.worker.remember(request.tokens())
            self._routing.release(lease)

    @property
    def now_s(self) -> float:
        """The end of the last turn of any worker."""
        return max(worker.clock.now_s for worker in self.workers())

    def workers(self) -> list[PlanWorker]:
        """All workers so far; a worker that changes its role counts as a new one."""
        return list(self._all)

    def pools(self) -> dict[str, list[PooledWorker]]:
        """The workers that get requests, by role."""
        return {role: list(pool) for role, pool in self._pools.items()}

    def join(self, role: str) -> PooledWorker:
        """Add a new worker, with an empty cache."""
        pooled = self._place(role)
        self._all.append(pooled.worker)
        self._pools.setdefault(role, []).append(pooled)
        return pooled

    def retire(self, pooled: PooledWorker, *, on_drained: Callable[[], None]) -> None:
        """Send no new request to a worker; call `on_drained` when it has none."""
        self._pools[pooled.worker.spec.role].remove(pooled)
        pooled.drain(on_drained)

    # ---- inside

    def _place(self, role: str) -> PooledWorker:
        pooled = PooledWorker(
            PlanWorker(
                self._spec.workers[role],
                timeline=self._timeline,
                network=self._network,
                host=self._host,
                on_outputs=lambda outputs, now_s: self._on_outputs(pooled, outputs, now_s),
            )
        )
        return pooled

    def _send(self, request: PlannedRequest, record: RequestRecord) -> None:
        chosen = [self._routing.choose(role, pool, request) for role, pool in self._pools.items()]
        used = [pooled for pooled, _ in chosen]
        self._host.finish("frontends", at_s=self._timeline.now_s, work_s=self._spec.host_request_s)
        rid, room = f"r{record.idx}", None
        if len(used) > 1:
            room = Bootstrap("planned", 1, record.idx + 1)
        self._live[rid] = _LiveRequest(request, record, used, [lease for _, lease in chosen])
        message = GenerateRequest(
            rid=rid,
            input_ids=request.tokens(),
            sampling=SamplingParams(max_new_tokens=request.output_len, ignore_eos=True, temperature=0.0),
            bootstrap=room,
            stream=True,
        )
        for pooled in used:
            pooled.begin()
            pooled.worker.receive(message)

    def _on_outputs(self, pooled: PooledWorker, outputs: list[TokenOutput], now_s: float) -> None:
        num_tokens = sum(len(output.new_ids) for output in outputs)
        self._host.finish("frontends", at_s=now_s, work_s=num_tokens * self._spec.host_token_s)
        for output in outputs:
            live = self._live[output.rid]
            if pooled is live.used[-1]:  # decode's: the client's answer is there
                _record(live, output, now_s)
            if output.finish is not None:
                self._end_at(live, pooled, output)

    def _end_at(self, live: _LiveRequest, pooled: PooledWorker, output: TokenOutput) -> None:
        live.open_workers.remove(pooled)
        self._routing.release(live.leases[live.used.index(pooled)])
        assert output.finish is not None
        if output.finish.kind == "abort":
            if live.record.error == LATE:  # the first reason counts
                live.record.error = output.finish.message
            for other in live.open_workers:
                now_s = max(self._timeline.now_s, other.worker.clock.now_s)
                self._timeline.at(now_s, partial(other.worker.receive, AbortRequest(output.rid)))
        elif pooled is live.used[-1]:
            live.record.error = None
        self._num_left -= not live.open_workers
        pooled.end()


def _record(live: _LiveRequest, output: TokenOutput, now_s: float) -> None:
    record = live.record
    if output.new_ids:
        if record.ttft_s is None:
            record.ttft_s = now_s - record.sent_s
        else:
            record.itl_s.append(now_s - live.last_s)
        live.last_s = now_s
        record.output_tokens += len(output.new_ids)
    record.cached_tokens = max(record.cached_tokens, output.cached_tokens)
    record.e2e_s = now_s - record.sent_s
