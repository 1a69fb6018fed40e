"""Predicts TTFT and ITL of a worker from what this router process measured there. Pure.

    TTFT of a prefill (or unified) worker    a + b * (tokens waiting there to be computed + the request's own)
    ITL of a decode (or unified) worker      a + b * requests there

a and b are fitted per worker to observed streams: the time from sending a request to the first byte of its answer, and the
mean time between its events. The fit thus includes network and batching. Early refusal follows Mooncake (FAST'25), separate
objectives for the two pools follow DistServe (OSDI'24).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from router.admission.fit import LineFit
from router.pool.worker import Role, Worker

TTFT_HEADER = "x-slo-ttft-ms"
ITL_HEADER = "x-slo-itl-ms"
MIN_EVENTS = 4  # of a stream that says something about ITL
STALE_S = 30.0  # without news for this long a worker is tried once despite its forecast: it may be faster now


class Slo(msgspec.Struct, frozen=True):
    """Objectives of one request, in seconds; inf: none."""

    ttft_s: float = math.inf
    itl_s: float = math.inf

    @property
    def is_set(self) -> bool:
        return self.ttft_s < math.inf or self.itl_s < math.inf


class TooLate(Exception):
    """No worker would keep the objective. `what`: "ttft" or "itl"."""

    def __init__(self, what: str, *, predicted_s: float, wanted_s: float) -> None:
        name = {"ttft": "the first token", "itl": "the time between tokens"}[what]
        super().__init__(
            f"{name} would take about {predicted_s * 1000:.0f} ms, more than the {wanted_s * 1000:.0f} ms asked for "
            f"(--slo-{what}-ms, X-SLO-{what.upper()}-ms); try again later"
        )
        self.what = what
        self.retry_after_s = max(1, math.ceil(min(60.0, predicted_s - wanted_s)))


@dataclass(slots=True)
class _Law:
    """One fitted line. `news_s`: time of the last measurement, or of the last try to get one (0: never)."""

    fit: LineFit = field(default_factory=LineFit)
    news_s: float = 0.0

    def learn(self, x: float, y: float, now_s: float) -> None:
        self.fit.add(x, y)
        self.news_s = now_s


@dataclass(slots=True, eq=False)
class _Known:
    """What was measured of one worker in one incarnation. `pending_tokens`: of prompts whose answers have not begun."""

    ttft: _Law = field(default_factory=_Law)
    itl: _Law = field(default_factory=_Law)
    pending_tokens: int = 0


class Trip(msgspec.Struct):
    """One request at one worker. `ahead_tokens`: to be computed before its first token, its own included."""

    known: _Known  # of that worker, in the incarnation that the request was sent to
    tokens: int
    ahead_tokens: int
    sent_s: float
    waiting: bool = True


class Forecast:
    """Fitted lines of every worker, by worker id."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def forget(self, worker: Worker) -> None:
        """Drop what is known: the worker left or restarted. Requests still running there no longer count."""
        self._known.pop(worker.worker_id, None)

    def depart(self, worker: Worker, tokens: int, *, now_s: float) -> Trip:
        """Note a request with this many uncached tokens that is about to be sent to the worker (and charged to it)."""
        known = self._of(worker)
        trip = Trip(known, tokens, self._waiting(worker) + tokens, now_s)
        known.pending_tokens += tokens
        return trip

    def begun(self, trip: Trip, *, now_s: float) -> None:
        """Learn TTFT: the first byte of the stream came."""
        trip.known.ttft.learn(trip.ahead_tokens, now_s - trip.sent_s, now_s)
        self.computed(trip)

    def computed(self, trip: Trip) -> None:
        """Stop counting the prompt as waiting. Idempotent."""
        if trip.waiting:
            trip.waiting = False
            trip.known.pending_tokens -= trip.tokens

    def on_pace(self, trip: Trip, pace: "Pace", *, requests: float, now_s: float) -> None:
        """Learn ITL from a stream that ended; `requests`: mean number at the worker meanwhile."""
        if pace.num_events >= MIN_EVENTS:
            trip.known.itl.learn(requests, (pace.last_s - pace.first_s) / pace.num_events, now_s)

    def ttft_s(self, worker: Worker, tokens: int) -> float | None:
        """Predict TTFT of a request with this many uncached tokens; None: unknown."""
        return self._of(worker).ttft.fit.at(self._waiting(worker) + tokens)

    def itl_s(self, worker: Worker) -> float | None:
        """Predict ITL with one more request at the worker; None: unknown."""
        return self._of(worker).itl.fit.at(worker.requests_everywhere + 1)

    def fits(self, worker: Worker) -> tuple[LineFit, LineFit]:
        """(TTFT by tokens, ITL by requests)."""
        known = self._of(worker)
        return known.ttft.fit, known.itl.fit

    def in_time(self, pool: Sequence[Worker], slo: Slo, *, tokens: Mapping[int, int], now_s: float) -> list[Worker]:
        """Return the workers of `pool` (one role) that would keep `slo` or are unknown. Raises `TooLate` if there are none.

        `tokens`: by worker id, what it would have to compute.
        """
        kept = list(pool)
        if pool[0].role is not Role.DECODE and slo.ttft_s < math.inf:
            kept = self._keep("ttft", {w: self.ttft_s(w, tokens[w.worker_id]) for w in kept}, slo.ttft_s, now_s)
        if pool[0].role is not Role.PREFILL and slo.itl_s < math.inf:
            kept = self._keep("itl", {w: self.itl_s(w) for w in kept}, slo.itl_s, now_s)
        return kept

    def _keep(self, what: str, predicted: Mapping[Worker, float | None], wanted_s: float, now_s: float) -> list[Worker]:
        kept = [w for w, at_s in predicted.items() if at_s is None or at_s <= wanted_s]
        kept = kept or [w for w in predicted if now_s - self._law(w, what).news_s >= STALE_S]
        if not kept:
            best_s = min(at_s for at_s in predicted.values() if at_s is not None)
            raise TooLate(what, predicted_s=best_s, wanted_s=wanted_s)
        for worker in kept:
            if (at_s := predicted[worker]) is not None and at_s > wanted_s:
                self._law(worker, what).news_s = now_s  # one request is enough to learn from
        return kept

    def _law(self, worker: Worker, what: str) -> _Law:
        known = self._of(worker)
        return known.ttft if what == "ttft" else known.itl

    def _waiting(self, worker: Worker) -> int:
        """Tokens to be computed there first. The load of a unified worker is KV, so only our own requests count there."""
        return worker.load_tokens if worker.role is Role.PREFILL else self._of(worker).pending_tokens

    def _of(self, worker: Worker) -> _Known:
        known = self._known.get(worker.worker_id)
        if known is None:
            known = self._known[worker.worker_id] = _Known()
        return known


