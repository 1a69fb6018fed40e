"""Routes of the dashboard, polled by the page with a key."""

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Response

from router.config import RouterConfig
from router.fleet import PeerProcesses
from router.history.recorder import DashboardRequest, DashboardSnapshot, Recorder, Second, add, quantile
from router.http.openapi import SERVER
from router.pool.breaker import Health
from router.pool.worker import Worker
from router.pool.workers import WorkerTable
from router.requests.dispatch import LiveRequests
from service.http.api import ApiRouter
from service.http.errors import ApiError, decode_or_none
from service.http.request import HttpRequest
from service.http.routes import get, json_response

# ---- The dashboard's JSON document. Pure.

SHOWN_REQUESTS = 48
SHOWN_SECONDS = 120  # in the charts
WINDOW_S = 60  # averaged over
SMOOTH_S = 3  # workers report about every second
MAX_FAILURE_CHARS = 300
_COUNTED = ("arrived", "ended", "failed", "retried")
_REPORTED = ("prompt_tokens", "cached_tokens", "output_tokens", "kv_bytes")  # by workers
_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def merge(snapshots: Iterable[DashboardSnapshot]) -> DashboardSnapshot:
    """Add up processes' counts; reports of workers, which all receive, count once."""
    seconds: dict[int, Second] = {}
    records: list[DashboardRequest] = []
    switching: dict[str, str] = {}
    for snapshot in snapshots:
        records += snapshot.records
        switching |= snapshot.switching
        for second in snapshot.seconds:
            into = seconds.setdefault(second.at, Second(second.at))
            _add_second(into, second, sums=_COUNTED)
            for name in _REPORTED:
                setattr(into, name, max(getattr(into, name), getattr(second, name)))
    in_order = sorted(records, key=lambda r: (r.started_s, r.key))
    return DashboardSnapshot([seconds[at] for at in sorted(seconds)], in_order, switching)


def _add_second(into: Second, second: Second, *, sums: Sequence[str]) -> None:
    for name in sums:
        setattr(into, name, getattr(into, name) + getattr(second, name))
    add(into.ttft, second.ttft)
    add(into.gaps, second.gaps)
    add(into.failures, second.failures)


def draw(memory: DashboardSnapshot, table: WorkerTable, *, now_s: float) -> dict[str, Any]:
    """`workers`, `window` (last minute), `series` (by second), `requests` (newest first)."""
    return {
        "workers": [
            show_worker(w, switching_to=memory.switching.get(w.url), misfit=table.misfits.get(w.worker_id, ""))
            for w in table.workers()
        ],
        "window": _window(memory.seconds, now_s),
        "series": _series(memory.seconds, now_s),
        "requests": pick_records(memory.records),
    }


def show_worker(worker: Worker, *, switching_to: str | None = None, misfit: str = "") -> dict[str, Any]:
    return {
        "url": worker.url,
        "role": worker.role.value,
        "models": worker.models,
        "switching_to": switching_to,
        "health": _health(worker, misfit),
        "error": (misfit or worker.checks.error)[:MAX_FAILURE_CHARS],
        "inflight_requests": worker.requests_everywhere,
        "inflight_tokens": worker.tokens_everywhere,
        "report": worker.report,
        "ranks": worker.ranks,
    }


def _health(worker: Worker, misfit: str) -> str:
    if worker.health is not Health.UP or worker.silent:
        return "silent" if worker.silent else worker.health.value
    return "incompatible" if misfit else "paused" if worker.process.paused else worker.health.value


def pick_records(records: Sequence[DashboardRequest]) -> list[DashboardRequest]:
    """The newest records, running ones first."""
    running = [record for record in records if record.ended_s is None][-SHOWN_REQUESTS:]
    ended = [record for record in records if record.ended_s is not None]
    ended.sort(key=lambda r: (r.ended_s or 0.0, r.key))
    left = SHOWN_REQUESTS - len(running)
    return running[::-1] + (ended[-left:][::-1] if left else [])


def _window(seconds: Sequence[Second], now_s: float) -> dict[str, Any]:
    """Rates per second, latencies in seconds."""
    inside = [s for s in seconds if int(now_s) - WINDOW_S <= s.at < int(now_s)]
    covered_s = min(WINDOW_S, max(1, int(now_s) - (seconds[0].at if seconds else 0)))
    total = Second(0)
    for second in inside:
        _add_second(total, second, sums=_COUNTED + _REPORTED)
    return {
        "seconds": covered_s,
        "requests_per_s": total.ended / covered_s,
        **{
            f"{name}_per_s": getattr(total, name) / covered_s for name in ("output_tokens", "prompt_tokens", "kv_bytes")
        },
        "cache_hit_rate": _hit_rate(inside),
        **{name: getattr(total, name) for name in ("ended", "failed", "retried", "failures")},
        "ttft": {name: quantile(total.ttft, share) for name, share in _SHARES.items()},
        "gap": {name: quantile(total.gaps, share) for name, share in _SHARES.items()},
    }


