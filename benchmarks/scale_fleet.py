"""A fleet of thousands of workers that register, renew, die, come back and drain, around one bootstrap registry and one router's core.

usage: python -m benchmarks.scale_fleet [--workers N] [--seconds S] [--rate R] [--seed N]

Production code in virtual time, from one seed: the registry of a shared bootstrap server; the router's table, picker, circuits, rooms, leases
and retries. Only what lies between them is simulated: a worker is alive or not, a message takes a moment. What must hold is asserted as
it happens (`_Sent`), and at the end, when all have come to rest (`Fleet.check`). Prints what it cost, and what happened.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.measures import Row, Tables, tell
from bootstrap_server.protocol import Registration
from bootstrap_server.registry import BootstrapConfig, Registry
from planner.world import Timeline
from router.attempts.pair_attempt import RoomMinter
from router.attempts.request import RequestContext
from router.attempts.upstream_call import CallFailed
from router.choice.policies import RoutingHints, cost_tokens, make_chooser
from router.config import RouterConfig
from router.parts.admission import Admission
from router.pool.breaker import Check, Event
from router.pool.worker import PAIR, Lease, LoadReport, Role, Worker
from router.pool.workers import WorkerTable
from router.requests.picking import Picker
from router.requests.route_choice import RouteChooser
from service.http.errors import ApiError

CHECK_S = 1.0
RENEW_S = 5.0  # a third of the lease
HOP_S = 0.002  # a message between two processes
ANSWER_S = 2.0  # mean
RATE_A_WORKER = 0.5  # requests a second
MOST_TRIES = 4
SAMPLE_S = 0.5  # between two looks at the balance
DOWN_S, DRAIN_S = 20.0, 3.0
CLOCK_CALLS = 20_000  # whose own cost is taken off
CHANGES = ("die", "die", "die for good", "drain", "move")


class Stopwatch:
    """CPU time of what runs between `start` and `stop`, by name."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = {}
        self.count: dict[str, int] = {}
        begun = time.thread_time_ns()
        for _ in range(CLOCK_CALLS):
            time.thread_time_ns()
        self._own_ns = (time.thread_time_ns() - begun) / CLOCK_CALLS

    def add(self, name: str, begun_ns: int) -> None:
        """It took from `begun_ns` (of `time.thread_time_ns`) until now."""
        self.ns[name] = self.ns.get(name, 0) + time.thread_time_ns() - begun_ns
        self.count[name] = self.count.get(name, 0) + 1

    def us(self, name: str) -> float:
        """Microseconds each."""
        count = self.count.get(name, 0)
        return max(0.0, self.ns[name] / count - self._own_ns) / 1000 if count else 0.0


@dataclass(eq=False)
class Node:
    """A worker's process, and what comes after it at its address. `lives`: so far; `server`: the name of its present life."""

    worker: Worker
    number: int
    alive: bool = True
    draining: bool = False
    lives: int = 1
    sent: dict["_Sent", None] = field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        return f"{self.number}.{self.lives}"

    def registration(self) -> Registration:
        return Registration(
            incarnation=self.incarnation,
            control_host=self.worker.url_host,
            control_port=8998,
            protocol_version=1,
            page_size=16,
            signature="m",
            dtype="bfloat16",
        )


@dataclass(eq=False)
class _Sent:
    """One attempt at a pair. It ends once."""

    request: RequestContext
    nodes: tuple[Node, Node]
    leases: list[Lease]
    room: int
    life: str  # of the prefill worker
    tries: int
    ended: bool = False


