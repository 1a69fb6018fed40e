"""Runs one cell: bring requests into the phase, do the fault, and hold the cluster to what it promises.

How a phase is held, without a sleep and without touching production code:

    bootstrapping   decode's look-up link is clogged: prefill has the requests, no handshake can end
    waiting         one request that may fill decode's pool runs (`Hog`); the handshakes are done (the look-ups were
                    answered), and decode has no pages to give
    transferring    the switch around prefill's engine holds the writes (`switches.py`)
    decoding        long answers; every stream has had its first tokens

The fault comes when `/check` of both workers (or the streams) show the phase; the hold ends once the fault is complete
(all of a killed worker's processes are gone, all of a stopped one's have stopped).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.e2e.cluster import READY_S
from tools.faults.cells import AWAY, DIES, ERRORS, Cell, Fault, Phase, Victim, must_be_right
from tools.faults.household import SETTLE_S, State, unclean, until
from tools.faults.load import Hog, Load, Outcome
from tools.faults.rig import POOL_TOKENS, Rig, role_of

NUM_REQUESTS = 4  # for each worker of a role
SHORT, LONG = 8, 500  # new tokens
PHASE_S = 60.0
ENTER_TRIES = 5
ENTER_S = 20.0
HOG_S = 10.0  # for its first token
FAULT_S = 10.0  # how long SIGSTOP and a cut last
DRAIN_S = 40.0  # --drain-timeout is 30 s
ALL_WRITES = 1_000_000
BOUND_S = 60.0  # of every request, after the fault
TRY_S = 0.02  # between requests that show whether it serves


@dataclass
class Ended:
    """What any cell came to. Seconds since the fault: `slowest_s` the last request's end, `settled_s` survivors clean."""

    cell: str
    ok: bool = False
    problems: list[str] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    settled_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    async def of(self, work: Awaitable[None]) -> None:
        """Do it; an error is a problem."""
        try:
            await work
        except Exception as error:
            self.problems.append(f"{type(error).__name__}: {str(error)[-600:]}")
        self.ok = not self.problems

    def note(self, outcomes: list[Outcome], at_s: float, allowed: Callable[[int], Collection[str]]) -> None:
        """`allowed`: how a request may end, by its number."""
        for i, outcome in enumerate(outcomes):
            self.ends[outcome.end] = self.ends.get(outcome.end, 0) + 1
            if outcome.end not in allowed(i):
                self.problems.append(f"a request ended {outcome.end}: {outcome.detail}")
        self.details = sorted({o.detail for o in outcomes if o.detail})
        self.slowest_s = max(o.at_s for o in outcomes) - at_s


@dataclass
class Result(Ended):
    """`serves_s`: seconds until right again (after the fault was over and the victim, if it died, was ready: `down_s`).

    `silence_s`: the longest in which the client of a stream heard nothing, since the fault, or the end of the hold on its phase.
    """

    silence_s: float = 0.0
    down_s: float = 0.0
    serves_s: float = 0.0
    took_s: float = 0.0


async def run_cell(rig: Rig, cell: Cell, *, seed: int, fault_s: float = FAULT_S) -> Result:
    """`rig` is whole before and, if nothing failed, after. What goes wrong is in `problems`."""
    result, started_s = Result(cell.name), time.monotonic()
    await result.of(_run(rig, cell, result, seed=seed, fault_s=fault_s))
    result.took_s = time.monotonic() - started_s
    return result


async def _run(rig: Rig, cell: Cell, result: Result, *, seed: int, fault_s: float) -> None:
    async with held(rig, cell.phase, seed):
        load = await entered(rig, cell, seed=seed)
        rig.household.note_segments()
        at_s = time.monotonic()
        await asyncio.to_thread(_begin, rig, cell)
        if cell.fault in ERRORS and cell.phase is Phase.DECODING:
            load.add(seed + 1)
    free_s = at_s if cell.phase is Phase.DECODING else time.monotonic()
    fault = asyncio.create_task(_end(rig, cell, at_s + fault_s))
    outcomes = await load.outcomes(BOUND_S)
    result.note(outcomes, at_s, lambda number: _allowed(cell, number))
    result.silence_s = max(outcome.silence_s(free_s) for outcome in outcomes)
    await fault
    if cell.fault is Fault.FREEZE and rig.parts[cell.part].alive:
        rig.kill(cell.victim)  # as a supervisor would; before that it may wake and write, so pages wait for it
        await until(lambda: not rig.parts[cell.part].alive, SETTLE_S, f"{cell.part} has ended")
    if cell.fault in (*AWAY, Fault.UNPLUG_FOR_GOOD):
        survivors = [rig.parts[name] for name in rig.workers if name != cell.part]
        but = _without_quarantine if cell.fault is Fault.UNPLUG_FOR_GOOD else dict
        result.problems += await unclean(survivors, but=but)
        result.settled_s = time.monotonic() - at_s
        _bring_back(rig, cell, result)
    if cell.fault is Fault.ERROR_ALWAYS:
        rig.switch("fail", None)
    if cell.fault in DIES:
        back_s = time.monotonic()
        await until(rig.parts[cell.part].is_ready, READY_S, f"{cell.part} is back")
        result.down_s = time.monotonic() - back_s
    result.serves_s = await until_serves(rig, seed=seed)
    result.problems += await unclean([rig.parts[name] for name in rig.workers])
    if not result.settled_s:
        result.settled_s = time.monotonic() - at_s
    result.problems += [f"left behind: {what}" for what in rig.household.left_behind()]