def _series(seconds: Sequence[Second], now_s: float) -> dict[str, list[float | None]]:
    by_at = {second.at: second for second in seconds}
    none, end = Second(0), int(now_s) - 1
    shown = [by_at.get(at, none) for at in range(end - SHOWN_SECONDS, end)]
    return {
        "requests": [float(s.ended) for s in shown],
        "failed": [float(s.failed) for s in shown],
        "output_tokens": _smooth(shown, lambda s: s.output_tokens),
        "prompt_tokens": _smooth(shown, lambda s: s.prompt_tokens),
        "cache_hit_rate": [_hit_rate(shown[max(0, i - SMOOTH_S + 1) : i + 1]) for i in range(len(shown))],
        "kv_bytes": _smooth(shown, lambda s: s.kv_bytes),
        "ttft_p50": [quantile(s.ttft, 0.5) for s in shown],
        "ttft_p99": [quantile(s.ttft, 0.99) for s in shown],
        "gap_p50": [quantile(s.gaps, 0.5) for s in shown],
        "gap_p99": [quantile(s.gaps, 0.99) for s in shown],
    }


def _hit_rate(seconds: Sequence[Second]) -> float | None:
    prompt_tokens = sum(s.prompt_tokens for s in seconds)
    return min(1.0, sum(s.cached_tokens for s in seconds) / prompt_tokens) if prompt_tokens else None


def _smooth(shown: Sequence[Second], value: Callable[[Second], int]) -> list[float | None]:
    values = [value(second) for second in shown]
    return [sum(values[max(0, i - SMOOTH_S + 1) : i + 1]) / SMOOTH_S for i in range(len(values))]


# ---- page

STATE, SNAPSHOT, REQUEST = "/dashboard/state", "/dashboard/snapshot", "/dashboard/requests/"


@dataclass(eq=False, kw_only=True)
class Dashboard:
    """Handlers. `auto_roles` returns /auto_roles, if on."""

    config: RouterConfig
    table: WorkerTable
    recorder: Recorder
    live: LiveRequests
    num_running: Callable[[], int]
    peers: PeerProcesses
    auto_roles: Callable[[], Awaitable[bytes]] | None = None

    def api(self) -> ApiRouter:
        routes = [get(STATE, self.state), get(SNAPSHOT, self.snapshot), get(REQUEST + "{key}", self.request)]
        return ApiRouter(SERVER, routes)

    async def state(self, request: HttpRequest) -> Response:
        """Return the state of all processes, without request details."""
        now_s = self.recorder.now_s()
        memory = await self.memory()
        roles = None if self.auto_roles is None else msgspec.Raw(await self.auto_roles())
        picture = draw(memory, self.table, now_s=now_s)
        status = {"now_s": now_s, "wall_s": time.time(), "router": self._router(), "auto_roles": roles}
        return _fresh({**status, **picture})

    async def snapshot(self, request: HttpRequest) -> Response:
        """Return the dashboard\'s memory of this process, for the others."""
        return _fresh(self._own())

    async def request(self, request: HttpRequest) -> Response:
        """Return all that is remembered of a request."""
        key = request.path.removeprefix(REQUEST)
        for record in (await self.memory()).records:
            if record.key == key:
                return _fresh({"now_s": self.recorder.now_s(), "record": record})
        raise ApiError(404, f"no request {key} is remembered any more", code="not_found")

    async def memory(self) -> DashboardSnapshot:
        others = [decode_or_none(body, DashboardSnapshot) for body in await self.peers.request("GET", SNAPSHOT)]
        return merge([self._own(), *(snapshot for snapshot in others if snapshot is not None)])

    def _own(self) -> DashboardSnapshot:
        snapshot = self.recorder.snapshot()
        snapshot.switching = {
            worker.url: worker.switching_to.value for worker in self.table.workers() if worker.switching_to is not None
        }
        return snapshot

    def _router(self) -> dict[str, Any]:
        return {
            "pd": self.config.pd_disaggregation,
            "mixed": self.config.mixed,
            "policy": self.config.default_policy,
            "processes": self.config.workers,
            "running": self.num_running(),
            "draining": self.live.draining,
            "blocked": self.live.blocked,
            "reports": self.config.load_poll_interval_s > 0,
        }


def _fresh(value: object) -> Response:
    return json_response(value, headers={"Cache-Control": "no-store"})
