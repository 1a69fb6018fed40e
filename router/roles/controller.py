"""Decides when a worker switches pools (docs/design/routing.md). Pure.

Work is counted in workers (demand.py). Pressure is demand over workers: 1 is at capacity.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.config import AutoRolesFlags
from router.pool.worker import Role

ROLES = (Role.PREFILL, Role.DECODE)
LEAST_S = 1.0  # least window for usual demand
GAIN = 0.2  # least relative relief of a pool by a switch
NEWS = 0.5  # weight of the last switch in the expected duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A worker. `demand` in workers, `backlog` its late part. `ready`: serving, with known
    demand.
    """

    worker_id: int
    role: Role
    model: str
    ready: bool
    demand: float
    backlog: float = 0.0

    @property
    def lasting(self) -> float:
        return self.demand - self.backlog


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A switch to carry out; `Controller.ended` must follow."""

    worker_id: int
    model: str
    to_role: Role
    reason: str


@dataclass(slots=True)
class Smooth:
    """Exponential mean over irregular intervals."""

    window_s: float
    value: float | None = None

    def add(self, sample: float, dt_s: float) -> None:
        weight = 1.0 if self.value is None else -math.expm1(-dt_s / self.window_s)
        self.value = sample if self.value is None else self.value + weight * (sample - self.value)

    @property
    def known(self) -> float:
        return 0.0 if self.value is None else self.value


@dataclass(slots=True)
class Standing:
    """A model's state: `short_since` by pool, `usual` mean lasting demand."""

    move_s: float
    pressure: dict[Role, float] = field(default_factory=dict)
    usual: dict[Role, Smooth] = field(default_factory=dict)
    seen_s: float = 0.0
    short_since: dict[Role, float] = field(default_factory=dict)
    moving: Move | None = None
    began_s: float = 0.0
    last_to: Role | None = None
    ended_s: float = 0.0
    failed_s: float | None = None
    verdict: str = ""


