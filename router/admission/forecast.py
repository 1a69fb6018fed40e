"""Predicts TTFT and ITL of a worker from what this router process measured there. Pure.

    TTFT of a prefill (or unified) worker    a + b * (tokens waiting there to be computed + the request's own)
    ITL of a decode (or unified) worker      a + b * requests there

a and b are fitted per worker to observed streams, so they include network and batching: recursive least squares with exponential
forgetting (West 1979, "Updating mean and variance estimates"), never negative; without spread in x the slope is 0. Early refusal follows
Mooncake (FAST'25), separate objectives for the two pools follow DistServe (OSDI'24).
"""

from dataclasses import dataclass, field

import msgspec

from router.attempts.pair_attempt import PairAttempt
from router.attempts.request import RequestContext
from router.pool.worker import Pool, Role, Worker

MIN_EVENTS = 4  # of a stream from which ITL is learned
KEEP = 0.98  # weight of a point relative to the next one: about 50 of them count
ANSWER_SHARE = 0.02  # of the mean length of answers, that each adds
MIN_POINTS = 8  # before which nothing is predicted
STALE_S = 30.0  # without a measurement for this long a worker is tried once despite its forecast: it may be faster now


@dataclass(slots=True)
class LineFit:
    """`news_s`: time of the last measurement or try to get one; 0: never."""

    news_s: float = 0.0
    num_points: int = 0
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, x: float, y: float, now_s: float) -> None:
        self.news_s = now_s
        self.num_points += 1
        self._weight = self._weight * KEEP + 1.0
        dx, dy, share = x - self._x, y - self._y, 1.0 / self._weight
        self._x += share * dx
        self._y += share * dy
        self._xx = KEEP * self._xx + dx * (x - self._x)
        self._xy = KEEP * self._xy + dx * (y - self._y)

    @property
    def slope(self) -> float:
        return max(0.0, self._xy / self._xx) if self._xx > 1e-9 else 0.0

    @property
    def intercept(self) -> float:
        return max(0.0, self._y - self.slope * self._x)

    @property
    def is_known(self) -> bool:
        return self.num_points >= MIN_POINTS

    def at(self, x: float) -> float | None:
        return self.intercept + self.slope * x if self.is_known else None


@dataclass(slots=True, eq=False)
class _Known:
    """Measurements of one worker in one incarnation. `pending_tokens`: of prompts whose answers have not begun."""

    ttft: LineFit = field(default_factory=LineFit)
    itl: LineFit = field(default_factory=LineFit)
    pending_tokens: int = 0


class SentPrompt(msgspec.Struct):
    """A request at one worker. `ahead_tokens`: to be computed before its first token, its own included."""

    known: _Known  # of the incarnation that the request was sent to
    tokens: int
    ahead_tokens: int
    sent_s: float
    waiting: bool = True


class ObservedStream(msgspec.Struct):
    """One attempt as its stream comes. Events of the first chunk do not count: their times are unknown."""

    prompt: SentPrompt
    answering: _Known
    first_s: float = 0.0
    last_s: float = 0.0
    num_events: int = 0
    requests: int = 0  # at the answering worker when the stream began


