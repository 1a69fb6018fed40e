"""One worker, and leases: load charged by an upstream call until released. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from router.pool.breaker import Check, Circuit, Health
from router.pool.shared_load import SharedLoad
from service.kv_layout import Layout

if TYPE_CHECKING:
    from router.pool.active_calls import ActiveCall

MAX_WORKERS = 16384  # per table
NO_NAMES: Mapping[str, str] = MappingProxyType({})


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"
    ENCODE = "encode"  # computes images for prefill and unified workers

    @property
    def holds_kv(self) -> bool:
        return self in (Role.DECODE, Role.UNIFIED)


Way = tuple[Role, ...]  # roles that serve one request together, the prompt's first
PAIR: Way = (Role.PREFILL, Role.DECODE)
UNIFIED: Way = (Role.UNIFIED,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A worker's report, summed over ranks. `*_total` count since its start.

    `stages`: requests by stage (reports.py). `transfer_*`, `store_*`: recent means.
    `pending_tokens`: demand of decode's prealloc queue. `cached_tokens_total`: of the prompt
    tokens. `accept_length`: tokens per request and step, 0 if unknown.
    """

    running_reqs: int = 0
    waiting_reqs: int = 0
    used_tokens: int = 0
    waiting_tokens: int = 0
    capacity_tokens: int = 0
    stages: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    output_tokens_total: int = 0
    kv_bytes_total: int = 0
    transfer_gb_s: float = 0.0
    transfer_ms: float = 0.0
    max_running_reqs: int = 0
    pending_tokens: int = 0
    busy_ms_total: int = 0
    accept_length: float = 0.0
    store_gb_s: float = 0.0
    avoided_encoders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSizes:
    """`joint`: with DP attention `tp` counts those of all DP ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    pids: tuple[int, ...] = ()
    joint: bool = False

    @property
    def count(self) -> int:
        return self.tp * self.pp * (1 if self.joint else self.dp)


ONE_RANK = RankSizes()


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A worker's prefix source, with KV bytes per token."""

    control: str
    incarnation: str
    token_bytes: int


@dataclass(frozen=True, slots=True)
class SharedStore:
    """`tokens`: of KV that this worker's part of its memory holds; 0 if unknown."""

    place: str
    token_bytes: int
    wait_s: float  # most that a request waits for its pages
    tokens: int = 0


@dataclass(slots=True)
class BootstrapAddress:
    """`port`: given, or as the worker reports."""

    host: str
    port: int | None
    given_port: int | None


@dataclass(slots=True, kw_only=True)
class CheckResults:
    """`streak`: equal ones in a row. `changed_s`: last change."""

    changed_s: float
    good_s: float  # last good check
    heard_s: float = -math.inf  # last check answered or heartbeat
    streak: int = 0
    last: Check | None = None
    error: str = "not checked yet"


@dataclass(slots=True)
class WorkerProcess:
    incarnation: str = ""  # empty if unknown
    seen_s: float = 0.0
    former_s: float = -math.inf  # when the previous one was last seen: older calls wait in vain
    former: tuple[str, ...] = ()
    busy_s: float | None = None  # duration of its present step
    paused: str = ""  # mode of a pause (/pause_generation)
    layout: Layout | None = None  # of its KV; None if unknown
    event_names: Mapping[str, str] = field(default_factory=dict)  # of adapters in KV events


