"""The worker table: workers, pools, results of checks. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import urlsplit

from router.config import BreakerFlags, HealthFlags
from router.pool.breaker import HEALTH_TRANSITIONS, Check, Circuit, Health, State
from router.pool.pairs import Group, fits, groups_of, misfits_of
from router.pool.shared_load import SharedLoad
from router.pool.worker import (
    MAX_WORKERS,
    NO_NAMES,
    PAIR,
    UNIFIED,
    BootstrapAddress,
    CheckResults,
    Loads,
    Pool,
    Role,
    Way,
    Worker,
)
from service.http.errors import ApiError
from service.kv_layout import Layout

# ---- models of workers

MAX_NAMES = 1024  # per worker

Names = tuple[str, ...]


class UnknownModel(ApiError):
    """No worker serves `model`."""

    why = "model"

    def __init__(self, model: str, known: Sequence[str]) -> None:
        message = f"model: {model!r} is not served here; there are: {', '.join(known)}"
        super().__init__(404, message, field="model", code="model_not_found")


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Served models: `bases`, `names` with adapters, `owners` name -> bases.

    Workers with one base model form a group, whose adapters may differ. A worker that reports none
    may serve any. With one group workers check `model`; only an adapter's name narrows the choice.
    """

    bases: Names = ()
    names: Names = ()
    owners: Mapping[str, Names] = field(default_factory=dict)
    event_names: Mapping[str, str] = field(default_factory=dict)  # of adapters; the name if workers differ

    @classmethod
    def of(cls, workers: Iterable[Names], variants: Iterable[Mapping[str, str]] = ()) -> "Catalogue":
        known = [names for names in workers if names]
        owners: dict[str, dict[str, None]] = {}
        for names in known:
            for name in names:
                owners.setdefault(name, {})[names[0]] = None
        bases = dict.fromkeys(names[0] for names in known)
        events: dict[str, str] = {}
        for name, key in chain.from_iterable(of_worker.items() for of_worker in variants):
            events[name] = key if events.setdefault(name, key) == key else name
        return cls(tuple(bases), tuple(owners), {name: tuple(of_name) for name, of_name in owners.items()}, events)

    @property
    def several(self) -> bool:
        return len(self.bases) > 1

    def meant(self, model: str, ready: "Iterable[str] | None" = None) -> str:
        """The name that workers must serve, empty for any. Raises UnknownModel.

        The default among several models is the first of `ready`.
        """
        if model in self.names:
            return model
        if not self.several:
            return ""
        if model:
            raise UnknownModel(model, self.names)
        return next(iter(ready or ()), self.bases[0])

    def of_adapter(self, *, model: object, adapter: object, loads: bool) -> str:
        """The base model whose workers load or unload an adapter, empty for all.

        Raises UnknownModel, ValueError.
        """
        if model is not None and not isinstance(model, str):
            raise ValueError("model: must be the name of a model that is served here")
        if model:
            if self.names and model not in self.names:
                raise UnknownModel(model, self.names)
            return model if self.names else ""
        if not self.several:
            return ""
        if not loads and adapter not in self.names:
            raise UnknownModel(str(adapter), self.names)
        owners = self.bases if loads else self.owners[str(adapter)]
        if len(owners) > 1:
            raise ValueError(f"model: name the one that the adapter belongs to; there are: {', '.join(owners)}")
        return owners[0]


def serves(names: Names, model: str) -> bool:
    return not names or model in names


def parse_models(info: object, listed: object) -> Names:
    names: list[str] = []
    if isinstance(info, dict):
        names += [info[key] for key in ("served_model_name", "model_path") if isinstance(info.get(key), str)]
    names += [row["id"] for row in _rows(listed)]
    return tuple(dict.fromkeys(name for name in names if name))[:MAX_NAMES]


def parse_event_names(info: object, listed: object) -> dict[str, str]:
    """Names of adapters in KV events: digests, or their own."""
    found = info.get("adapters") if isinstance(info, dict) else None
    digests = found if isinstance(found, dict) else {}
    names = [row["id"] for row in _rows(listed)[:MAX_NAMES] if row.get("parent")]
    return {name: str(digests.get(name, name)) for name in names}


def has_adapters(info: object) -> bool:
    """It may serve more names than in `/server_info`."""
    return isinstance(info, dict) and bool(info.get("enable_lora") or info.get("lora_paths"))


def reports_models(listed: object) -> bool:
    return isinstance(listed, dict) and isinstance(listed.get("data"), list)


def join_models(answers: Iterable[object], *, field: str = "data", key: str = "id") -> list[dict[str, Any]]:
    """Each name once."""
    rows: dict[str, dict[str, Any]] = {}
    for row in chain.from_iterable(_rows(answer, field, key) for answer in answers):
        rows.setdefault(row[key], row)
    return list(rows.values())


