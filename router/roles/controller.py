"""Decides when a worker switches pools (docs/design/routing.md). Pure.

Pressure is demand over workers: 1 is at capacity.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.config import AutoRolesFlags
from router.pool.breaker import Health
from router.pool.worker import PAIR, LoadReport, Role, Worker

ROLES = (Role.PREFILL, Role.DECODE)
LEAST_S = 1.0  # least window for usual demand
GAIN = 0.2  # least relative relief of a pool by a switch
NEWS = 0.5  # weight of the last switch in the expected duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """`demand` in workers, `backlog` its late part. `ready`: serving, with known demand."""

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
        """After a failure the model cools down."""
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
        """Its pressure without one worker. Prefill beyond 1 holds back decode's work."""
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


# ---- demand of workers

WINDOW_SHARE = 1 / 3  # smoothing window as share of --auto-roles-sustain
SPEED_WINDOWS = 6.0  # windows to measure the speed of prefill
MIN_BUSY = 0.05  # utilization below which speed is not measured


@dataclass(slots=True, kw_only=True)
class _Trend:
    """A worker in one role and incarnation. `blocked`: tokens at decode that wait for prefill."""

    role: Role
    incarnation: str
    report: LoadReport
    at_s: float
    is_known: bool = False
    work: Smooth
    waiting: Smooth
    blocked: Smooth
    arrived: Smooth
    speed_tokens: Smooth
    speed_busy: Smooth


@dataclass(slots=True)
class Gauge:
    """Demands in workers, by their reports, at regular calls of `read`.

      prefill   seconds of prompts arriving per second + seconds of queue / --auto-roles-ttft
      decode    max of: KV held and requested / capacity, requests / --max-running-requests,
                ITL / --auto-roles-itl

    Prefill's is offered load plus workers to clear the queue within the SLO. Smoothed over
    `window_s`, arrivals and prefill speed for longer, as prompts vary.
    """

    flags: AutoRolesFlags
    window_s: float = field(init=False)
    _trends: dict[int, _Trend] = field(default_factory=dict)
    _speed: dict[str, float] = field(default_factory=dict)  # tokens/s of a prefill worker, by model

    def __post_init__(self) -> None:
        flags = self.flags
        self.window_s = max(flags.auto_roles_interval_s, WINDOW_SHARE * flags.auto_roles_sustain_s)

    def read(self, workers: Sequence[Worker], now_s: float) -> list[Seen]:
        known = [worker for worker in workers if worker.role in PAIR]
        self._trends = {w.worker_id: self._trends[w.worker_id] for w in known if w.worker_id in self._trends}
        for worker in known:
            self._take(worker, now_s)
        models = sorted({worker.model for worker in known})
        waits = {model: self._wait_of(model, [w for w in known if w.model == model]) for model in models}
        return [self._seen(worker, waits[worker.model]) for worker in known]

    def _take(self, worker: Worker, now_s: float) -> None:
        report, trend = worker.report, self._trends.get(worker.worker_id)
        if report is None or worker.health is not Health.UP:
            self._trends.pop(worker.worker_id, None)
        elif trend is None or _is_another(trend, worker, report):
            self._trends[worker.worker_id] = self._begin(worker, report, now_s)
        elif report is not trend.report and now_s > trend.at_s:
            self._sample(trend, report, now_s - trend.at_s)
            trend.report, trend.at_s = report, now_s

    def _begin(self, worker: Worker, report: LoadReport, now_s: float) -> _Trend:
        short, long = self.window_s, SPEED_WINDOWS * self.window_s
        return _Trend(
            role=worker.role,
            incarnation=worker.process.incarnation,
            report=report,
            at_s=now_s,
            work=Smooth(short),
            waiting=Smooth(short),
            blocked=Smooth(short),
            arrived=Smooth(long),
            speed_tokens=Smooth(long),
            speed_busy=Smooth(long),
        )

    def _sample(self, trend: _Trend, report: LoadReport, dt_s: float) -> None:
        trend.is_known = True
        if trend.role is Role.DECODE:
            work, blocked = decode_demand(report, self.flags, gap_s=_gap_s(trend.report, report, dt_s))
            trend.work.add(work, dt_s)
            trend.blocked.add(blocked, dt_s)
            return
        before = trend.report
        busy = (report.busy_ms_total - before.busy_ms_total) / (1000 * dt_s)
        arrived = report.prompt_tokens_total - before.prompt_tokens_total
        trend.work.add(busy, dt_s)
        trend.arrived.add(arrived / dt_s, dt_s)
        trend.waiting.add(report.waiting_tokens, dt_s)
        trend.speed_tokens.add((arrived - report.waiting_tokens + before.waiting_tokens) / dt_s, dt_s)
        trend.speed_busy.add(busy, dt_s)

    def _wait_of(self, model: str, workers: Sequence[Worker]) -> "_Prompts":
        trends = [self._trends[w.worker_id] for w in workers if w.worker_id in self._trends]
        prefill = [trend for trend in trends if trend.role is Role.PREFILL]
        busy = sum(trend.speed_busy.known for trend in prefill)
        tokens = sum(trend.speed_tokens.known for trend in prefill)
        if busy >= MIN_BUSY and tokens > 0:
            self._speed[model] = tokens / busy
        blocked = sum(trend.blocked.known for trend in trends if trend.role is Role.DECODE)
        speed = self._speed.get(model)
        return _Prompts(speed, blocked / max(1, len(prefill)))

    def _seen(self, worker: Worker, prompts: "_Prompts") -> Seen:
        trend = self._trends.get(worker.worker_id)
        lasting, backlog = 0.0, 0.0
        if trend is not None and trend.role is Role.PREFILL:
            lasting, backlog = self._prefill_demand(trend, prompts)
        elif trend is not None:
            lasting = trend.work.known
        return Seen(
            worker_id=worker.worker_id,
            role=worker.role,
            model=worker.model,
            ready=trend is not None and trend.is_known and not worker.leaving,
            demand=lasting + backlog,
            backlog=backlog,
        )

    def _prefill_demand(self, trend: _Trend, prompts: "_Prompts") -> tuple[float, float]:
        """Lasting demand and backlog; busy time without known speed."""
        if prompts.speed is None:
            return min(1.0, trend.work.known), 0.0
        waiting_s = (trend.waiting.known + prompts.blocked_tokens) / prompts.speed
        return trend.arrived.known / prompts.speed, waiting_s / self.flags.auto_roles_ttft_s