class Fleet(Timeline):
    def __init__(self, workers: int, *, seed: int, rate: float) -> None:
        super().__init__()
        self._rng, self._rate = random.Random(seed), rate
        self._quiet = False  # no new request, and no new fault
        self.counts: Counter[str] = Counter()
        self.watch = Stopwatch()
        self._fullest: list[float] = []
        self.registry = Registry(BootstrapConfig(max_workers=workers), shared=True)
        config = RouterConfig(pd_disaggregation=True, policy="least_load")
        chooser = make_chooser(config, draw=self._rng.randrange)
        self.table = WorkerTable(config, on_gone=chooser.forget, breaker=config)
        self.rooms = RoomMinter(self._rng.getrandbits)
        admission = Admission(config)
        self.picker = Picker(
            table=self.table,
            routes=RouteChooser(policies=chooser.policies, forecast=admission.forecast, worker_of=self.table.get),
            look_in_time=admission.look_in_time,
            wait_s=0.0,
            silence_s=0.0,
            clock=lambda: self.now_s,
        )
        self.nodes: dict[Worker, Node] = {}
        for number in range(workers):
            self.at(self._rng.random(), lambda number=number: self._join(number))  # type: ignore[misc]

    def run(self, seconds: float) -> None:
        """So long under load and faults; then all heal, and all that runs must end."""
        self.at(2.0, self._arrive)
        self.at(2.0, self._strike)
        self.at(2.0 + ANSWER_S, self._sample)
        self.run_until(seconds, done=bool)  # which is False: not before
        self._quiet = True
        self.run_until(seconds + DOWN_S + 3 * RENEW_S, done=bool)
        self.check()

    def check(self) -> None:
        """At rest nothing is left of any request, and the registry knows the prefill workers that are alive, and no other."""
        self.table.check()
        self.registry.check()
        self.rooms.check()
        assert self.table.loads.num_leases == self.rooms.num_live == 0
        assert self.counts["arrived"] == self.counts["answered"] + self.counts["failed"] + self.counts["no worker"]
        assert not any(node.sent for node in self.nodes.values())
        registered = set(self.registry._workers)
        assert registered == {
            n.incarnation for n in self.nodes.values() if n.alive and n.worker.role is Role.PREFILL
        }, "registrations of the dead have not expired, or one of the living has"
        self.registry.expire(self.now_s + self.registry._config.room_ttl_s)
        assert self.registry.num_rooms == 0

    # ---- workers

    def _join(self, number: int) -> None:
        role = PAIR[number % 2]
        worker = self.table.add(f"http://10.{number >> 8}.{number & 255}.1:30000", role=role, now_s=self.now_s)
        node = self.nodes[worker] = Node(worker, number)
        self.table.on_bootstrap(worker, "bootstrap", 8998)
        self._renew(node, node.incarnation)
        self._look(node)

    def _renew(self, node: Node, life: str) -> None:
        if node.alive and not node.draining and node.incarnation == life and node.worker.role is Role.PREFILL:
            begun_ns = time.thread_time_ns()
            self.registry.expire(self.now_s)
            self.registry.register(node.registration(), self.now_s)
            self.watch.add("renewal", begun_ns)
            self.at(self.now_s + RENEW_S, lambda: self._renew(node, life))

    def _look(self, node: Node) -> None:
        """The router's check of it, and its report."""
        if node.worker not in self.table:
            return
        begun_ns = time.thread_time_ns()
        result = Check.REFUSED if not node.alive else Check.DRAINING if node.draining else Check.OK
        if node.alive:
            self.table.on_incarnation(node.worker, node.incarnation, checked_s=self.now_s)
        self.table.on_check(node.worker, result, now_s=self.now_s)
        if result is Check.OK:
            self.table.loads.on_report(node.worker, LoadReport(capacity_tokens=1_000_000))
        self.watch.add("check", begun_ns)
        self.at(self.now_s + CHECK_S, lambda: self._look(node))

    def _strike(self) -> None:
        """Something happens to one worker: about four a second, and of many thousands more."""
        if self._quiet:
            return
        node, what = self._rng.choice([*self.nodes.values()]), self._rng.choice(CHANGES)
        if node.alive and not node.draining:
            self.counts[what] += 1
            {"drain": self._drain, "move": self._move}.get(what, partial(self._die, for_good=what != "die"))(node)
        self.at(self.now_s + self._rng.expovariate(max(4.0, len(self.nodes) / 500)), self._strike)

    def _die(self, node: Node, *, for_good: bool = False) -> None:
        node.alive = False
        for sent in list(node.sent):
            self.at(self.now_s + HOP_S, lambda sent=sent: self._fail(sent, node))  # type: ignore[misc]
        if not for_good:
            self.at(self.now_s + self._rng.uniform(0.1, DOWN_S), lambda: self._come_back(node))

    def _come_back(self, node: Node) -> None:
        node.alive, node.draining, node.lives = True, False, node.lives + 1
        self._renew(node, node.incarnation)

    def _drain(self, node: Node) -> None:
        """It takes nothing new, leaves the registry, ends what it has, and another process follows at its address."""
        node.draining = True
        if node.worker.role is Role.PREFILL:
            self.registry.leave(node.incarnation)
        self._end_drain(node)

    def _end_drain(self, node: Node) -> None:
        if node.sent:
            self.at(self.now_s + 0.1, lambda: self._end_drain(node))
        else:
            self.at(self.now_s + DRAIN_S, lambda: self._come_back(node))

    def _move(self, node: Node) -> None:
        """It is taken out of the fleet, and another worker comes."""
        if node.sent:
            return self._drain(node)
        self.table.remove(node.worker.url)
        if node.worker.role is Role.PREFILL:
            self.registry.leave(node.incarnation)
        node.alive = False
        del self.nodes[node.worker]
        return self._join(node.number)

    # ---- requests

    def _arrive(self) -> None:
        if self._quiet:
            return
        self.counts["arrived"] += 1
        tokens = self._rng.randrange(50, 4000)
        absent: Any = None
        hints = RoutingHints(prompt_tokens=tokens, output_tokens=200)
        request = RequestContext(
            http=absent, task=absent, request_id="", path="", started_s=self.now_s, hints=hints, ways=(PAIR,)
        )
        self._send(request, 1)
        self.at(self.now_s + self._rng.expovariate(self._rate), self._arrive)

    def _send(self, request: RequestContext, tries: int) -> None:
        begun_ns = time.thread_time_ns()
        chosen = self.picker.pick(request)
        self.watch.add("pick" if tries == 1 else "pick again", begun_ns)
        if chosen is None:
            self.counts["no worker"] += 1
            return
        loads = self.table.loads
        leases = [
            loads.charge(choice.worker, cost_tokens(choice, request.hints), now_s=self.now_s) for choice in chosen
        ]
        (room,) = self.rooms.mint(1)
        prefill, decode = (self.nodes[choice.worker] for choice in chosen)
        sent = _Sent(request, (prefill, decode), leases, room, prefill.incarnation, tries)
        prefill.sent[sent] = decode.sent[sent] = None
        self.at(self.now_s + HOP_S, lambda: self._come(sent))

    def _come(self, sent: _Sent) -> None:
        """At the workers: prefill registers the room, decode looks it up a hop later."""
        prefill = sent.nodes[0]
        for node in sent.nodes:
            if not node.alive or node.draining or (node is prefill and node.incarnation != sent.life):
                return self._fail(sent, node)
        begun_ns = time.thread_time_ns()
        try:
            self.registry.expire(self.now_s)
            self.registry.register_rooms(prefill.incarnation, (sent.room,), self.now_s)
        except ApiError:
            return self._fail(sent, prefill)
        self.watch.add("room", begun_ns)
        return self.at(self.now_s + HOP_S, lambda: self._join_room(sent))

    def _join_room(self, sent: _Sent) -> None:
        if sent.ended:
            return
        try:
            found = self.registry.look_up(sent.room)
        except ApiError:
            return self._fail(sent, sent.nodes[0])
        assert found.worker.incarnation == sent.life, "another worker has the room"
        self.at(self.now_s + self._rng.expovariate(1 / ANSWER_S), lambda: self._answer(sent))

    def _answer(self, sent: _Sent) -> None:
        if not sent.ended:
            self.counts["answered"] += 1
            for node in sent.nodes:
                node.worker.circuit.record(Event.BEGUN, self.now_s)
                node.worker.circuit.record(Event.WELL, self.now_s)
            self._end(sent)

    def _fail(self, sent: _Sent, node: Node) -> None:
        """The attempt is over, and the request goes on at others."""
        if sent.ended:
            return
        self._end(sent)
        self.counts["retried"] += 1
        failure = CallFailed(node.worker, reason="refused" if not node.alive else "lost")
        node.worker.circuit.record(Event.FAULT, self.now_s)
        if not node.alive and node.worker in self.table:
            self.table.on_check(node.worker, Check.REFUSED, now_s=self.now_s)
        sent.request.note_failed(failure, [one.worker for one in sent.nodes])
        if sent.tries < MOST_TRIES:
            self._send(sent.request, sent.tries + 1)
        else:
            self.counts["failed"] += 1

    def _end(self, sent: _Sent) -> None:
        assert not sent.ended, "it ends twice"
        sent.ended = True
        for lease in sent.leases:
            self.table.loads.release(lease)
        self.rooms.release((sent.room,))
        for node in sent.nodes:
            del node.sent[sent]

    # ---- balance

    @property
    def fullest(self) -> float:
        """Requests of the fullest worker of a role over the mean's, on average over the run; 1 is perfect."""
        return sum(self._fullest) / len(self._fullest) if self._fullest else 0.0

    def _sample(self) -> None:
        if self._quiet:
            return
        for role in PAIR:
            counts = [len(n.sent) for n in self.nodes.values() if n.alive and not n.draining and n.worker.role is role]
            if any(counts):
                self._fullest.append(max(counts) * len(counts) / sum(counts))
        self.at(self.now_s + SAMPLE_S, self._sample)