def _bring_back(rig: Rig, cell: Cell, result: Result) -> None:
    """The victim that was away, at its address."""
    if cell.fault is Fault.UNPLUG_FOR_GOOD:
        return rig.heal(cell.victim)
    if cell.fault is Fault.DRAIN and (status := rig.parts[cell.part].process.returncode) != 0:
        result.problems.append(f"{cell.part} drained and ended with exit status {status}")
    rig.begin(cell.part)


async def entered(rig: Rig, cell: Cell, *, seed: int) -> Load:
    """Requests that are in the phase. Others are sent when "decoding" was over before anybody looked: only its length holds it. And
    when the victim has none of them: on a loaded machine the router may have taken it for silent."""
    for attempt in range(ENTER_TRIES):
        await until(rig.is_balanced, PHASE_S, "the router uses all workers alike")
        asked = rig.num_looked_up
        new_tokens = LONG if cell.phase is Phase.DECODING else SHORT
        load = Load(rig.router, count=num_requests(cell), new_tokens=new_tokens, seed=seed + 100 * attempt)
        seen = [False]

        def entered(load: Load = load, asked: int = asked, seen: list[bool] = seen) -> bool:
            seen[0] = _is_in_phase(rig, cell, load, asked)
            return seen[0] or load.is_over

        with contextlib.suppress(AssertionError):
            await until(entered, ENTER_S, f"requests are {cell.phase}")
        if seen[0]:
            return load
        await load.leave()
    raise AssertionError(f"{ENTER_TRIES} times requests were not seen {cell.phase}")


def num_requests(cell: Cell) -> int:
    return NUM_REQUESTS * cell.size.workers


@contextlib.asynccontextmanager
async def held(rig: Rig, phase: Phase, seed: int) -> AsyncIterator[None]:
    if phase is Phase.BOOTSTRAPPING:
        rig.clog_lookups()
        try:
            yield
        finally:
            rig.loosen_lookups()
    elif phase is Phase.WAITING:
        async with contextlib.AsyncExitStack() as hogs:
            await _fill_pools(rig, hogs, seed)
            yield
    elif phase is Phase.TRANSFERRING:
        rig.switch("hold", "")
        try:
            yield
        finally:
            rig.switch("hold", None)
    else:
        yield


async def _fill_pools(rig: Rig, hogs: contextlib.AsyncExitStack, seed: int) -> None:
    """A hog for each decode worker. The router may choose one twice, on a loaded machine: the hog waits there, and another is sent."""
    for attempt in range(ENTER_TRIES):
        await until(rig.is_balanced, PHASE_S, "the router uses all workers alike")
        hog = Hog(rig.router, pool_tokens=POOL_TOKENS, seed=seed + attempt)
        try:
            await asyncio.wait_for(hog.begun.wait(), HOG_S)
        except TimeoutError:
            await hog.end()
            continue
        hogs.push_async_callback(hog.end)
        if all([(await asyncio.to_thread(rig.state, name))["running"] == 1 for name in rig.of_role("decode")]):
            return
    raise AssertionError(f"after {ENTER_TRIES} hogs a decode worker has none")