@dataclass(slots=True, eq=False, kw_only=True)
class Worker:
    """`WorkerTable` and `Loads` change it; `HealthMonitor` sets values of reports."""

    worker_id: int
    url: str
    role: Role
    bootstrap: BootstrapAddress
    checks: CheckResults
    process: WorkerProcess = field(default_factory=WorkerProcess)
    health: Health = Health.STARTING
    inflight_requests: int = 0
    inflight_tokens: int = 0
    assigned_total: int = 0
    answers_here: int = 0  # whole requests at a prefill worker, past their prompts
    report: LoadReport | None = None
    foreign_tokens: int = 0
    peers: SharedLoad | None = None  # with several router processes
    slot: int = 0  # in `peers`
    leaving: bool = False  # gets no new requests, even if healthy
    last_resort: bool = False  # gets them if no other worker of its role is up
    silent: bool = False  # answers no probe: gets requests only if all others are silent
    beats: bool = False  # sends heartbeats, so needs no probes
    ranks: RankSizes = ONE_RANK
    switching_to: Role | None = None  # role requested by this router
    serves_whole: bool = False  # whole requests, without a peer, as it says
    prefix: PrefixHolder | None = None  # None: it gives and fetches no prefixes
    discovered: bool = False  # found by service discovery in each process
    models: tuple[str, ...] = ()  # served names, base first; empty if unknown
    runtime_type: str | None = None  # VLLM (reports.py) or None
    circuit: Circuit = field(default_factory=Circuit)
    calls: dict["ActiveCall", None] = field(default_factory=dict)  # running, oldest first

    @property
    def model(self) -> str:
        """The base model, empty if unknown."""
        return self.models[0] if self.models else ""

    @property
    def url_host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def answers(self) -> bool:
        return self.health is Health.UP and not self.silent

    @property
    def load_tokens(self) -> int:
        """Tokens in flight, of all routers."""
        tokens = self.inflight_tokens + self.foreign_tokens
        return tokens if self.peers is None else tokens + self.peers.others_tokens(self.slot)

    @property
    def requests_everywhere(self) -> int:
        return self.inflight_requests + (0 if self.peers is None else self.peers.others_requests(self.slot))

    @property
    def tokens_everywhere(self) -> int:
        return self.inflight_tokens + (0 if self.peers is None else self.peers.others_tokens(self.slot))

    @property
    def num_answers(self) -> int:
        return self.requests_everywhere if self.role.holds_kv else self.answers_here

    @property
    def capacity_tokens(self) -> int:
        return self.report.capacity_tokens if self.report is not None else 0


worker_id_of = attrgetter("worker_id")
Pool = Sequence[Worker]  # workers of one role, in the order of ids


class Lease(msgspec.Struct, eq=False):
    """`answering`: the prompt of a whole request at a prefill worker is computed."""

    worker: Worker
    tokens: int
    trial: bool = False
    answering: bool = False


@dataclass(slots=True)
class Loads:
    """Leases of one router process."""

    _leases: dict[int, Lease] = field(default_factory=dict)

    def charge(self, worker: Worker, tokens: int, *, now_s: float = 0.0) -> Lease:
        assert tokens >= 0, tokens
        circuit = worker.circuit
        lease = Lease(worker, tokens, not circuit.quiet and circuit.send(now_s))
        self._leases[id(lease)] = lease
        worker.inflight_requests += 1
        worker.inflight_tokens += tokens
        worker.assigned_total += 1
        self._on_load(worker)
        return lease

    def release(self, lease: Lease) -> None:
        """Idempotent."""
        if self._leases.pop(id(lease), None) is not None:
            lease.worker.inflight_requests -= 1
            lease.worker.inflight_tokens -= lease.tokens
            lease.worker.answers_here -= lease.answering
            if lease.trial:
                lease.worker.circuit.end_trial()
            self._on_load(lease.worker)

    def on_answer(self, lease: Lease) -> None:
        """At a prefill worker only prompts are load. Idempotent."""
        worker = lease.worker
        if worker.role is Role.PREFILL and id(lease) in self._leases and not lease.answering:
            worker.inflight_tokens -= lease.tokens
            worker.answers_here += 1
            lease.tokens, lease.answering = 0, True
            self._on_load(worker)

    def on_report(self, worker: Worker, report: LoadReport | None) -> None:
        """Count this router's load once."""
        worker.report = report
        reported = 0
        if report is not None:  # waiting tokens for prefill, as a cache is no load, else also KV
            reported = report.waiting_tokens + (report.used_tokens if worker.role.holds_kv else 0)
        worker.foreign_tokens = max(0, reported - worker.tokens_everywhere)

    def _on_load(self, worker: Worker) -> None:
        if worker.peers is not None:
            worker.peers.publish(worker.slot, tokens=worker.inflight_tokens, requests=worker.inflight_requests)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def check(self, workers: Sequence[Worker]) -> None:
        for worker in [*workers, *(lease.worker for lease in self._leases.values())]:
            held = [lease.tokens for lease in self._leases.values() if lease.worker is worker]
            assert worker.inflight_requests == len(held), (worker.url, worker.inflight_requests, len(held))
            assert worker.inflight_tokens == sum(held), (worker.url, worker.inflight_tokens, sum(held))
            answering = sum(lease.answering for lease in self._leases.values() if lease.worker is worker)
            assert worker.answers_here == answering, (worker.url, worker.answers_here, answering)
