"""One attempt of a request: at one worker, or at a prefill and a decode worker. Owns all that it takes there while it runs.

Rooms, leases, what the forecast was told, and the legs themselves: `end` gives all of it back, whatever became of them.
Knows nothing of clients' answers, of other attempts, and of whether there will be any.
"""

from collections.abc import Callable, Sequence

from router.admission.forecast import Forecast, Trip
from router.body import write_bodies
from router.choice.chooser import cost_tokens
from router.choice.policies import Ask, Choice
from router.client.upstream import UpstreamError
from router.pool.breaker import Event
from router.pool.worker import Lease, Role, Worker
from router.pool.workers import WorkerTable
from router.requests.exchange import Exchange
from router.requests.journey import Attempt as Told
from router.requests.legs import Call, Leg, Legs
from router.requests.race import Race
from router.requests.rooms import RoomMinter
from service.security.voucher import VOUCHER_HEADER, vouch


class Attempt:
    """`trip`: at the worker that computes the prompt; `answer_trip`: at the one that answers. `end` must be called, once."""

    __slots__ = ("_launcher", "_leases", "_rooms", "answer_trip", "race", "told", "trip", "workers")

    def __init__(
        self,
        launcher: "Launcher",
        race: Race,
        *,
        workers: tuple[Worker, ...],
        trips: Sequence[Trip],
        leases: Sequence[Lease],
        rooms: Sequence[int],
        told: Told,
    ) -> None:
        self._launcher = launcher
        self._leases = leases
        self._rooms = rooms
        self.race = race
        self.workers = workers
        self.trip, self.answer_trip = trips[0], trips[-1]
        self.told = told

    def begun(self) -> None:
        """Its answer has begun."""
        self._launcher.tell_begun(self)
        if self.race.prefill is not None:
            self._launcher.table.release(self._leases[0])  # its tokens are computed: decode would not have begun

    def end(self, why: UpstreamError | None = None) -> None:
        """It is over; legs that still run are ended with that error."""
        launcher, race = self._launcher, self.race
        launcher.tell_end(race.answering)
        launcher.forecast.computed(self.trip)
        launcher.table.release(self._leases[-1])
        race.close(why)
        if race.prefill is not None:
            launcher.follow(race, race.prefill, self._rooms)


class Launcher:
    """Begins attempts, and follows the prefill legs that outlive theirs (`tails`). `close` ends those."""

    def __init__(
        self,
        *,
        table: WorkerTable,
        rooms: RoomMinter,
        legs: Legs,
        forecast: Forecast,
        secret: bytes | None,
        clock: Callable[[], float],
    ) -> None:
        self.table = table
        self.forecast = forecast
        self.tails: set[Leg] = set()
        self._rooms = rooms
        self._legs = legs
        self._secret = secret
        self._clock = clock

    def begin(self, exchange: Exchange, call: Call, chosen: Sequence[Choice], *, hedge: bool = False) -> Attempt:
        """Send a request to those. `hedge`: beside another attempt that goes on."""
        if len(chosen) == 2:
            return self._begin_pair(exchange, call, chosen[0], chosen[1], hedge=hedge)
        (choice,), now_s = chosen, self._clock()
        trip, lease = self._depart(choice, exchange.ask, now_s), self._charge(choice, exchange.ask)
        leg = self._legs.send(choice.worker, call, exchange.body, stream=True)
        told = exchange.journey.sent(leg, now_s=now_s, hedge=hedge)
        return Attempt(self, Race(leg), workers=(choice.worker,), trips=(trip,), leases=(lease,), rooms=(), told=told)

    def _begin_pair(
        self, exchange: Exchange, call: Call, compute: Choice, answer_by: Choice, *, hedge: bool
    ) -> Attempt:
        parsed, prefill, decode = exchange.parsed, compute.worker, answer_by.worker
        rooms = self._rooms.mint(parsed.num_samples)
        prefill_body, decode_body = write_bodies(
            parsed, host=prefill.bootstrap_host, port=prefill.bootstrap_port, rooms=rooms
        )
        now_s = self._clock()
        trips = self._depart(compute, exchange.ask, now_s), self._depart(answer_by, exchange.ask, now_s)
        leases = self._charge(compute, exchange.ask), self._charge(answer_by, exchange.ask)
        first = self._legs.send(prefill, call, prefill_body, stream=False)
        second = self._legs.send(decode, self._vouched(call, prefill, rooms), decode_body, stream=True)
        told = exchange.journey.sent(first, second, rooms=rooms, now_s=now_s, hedge=hedge)
        race = Race(second, prefill=first)
        # However the prefill leg ends, `race.close` at the latest; an answer that is not streamed ends long after it.
        race.when_prefill_ends(lambda: self.table.release(leases[0]))
        return Attempt(self, race, workers=(prefill, decode), trips=trips, leases=leases, rooms=rooms, told=told)

    def close(self) -> None:
        """End what prefill legs still run after their clients were served."""
        for leg in tuple(self.tails):
            leg.close()

    def tell_begun(self, attempt: Attempt) -> None:
        """The circuits of its workers, and the forecast."""
        now_s = self._clock()
        for worker in attempt.workers:
            worker.circuit.tell(Event.BEGUN, now_s)
        if attempt.race.answering.streaming:  # a whole answer says nothing about its first token
            self.forecast.begun(attempt.trip, now_s=now_s)

    def tell_end(self, leg: Leg) -> None:
        """Nothing more comes. What broke was told when it did."""
        if leg.well:
            leg.worker.circuit.tell(Event.WELL, self._clock())

    def follow(self, race: Race, prefill: Leg, rooms: Sequence[int]) -> None:
        """Until the prefill leg ends: then nothing of the attempt runs any more, here or there."""
        self.tails.add(prefill)
        race.when_prefill_ends(lambda: self._end_tail(prefill, rooms))

    def _end_tail(self, prefill: Leg, rooms: Sequence[int]) -> None:
        self.tails.discard(prefill)
        self.tell_end(prefill)
        self._rooms.release(rooms)

    def _vouched(self, call: Call, prefill: Worker, rooms: Sequence[int]) -> Call:
        """With our word for the bootstrap server that the body names, where there is a secret to give it by."""
        secret, port = self._secret, prefill.bootstrap_port
        if secret is None or port is None:
            return call
        voucher = vouch(secret, host=prefill.bootstrap_host, port=port, rooms=rooms)
        return Call(call.path, {**call.headers, VOUCHER_HEADER: voucher})

    def _depart(self, choice: Choice, ask: Ask, now_s: float) -> Trip:
        tokens = 0 if choice.worker.role is Role.DECODE else ask.prompt_tokens - choice.cached_tokens
        return self.forecast.depart(choice.worker, tokens, now_s=now_s)

    def _charge(self, choice: Choice, ask: Ask) -> Lease:
        return self.table.charge(choice.worker, cost_tokens(choice, ask))