def _rows(listed: object, field: str = "data", key: str = "id") -> list[dict[str, Any]]:
    rows = listed.get(field) if isinstance(listed, dict) else None
    rows = rows if isinstance(rows, list) else []
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get(key), str)]


# ---- workers

MAX_FORMER_LIVES = 16  # former incarnations per worker
MAX_POOLS = 256  # cached until the next change
_K = TypeVar("_K")
_V = TypeVar("_V")


class WorkerTableError(ApiError):
    def __init__(self, message: str) -> None:
        super().__init__(400, message, field="url")


@dataclass(slots=True)
class WorkerTable:
    """`on_gone` gets workers whose cache is lost: removed, down, restarted, switched. `on_change`
    follows changes of pools.
    """

    health: HealthFlags = field(default_factory=HealthFlags)
    peers: SharedLoad | None = None
    on_gone: Callable[[Worker], None] = lambda worker: None
    on_change: Callable[[], None] = lambda: None
    breaker: BreakerFlags = field(default_factory=BreakerFlags)
    loads: Loads = field(default_factory=Loads)
    pairs: bool = True
    whole_at: frozenset[Role] = frozenset()  # halves of pairs that may serve whole requests (--route)
    _workers: dict[int, Worker] = field(default_factory=dict)  # by id
    _by_name: dict[str, Worker] = field(default_factory=dict)  # by `same_url`
    _by_slot: dict[int, Worker] = field(default_factory=dict)  # by slot in `peers`
    _next_id: int = 0
    _pools: dict[tuple[Role, str], Pool] = field(default_factory=dict)  # cache
    _routes: dict[tuple[Way, str], tuple[Group, ...]] = field(default_factory=dict)  # cache
    _misfits: Mapping[int, str] | None = None  # cache
    _models: Catalogue | None = None  # cache, until models change
    _unsettled: dict[int, Worker] = field(default_factory=dict)  # with circuits that are not closed

    def add(
        self, url: str, *, role: Role, bootstrap_port: int | None = None, now_s: float = 0.0, discovered: bool = False
    ) -> Worker:
        """The worker serves after a good check. Raises WorkerTableError."""
        url = url.rstrip("/")
        if same_url(url) in self._by_name:
            raise WorkerTableError(f"url: {url} is already in the table")
        if len(self._workers) >= MAX_WORKERS:
            raise WorkerTableError(f"url: {MAX_WORKERS} workers are in the table, no more fit")
        worker = Worker(
            worker_id=self._next_id,
            url=url,
            role=role,
            bootstrap=BootstrapAddress(urlsplit(url).hostname or "", bootstrap_port, bootstrap_port),
            checks=CheckResults(changed_s=now_s, good_s=now_s),
            peers=self.peers,
            slot=0 if self.peers is None else self.peers.take(url),
            discovered=discovered,
            circuit=Circuit(self.breaker),
        )
        worker.circuit.on_open = lambda until_s: self._on_circuit(worker, until_s)
        self._next_id += 1
        self._workers[worker.worker_id] = worker
        self._by_name[same_url(url)] = self._by_slot[worker.slot] = worker
        self._on_change()
        return worker

    def remove(self, url: str) -> Worker:
        """Running requests continue. Raises WorkerTableError."""
        worker = self.find(url)
        del self._workers[worker.worker_id]
        del self._by_name[same_url(url)]
        self._by_slot.pop(worker.slot, None)
        self._unsettled.pop(worker.worker_id, None)
        if worker.peers is not None:
            worker.peers.give_back(worker.slot)
        worker.peers, worker.slot = None, 0
        self._models = None if worker.models else self._models
        self._on_change()
        self.on_gone(worker)
        return worker

    def retire(self, url: str, *, last_resort: bool = False) -> Worker:
        """No new requests, except as `last_resort` if no other is up. Raises WorkerTableError."""
        worker = self.find(url)
        worker.leaving, worker.last_resort = True, last_resort
        self._on_change()
        return worker

    def find(self, url: str) -> Worker:
        """Find a URL in any spelling. Raises WorkerTableError."""
        worker = self._by_name.get(same_url(url))
        if worker is None:
            raise WorkerTableError(f"url: {url} is not in the table")
        return worker

    def workers(self, role: Role | None = None) -> list[Worker]:
        return [w for w in self._workers.values() if role is None or w.role is role]

    def get(self, worker_id: int) -> Worker | None:
        return self._workers.get(worker_id)

    def __contains__(self, worker: Worker) -> bool:
        return self._workers.get(worker.worker_id) is worker

    def alive(self, role: Role) -> list[Worker]:
        """Workers that are up; leaving last resorts if no other is."""
        here = [w for w in self._workers.values() if w.role is role and is_up(w)]
        return [w for w in here if not w.leaving] or here

    def is_alive(self, worker: Worker) -> bool:
        return worker in self.alive(worker.role)

    def pool(self, role: Role, model: str) -> Pool:
        """Alive workers of `model` (empty: any), silent ones if all are. Cached."""
        return _kept(self._pools, (role, model), lambda: _heard(self._serving(role, model)))

    def _serving(self, role: Role, model: str) -> Pool:
        return [w for w in self.alive(role) if not model or serves(w.models, model)]

    def routes(self, way: Way, model: str) -> Sequence[Group]:
        """Groups that serve `model` (empty: any); for pairs also workers that serve whole requests,
        as groups of one pool. Cached.
        """
        return _kept(self._routes, (way, model), lambda: self._groups(way, model))

    @property
    def misfits(self) -> Mapping[int, str]:
        """Why workers have no fitting peer, by id. Cached."""
        if self._misfits is None:
            self._misfits = misfits_of(self.alive(Role.PREFILL), self.alive(Role.DECODE))
        return self._misfits

    def has_peer(self, worker: Worker) -> bool:
        return any(worker in pool for group in self.routes(PAIR, worker.model) for pool in group)

    def _groups(self, way: Way, model: str) -> tuple[Group, ...]:
        names = self.models.bases if not model and self.models.several else (model,)
        groups = [group for name in names for group in self._groups_of([self._serving(role, name) for role in way])]
        heard = [tuple([_heard(pool) for pool in group]) for group in groups]
        same = {pool: pool for group in reversed(heard) for pool in group}  # one object, of which a choice is made once
        return tuple([tuple([same[pool] for pool in group]) for group in heard])

    def _groups_of(self, pools: Sequence[Pool]) -> Sequence[Group]:
        if len(pools) < 2:
            return groups_of(pools)
        alone = [tuple([w for w in pool if w.serves_whole and w.role in self.whole_at]) for pool in pools]
        return [*(groups_of(pools) if self.pairs else ()), *((pool,) for pool in reversed(alone) if pool)]

    def ready(self, pool: Pool, *, now_s: float) -> Pool:
        """Workers with closed circuits, else all."""
        faulty: set[int] = set()
        if self._unsettled:
            faulty = {worker_id for worker_id, worker in self._unsettled.items() if not worker.circuit.takes(now_s)}
        if self.peers is not None and (others := self.peers.others_open(now_s)):
            faulty.update([self._by_slot[slot].worker_id for slot in others if slot in self._by_slot])
        return [w for w in pool if w.worker_id not in faulty] or pool if faulty else pool

    def trusts(self, worker: Worker, *, now_s: float) -> bool:
        others = () if self.peers is None else self.peers.others_open(now_s)
        return worker.circuit.takes(now_s) and worker.slot not in others

    def has_others(self, worker: Worker) -> bool:
        """Others can replace it: its role, or another whole route."""
        if any(other is not worker and not other.silent and fits(other, worker) for other in self.pool_of(worker)):
            return True
        groups = [group for way in (PAIR, UNIFIED) for group in self.routes(way, worker.model)]
        return any(all(any(w is not worker and not w.silent for w in pool) for pool in group) for group in groups)

    def pool_of(self, worker: Worker) -> Pool:
        return self.pool(worker.role, worker.model)

    def on_check(self, worker: Worker, result: Check, *, now_s: float, error: str = "") -> bool:
        """Apply a check's result; return whether the state changed."""
        checks = worker.checks
        same = checks.last is not None and _kind(checks.last) is _kind(result)
        checks.streak = checks.streak + 1 if same else 1
        checks.last, checks.error = result, error
        if result in (Check.OK, Check.DRAINING):
            checks.good_s = now_s
        target, threshold = HEALTH_TRANSITIONS[worker.health, result]
        if target is worker.health or (threshold and checks.streak < getattr(self.health, threshold)):
            return False
        worker.health, checks.changed_s = target, now_s
        self._on_change()
        if target is Health.DOWN:
            worker.silent, worker.process.busy_s, worker.process.paused = False, None, ""  # superseded
            self._forget(worker)
        return True

    def on_silence(self, worker: Worker, silent: bool) -> bool:
        if worker.silent is silent:
            return False
        worker.silent = silent
        self._on_change()
        return True

    def on_incarnation(self, worker: Worker, incarnation: str, *, checked_s: float) -> None:
        """A process that comes back is one of several behind the URL, and changes nothing."""
        process = worker.process
        if process.incarnation not in ("", incarnation) and incarnation:
            process.former = (*process.former, process.incarnation)[-MAX_FORMER_LIVES:]
            if incarnation not in process.former:
                process.former_s = process.seen_s
                worker.circuit.reset()
                self.on_gone(worker)
        if incarnation:
            process.incarnation, process.seen_s = incarnation, checked_s

    def set_switching(self, worker: Worker, role: Role | None) -> None:
        """No new requests during a switch; None ends it."""
        assert role is None or (worker.switching_to is None and worker.role is not role), (worker.url, worker.role)
        worker.switching_to = role
        self._on_change()

    def on_role(self, worker: Worker, role: Role) -> None:
        worker.role = role
        self._on_change()
        worker.bootstrap.given_port = None
        self._forget(worker)

    def on_layout(self, worker: Worker, layout: Layout | None) -> None:
        if layout != worker.process.layout:
            worker.process.layout = layout
            self._on_change()

    def on_models(self, worker: Worker, names: tuple[str, ...], event_names: Mapping[str, str] = NO_NAMES) -> None:
        if (names, event_names) != (worker.models, worker.process.event_names):
            worker.models, worker.process.event_names, self._models = names, event_names, None
            self._on_change()

    def on_whole(self, worker: Worker, serves_whole: bool) -> None:
        if serves_whole is not worker.serves_whole:
            worker.serves_whole = serves_whole
            self._on_change()

    def on_bootstrap(self, worker: Worker, host: str, port: int | None) -> None:
        if (host, port) != (worker.bootstrap.host, worker.bootstrap.port):
            worker.bootstrap.host, worker.bootstrap.port = host, port
            self._on_change()

    @property
    def models(self) -> Catalogue:
        if self._models is None:
            workers = [w for w in self._workers.values() if w.role is not Role.ENCODE]
            self._models = Catalogue.of([w.models for w in workers], [w.process.event_names for w in workers])
        return self._models

    def _forget(self, worker: Worker) -> None:
        worker.report, worker.foreign_tokens = None, 0
        worker.circuit.reset()
        self.on_gone(worker)

    def _on_change(self) -> None:
        self._pools.clear()
        self._routes.clear()
        self._misfits = None
        self.on_change()

    def _on_circuit(self, worker: Worker, until_s: float) -> None:
        if worker.peers is not None:
            worker.peers.publish_open(worker.slot, until_s)
        if worker.circuit.state is State.CLOSED or worker not in self:
            self._unsettled.pop(worker.worker_id, None)
        else:
            self._unsettled[worker.worker_id] = worker

    def check(self) -> None:
        workers = self.workers()
        assert len({w.url for w in workers}) == len(workers)
        assert list(self._workers) == sorted(self._workers) == [w.worker_id for w in workers]
        assert list(self._by_name.values()) == workers
        assert all(self.find(w.url) is w for w in workers)
        assert sorted(self._unsettled) == [w.worker_id for w in workers if w.circuit.state is not State.CLOSED]
        anew = {key: _heard(self._serving(*key)) for key in self._pools}
        assert self._pools == anew
        grouped = {key: self._groups(*key) for key in self._routes}
        assert self._routes == grouped
        self.loads.check(workers)


