"""`python -m tools.simulation.stores`: workers of both roles over one store that loses, delays, lies and answers with stale values.

The production scheduler, host tier, storage, breaker and Mooncake store, in virtual time; what is played is the client of the library, the
threads (a call ends when the seed says, and copies then), and a model whose KV each step verifies (tests/core/hash_model.py). Tokens are
compared with what the prompt and the weights say.
"""

import argparse
import ctypes
import logging
import random
import re
import struct
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.core.mem_cache.host_cache import HostCache, TierRoom
from engine.core.mem_cache.page_allocator import KVIdentity
from engine.core.mem_cache.storage_tier import PageRead, PageWrite, StorageIndex, StorageWork
from engine.core.plan import ItemResult
from engine.core.request import Request
from engine.hicache.mooncake_store import NO_ROOM, NOT_FOUND, TOO_LONG, MooncakeStore
from engine.hicache.page_files import HEADER_BYTES, header_of
from engine.hicache.storage import READS, WRITES, Breaker, PageStorage
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import Slot, State, expected_tokens, next_token, prefix_hash, step_hash
from tools.progress import progress

SLOT = struct.Struct("<qq")
NOTHING, NO_STATE = Slot(-1, -1), State(-1, -1)
GRID = 8
UNREACHABLE = -900
WAIT_S = 1.0
STEP_S = 0.1  # of virtual time, at most
MAX_STEPS = 6000
MAX_CALL_S = 4.3  # as a put behind the master's death


@dataclass(frozen=True, kw_only=True)
class Options:
    """Shares of calls and of values. `slow`: of calls beyond the deadline; `late`: of reads whose bytes land once more, later."""

    workers: int
    page_size: int
    num_pages: int
    host_pages: int
    depth: int
    write_policy: str
    prefetch_policy: str
    requests: int
    fails: float
    slow: float
    late: float
    loses: float
    lies: float
    stale: float
    dies_every_s: float  # the master
    kills: float
    updates: float
    flushes: float
    aborts: float
    state_slots: int  # 0: the model has no recurrent states
    host_states: int


def options_of(seed: int) -> Options:
    draw = random.Random(f"{seed}/store")

    def share(most: float) -> float:
        return draw.choice([0.0, most / 4, most])

    page_size = draw.choice([1, 2, 4])
    options = Options(
        workers=draw.choice([2, 3, 4]),
        page_size=page_size,
        num_pages=draw.choice([56, 80]) // page_size,
        host_pages=draw.choice([20, 40, 100]) // page_size,
        depth=draw.choice([1, 2]),
        write_policy=draw.choice(["write_through", "write_through", "write_through_selective", "write_back"]),
        prefetch_policy=draw.choice(["timeout", "timeout", "wait_complete", "best_effort"]),
        requests=draw.choice([40, 80]),
        fails=share(0.1),
        slow=share(0.1),
        late=share(0.3),
        loses=share(0.04),
        lies=share(0.05),
        stale=share(0.3),
        dies_every_s=draw.choice([0.0, 0.0, 10.0]),
        kills=share(0.02),
        updates=share(0.002),
        flushes=share(0.0005),
        aborts=share(0.03),
        state_slots=draw.choice([0, 4, 8]),
        host_states=draw.choice([1, 3, 8]),
    )
    room = 160 // page_size  # up to a state it is all or nothing
    return replace(options, host_pages=room) if options.state_slots else options


