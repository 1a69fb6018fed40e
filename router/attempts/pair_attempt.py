"""One attempt at a prefill and a decode worker, or at one worker.

Both answers wake one waiter, without tasks; the first failure ends both calls.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from router.attempts.request import CallPart, Events, PromptCall, RequestContext
from router.attempts.upstream_call import CallFailed, UpstreamCall, stays
from router.body import without_dp_rank, write_bodies
from router.choice.policies import Placement, cost_tokens
from router.client.upstream import Upstream
from router.pool.worker import Lease, Worker
from router.pool.workers import WorkerTable
from service.http.guard import RANK_HEADER, less_time
from service.security.keys import VOUCHER_HEADER, vouch
from service.waiter import Waiter

TAIL_S = 5.0  # how long prefill may take to end its own answer after the client has all of decode's
GOING = 503  # status of a worker that is ending, or whose engine died
ROOM_BITS = 63
MAX_LIVE_ROOMS = 1 << 20


class RoomMinter:
    """Mints bootstrap rooms from random bits (`draw`): never 0, which SGLang's prefill never
    completes, nor a live one, which would mix two requests' KV.
    """

    def __init__(self, draw: Callable[[int], int] = secrets.randbits) -> None:
        self._draw = draw
        self._live: set[int] = set()

    def has_room_for(self, count: int) -> bool:
        return len(self._live) + count <= MAX_LIVE_ROOMS

    def mint(self, count: int, *, rank: int = 0, num_ranks: int = 1) -> tuple[int, ...]:
        """`rank`: a DP rank, their remainder by `num_ranks`."""
        assert 0 <= rank < num_ranks, (rank, num_ranks)
        return tuple([self._mint_one(rank, num_ranks) for _ in range(count)])

    def _mint_one(self, rank: int, num_ranks: int) -> int:
        room = 0
        while room == 0 or room in self._live or room >> ROOM_BITS:
            room = self._draw(ROOM_BITS)
            room += rank - room % num_ranks
        self._live.add(room)
        return room

    def release(self, rooms: Iterable[int]) -> None:
        self._live.difference_update(rooms)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def check(self) -> None:
        assert all(0 < room < 1 << ROOM_BITS for room in self._live)


@dataclass(eq=False, kw_only=True)
class PairAttempt:
    """Owns rooms, leases and calls until `end`, which must be called.

    `waits_for_prefill`: the answer needs prefill's. `waiter` wakes when `settled` may have changed.
    `refused`: by prefill after the answer started.
    """

    launcher: "AttemptLauncher"
    answering: UpstreamCall
    prefill: UpstreamCall | None
    placements: Sequence[Placement]
    leases: Sequence[Lease]
    rooms: Sequence[int]
    started_s: float
    waits_for_prefill: bool
    prompt_leases: Sequence[Lease] = ()  # until the prompt is computed
    by_kv: bool = False  # the answer of another worker goes on with its KV

    waiter: Waiter = field(default_factory=Waiter)
    refused: CallFailed | None = None
    completed: bool = False
    _closed: bool = False
    _ended: bool = False
    _on_late_failure: Callable[[CallFailed], None] | None = None

    def __post_init__(self) -> None:
        self.workers = tuple([placement.worker for placement in self.placements])
        self.answering.reply.listener = self._ring
        if self.prefill is not None:
            if self.prefill.ended:
                self._end_prompt()
            self.prefill.reply.listener = partial(self._on_prefill_change, self.prefill)

    @property
    def calls(self) -> tuple[UpstreamCall, ...]:
        return (self.answering,) if self.prefill is None else (self.prefill, self.answering)

    def settled(self) -> bool:
        """Return whether the answer has started. Raises CallFailed."""
        if not self._is_decided():
            return False
        failures = [failure for call in self.calls if (failure := call.failure())]
        if failures:
            raise min(failures, key=_severity)
        return True

    def stay(self) -> None:
        """Keep calls at silent workers, as no attempt is left, or the answer has started."""
        for call in self.calls:
            call.goes_on = stays

    def begin_answer(self) -> None:
        """Release the prefill worker: decode only answers computed prompts."""
        self.stay()
        self._end_prompt()
        self.launcher.table.loads.on_answer(self.leases[-1])

    def watch_prefill(self, on_failure: Callable[[CallFailed], None]) -> None:
        """Report later failures of prefill.

        An HTTP error cuts decode's stream (`refused`). After a lost connection, or 503 of an ending
        worker, decode may have all KV, and decides.
        """
        self._on_late_failure = on_failure

    def complete(self) -> None:
        self.completed = self._closed = True
        if self.prefill is not None and not self.prefill.ended:
            asyncio.get_running_loop().call_later(TAIL_S, self.prefill.reply.close)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for call in self.calls:
                call.reply.close()

    def end(self) -> None:
        """Release everything. Idempotent."""
        if self._ended:
            return
        launcher = self.launcher
        launcher.on_ended(self)
        launcher.table.loads.release(self.leases[-1])
        self.close()
        self._ended = True
        if self.prefill is None:
            self._end_prompt()
        else:
            launcher.tails[self] = None
            if self.prefill.ended:
                launcher.on_prefill_ended(self)

    def _end_prompt(self) -> None:
        for lease in (*self.prompt_leases, *self.leases[:-1]):
            self.launcher.table.loads.release(lease)

    def _is_decided(self) -> bool:
        if self.answering.begun and (self.prefill is None or self.prefill.ended or not self.waits_for_prefill):
            return True
        return any([call.failure() for call in self.calls])

    def _ring(self) -> None:
        """Wake the waiter once decided; a good end of prefill decides nothing."""
        if self.waiter.is_waiting and self._is_decided():
            self.waiter.wake()

    def _on_prefill_change(self, prefill: UpstreamCall) -> None:
        self._ring()
        if not prefill.ended:
            return
        self._end_prompt()
        if self._ended:
            self.launcher.on_prefill_ended(self)
        elif self._on_late_failure and not self._closed and (failure := prefill.failure()):
            self._on_late_failure(failure)
            if failure.reason == "status" and failure.status != GOING:
                self.refused = failure
                self.answering.reply.close()


def _severity(failure: CallFailed) -> tuple[bool, bool]:
    """Sort final errors first, then lost connections, then complaints about the peer."""
    return failure.retryable and not failure.is_own, failure.reason == "status"


@dataclass(eq=False, kw_only=True)
class AttemptLauncher:
    """`parts` are of all requests. `tails`: ended ones with a running prefill call."""

    table: WorkerTable
    rooms: RoomMinter
    upstream: Upstream
    events: Events
    secret: bytes | None
    clock: Callable[[], float]
    parts: tuple[CallPart, ...] = ()
    tails: dict[PairAttempt, None] = field(default_factory=dict, init=False)

    def begin(self, request: RequestContext, placements: Sequence[Placement]) -> PairAttempt:
        now_s, first, last = self.clock(), placements[0], placements[-1]
        headers = self.headers_at(request, now_s)
        rooms: tuple[int, ...] = ()
        answer_headers, body, answer_body = headers, request.body, request.body
        if first is not last:
            compute, rooms = first.worker, self._rooms(request, first.worker)
            headers, answer_headers, body, answer_body = self._for_pair(request, headers, compute, last.worker, rooms)
        headers, prompt_leases = self._prepared(request, first, headers, now_s)
        leases = self._charge(request, placements, now_s)
        prefill: UpstreamCall | None = None
        if first is last:
            answering = self._call(last.worker, request.path, headers, body, stream=True)
        else:
            prefill = self._call(first.worker, request.path, headers, body, stream=False)
            answering = self._call(last.worker, request.path, answer_headers, answer_body, stream=True)
        attempt = PairAttempt(
            launcher=self,
            answering=answering,
            prefill=prefill,
            placements=placements,
            leases=leases,
            rooms=rooms,
            started_s=now_s,
            waits_for_prefill=request.parsed.wants_input_logprobs,
            prompt_leases=prompt_leases,
        )
        self._report_sent(request, attempt)
        return attempt

    def begin_rest(
        self, request: RequestContext, placement: Placement, *, prefill: Worker, rooms: Sequence[int]
    ) -> PairAttempt:
        """Start at a decode worker that takes over KV, in `rooms` of the caller.

        After a retraction `prefill`, of the former pair, recomputes the KV.
        """
        now_s, worker = self.clock(), placement.worker
        _, headers, _, body = self._for_pair(request, self.headers_at(request, now_s), prefill, worker, rooms)
        leases = self._charge(request, [placement], now_s)
        attempt = PairAttempt(
            launcher=self,
            answering=self._call(worker, request.path, headers, body, stream=True),
            prefill=None,
            placements=[placement],
            leases=leases,
            rooms=(),
            started_s=now_s,
            waits_for_prefill=False,
            by_kv=True,
        )
        self._report_sent(request, attempt)
        return attempt

    async def until_started(self, request: RequestContext, attempt: PairAttempt) -> None:
        """Wait for the answer's start. Raises CallFailed after notifying observers."""
        try:
            while not attempt.settled():
                await attempt.waiter.wait()
        except CallFailed as failure:
            request.note_failed(failure, attempt.workers)
            now_s = self.clock()
            for notify in self.events.on_attempt_failed:
                notify(request, attempt, failure, now_s)
            self.on_call_failed(failure)
            raise

    def headers_at(self, request: RequestContext, now_s: float) -> Mapping[str, str]:
        """Add the remaining deadline."""
        return less_time(request.headers, now_s - request.started_s)

    def _report_sent(self, request: RequestContext, attempt: PairAttempt) -> None:
        for notify in self.events.on_sent:
            notify(request, attempt, attempt.started_s)

    def close(self) -> None:
        for attempt in tuple(self.tails):
            if attempt.prefill is not None:
                attempt.prefill.reply.close()

    def on_ended(self, attempt: PairAttempt) -> None:
        now_s = self.clock()
        for notify in self.events.on_attempt_ended:
            notify(attempt, now_s)

    def on_prefill_ended(self, attempt: PairAttempt) -> None:
        self.tails.pop(attempt, None)
        now_s = self.clock()
        for notify in self.events.on_prefill_ended:
            notify(attempt, now_s)
        self.rooms.release(attempt.rooms)

    def _prepared(
        self, request: RequestContext, placement: Placement, headers: Mapping[str, str], now_s: float
    ) -> tuple[Mapping[str, str], Sequence[Lease]]:
        parts = self.parts + request.parts
        if not parts:
            return headers, ()
        call = PromptCall(request=request, placement=placement, headers=headers, now_s=now_s)
        for prepare in parts:
            prepare(call)
        return call.headers, call.leases

    def _for_pair(
        self, request: RequestContext, headers: Mapping[str, str], prefill: Worker, decode: Worker, rooms: Sequence[int]
    ) -> tuple[Mapping[str, str], Mapping[str, str], bytes, bytes]:
        """A worker with one rank gets no DP rank if its peer has several."""
        host, port = prefill.bootstrap.host, prefill.bootstrap.port
        to_prefill, to_decode = write_bodies(request.parsed, host=host, port=port, rooms=rooms)
        of_prefill = of_decode = headers
        if prefill.ranks.dp != decode.ranks.dp and 1 in (prefill.ranks.dp, decode.ranks.dp):
            without = write_bodies(without_dp_rank(request.parsed), host=host, port=port, rooms=rooms)
            unranked = {name: value for name, value in headers.items() if name != RANK_HEADER}
            if prefill.ranks.dp == 1:
                of_prefill, to_prefill = unranked, without[0]
            else:
                of_decode, to_decode = unranked, without[1]
        if self.secret is not None and port is not None:
            of_decode = {**of_decode, VOUCHER_HEADER: vouch(self.secret, host=host, port=port, rooms=rooms)}
        return of_prefill, of_decode, to_prefill, to_decode

    def _rooms(self, request: RequestContext, prefill: Worker) -> tuple[int, ...]:
        """Mint rooms of the request's DP rank, which prefill reads from the room."""
        rank, num_ranks, count = request.dp_rank, prefill.ranks.dp, request.parsed.num_samples
        if rank is None or not 0 <= rank < num_ranks:
            return self.rooms.mint(count)
        return self.rooms.mint(count, rank=rank, num_ranks=num_ranks)

    def on_call_failed(self, failure: CallFailed) -> None:
        now_s = self.clock()
        for notify in self.events.on_call_failed:
            notify(failure, now_s)

    def _charge(self, request: RequestContext, placements: Sequence[Placement], now_s: float) -> list[Lease]:
        hints, charge = request.hints, self.table.loads.charge
        return [charge(placement.worker, cost_tokens(placement, hints), now_s=now_s) for placement in placements]

    def _call(
        self, worker: Worker, path: str, headers: Mapping[str, str], body: bytes, *, stream: bool
    ) -> UpstreamCall:
        reply = self.upstream.post(worker.url, path, headers=headers, body=body)
        call = UpstreamCall(worker, reply, stream=stream)
        if not call.ended:
            worker.calls[call] = None
            reply.on_end = partial(worker.calls.pop, call, None)
        return call
