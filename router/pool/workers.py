"""The worker table: which workers there are, which are alive, and how much work each one holds.

Owns workers, their health and the leases on them. Pure: it receives check results, load reports and the time; it opens
no socket and reads no clock. One lease is one call of one request; it charges tokens to a worker until released.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import urlsplit

from router.pool.breaker import BreakerSettings, Circuit, State
from router.pool.models import Catalogue, serves
from router.pool.peer_load import PeerLoad
from router.pool.pools import MAX_LOG, LoadLog, WorkerPool
from router.pool.states import TRANSITIONS, Check, Health, Thresholds
from router.pool.worker import Lease, LoadReport, Role, Worker
from service.http.errors import ApiError

MAX_WORKERS = 4096
MAX_FORMER_LIVES = 16  # incarnations of one worker that are remembered


class WorkerTableError(ApiError):
    """A change of the table that cannot be made: a URL that is already there, or not there."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message, field="url")


@dataclass(slots=True)
class WorkerTable:
    """All workers of one router, in the order they were added.

    `on_gone` receives a worker that was removed, went down, is another process now, or has another role: what it had cached
    is lost. `on_change` is called whenever the workers that may be chosen change.
    """

    thresholds: Thresholds = field(default_factory=Thresholds)
    peers: PeerLoad | None = None
    on_gone: Callable[[Worker], None] = lambda worker: None
    on_change: Callable[[], None] = lambda: None
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    _workers: list[Worker] = field(default_factory=list)
    _by_name: dict[str, Worker] = field(default_factory=dict)  # of `same_url`
    _by_slot: dict[int, Worker] = field(default_factory=dict)  # slots of `peers`; without, all workers have the same
    _leases: dict[int, Lease] = field(default_factory=dict)
    _next_id: int = 0
    _log: LoadLog = field(default_factory=LoadLog)
    _pools: dict[tuple[Role, str], WorkerPool] = field(
        default_factory=dict
    )  # forgotten when a worker comes, goes or changes
    _models: Catalogue | None = None  # the same
    _unsettled: dict[int, Worker] = field(default_factory=dict)  # whose circuits are not closed

    def __post_init__(self) -> None:
        self._log.has_peers = self.peers is not None

    def add(
        self,
        url: str,
        *,
        role: Role,
        bootstrap_port: int | None = None,
        now_s: float = 0.0,
        discovered: bool = False,
    ) -> Worker:
        """Add a worker; it gets no request before its first good check. `WorkerTableError` if the URL is known."""
        url = url.rstrip("/")
        if same_url(url) in self._by_name:
            raise WorkerTableError(f"url: {url} is already in the table")
        if len(self._workers) >= MAX_WORKERS:
            raise WorkerTableError(f"url: {MAX_WORKERS} workers are in the table, no more fit")
        worker = Worker(
            worker_id=self._next_id,
            url=url,
            role=role,
            given_bootstrap_port=bootstrap_port,
            bootstrap_host=urlsplit(url).hostname or "",
            bootstrap_port=bootstrap_port,
            changed_s=now_s,
            peers=self.peers,
            slot=0 if self.peers is None else self.peers.take(url),
            good_s=now_s,
            discovered=discovered,
            circuit=Circuit(self.breaker),
        )
        worker.circuit.on_open = lambda until_s: self._on_circuit(worker, until_s)
        self._next_id += 1
        self._workers.append(worker)
        self._by_name[same_url(url)] = self._by_slot[worker.slot] = worker
        self._on_change()
        return worker

    def _on_change(self) -> None:
        self._pools.clear()
        self._models = None
        self.on_change()

    def _on_circuit(self, worker: Worker, until_s: float) -> None:
        if worker.peers is not None:
            worker.peers.publish_open(worker.slot, until_s)
        if worker.circuit.state is State.CLOSED:
            self._unsettled.pop(worker.worker_id, None)
        elif self._by_name.get(same_url(worker.url)) is worker:
            self._unsettled[worker.worker_id] = worker

    def remove(self, url: str) -> Worker:
        """Take a worker out. Its running requests go on; their leases are still released. `WorkerTableError` if unknown."""
        worker = self.find(url)
        self._workers.remove(worker)
        del self._by_name[same_url(url)]
        self._by_slot.pop(worker.slot, None)
        self._unsettled.pop(worker.worker_id, None)
        if worker.peers is not None:
            worker.peers.give_back(worker.slot)
        worker.peers, worker.slot = None, 0
        self._on_change()
        self.on_gone(worker)
        return worker

    def retire(self, url: str, *, last_resort: bool = False) -> Worker:
        """It gets no new request; it stays in the table until `remove`. `WorkerTableError` if unknown.

        `last_resort`: while it is up, it serves if no other worker of its role is up: better than no answer.
        """
        worker = self.find(url)
        worker.leaving, worker.last_resort = True, last_resort
        self._on_change()
        return worker

    def find(self, url: str) -> Worker:
        """The worker at this address, however it is written. `WorkerTableError` if unknown."""
        worker = self._by_name.get(same_url(url))
        if worker is None:
            raise WorkerTableError(f"url: {url} is not in the table")
        return worker

    def workers(self, role: Role | None = None) -> list[Worker]:
        return [w for w in self._workers if role is None or w.role is role]

    def alive(self, role: Role) -> list[Worker]:
        """The workers that get requests."""
        up = Health.UP
        here = [w for w in self._workers if w.role is role and w.health is up and w.switching_to is None]
        return [w for w in here if not w.leaving] or [w for w in here if w.last_resort]

    def pool(self, role: Role, model: str) -> WorkerPool:
        """Return the workers of `alive` that serve `model`; "": any. Silence narrows the choice and never empties it."""
        found = self._pools.get((role, model))
        if found is None:
            alive = self.alive(role)
            serving = [w for w in alive if serves(w.models, model)] if model else alive
            found = self._pools[role, model] = WorkerPool([w for w in serving if not w.silent] or serving, self._log)
        return found

    def ready(self, role: Role, model: str, *, now_s: float) -> WorkerPool:
        """Return the workers of `pool` that no circuit keeps requests from. That narrows the choice and never empties it."""
        pool = self.pool(role, model)
        if not self._unsettled and self.peers is None:
            return pool
        faulty = {w.worker_id for w in list(self._unsettled.values()) if not w.circuit.takes(now_s)}
        if self.peers is not None:
            others = self.peers.others_open(now_s)
            faulty.update(self._by_slot[slot].worker_id for slot in others if slot in self._by_slot)
        return (pool.without(frozenset(faulty)) or pool) if faulty else pool

    def on_check(self, worker: Worker, result: Check, *, now_s: float, error: str = "") -> bool:
        """Take the result of a check, or of a request that could not connect. True if the worker's state changed."""
        same = worker.last_check is not None and _kind(worker.last_check) is _kind(result)
        worker.streak = worker.streak + 1 if same else 1
        worker.last_check = result
        worker.last_error = error
        if result in (Check.OK, Check.DRAINING):
            worker.good_s = now_s
        target, threshold = TRANSITIONS[worker.health, result]
        if target is worker.health or worker.streak < getattr(self.thresholds, threshold):
            return False
        worker.health, worker.changed_s = target, now_s
        self._on_change()
        if target is Health.DOWN:
            worker.silent, worker.busy_s = False, None  # worse
            worker.report, worker.foreign_tokens = None, 0
            worker.circuit.reset()
            self.on_gone(worker)
        return True

    def on_silence(self, worker: Worker, silent: bool) -> bool:
        """Note whether a worker has answered nothing for too long while it was probed. True if that is new."""
        if worker.silent is silent:
            return False
        worker.silent = silent
        self._on_change()
        return True

    def on_busy(self, worker: Worker, busy_s: float | None) -> None:
        """Note how long a worker's present step has run, as it reports; None: it is in none. Nothing follows from it."""
        worker.busy_s = busy_s

    def on_incarnation(self, worker: Worker, incarnation: str, *, asked_s: float) -> None:
        """Note which process answered a check that began at `asked_s`; "": it did not say.

        An incarnation that comes back after another one is one of several behind this URL: nothing follows then.
        """
        if worker.incarnation not in ("", incarnation) and incarnation:
            worker.former_lives = (*worker.former_lives, worker.incarnation)[-MAX_FORMER_LIVES:]
            if incarnation not in worker.former_lives:
                worker.former_life_s = worker.incarnation_s
                worker.circuit.reset()
                self.on_gone(worker)
        if incarnation:
            worker.incarnation, worker.incarnation_s = incarnation, asked_s

    def begin_switch(self, worker: Worker, role: Role) -> None:
        """It is asked to change its role: nothing new goes there until `end_switch`."""
        assert worker.switching_to is None and worker.role is not role, (worker.url, worker.role, worker.switching_to)
        worker.switching_to = role
        self._on_change()

    def end_switch(self, worker: Worker) -> None:
        """However it ended."""
        worker.switching_to = None
        self._on_change()

    def on_role(self, worker: Worker, role: Role) -> None:
        """Note that a worker has another role than was thought. What was known of it in the old role is forgotten.

        So is the bootstrap port that was named for it: from now on it counts what the worker says.
        """
        worker.role = role
        self._on_change()
        worker.given_bootstrap_port = None
        worker.report, worker.foreign_tokens = None, 0
        worker.circuit.reset()
        self.on_gone(worker)

    def on_report(self, worker: Worker, report: LoadReport | None) -> None:
        """Take what a worker reports (None: nothing). Only load that this router did not send itself is added."""
        before = (worker.foreign_tokens, worker.capacity_tokens)
        worker.report = report
        reported = 0 if report is None else _reported_tokens(worker.role, report)
        worker.foreign_tokens = max(0, reported - worker.tokens_everywhere)
        if before != (worker.foreign_tokens, worker.capacity_tokens):
            self._note_load(worker)

    def on_bootstrap(self, worker: Worker, *, host: str, port: int | None) -> None:
        """Note where a prefill worker's bootstrap server listens."""
        worker.bootstrap_host, worker.bootstrap_port = host, port

    def on_models(self, worker: Worker, names: tuple[str, ...]) -> None:
        """Note what a worker serves; it stays noted while the worker is down."""
        if names != worker.models:
            worker.models = names
            self._on_change()

    @property
    def models(self) -> Catalogue:
        """What is served here."""
        if self._models is None:
            self._models = Catalogue.of(w.models for w in self._workers)
        return self._models

    def charge(self, worker: Worker, tokens: int, *, now_s: float = 0.0) -> Lease:
        """Count a request with this many tokens there, until its lease is released."""
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
        """Give a lease back; a second time does nothing (the legs of a request end in any order)."""
        if self._leases.pop(id(lease), None) is not None:
            lease.worker.inflight_requests -= 1
            lease.worker.inflight_tokens -= lease.tokens
            if lease.trial:
                lease.worker.circuit.end_trial()
            self._on_load(lease.worker)

    def _note_load(self, worker: Worker) -> None:
        log = self._log
        log.ids.append(worker.worker_id)
        if len(log.ids) > 2 * MAX_LOG:
            log.trim()

    def _on_load(self, worker: Worker) -> None:
        self._note_load(worker)
        if worker.peers is not None:
            worker.peers.publish(worker.slot, tokens=worker.inflight_tokens, requests=worker.inflight_requests)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def check(self) -> None:
        """Assert that in-flight counts are the sums of live leases and that URLs and ids are unique."""
        assert len({w.url for w in self._workers}) == len(self._workers)
        ids = [w.worker_id for w in self._workers]
        assert ids == sorted(set(ids))
        assert list(self._by_name.values()) == self._workers
        assert all(self.find(w.url) is w for w in self._workers)
        assert sorted(self._unsettled) == [w.worker_id for w in self._workers if w.circuit.state is not State.CLOSED]
        for worker in [*self._workers, *(lease.worker for lease in self._leases.values())]:
            held = [lease.tokens for lease in self._leases.values() if lease.worker is worker]
            assert worker.inflight_requests == len(held), (worker.url, worker.inflight_requests, len(held))
            assert worker.inflight_tokens == sum(held), (worker.url, worker.inflight_tokens, sum(held))


@lru_cache(maxsize=2 * MAX_WORKERS)
def same_url(url: str) -> str:
    """One way to write an address: lower case, no default port, no slash. So no worker is there twice."""
    parts = urlsplit(url)
    if not parts.hostname:
        return url
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{host}:{port}"


def _kind(check: Check) -> Check:
    """Refused or failed: bad either way."""
    return Check.FAILED if check is Check.REFUSED else check


def missing_roles(table: WorkerTable, roles: Iterable[Role], model: str = "") -> list[Role]:
    """The roles of which no worker (that serves `model`) is alive."""
    return [role for role in roles if not table.pool(role, model)]


def silent_roles(table: WorkerTable, roles: Iterable[Role], model: str = "") -> list[Role]:
    """The roles of which workers (that serve `model`) are alive, and none says anything."""
    return [role for role in roles if (pool := table.pool(role, model)) and pool[0].silent]


def _reported_tokens(role: Role, report: LoadReport) -> int:
    """Prefill: what still waits to be computed (its cache is no load). Else: what sits in the KV cache, and waits."""
    return report.waiting_tokens if role is Role.PREFILL else report.used_tokens + report.waiting_tokens