class Pace:
    """Counts the events of one stream."""

    __slots__ = ("first_s", "last_s", "num_events")

    def __init__(self) -> None:
        self.num_events = 0
        self.first_s = self.last_s = 0.0

    def on_chunk(self, chunk: bytes, now_s: float) -> None:
        """Count events. Those in the first chunk do not count: the time at which the model made them is unknown."""
        self.last_s = now_s
        if self.first_s:
            self.num_events += chunk.count(b"\n\n")
        else:
            self.first_s = now_s


def read_slo(headers: Mapping[str, str], default: Slo) -> Slo:
    """Read the objectives of one request, else the router's. `ValueError` names the header that is no positive number."""
    if TTFT_HEADER not in headers and ITL_HEADER not in headers:
        return default
    return Slo(_seconds(headers, TTFT_HEADER, default.ttft_s), _seconds(headers, ITL_HEADER, default.itl_s))


def _seconds(headers: Mapping[str, str], name: str, default_s: float) -> float:
    text = headers.get(name)
    if text is None:
        return default_s
    try:
        value_s = float(text) / 1000
    except ValueError:
        value_s = 0.0
    if not 0.0 < value_s < math.inf:
        raise ValueError(f"{name}: must be a number of milliseconds above 0, got {text[:40]!r}")
    return value_s
