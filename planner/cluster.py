"""One run: a layout's workers serve a workload at one rate.

Workers may join and retire, as in role switches (tests/planner/role_moves.py).
"""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from deploy.bench.stats import RequestRecord
from engine.frontend.apis.admin.load import v1_loads_entry
from engine.messages import AbortRequest, Bootstrap, GenerateRequest, GetState, PrefixSource, TokenOutput
from engine.sampling_params import SamplingParams
from planner.executor import Host
from planner.routing import ANY, REPORT_S, Routed, Routing
from planner.transfer import Network
from planner.worker import PlanWorker, WorkerSpec
from planner.workload import PlannedRequest, tokens_of
from planner.world import Timeline
from router.attempts.request import Slo
from router.config import RouterConfig
from router.pool.reports import parse_load
from service.flags import ConfigError

# ---- Layouts of clusters: xPyD, unified, or both. Pure.

MOST_WORKERS, MAX_GPUS = 999, 32  # per pool; per worker


@dataclass(frozen=True, slots=True, order=True)
class ClusterLayout:
    """Numbers of workers with `tp` GPUs. `mixed`: unified ones mix decodes into prefill steps."""

    prefill: int = 0
    decode: int = 0
    unified: int = 0
    mixed: bool = False
    tp: int = 1

    @property
    def name(self) -> str:
        pools = (f"{self.prefill}P{self.decode}D" if self.prefill else "") + (
            f"{self.unified}U" if self.unified else ""
        )
        return pools + ("-mixed" if self.mixed else "") + (f"-tp{self.tp}" if self.tp > 1 else "")

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.unified

    @property
    def num_gpus(self) -> int:
        return self.num_workers * self.tp

    @property
    def roles(self) -> list[str]:
        return ["prefill"] * self.prefill + ["decode"] * self.decode + ["unified"] * self.unified


def parse_layout(text: str) -> ClusterLayout:
    """Parse "2P3D", "4U", "4U-mixed", "2P1D1U", perhaps with "-tp2"."""
    found = re.fullmatch(r"(?:(\d+)P(\d+)D)?(?:(\d+)U(-mixed)?)?(?:-tp(\d+))?", text, re.IGNORECASE)
    prefill, decode, unified, mixed, tp = found.groups() if found else (None,) * 5
    pools = [int(size) for size in (prefill, decode, unified) if size is not None]
    if not pools or not all(1 <= size <= MOST_WORKERS for size in pools) or not 1 <= int(tp or 1) <= MAX_GPUS:
        raise ConfigError(
            f"--layouts {text}: write 2P3D (prefill and decode workers), 4U (unified ones), 4U-mixed, or 2P1D1U (a mixed pool); "
            "2P3D-tp2: of two GPUs each"
        )
    return ClusterLayout(
        prefill=int(prefill or 0),
        decode=int(decode or 0),
        unified=int(unified or 0),
        mixed=mixed is not None,
        tp=int(tp or 1),
    )


def candidates(num_workers: int, *, tps: Sequence[int] = (1,)) -> list[ClusterLayout]:
    """All have equally many GPUs: larger pools queue better."""
    found, gpus = list[ClusterLayout](), num_workers * max(tps)
    for tp in [tp for tp in tps if gpus % tp == 0]:
        workers = gpus // tp
        found += [ClusterLayout(unified=workers, tp=tp), ClusterLayout(unified=workers, mixed=True, tp=tp)]
        found += [ClusterLayout(prefill=p, decode=workers - p, tp=tp) for p in range(1, workers)]
    return found


# ---- cluster

LATE = "late"
WARMING = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCosts:
    """Costs outside of steps.

    `outside_s`: HTTP and tokenizer before the scheduler. `control_s`: a message between workers.
    `latency_s`: of a transfer. `cores`: of a shared host, `worker_cores` bound to each worker.
    `host_*_s`: CPU seconds of that host.
    """

    control_s: float
    latency_s: float
    outside_s: float
    cores: float | None = None
    worker_cores: float | None = None
    host_request_s: float = 0.0
    host_token_s: float = 0.0
    policy: str = "least_load"
    route: str = RouterConfig.route
    wanted: Slo = ANY


@dataclass(slots=True)
class _LiveRequest:
    request: PlannedRequest
    record: RequestRecord
    routed: Routed[PlanWorker]
    open_workers: list[PlanWorker]
    last_s: float = 0.0


_Sending = tuple[PlannedRequest, RequestRecord]