class VirtualStore:
    """What master and holders have, by name. `ever`: each value that was put, for stale answers."""

    def __init__(self, options: Options, draw: random.Random) -> None:
        self.options, self.draw = options, draw
        self.values: dict[str, bytes] = {}
        self.ever: list[bytes] = []
        self.dead_until_s = -1.0
        self.now_s = 0.0
        self.late: list[tuple[float, int, bytes]] = []  # (when, address, bytes) that land once more
        self.seen: Counter[str] = Counter()
        self.mixed: list[str] = []  # names of two pages: the first value would stay

    def tick(self, now_s: float) -> None:
        self.now_s = now_s
        every_s = self.options.dies_every_s
        if every_s and self.draw.random() < STEP_S / every_s:
            self.values.clear()
            self.dead_until_s = now_s + self.draw.uniform(0.1, 5.0)
            self.seen["deaths of the master"] += 1
        for landing in [one for one in self.late if one[0] <= now_s]:
            self.late.remove(landing)
            ctypes.memmove(landing[1], landing[2], len(landing[2]))

    def fails(self) -> bool:
        failed = self.now_s < self.dead_until_s or self.draw.random() < self.options.fails
        self.seen["failed calls"] += failed
        return failed

    def stale(self, right: bytes) -> bytes:
        """A value that is not the one of its name."""
        self.seen["stale or damaged values"] += 1
        kind = self.draw.choice(["other", "other", "flipped", "flipped", "short", "long"])
        if kind == "other":
            return self.draw.choice(self.ever)
        if kind == "flipped":
            at = self.draw.randrange(0 if self.draw.random() < 0.2 else HEADER_BYTES, len(right))
            return right[:at] + bytes([right[at] ^ 1 << self.draw.randrange(8)]) + right[at + 1 :]
        return right[: self.draw.randrange(len(right))] if kind == "short" else right + b"\0"


def _of(value: bytes) -> tuple[KVIdentity, bytes]:
    header = header_of(value[:HEADER_BYTES])
    return header.identity, header.key


class VirtualClient:
    """The calls of `MooncakeDistributedStore` that the product makes."""

    def __init__(self, store: VirtualStore) -> None:
        self._store = store
        self._memory: list[range] = []

    def register_buffer(self, address: int, size: int) -> int:
        self._memory.append(range(address, address + size))
        return 0

    def batch_is_exist(self, names: Sequence[str]) -> list[int]:
        store, draw = self._store, self._store.draw
        if store.fails():
            return [UNREACHABLE] * len(names)
        return [int((name in store.values) != (draw.random() < store.options.lies)) for name in names]

    def batch_put_from(self, names: Sequence[str], addresses: list[int], sizes: list[int], copies: Any) -> list[int]:
        store, draw = self._store, self._store.draw
        failed, codes = store.fails(), []
        for name, address, size in zip(names, addresses, sizes, strict=True):
            value, lost = ctypes.string_at(address, size), draw.random() < store.options.loses
            if not lost and not (failed and draw.random() < 0.5):  # one that failed may have come, too
                kept = store.values.setdefault(name, value)
                store.mixed += [name] * (_of(kept) != _of(value))
                store.ever.append(value)
            codes.append(UNREACHABLE if failed else NO_ROOM if lost and draw.random() < 0.3 else 0)
        return codes

    def batch_get_into(self, names: Sequence[str], addresses: list[int], sizes: list[int]) -> list[int]:
        store = self._store
        failed = store.fails()
        return [self._get(*one, failed) for one in zip(names, addresses, sizes, strict=True)]

    def _get(self, name: str, address: int, size: int, failed: bool) -> int:
        store, draw = self._store, self._store.draw
        if draw.random() < store.options.loses:
            store.values.pop(name, None)
        value = store.values.get(name)
        if value is None:
            return UNREACHABLE if failed else NOT_FOUND
        if draw.random() < store.options.stale:
            value = store.stale(value)
        if failed or len(value) > size:
            ctypes.memmove(address, value, draw.randrange(min(size, len(value)) + 1))  # a part of it came
            return UNREACHABLE if failed else TOO_LONG
        ctypes.memmove(address, value, len(value))
        if draw.random() < store.options.late:
            other = draw.choice(store.ever)[:size]
            store.late.append((store.now_s + draw.uniform(0, 1), address, other))
        return len(value)

    def batch_remove(self, names: Sequence[str], force: bool) -> list[int]:
        for name in () if self._store.fails() else names:
            self._store.values.pop(name, None)
        return [0] * len(names)

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        found = [] if self._store.fails() else [name for name in self._store.values if re.match(pattern, name)]
        for name in found:
            del self._store.values[name]
        return len(found)

    def close(self) -> None:
        """Nothing lands in the memory of a process that is gone."""
        late = self._store.late
        late[:] = [landing for landing in late if not any(landing[1] in memory for memory in self._memory)]