@dataclass(frozen=True, slots=True)
class _Prompts:
    """A model's tokens/s of a prefill worker, and tokens per worker that wait at decode."""

    speed: float | None
    blocked_tokens: float


def decode_demand(report: LoadReport, flags: AutoRolesFlags, *, gap_s: float | None) -> tuple[float, float]:
    """Demand in workers, and tokens that wait for prefill."""
    own = report.running_reqs + report.stages.get("retracted", 0)
    waits = report.stages.get("transfer", 0)  # with memory reserved, waiting for KV
    share = own / (own + waits) if own + waits else 1.0
    tokens = share * (report.used_tokens + report.pending_tokens)
    requests = own + share * report.stages.get("prealloc", 0)
    demand = tokens / report.capacity_tokens if report.capacity_tokens else 0.0
    if report.max_running_reqs:
        demand = max(demand, requests / report.max_running_reqs)
    if gap_s is not None and flags.auto_roles_itl_s:
        demand = max(demand, gap_s / flags.auto_roles_itl_s)
    return demand, (1 - share) * report.pending_tokens


def _gap_s(before: LoadReport, report: LoadReport, dt_s: float) -> float | None:
    tokens = report.output_tokens_total - before.output_tokens_total
    running = (before.running_reqs + report.running_reqs) / 2
    return running * dt_s / tokens if tokens > 0 and running >= 1 else None


def _is_another(trend: _Trend, worker: Worker, report: LoadReport) -> bool:
    before = trend.report
    fell = report.busy_ms_total < before.busy_ms_total or report.prompt_tokens_total < before.prompt_tokens_total
    return trend.role is not worker.role or trend.incarnation != worker.process.incarnation or fell
