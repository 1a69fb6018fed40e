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

from router.admission.fit import MIN_POINTS, STATE, Fit
from router.pool.load_view import NUM_LEARNT
from router.pool.worker import Role, Worker

TTFT_HEADER = "x-slo-ttft-ms"
ITL_HEADER = "x-slo-itl-ms"
MIN_EVENTS = 4  # of a stream that says something of pace
WHAT = ("ttft", "itl")
TELL_S = 0.1  # between two times that other processes are told of one worker; at first they are told of each stream
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
    """What was seen of one worker. `news_s`: when something was last learnt, or tried to be (0: never)."""

    fits: dict[str, Fit] = field(default_factory=lambda: {what: Fit() for what in WHAT})
    news_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WHAT, 0.0))

    @property
    def numbers(self) -> list[float]:
        """As other processes get it."""
        told = [1.0]
        for what in WHAT:
            told += (self.news_s[what], *self.fits[what].state)
        return told

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "_Learnt":
        begins = {what: 1 + i * (1 + STATE) for i, what in enumerate(WHAT)}
        fits = {what: Fit.of(numbers[at + 1 : at + 1 + STATE]) for what, at in begins.items()}
        return cls(fits, {what: numbers[at] for what, at in begins.items()})

    def joined(self, other: "_Learnt") -> "_Learnt":
        """What both have seen."""
        fits = {what: fit.joined(other.fits[what]) for what, fit in self.fits.items()}
        return _Learnt(fits, {what: max(at_s, other.news_s[what]) for what, at_s in self.news_s.items()})


_NOTHING = _Learnt()  # never written to: what is heard is joined into new ones


@dataclass(slots=True, eq=False)
class _Known:
    """Of one worker in one life. `here`: what this process has seen itself; the others were told at `told_s`.

    `heard`: what they said when it was last looked at, and what all of it says together.
    """

    worker: Worker
    here: _Learnt = field(default_factory=_Learnt)
    pending_tokens: int = 0  # of prompts whose answers have not begun
    told_s: float = -math.inf
    heard: tuple[list[Sequence[float]], _Learnt] = ([], _NOTHING)


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
        self._learn(trip.known, "ttft", trip.ahead_tokens, now_s - trip.sent_s, now_s=now_s)
        self.computed(trip)

    def computed(self, trip: Trip) -> None:
        """Its prompt waits no longer, for whatever reason; a second time does nothing."""
        if trip.waiting:
            trip.waiting = False
            trip.known.pending_tokens -= trip.tokens

    def on_pace(self, trip: Trip, pace: "Pace", *, requests: float, now_s: float) -> None:
        """A stream ended; so many requests ran there meanwhile."""
        if pace.num_events >= MIN_EVENTS:
            self._learn(trip.known, "itl", requests, (pace.last_s - pace.first_s) / pace.num_events, now_s=now_s)

    def ttft_s(self, worker: Worker, tokens: int) -> float | None:
        """For a request with so many uncached tokens; None: unknown."""
        return self._fit(worker, "ttft").at(self._waiting(worker) + tokens)

    def itl_s(self, worker: Worker) -> float | None:
        """For one more request there."""
        return self._fit(worker, "itl").at(requests_at(worker) + 1)

    def fits(self, worker: Worker) -> tuple[Fit, Fit]:
        """(TTFT by tokens, ITL by requests), as far as they are known."""
        return self._fit(worker, "ttft"), self._fit(worker, "itl")

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
        kept = kept or [w for w in foretold if now_s - self._news_s(w, what) >= STALE_S]
        if not kept:
            best_s = min(at_s for at_s in foretold.values() if at_s is not None)
            raise TooLate(what, foretold_s=best_s, wanted_s=wanted_s)
        for worker in kept:
            if (at_s := foretold[worker]) is not None and at_s > wanted_s:
                known = self._of(worker)
                known.here.news_s[what] = now_s  # one request is enough to learn by
                self._tell(known, now_s)
        return kept

    def _learn(self, known: _Known, what: str, x: float, y: float, *, now_s: float) -> None:
        fit = known.here.fits[what]
        fit.add(x, y)
        known.here.news_s[what] = now_s
        if fit.num_points <= MIN_POINTS or now_s - known.told_s >= TELL_S:
            self._tell(known, now_s)

    def _tell(self, known: _Known, now_s: float) -> None:
        """Of a life that is over the other processes want to hear nothing."""
        worker = known.worker
        if worker.view.has_siblings and self._known.get(worker.worker_id) is known:
            worker.view.publish_learnt(worker.slot, known.here.numbers)
            known.told_s = now_s

    def _fit(self, worker: Worker, what: str) -> Fit:
        """Through what all processes of this router have seen; not to be changed."""
        known = self._of(worker)
        return known.here.fits[what].joined(self._elsewhere(known).fits[what])

    def _news_s(self, worker: Worker, what: str) -> float:
        known = self._of(worker)
        return max(known.here.news_s[what], self._elsewhere(known).news_s[what])

    def _elsewhere(self, known: _Known) -> _Learnt:
        """What the other processes have seen."""
        said = known.worker.view.others_learnt(known.worker.slot)
        if said != known.heard[0]:
            learnt = _NOTHING
            for numbers in said:
                learnt = learnt.joined(_Learnt.of(numbers))
            known.heard = said, learnt
        return known.heard[1]

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