@lru_cache(maxsize=2 * MAX_WORKERS)
def same_url(url: str) -> str:
    """Lower case, port, no slash."""
    parts = urlsplit(url)
    if not parts.hostname:
        return url
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{host}:{port}"


def is_up(worker: Worker) -> bool:
    if worker.health is not Health.UP or worker.switching_to is not None:
        return False
    return not worker.leaving or worker.last_resort


def _kept(cache: dict[_K, _V], key: _K, make: Callable[[], _V]) -> _V:
    found = cache.get(key)
    if found is None:
        if len(cache) >= MAX_POOLS:
            cache.clear()
        found = cache[key] = make()
    return found


def _heard(pool: Pool) -> tuple[Worker, ...]:
    return tuple([w for w in pool if not w.silent] or pool)


def _kind(check: Check) -> Check:
    return Check.FAILED if check is Check.REFUSED else check


def missing_roles(table: WorkerTable, ways: Iterable[Way], model: str = "") -> list[Role]:
    """Roles without live worker, none if a route is complete."""
    return _lacking(_missing(table, way, model) for way in ways)


def _missing(table: WorkerTable, way: Way, model: str) -> list[Role]:
    """Roles without live worker, all if no pair fits."""
    if table.routes(way, model):
        return []
    return [role for role in way if not table.pool(role, model)] or list(way)


def silent_roles(table: WorkerTable, ways: Iterable[Way], model: str = "") -> list[Role]:
    """Roles with silent workers only, none if a complete route answers."""
    whole = [pools for way in ways for pools in table.routes(way, model)]
    return _lacking([pool[0].role for pool in pools if pool[0].silent] for pools in whole)


def _lacking(of_ways: Iterable[list[Role]]) -> list[Role]:
    found = list(of_ways)
    return list(dict.fromkeys(role for roles in found for role in roles)) if all(found) else []