def measure(workers: int, *, seconds: float, rate: float, seed: int) -> dict[str, Any]:
    """Run a fleet; raises if something that must hold does not."""
    begun_s = time.monotonic()
    fleet = Fleet(workers, seed=seed, rate=rate)
    fleet.run(seconds)
    cost = {f"{name}_us": round(fleet.watch.us(name), 1) for name in sorted(fleet.watch.ns)}
    run = {"workers": workers, "seed": seed, "wall_s": round(time.monotonic() - begun_s, 1), **cost}
    return {**run, "fullest": round(fleet.fullest, 2), "counts": dict(sorted(fleet.counts.items()))}


def measure_sizes(*, workers: Sequence[int] = (10, 100, 1000), seconds: float = 10.0) -> Tables:
    """The same rate for each worker, however many there are."""
    rows: list[Row] = []
    for count in workers:
        found = measure(count, seconds=seconds, rate=count * RATE_A_WORKER, seed=1)
        row: Row = {"workers": count, "a choice, CPU us": found["pick_us"], "a check and its report": found["check_us"]}
        row |= {"a room registered": found["room_us"], "a lease renewed": found["renewal_us"]}
        rows.append(row | {"fullest worker over the mean": found["fullest"]})
        tell(str(count), **found)
    return {"": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of virtual time, under load and faults")
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found = measure(args.workers, seconds=args.seconds, rate=args.rate, seed=args.seed)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