@dataclass
class Asked:
    """`since_s`: it waits for the store since then. `stage`: of a decode worker's, "" | "asked" | "reserved" | "given"."""

    request: Request
    prompt: list[int]
    new: int
    weights: int
    stage: str = ""
    given_s: float = 0.0
    since_s: float | None = None


class Worker(EngineInATest):
    """One life of one worker."""

    def __init__(self, name: str, store: VirtualStore, *, decodes: bool, weights: int) -> None:
        self.name, self.store, self.decodes = name, store, decodes
        options = store.options
        self.page_bytes = options.page_size * SLOT.size
        self.host = HostCache(
            room=TierRoom(options.host_pages, options.host_states if options.state_slots else 0, GRID),
            identity=self._identity(weights),
            write_policy=options.write_policy,
            prefetch_policy=options.prefetch_policy,
            storage=StorageIndex(wait_s=WAIT_S),
        )
        super().__init__(
            page_size=options.page_size,
            num_pages=options.num_pages,
            host=self.host,
            depth=options.depth,
            lag=True,
            conservativeness=0.0,
            max_running=3,
            peers_write=decodes,
            state_slots=options.state_slots,
            grid=GRID,
        )
        self.model.weights = weights
        self.views: dict[int, bytearray] = {}  # host pages as bytes, during a call
        self.client = VirtualClient(store)
        client = MooncakeStore(
            self.client,
            page_bytes=self.page_bytes,
            page_of=self._page,
            copies=None,
            master="",
            state_bytes=SLOT.size,
        )
        client.batch = store.draw.choice([1, 3, 16])
        assert self.host.storage is not None
        self.storage = PageStorage(
            client,
            tier=self.host.storage,
            when_done=lambda: None,
            breaker=Breaker(patience_s=WAIT_S, pause_s=2.0),
            now_s=lambda: store.now_s,
            threads=False,
        )
        self.calls: dict[str, tuple[float, list[StorageWork]]] = {}  # of each thread: when it ends
        self.asked: dict[str, Asked] = {}
        self.num_tokens = 0

    def _identity(self, weights: int) -> KVIdentity:
        return KVIdentity(
            layout="simulated",
            dtype="hash",
            page_size=self.store.options.page_size,
            page_bytes=self.page_bytes,
            model="hash",
            weights=f"w{weights}",
            state_bytes=SLOT.size,
        )

    # ---- host pages, then states, as bytes

    def _page(self, host_page: int) -> memoryview:
        options = self.store.options
        if host_page >= options.host_pages:
            state = self.model.host_states.get(host_page - options.host_pages, NO_STATE)
            self.views[host_page] = bytearray(SLOT.pack(state.length, state.value))
        else:
            slots = self.model.host.get(host_page, [NOTHING] * options.page_size)
            self.views[host_page] = bytearray(b"".join(SLOT.pack(slot.value, slot.token) for slot in slots))
        return memoryview(self.views[host_page])

    def _landed(self, host_page: int, view: bytearray) -> None:
        if (state := host_page - self.store.options.host_pages) >= 0:
            self.model.host_states[state] = State(*SLOT.unpack(view))
            self.store.seen["states read"] += 1
        else:
            self.model.host[host_page] = [Slot(*pair) for pair in SLOT.iter_unpack(view)]

    def _end_call(self, name: str, batch: list[StorageWork]) -> None:
        """Copies from and to host pages happen now, as late as they may."""
        self.views.clear()
        self.storage.do(name, batch)
        for work in batch:
            if isinstance(work, PageRead) and (view := self.views.get(work.host_page)) is not None:
                self._landed(work.host_page, view)
            self.store.seen["pages written"] += isinstance(work, PageWrite)
        self.scheduler.check()

    # ---- a moment

    def tick(self) -> None:
        now_s, draw, options = self.store.now_s, self.store.draw, self.store.options
        self.now_s = now_s
        self.storage.on_turn(now_s)
        for name in (READS, WRITES):
            if name in self.calls and self.calls[name][0] <= now_s:
                self._end_call(name, self.calls.pop(name)[1])
            if name not in self.calls and (batch := self.storage.take(name, wait=False)):
                long = draw.random() < options.slow
                self.calls[name] = now_s + (draw.uniform(1, MAX_CALL_S) if long else draw.uniform(0, 0.3)), batch
        assert not self.store.mixed, f"one name for pages of two versions: {self.store.mixed}"
        for _ in range(draw.randrange(6)):
            self.turn()
        for asked in list(self.asked.values()):
            if asked.stage:
                self._move(asked)
            self._check_wait(asked)

    def _check_wait(self, asked: Asked) -> None:
        """No request waits for the store beyond its deadline, whatever the store does."""
        if not self.host.awaits(asked.request, self.now_s):
            asked.since_s = None
        elif asked.since_s is None:
            asked.since_s = self.now_s
        else:
            assert self.now_s - asked.since_s <= WAIT_S + 2 * STEP_S, f"{asked.request.rid} waits for the store"

    def ask(self, rid: str, prompt: list[int], new: int) -> None:
        request = self._request(rid, prompt, max_new_tokens=new)
        asked = self.asked[rid] = Asked(request, prompt, new, self.model.weights)
        if not self.decodes:
            self.say(self.scheduler.add(request))
            return
        assert self.scheduler.held.adopt(request) is None
        asked.stage = "asked"

    def _move(self, asked: Asked) -> None:
        """As a decode worker and the peer that writes its pages."""
        request, held = asked.request, self.scheduler.held
        if asked.stage == "asked" and held.reserve(request):
            asked.stage = "reserved"
        own, slot = request.own_pages(), request.recurrent.slot
        if asked.stage == "reserved" and self.scheduler.lower_tier.is_settled(own, state=slot):
            asked.stage, asked.given_s = "given", self.now_s + self.store.draw.uniform(0, 0.5)
            self._write(asked, wrong=True)
        elif asked.stage == "given" and asked.given_s <= self.now_s:
            self._write(asked, wrong=False)
            asked.stage = ""
            first = ItemResult(next_token(prefix_hash(asked.prompt, asked.weights)))
            self.say(held.start_decoding(request, first, cached_tokens=0))

    def _write(self, asked: Asked, *, wrong: bool) -> None:
        """A peer writes pages without regard to our steps, first a part of something."""
        size, value = self.store.options.page_size, asked.weights
        begin = asked.request.shared_pages * size
        for position, token in enumerate(asked.prompt):
            value = step_hash(value, token)
            if position >= begin:
                page = asked.request.pages[position // size]
                self.model.kv[page, position % size] = NOTHING if wrong else Slot(value, token)
        if slot := asked.request.recurrent.slot:
            self.model.states[slot] = NO_STATE if wrong else State(len(asked.prompt), value)

    def finished(self) -> list[str]:
        """Compare what has ended; return their names."""
        ended = [rid for rid in self.asked if rid in self.finish]
        for rid in ended:
            asked, told = self.asked.pop(rid), self.tokens.get(rid, [])
            right = expected_tokens(asked.prompt, asked.new, adapter=asked.weights)
            whole = self.finish[rid].kind == "length"
            assert told == (right if whole else right[: len(told)]), f"{self.name}: {rid} got {told}, not {right}"
            self.num_tokens += len(told)
        return ended

    def update(self, weights: int) -> None:
        """Others, while nothing runs."""
        self.scheduler.forget_prefixes()
        self.model.weights = weights
        self.model.kv.clear()
        self.host.use_identity(self._identity(weights))

    def tally(self) -> Counter[str]:
        counted = self.host.counted
        return Counter(
            {
                "tokens": self.num_tokens,
                "pages read": counted["hicache_read_pages"],
                "bad values refused": counted["hicache_bad_files"],
                "tokens from the store": counted["hicache_disk_hit_tokens"],
                "pauses by a breaker": self.storage._breaker.num_opened,
            }
        )


@dataclass
class Outcome:
    problem: str = ""
    seen: Counter[str] = field(default_factory=Counter)


class World:
    def __init__(self, seed: int) -> None:
        self.options, self.draw = options_of(seed), random.Random(f"{seed}/events")
        self.store = VirtualStore(self.options, random.Random(f"{seed}/faults"))
        self.weights = 0
        self.lives = 0
        self.seen: Counter[str] = Counter()
        self.workers = [self._start(i == 1) for i in range(self.options.workers)]
        self.families = [[self.draw.randrange(45) for _ in range(40)] for _ in range(8)]

    def _start(self, decodes: bool) -> Worker:
        self.lives += 1
        return Worker(f"life {self.lives}", self.store, decodes=decodes, weights=self.weights)

    def run(self) -> None:
        left, now_s = self.options.requests, 0.0
        for _ in range(MAX_STEPS):
            now_s += self.draw.uniform(0.001, STEP_S)
            self.store.tick(now_s)
            if left and self.draw.random() < 0.25:
                left -= 1
                self._ask(f"r{left}")
            for i, worker in enumerate(self.workers):
                self._disturb(i, worker)
                self.workers[i].tick()
                self.workers[i].finished()
            if not left and not any(worker.asked or worker.calls for worker in self.workers):
                break
        else:
            raise AssertionError(f"no rest: {[list(worker.asked) for worker in self.workers]}")
        for worker in self.workers:
            self._end(worker)

    def _ask(self, rid: str) -> None:
        worker = self.draw.choice(self.workers)
        length = self.draw.choice((17, 33)) if self.options.state_slots else self.draw.randint(8, 40)
        prompt = self.draw.choice(self.families)[:length]  # with states few meet
        tail = [self.draw.randrange(45) for _ in range(self.draw.randrange(4))]
        worker.ask(rid, prompt + tail, self.draw.randint(1, 5))

    def _disturb(self, i: int, worker: Worker) -> None:
        options, draw = self.options, self.draw
        if draw.random() < options.kills:
            self._end(worker)
            self.workers[i] = self._start(worker.decodes)
            for name in [name for name in self.store.values if draw.random() < 0.3]:
                del self.store.values[name]  # it held them
        elif not worker.asked and not worker.launched and draw.random() < options.updates:
            self.weights += draw.choice([0, 1])
            worker.update(self.weights)
            self.seen["updates of weights"] += 1
        elif not worker.asked and not worker.launched and draw.random() < options.flushes:
            self.seen["flushes"] += worker.scheduler.flush_cache()
        elif worker.asked and draw.random() < options.aborts:
            rid = draw.choice(list(worker.asked))
            if not worker.asked[rid].stage:
                worker.abort(rid)

    def _end(self, worker: Worker) -> None:
        self.seen += worker.tally()
        worker.client.close()


def run(seed: int) -> Outcome:
    world, problem = World(seed), ""
    try:
        world.run()
    except AssertionError as error:
        problem = f"{error or type(error).__name__}"
    return Outcome(problem, world.seen + world.store.seen)


def play(seeds: Sequence[int], *, tell: Callable[[int, Outcome], None] = lambda seed, outcome: None) -> Counter[str]:
    """What was seen in all, "seeds" and "wrong" among it."""
    total: Counter[str] = Counter()
    for seed in seeds:
        outcome = run(seed)
        total += outcome.seen + Counter({"seeds": 1, "wrong": int(bool(outcome.problem))})
        tell(seed, outcome)
    return total


def simulate(seeds: range) -> dict[str, int]:
    """With a progress bar; return what happened, `wrong` first of all but `seeds` and `tokens`."""
    logging.disable(logging.WARNING)  # each failure of the store
    with progress(len(seeds), unit="seed") as bar:

        def tell(seed: int, outcome: Outcome) -> None:
            bar.update(1)
            if outcome.problem:
                bar.write(f"FAILED: {outcome.problem[:300]}\nreplay: --first {seed} --seeds 1")

        total = play(seeds, tell=tell)
    first = ("seeds", "tokens", "wrong")
    return {name: total[name] for name in (*first, *sorted(set(total) - set(first)))}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.simulation.stores", description=__doc__)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1000)
    args = parser.parse_args()
    total = simulate(range(args.first, args.first + args.seeds))
    for what, times in total.items():
        print(f"{what:26} {times:,}")
    return int(total["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