def _is_in_phase(rig: Rig, cell: Cell, load: Load, looked_up: int) -> bool:
    """Whether all requests are, and where a worker is the victim, some of them there."""
    states, count = {name: rig.state(name) for name in rig.workers}, num_requests(cell)
    if cell.phase is Phase.DECODING:
        running = {name: state["running"] for name, state in states.items()}
        return load.begun.is_set() and _are_at(cell, running, "decode", count)
    queues = {name: state["queues"] for name, state in states.items()}
    of_prefill, of_decode = ("inflight", "transfer") if cell.phase is Phase.TRANSFERRING else ("bootstrap", "prealloc")
    both = all(
        _are_at(cell, {name: queues[name][queue] for name in rig.of_role(role)}, role, count)
        for role, queue in (("prefill", of_prefill), ("decode", of_decode))
    )
    return both and (cell.phase is not Phase.WAITING or rig.num_looked_up - looked_up >= count)


def _are_at(cell: Cell, found: Mapping[str, int], role: str, count: int) -> bool:
    """`found`: requests by worker."""
    there = {name: number for name, number in found.items() if role_of(name) == role}
    return sum(there.values()) == count and there.get(cell.part, 1) > 0


def _begin(rig: Rig, cell: Cell) -> None:
    """Do the fault."""
    match cell.fault:
        case Fault.KILL | Fault.RESTART:
            rig.kill(cell.victim)
        case Fault.STOP | Fault.FREEZE:
            rig.stop(cell.victim)
        case Fault.CUT | Fault.UNPLUG | Fault.UNPLUG_FOR_GOOD:
            rig.cut(cell.victim)
        case Fault.DRAIN:
            rig.drain(cell.victim)
        case Fault.ERROR | Fault.ERROR_TWICE | Fault.ERROR_ALWAYS:
            rig.switch("fail", str(_num_errors(cell)))


def _num_errors(cell: Cell) -> int:
    """Writes that fail: the first of each request, or its second try too, or all there are."""
    if cell.fault is Fault.ERROR_ALWAYS:
        return ALL_WRITES
    tries = 2 if cell.fault is Fault.ERROR_TWICE else 1
    return tries * (1 if cell.phase is Phase.DECODING else NUM_REQUESTS)


async def _end(rig: Rig, cell: Cell, at_s: float) -> None:
    """End the fault at `at_s`, if it passes. A killed child's worker has ended by itself by then. Only the frozen router could
    answer its clients, so its supervisor ends it."""
    match cell.fault:
        case Fault.KILL | Fault.RESTART:
            await until(lambda: not rig.parts[cell.part].alive, SETTLE_S, f"{cell.part} has ended")
            if cell.fault is Fault.RESTART:
                rig.begin(cell.part)
        case Fault.STOP:
            await asyncio.sleep(at_s - time.monotonic())
            rig.resume(cell.victim)
        case Fault.CUT | Fault.UNPLUG:
            await asyncio.sleep(at_s - time.monotonic())
            rig.heal(cell.victim)
        case Fault.DRAIN:
            await until(lambda: not rig.parts[cell.part].alive, DRAIN_S, f"{cell.part} has drained and ended")
        case Fault.FREEZE if cell.victim is Victim.ROUTER:
            await asyncio.sleep(at_s - time.monotonic())
            rig.kill(cell.victim)


def _allowed(cell: Cell, number: int) -> set[str]:
    if cell.fault is Fault.ERROR_ALWAYS and number >= NUM_REQUESTS:
        return {"error"}  # of the fault, beside those that decode
    allowed = {"right"} if must_be_right(cell) else {"right", "error"}
    if cell.victim is Victim.ROUTER and cell.fault in (Fault.KILL, Fault.RESTART, Fault.FREEZE):
        allowed.add("cut")  # who answers is gone
    return allowed


def _without_quarantine(state: State) -> State:
    """A peer that cannot be reached may be alive: pages that it may write stay quarantined, and no others."""
    counters = {name: 0 if name in ("rooms", "exposed_rooms") else count for name, count in state["counters"].items()}
    queues = {**state["queues"], "quarantined": 0}
    return {**state, "queues": queues, "pages": {**state["pages"], "quarantined": 0}, "counters": counters}


async def until_serves(rig: Rig, *, seed: int) -> float:
    """Right answers again, by the same router; how often it took a try is not held against it, wrong answers are. Return the seconds."""
    began_s = time.monotonic()
    while True:
        outcomes = await Load(rig.router, count=2, new_tokens=4, seed=seed + 7).outcomes(BOUND_S)
        if all(o.end == "right" for o in outcomes):
            return time.monotonic() - began_s
        bad = [o for o in outcomes if o.end in ("wrong", "hangs")]
        assert not bad, f"afterwards a request ended {bad[0].end}: {bad[0].detail}"
        assert time.monotonic() - began_s < SETTLE_S, f"does not serve again: {outcomes}"
        await asyncio.sleep(TRY_S)