class Controller:
    def __init__(self, flags: AutoRolesFlags) -> None:
        assert 0 < flags.auto_roles_leave < flags.auto_roles_enter, flags
        self._flags = flags
        self._least = {Role.PREFILL: flags.auto_roles_min_prefill, Role.DECODE: flags.auto_roles_min_decode}
        assert min(self._least.values()) >= 1, "an empty pool serves no request"
        self.standings: dict[str, Standing] = {}

    def tick(self, now_s: float, seen: Sequence[Seen]) -> list[Move]:
        models = sorted({worker.model for worker in seen})
        for model in [m for m, standing in self.standings.items() if m not in models and standing.moving is None]:
            del self.standings[model]
        moves = [self._tick(now_s, model, [w for w in seen if w.model == model]) for model in models]
        return [move for move in moves if move is not None]

    def ended(self, move: Move, *, ok: bool, now_s: float) -> None:
        """Record a switch's end. After a failure the model cools down."""
        standing = self.standings[move.model]
        assert standing.moving == move, (standing.moving, move)
        standing.moving, standing.ended_s = None, now_s
        standing.short_since.clear()
        if ok:
            standing.last_to, standing.failed_s = move.to_role, None
            standing.move_s += NEWS * (now_s - standing.began_s - standing.move_s)
        else:
            standing.failed_s = now_s

    def _tick(self, now_s: float, model: str, workers: list[Seen]) -> Move | None:
        standing = self.standings.setdefault(model, Standing(self._flags.auto_roles_switch_time_s))
        pools = {role: [worker for worker in workers if worker.role is role] for role in ROLES}
        self._note_usual(standing, pools, now_s)
        if standing.moving is not None:
            standing.verdict = f"a worker moves to {standing.moving.to_role}"
            return None
        standing.verdict = _why_unknown(workers, pools)
        if standing.verdict:
            standing.pressure.clear()
            standing.short_since.clear()
            return None
        standing.pressure = {role: sum(worker.demand for worker in pool) / len(pool) for role, pool in pools.items()}
        self._note_shortage(standing, now_s)
        move, standing.verdict = self._judge(now_s, model, standing, pools)
        if move is not None:
            standing.moving, standing.began_s = move, now_s
        return move

    def _note_usual(self, standing: Standing, pools: dict[Role, list[Seen]], now_s: float) -> None:
        """Update usual demand, also during switches."""
        dt_s, standing.seen_s = now_s - standing.seen_s, now_s
        for role, pool in pools.items():
            mean = standing.usual.setdefault(role, Smooth(max(self._flags.auto_roles_cooldown_s, LEAST_S)))
            mean.add(sum(worker.lasting for worker in pool), dt_s)

    def _note_shortage(self, standing: Standing, now_s: float) -> None:
        for role, pressure in standing.pressure.items():
            if pressure < self._flags.auto_roles_leave:
                standing.short_since.pop(role, None)
            elif pressure >= self._flags.auto_roles_enter:
                standing.short_since.setdefault(role, now_s)

    def _judge(
        self, now_s: float, model: str, standing: Standing, pools: dict[Role, list[Seen]]
    ) -> tuple[Move | None, str]:
        to = max(ROLES, key=lambda role: standing.pressure[role])
        giver = Role.DECODE if to is Role.PREFILL else Role.PREFILL
        if to not in standing.short_since or standing.pressure[to] < self._flags.auto_roles_enter:
            return None, "neither pool is short"
        if self._least[giver] >= len(pools[giver]):
            return None, f"{to} is short, but {giver} is at its minimum of {self._least[giver]}"
        before = sum(worker.lasting for worker in pools[to]) / len(pools[to])
        after = self._giver_after(standing, pools, giver, lasting=before)
        if after >= before * (1 - GAIN):  # also with nothing lasting: a backlog passes without a switch
            return None, (
                f"{to} is short, but {giver} cannot spare a worker: it would have {after:.2f} of lasting work, "
                f"{to} has {before:.2f}"
            )
        wait = self._wait_s(now_s, standing, to)
        if wait > 0:
            return None, f"{to} is short; a move would be due in {wait:.0f} s"
        victim = min(pools[giver], key=lambda worker: (worker.demand, worker.worker_id))
        reason = (
            f"{to} is short since {now_s - standing.short_since[to]:.0f} s: pressure {standing.pressure[to]:.2f}; "
            f"of it {before:.2f} will last; {giver} has {standing.pressure[giver]:.2f}, and {after:.2f} with a worker less"
        )
        return Move(worker_id=victim.worker_id, model=model, to_role=to, reason=reason), reason

    def _giver_after(self, standing: Standing, pools: dict[Role, list[Seen]], giver: Role, *, lasting: float) -> float:
        """Return its pressure without one worker. Prefill beyond 1 holds back decode's work."""
        has, flow = sum(worker.lasting for worker in pools[giver]), 1.0
        if giver is Role.DECODE:
            size = len(pools[Role.PREFILL])
            flow = min((size + 1) / size, max(1.0, lasting))
        return flow * max(has, standing.usual[giver].known) / (len(pools[giver]) - 1)

    def _wait_s(self, now_s: float, standing: Standing, to: Role) -> float:
        due_s = standing.short_since[to] + max(self._flags.auto_roles_sustain_s, standing.move_s)
        if standing.last_to not in (None, to):
            due_s = max(due_s, standing.ended_s + self._flags.auto_roles_cooldown_s)
        if standing.failed_s is not None:
            due_s = max(due_s, standing.failed_s + self._flags.auto_roles_cooldown_s)
        return due_s - now_s


def _why_unknown(workers: Sequence[Seen], pools: dict[Role, list[Seen]]) -> str:
    for role in ROLES:
        if not pools[role]:
            return f"there is no {role} worker"
    absent = [worker for worker in workers if not worker.ready]
    if absent:
        return f"{len(absent)} of {len(workers)} workers are down, drain, or have not reported their load yet"
    return ""
