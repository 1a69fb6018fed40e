"""One run: a layout's workers, the requests of a workload at one rate, and when each of their tokens came.

The router's own policies say where a request goes (planner/routing.py). A worker may change its role meanwhile
(planner/role_moves.py): it gets nothing new, ends what it has, is away, and comes back empty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from deploy.bench.stats import RequestRecord
from engine.messages import AbortRequest, Bootstrap, GenerateRequest, TokenOutput
from engine.sampling_params import SamplingParams
from planner.host import Host
from planner.layout import ClusterLayout
from planner.placed import Placed
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
    """`workers`: by role. `outside_s`: of each request, in HTTP and tokenizer, before a scheduler sees it.

    `cores`: of the host that all share (None: nobody shares); its CPU seconds a request and an output token beside the steps.
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
    """One request on its way. `open_legs`: workers that have not ended it yet."""

    def __init__(self, request: PlannedRequest, record: RequestRecord, legs: list[Placed], leases: list[Lease]) -> None:
        self.request = request
        self.record = record
        self.legs = legs
        self.leases = leases
        self.open_legs = list(legs)
        self.last_s = 0.0


class PlannedCluster:
    def __init__(self, spec: ClusterSpec, *, auto: AutoSpec | None = None) -> None:
        """`auto`: workers change their roles as the router's controller says."""
        self._spec = spec
        self._timeline = Timeline()
        self._host = Host(spec.cores)
        self._routing = Routing[Placed](spec.policy)
        page_bytes = next(iter(spec.workers.values())).page_bytes
        self._network = Network(
            self._timeline,
            page_bytes=page_bytes,
            control_s=spec.control_s,
            latency_s=spec.latency_s,
            host=self._host,
        )
        self._all: list[PlanWorker] = []
        self._pools: dict[str, list[Placed]] = {}
        for role in spec.layout.roles:
            self.join(role)
        self.moves = None if auto is None else RoleMoves(spec=auto, fleet=self, timeline=self._timeline)
        self._lives: dict[str, _LiveRequest] = {}
        self._num_left = 0

    def run(self, requests: Sequence[PlannedRequest], *, rate: float, until_s: float) -> list[RequestRecord]:
        """Requests at `rate` a second for the whole cluster; those without an answer at `until_s` say "late"."""
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
        """Prefixes of earlier requests are where prompts are computed, one after another."""
        role, pool = next(iter(self._pools.items()))
        for request in history:
            placed, lease = self._routing.choose(role, pool, request)
            placed.worker.remember(request.tokens())
            self._routing.release(lease)

    @property
    def now_s(self) -> float:
        """The end of the last turn of anybody."""
        return max(worker.clock.now_s for worker in self.workers())

    def workers(self) -> list[PlanWorker]:
        """All that there ever were: one that changed its role is another one since."""
        return list(self._all)

    def pools(self) -> dict[str, list[Placed]]:
        """Who gets requests, by role."""
        return {role: list(pool) for role, pool in self._pools.items()}

    def join(self, role: str) -> Placed:
        """A worker that nothing was asked of yet."""
        placed = self._place(role)
        self._all.append(placed.worker)
        self._pools.setdefault(role, []).append(placed)
        return placed

    def retire(self, placed: Placed, *, on_drained: Callable[[], None]) -> None:
        """It gets no new request; `on_drained` is called when it has none."""
        self._pools[placed.worker.spec.role].remove(placed)
        placed.drain(on_drained)

    # ---- inside

    def _place(self, role: str) -> Placed:
        placed = Placed(
            PlanWorker(
                self._spec.workers[role],
                timeline=self._timeline,
                network=self._network,
                host=self._host,
                say=lambda outputs, now_s: self._hear(placed, outputs, now_s),
            )
        )
        return placed

    def _send(self, request: PlannedRequest, record: RequestRecord) -> None:
        chosen = [self._routing.choose(role, pool, request) for role, pool in self._pools.items()]
        legs = [placed for placed, _ in chosen]
        self._host.finish("frontends", at_s=self._timeline.now_s, work_s=self._spec.host_request_s)
        rid, room = f"r{record.idx}", None
        if len(legs) > 1:
            room = Bootstrap("planned", 1, record.idx + 1)
        self._lives[rid] = _LiveRequest(request, record, legs, [lease for _, lease in chosen])
        message = GenerateRequest(
            rid=rid,
            input_ids=request.tokens(),
            sampling=SamplingParams(max_new_tokens=request.output_len, ignore_eos=True, temperature=0.0),
            bootstrap=room,
            stream=True,
        )
        for leg in legs:
            leg.take()
            leg.worker.receive(message)

    def _hear(self, placed: Placed, outputs: list[TokenOutput], now_s: float) -> None:
        told = sum(len(output.new_ids) for output in outputs)
        self._host.finish("frontends", at_s=now_s, work_s=told * self._spec.host_token_s)
        for output in outputs:
            life = self._lives[output.rid]
            if placed is life.legs[-1]:  # decode's: the client's answer is there
                _note(life, output, now_s)
            if output.finish is not None:
                self._end_leg(life, placed, output)

    def _end_leg(self, life: _LiveRequest, placed: Placed, output: TokenOutput) -> None:
        life.open_legs.remove(placed)
        self._routing.release(life.leases[life.legs.index(placed)])
        assert output.finish is not None
        if output.finish.kind == "abort":
            if life.record.error == LATE:  # the first reason counts
                life.record.error = output.finish.message
            for leg in life.open_legs:
                now_s = max(self._timeline.now_s, leg.worker.clock.now_s)
                self._timeline.at(now_s, partial(leg.worker.receive, AbortRequest(output.rid)))
        elif placed is life.legs[-1]:
            life.record.error = None
        self._num_left -= not life.open_legs
        placed.give_back()


def _note(life: _LiveRequest, output: TokenOutput, now_s: float) -> None:
    record = life.record
    if output.new_ids:
        if record.ttft_s is None:
            record.ttft_s = now_s - record.sent_s
        else:
            record.itl_s.append(now_s - life.last_s)
        life.last_s = now_s
        record.output_tokens += len(output.new_ids)
    record.cached_tokens = max(record.cached_tokens, output.cached_tokens)
    record.e2e_s = now_s - record.sent_s
