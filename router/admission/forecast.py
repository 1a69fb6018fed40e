"""Foretells when a request's first token would come, and how fast the others, from what each worker did lately. Pure.

    TTFT of a prefill (or unified) worker    a + b * (tokens that wait there to be computed + the request's own)
    ITL of a decode (or unified) worker      a + b * requests there

a and b are fitted for each worker (fit.py) to what this router saw of streams: from sending a request to its answer's first
byte, and the mean time between its events. So they hold network, batching and whatever else there is. Several processes of one
router tell one another what they saw (router/fleet/shared_load.py), and each foretells from all of it. The idea of
refusing early what would be too late is Mooncake's (FAST'25), that of two objectives for two pools DistServe's (OSDI'24).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from router.admission.fit import STATE, Fit
from router.pool.load_view import NUM_LEARNT
from router.pool.workers import Role, Worker

TTFT_HEADER = "x-slo-ttft-ms"
ITL_HEADER = "x-slo-itl-ms"
MIN_EVENTS = 4  # of a stream that says something of pace
STALE_S = 30.0  # without news for so long a worker is tried once, whatever was foretold: it may be faster now


class Slo(msgspec.Struct, frozen=True):
    """What a request's client wants, in seconds; inf: nothing."""

    ttft_s: float = math.inf
    itl_s: float = math.inf

    @property
    def is_set(self) -> bool:
        return self.ttft_s < math.inf or self.itl_s < math.inf


class TooLate(Exception):
    """Nobody would be in time. `what`: "ttft" or "itl"; the best that was foretold, and what was wanted."""

    def __init__(self, what: str, *, foretold_s: float, wanted_s: float) -> None:
        name = {"ttft": "the first token", "itl": "the time between tokens"}[what]
        super().__init__(
            f"{name} would take about {foretold_s * 1000:.0f} ms, more than the {wanted_s * 1000:.0f} ms asked for "
            f"(--slo-{what}-ms, X-SLO-{what.upper()}-ms); try again later"
        )
        self.what = what
        self.retry_after_s = max(1, math.ceil(min(60.0, foretold_s - wanted_s)))


@dataclass(slots=True)
class _Learnt:
    """`ttft_s`, `itl_s`: when something was last learnt of it, or tried to be (0: never)."""

    ttft: Fit = field(default_factory=Fit)
    itl: Fit = field(default_factory=Fit)
    news_s: dict[str, float] = field(default_factory=lambda: {"ttft": 0.0, "itl": 0.0})

    @property
    def numbers(self) -> list[float]:
        """As other processes get it."""
        return [1.0, self.news_s["ttft"], self.news_s["itl"], *self.ttft.state, *self.itl.state]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "_Learnt":
        _, ttft_s, itl_s, *states = numbers
        return cls(Fit.of(states[:STATE]), Fit.of(states[STATE:]), {"ttft": ttft_s, "itl": itl_s})

    def join(self, other: "_Learnt") -> None:
        """Add what another process has learnt."""
        self.ttft.join(other.ttft)
        self.itl.join(other.itl)
        for what, at_s in other.news_s.items():
            self.news_s[what] = max(self.news_s[what], at_s)


@dataclass(slots=True, eq=False)
class _Known:
    """Of one worker in one life. `here`: what this process has seen itself."""

    worker: Worker
    here: _Learnt = field(default_factory=_Learnt)
    pending_tokens: int = 0  # of prompts whose answers have not begun


class Trip(msgspec.Struct):
    """One request at one worker. `ahead_tokens`: that had to be computed for its first token, its own included."""

    known: _Known  # of that worker, in the life that the request was sent to
    tokens: int
    ahead_tokens: int
    sent_s: float
    waiting: bool = True


