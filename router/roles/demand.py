"""Workers' demand, counted in workers, by their reports. Pure.

    prefill   seconds of prompts arriving per second + seconds of queued prompts / --auto-roles-ttft
    decode    max of: KV held and requested / capacity, requests / --max-running-requests,
              ITL / --auto-roles-itl

Prefill's is offered load plus workers to clear the queue within the SLO. Smoothed over `window_s`,
arrivals and prefill speed for longer, as prompts vary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.config import AutoRolesFlags
from router.pool.states import Health
from router.pool.worker import PAIR, LoadReport, Role, Worker
from router.roles.controller import Seen, Smooth

WINDOW_SHARE = 1 / 3  # smoothing window as share of --auto-roles-sustain
SPEED_WINDOWS = 6.0  # windows to measure the speed of prefill
LEAST_BUSY = 0.05  # utilization below which speed is not measured


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
    """Demands at regular calls of `read`."""

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
        models = {model_of(worker) for worker in known}
        waits = {model: self._wait_of(model, [w for w in known if model_of(w) == model]) for model in sorted(models)}
        return [self._seen(worker, waits[model_of(worker)]) for worker in known]

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
            incarnation=worker.incarnation,
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
        if busy >= LEAST_BUSY and tokens > 0:
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
            model=model_of(worker),
            ready=trend is not None and trend.is_known and not worker.leaving,
            demand=lasting + backlog,
            backlog=backlog,
        )

    def _prefill_demand(self, trend: _Trend, prompts: "_Prompts") -> tuple[float, float]:
        """Return lasting demand and backlog; busy time without known speed."""
        if prompts.speed is None:
            return min(1.0, trend.work.known), 0.0
        waiting_s = (trend.waiting.known + prompts.blocked_tokens) / prompts.speed
        return trend.arrived.known / prompts.speed, waiting_s / self.flags.auto_roles_ttft_s


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Rates of one model: tokens/s of a prefill worker, and tokens per worker that wait at
    decode.
    """

    speed: float | None
    blocked_tokens: float


def model_of(worker: Worker) -> str:
    return next(iter(worker.models), "")


def decode_demand(report: LoadReport, flags: AutoRolesFlags, *, gap_s: float | None) -> tuple[float, float]:
    """Return demand in workers, and tokens that wait for prefill."""
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
    fell = report.busy_ms_total < trend.report.busy_ms_total or (
        report.prompt_tokens_total < trend.report.prompt_tokens_total
    )
    return trend.role is not worker.role or trend.incarnation != worker.incarnation or fell