class Forecast:
    """`answer_events`: of a stream, the mean of those that ended; 0: none has."""

    def __init__(self) -> None:
        self.answer_events = 0.0
        self._known: dict[int, _Known] = {}  # by worker id
        self._streams: dict[PairAttempt, ObservedStream] = {}

    def forget(self, worker: Worker) -> None:
        """The worker left or restarted. Requests that run there no longer count."""
        self._known.pop(worker.worker_id, None)

    def on_sent(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        first = attempt.placements[0]
        tokens = request.hints.prompt_tokens - first.cached_tokens
        prompt = self.expect(first.worker, tokens, now_s=now_s)
        self._streams[attempt] = ObservedStream(prompt, self._of(attempt.answering.worker))

    def on_first_byte(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        if attempt.answering.streaming:  # a whole answer does not show its first token
            stream = self._streams[attempt]
            self.learn_ttft(stream.prompt, now_s=now_s)
            stream.first_s = stream.last_s = now_s
            stream.requests = attempt.answering.worker.requests_everywhere

    def on_chunk(self, request: RequestContext, attempt: PairAttempt, chunk: bytes, now_s: float) -> None:
        stream = self._streams[attempt]
        stream.num_events += chunk.count(b"\n\n")
        stream.last_s = now_s

    def on_attempt_ended(self, attempt: PairAttempt, now_s: float) -> None:
        stream = self._streams.pop(attempt)
        self.computed(stream.prompt)
        if attempt.completed and stream.num_events:
            requests = (stream.requests + attempt.answering.worker.requests_everywhere) / 2
            lasted_s = stream.last_s - stream.first_s
            self._learn_answer(stream.answering, stream.num_events, lasted_s, requests, now_s)

    def expect(self, worker: Worker, tokens: int, *, now_s: float) -> SentPrompt:
        """Note a request with this many uncached tokens, after it was charged to the worker."""
        known = self._of(worker)
        own = 0 if worker.role is Role.PREFILL else tokens  # a prefill worker's load holds them already
        prompt = SentPrompt(known, tokens, self.waiting_tokens(worker) + own, now_s)
        known.pending_tokens += tokens
        return prompt

    def learn_ttft(self, prompt: SentPrompt, *, now_s: float) -> None:
        prompt.known.ttft.add(prompt.ahead_tokens, now_s - prompt.sent_s, now_s)
        self.computed(prompt)

    def learn_answer(self, worker: Worker, num_events: int, lasted_s: float, *, requests: float, now_s: float) -> None:
        """`requests`: at the worker meanwhile, on average."""
        self._learn_answer(self._of(worker), num_events, lasted_s, requests, now_s)

    def _learn_answer(self, known: _Known, num_events: int, lasted_s: float, requests: float, now_s: float) -> None:
        share = ANSWER_SHARE if self.answer_events else 1.0
        self.answer_events += share * (num_events - self.answer_events)
        if num_events >= MIN_EVENTS:
            known.itl.add(requests, lasted_s / num_events, now_s)

    def computed(self, prompt: SentPrompt) -> None:
        """The prompt waits no longer. Idempotent."""
        if prompt.waiting:
            prompt.waiting = False
            prompt.known.pending_tokens -= prompt.tokens

    def ttft_s(self, worker: Worker, tokens: int) -> float | None:
        """TTFT of a request with this many uncached tokens; None: unknown."""
        return self._of(worker).ttft.at(self.waiting_tokens(worker) + tokens)

    def itl_s(self, worker: Worker) -> float | None:
        """ITL with one more request at the worker; None: unknown."""
        return self._of(worker).itl.at(worker.requests_everywhere + 1)

    def fits(self, worker: Worker) -> tuple[LineFit, LineFit]:
        """(TTFT by tokens, ITL by requests)."""
        known = self._of(worker)
        return known.ttft, known.itl

    def waiting_tokens(self, worker: Worker) -> int:
        """Tokens to be computed first. The load of a unified worker is KV, so only our own requests count."""
        return worker.load_tokens if worker.role is Role.PREFILL else self._of(worker).pending_tokens

    def first_known(self, pool: Pool, which: int) -> LineFit | None:
        """The line (0: TTFT, 1: ITL) of the first worker of `pool` of which it is known."""
        for worker in pool:
            known = self._known.get(worker.worker_id)
            if known is not None and (line := (known.ttft, known.itl)[which]).is_known:
                return line
        return None

    def note_try(self, fit: LineFit, now_s: float) -> None:
        """A request goes there, in spite of the line: there will be news of it."""
        fit.news_s = max(fit.news_s, now_s)

    def _of(self, worker: Worker) -> _Known:
        known = self._known.get(worker.worker_id)
        if known is None:
            known = self._known[worker.worker_id] = _Known()
        return known