class PlannedCluster:
    def __init__(self, layout: ClusterLayout, workers: dict[str, WorkerSpec], costs: ClusterCosts) -> None:
        self.timeline = Timeline()
        self._specs = workers
        self._costs = costs
        self._host = Host(costs.cores, home_cores=costs.worker_cores)
        kv_tokens = min(spec.num_pages * spec.engine.page_size for spec in workers.values())
        self.routing = Routing[PlanWorker](costs.policy, costs.route, costs.wanted, kv_tokens)
        self._network = Network(
            self.timeline,
            page_bytes=next(iter(workers.values())).page_bytes,
            control_s=costs.control_s,
            latency_s=costs.latency_s,
            host=self._host,
        )
        self.workers: list[PlanWorker] = []  # all so far; a switched one is new
        self.pools: dict[str, list[PlanWorker]] = {}
        for role in layout.roles:
            self.join(role)
        self._live: dict[str, _LiveRequest] = {}
        self._later = defaultdict[int, list[_Sending]](list)  # turns, by the request that they wait for
        self._num_left = 0
        self._decode_steps = self._accepted = 0
        self.on_end: Callable[[PlanWorker], None] = lambda worker: None  # a request there has ended

    def run(self, requests: Sequence[PlannedRequest], *, rate: float, until_s: float) -> list[RequestRecord]:
        """`rate`: per second. Unanswered at `until_s` they fail as "late"."""
        records = [
            RequestRecord(idx=i, sent_s=request.at / rate, prompt_tokens=request.input_len, error=LATE)
            for i, request in enumerate(requests)
        ]
        self._num_left = len(records)
        for request, record in zip(requests, records, strict=True):
            if request.after is None:
                self._send_later(request, record)
            else:
                self._later[request.after].append((request, record))
        self._report()
        self.timeline.run_until(until_s, done=lambda: self._num_left == 0)
        return records

    def warm(self, history: Sequence[PlannedRequest]) -> None:
        """Put earlier prefixes into caches."""
        recent = deque[Routed[PlanWorker]]()  # still charged, so that history spreads as a load does
        for request in history:
            routed = self.routing.choose(self.pools, request, now_s=0.0)
            for worker in routed.workers:
                worker.remember(tokens_of(request.answered if worker is routed.workers[-1] else request.blocks))
            self.routing.on_answered(routed, request)
            recent.append(routed)
            if len(recent) > WARMING:
                self.routing.cancel(recent.popleft())
        for routed in recent:
            self.routing.cancel(routed)

    @property
    def now_s(self) -> float:
        return max(worker.clock.now_s for worker in self.workers)

    @property
    def step_tokens(self) -> float | None:
        return 1 + self._accepted / self._decode_steps if self._decode_steps else None

    def join(self, role: str) -> PlanWorker:
        worker = PlanWorker(
            self._specs[role],
            timeline=self.timeline,
            network=self._network,
            host=self._host,
            on_outputs=lambda outputs, now_s: self._on_outputs(worker, outputs, now_s),
        )
        self.workers.append(worker)
        self.pools.setdefault(role, []).append(worker)
        if worker.spec.prefix_fetch:
            token_bytes = worker.spec.page_bytes // worker.spec.engine.page_size
            self.routing.fetches(role, worker, token_bytes=token_bytes)
        return worker

    # ---- inside

    def _report(self) -> None:
        for worker in self.workers:
            if worker.state is not None:
                most = worker.scheduler.limits.max_running_requests
                entry = v1_loads_entry(worker.state, mode=worker.spec.role, max_running_requests=most, num_live=0)
                self.routing.on_report(worker, parse_load(entry))
            worker.receive(GetState("planned"))
        self.timeline.at(self.timeline.now_s + REPORT_S, self._report)

    def _send_later(self, request: PlannedRequest, record: RequestRecord) -> None:
        self.timeline.at(record.sent_s + self._costs.outside_s, partial(self._send, request, record))

    def _send(self, request: PlannedRequest, record: RequestRecord) -> None:
        routed = self.routing.choose(self.pools, request, now_s=self.timeline.now_s)
        used, source, prefix = routed.workers, routed.source, None
        if source is not None:
            prefix = PrefixSource(source.address, source.address, num_tokens=routed.num_fetched)
        self._host.finish("frontends", at_s=self.timeline.now_s, work_s=self._costs.host_request_s)
        rid = f"r{record.idx}"
        self._live[rid] = _LiveRequest(request, record, routed, open_workers=list(used))
        message = GenerateRequest(
            rid=rid,
            input_ids=request.tokens(),
            sampling=SamplingParams(max_new_tokens=request.output_len, ignore_eos=True, temperature=0.0),
            bootstrap=Bootstrap("planned", 1, record.idx + 1) if len(used) > 1 else None,
            stream=True,
            prefix_source=prefix,
        )
        for worker in used:
            worker.receive(message)

    def _on_outputs(self, worker: PlanWorker, outputs: list[TokenOutput], now_s: float) -> None:
        num_tokens = sum(len(output.new_ids) for output in outputs)
        self._host.finish("frontends", at_s=now_s, work_s=num_tokens * self._costs.host_token_s)
        for output in outputs:
            live = self._live[output.rid]
            if worker is live.routed.workers[-1]:  # the client's answer comes from decode
                if output.new_ids and live.record.ttft_s is None:
                    self.routing.on_first_token(live.routed, now_s)
                _record(live, output, now_s)
            if output.finish is not None:
                if output.drafts is not None:
                    self._decode_steps += output.drafts.steps
                    self._accepted += output.drafts.accepted
                self._end_at(live, worker, output)

    def _end_at(self, live: _LiveRequest, worker: PlanWorker, output: TokenOutput) -> None:
        live.open_workers.remove(worker)
        assert output.finish is not None
        if worker is live.routed.workers[-1]:
            is_whole = output.finish.kind != "abort"
            self.routing.on_end(live.routed, live.record.output_tokens if is_whole else 0, live.last_s)
            self.routing.on_answered(live.routed, live.request)
            for request, record in self._later.pop(live.record.idx, ()):
                record.sent_s = max(record.sent_s, live.last_s)
                self._send_later(request, record)
        self.routing.release(live.routed.leases[live.routed.workers.index(worker)])
        if output.finish.kind == "abort":
            if live.record.error == LATE:  # the first error counts
                live.record.error = output.finish.message
            for other in live.open_workers:
                now_s = max(self.timeline.now_s, other.clock.now_s)
                self.timeline.at(now_s, partial(other.receive, AbortRequest(output.rid)))
        elif worker is live.routed.workers[-1]:
            live.record.error = None
        self._num_left -= not live.open_workers
        self.on_end(worker)


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