class Forecast:
    """What is known of workers, by id."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def forget(self, worker: Worker) -> None:
        """It left, or is another process now; what still runs there teaches nothing about the next one."""
        if self._known.pop(worker.worker_id, None) is not None:
            worker.view.publish_learnt(worker.slot, [0.0] * NUM_LEARNT)

    def depart(self, worker: Worker, tokens: int, *, now_s: float) -> Trip:
        """A request with so many uncached tokens is about to be sent there (and charged to it)."""
        known = self._of(worker)
        trip = Trip(known, tokens, self._waiting(worker) + tokens, now_s)
        known.pending_tokens += tokens
        return trip

    def begun(self, trip: Trip, *, now_s: float) -> None:
        """The first byte of its stream came."""
        trip.known.here.ttft.add(trip.ahead_tokens, now_s - trip.sent_s)
        self._news(trip.known, "ttft", now_s)
        self.computed(trip)

    def computed(self, trip: Trip) -> None:
        """Its prompt waits no longer, for whatever reason; a second time does nothing."""
        if trip.waiting:
            trip.waiting = False
            trip.known.pending_tokens -= trip.tokens

    def on_pace(self, trip: Trip, pace: "Pace", *, requests: float, now_s: float) -> None:
        """A stream ended; so many requests ran there meanwhile."""
        if pace.num_events >= MIN_EVENTS:
            trip.known.here.itl.add(requests, (pace.last_s - pace.first_s) / pace.num_events)
            self._news(trip.known, "itl", now_s)

    def ttft_s(self, worker: Worker, tokens: int) -> float | None:
        """For a request with so many uncached tokens; None: unknown."""
        return self._everywhere(worker).ttft.at(self._waiting(worker) + tokens)

    def itl_s(self, worker: Worker) -> float | None:
        """For one more request there."""
        return self._everywhere(worker).itl.at(requests_at(worker) + 1)

    def fits(self, worker: Worker) -> tuple[Fit, Fit]:
        """(TTFT by tokens, ITL by requests), as far as they are known."""
        learnt = self._everywhere(worker)
        return learnt.ttft, learnt.itl

    def in_time(self, pool: Sequence[Worker], slo: Slo, *, tokens: Mapping[int, int], now_s: float) -> list[Worker]:
        """Those of `pool` (of one role) that would keep `slo`, or of which too little is known. `TooLate` if none would.

        `tokens`: by worker id, what it would have to compute.
        """
        kept = list(pool)
        if pool[0].role is not Role.DECODE and slo.ttft_s < math.inf:
            kept = self._keep("ttft", {w: self.ttft_s(w, tokens[w.worker_id]) for w in kept}, slo.ttft_s, now_s)
        if pool[0].role is not Role.PREFILL and slo.itl_s < math.inf:
            kept = self._keep("itl", {w: self.itl_s(w) for w in kept}, slo.itl_s, now_s)
        return kept

    def _keep(self, what: str, foretold: Mapping[Worker, float | None], wanted_s: float, now_s: float) -> list[Worker]:
        kept = [w for w, at_s in foretold.items() if at_s is None or at_s <= wanted_s]
        kept = kept or [w for w in foretold if now_s - self._everywhere(w).news_s[what] >= STALE_S]
        if not kept:
            best_s = min(at_s for at_s in foretold.values() if at_s is not None)
            raise TooLate(what, foretold_s=best_s, wanted_s=wanted_s)
        for worker in kept:
            if (at_s := foretold[worker]) is not None and at_s > wanted_s:
                self._news(self._of(worker), what, now_s)  # one request is enough to learn by
        return kept

    def _news(self, known: _Known, what: str, now_s: float) -> None:
        """Something was learnt, or will be: the other processes are told. Of a life that is over they want to hear nothing."""
        known.here.news_s[what] = now_s
        worker = known.worker
        if worker.view.has_siblings and self._known.get(worker.worker_id) is known:
            worker.view.publish_learnt(worker.slot, known.here.numbers)

    def _everywhere(self, worker: Worker) -> _Learnt:
        """What all processes of this router have seen; not to be changed."""
        here = self._of(worker).here
        others = worker.view.others_learnt(worker.slot)
        if not others:
            return here
        learnt = _Learnt.of(here.numbers)
        for numbers in others:
            learnt.join(_Learnt.of(numbers))
        return learnt

    def _waiting(self, worker: Worker) -> int:
        """Tokens that are to be computed there first. A unified worker's load is KV, so there our own requests are what we know."""
        return worker.load_tokens if worker.role is Role.PREFILL else self._of(worker).pending_tokens

    def _of(self, worker: Worker) -> _Known:
        known = self._known.get(worker.worker_id)
        if known is None:
            known = self._known[worker.worker_id] = _Known(worker)
        return known


class Pace:
    """Counts the events of one stream."""

    __slots__ = ("first_s", "last_s", "num_events")

    def __init__(self) -> None:
        self.num_events = 0
        self.first_s = self.last_s = 0.0

    def on_chunk(self, chunk: bytes, now_s: float) -> None:
        """Bytes came. Those that came with the first event are not counted: when the model made them is unknown."""
        self.last_s = now_s
        if self.first_s:
            self.num_events += chunk.count(b"\n\n")
        else:
            self.first_s = now_s


def requests_at(worker: Worker) -> int:
    """That this router has there, all its processes together."""
    return worker.inflight_requests + worker.view.others_requests(worker.slot)


def read_slo(headers: Mapping[str, str], default: Slo) -> Slo:
    """A request's own objectives, else the router's. `ValueError` names the header that is no positive number."""
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
