"""A process with the product's Mooncake store behind its threads and breaker, told what to do line by line.

A second thread plays the scheduler: it takes turns all the time, and says how long the slowest took.
"""

import json
import sys
import threading
import time
from typing import Any

from engine.core.mem_cache.page_allocator import KVIdentity
from engine.core.mem_cache.storage_tier import (
    PageClear,
    PageDelete,
    PageLookup,
    PageRead,
    PageWrite,
    StorageDone,
    StorageWork,
)
from engine.flags.hicache import MooncakeStoreConfig
from engine.hicache.mooncake_store import MooncakeStore, connect, copies, name_of
from engine.hicache.page_files import encode_header
from engine.hicache.storage import Breaker, PageStorage

NUM_PAGES = 256  # of host memory
LONGEST_S = 300.0


class NoTier:
    """The work comes from `Worker.do`."""

    busy = False

    def __init__(self) -> None:
        self.work: list[StorageWork] = []
        self.done: list[StorageDone] = []

    def take_work(self) -> list[StorageWork]:
        work, self.work = self.work, []
        return work

    def note_pauses(self, count: int) -> None:
        """Told by the breaker."""

    def on_done(self, done: StorageDone) -> None:
        self.done.append(done)


class Worker:
    def __init__(self, config: MooncakeStoreConfig, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.host = bytearray(NUM_PAGES * page_bytes)
        self.client = connect(config)
        store = MooncakeStore(
            self.client, page_bytes=page_bytes, page_of=self.page, copies=copies(config.replica_num), master=""
        )
        self.breaker = Breaker(patience_s=config.timeout_s, pause_s=config.pause_s)
        self.tier: Any = NoTier()
        self.storage = PageStorage(store, tier=self.tier, when_done=lambda: None, breaker=self.breaker)
        self.slowest_s = self.moved_s = 0.0
        self._given = threading.Lock()
        threading.Thread(target=self._turn, daemon=True).start()

    def page(self, i: int) -> memoryview:
        return memoryview(self.host)[i * self.page_bytes : (i + 1) * self.page_bytes]

    def identity(self, **other: Any) -> KVIdentity:
        own = dict(layout="l", dtype="d", page_size=16, page_bytes=self.page_bytes, model="m", weights="w")
        return KVIdentity(**{**own, **other})

    def _turn(self) -> None:
        last_s = time.monotonic()
        while True:
            with self._given:
                self.storage.on_turn(last_s)
            time.sleep(0.001)
            now_s = time.monotonic()
            self.slowest_s, last_s = max(self.slowest_s, now_s - last_s), now_s

    def do(self, work: list[StorageWork]) -> list[StorageDone]:
        """In the order of `work`, whatever order it ended in. `moved_s`: what it took."""
        began_s = time.monotonic()
        with self._given:
            self.tier.done, self.tier.work = [], list(work)
        deadline_s = time.monotonic() + LONGEST_S
        while len(self.tier.done) < len(work):
            assert time.monotonic() < deadline_s, "the store's threads do not come to rest"
            time.sleep(0.0005)
        self.moved_s = time.monotonic() - began_s
        ended = {id(done.work): done for done in self.tier.done}
        return [ended[id(one)] for one in work]

    # ---- what is asked

    def write(self, keys: list[int], fill: int, **other: Any) -> dict[str, Any]:
        """Pages whose bytes are `fill` and the key."""
        for i, key in enumerate(keys):
            self.page(i)[:] = content(key, fill, self.page_bytes)
        done = self.do([PageWrite(key_of(key), i, self.identity(**other)) for i, key in enumerate(keys)])
        return {"ok": sum(one.ok for one in done)}

    def read(self, keys: list[int], fill: int, **other: Any) -> dict[str, Any]:
        """How each ended: "right" and "WRONG" bytes, "bad", "none"."""
        self.host[:] = bytes(len(self.host))
        self.slowest_s = 0.0
        done = self.do([PageRead(key_of(key), i, self.identity(**other)) for i, key in enumerate(keys)])
        ends = []
        for i, (key, one) in enumerate(zip(keys, done, strict=True)):
            right = bytes(self.page(i)) == content(key, fill, self.page_bytes)
            ends.append(("right" if right else "WRONG") if one.ok else "bad" if one.bad else "none")
        return {"ends": {end: ends.count(end) for end in sorted(set(ends))}}

    def find(self, keys: list[int], **other: Any) -> dict[str, Any]:
        (done,) = self.do([PageLookup(tuple(key_of(key) for key in keys), self.identity(**other))])
        return {"found": len(done.found), "ok": done.ok}

    def delete(self, keys: list[int]) -> dict[str, Any]:
        self.do([PageDelete(tuple(key_of(key) for key in keys), self.identity())])
        return {}

    def clear(self, **other: Any) -> dict[str, Any]:
        self.do([PageClear(self.identity(**other))])
        return {}

    def plant(self, key: int, fill: int, wrong: str, **other: Any) -> dict[str, Any]:
        """A value that is not the page of its key, by the client alone."""
        identity, page = self.identity(**other), content(key, fill, self.page_bytes)
        value = bytearray(encode_header(identity, key_of(key + 1 if wrong == "key" else key), memoryview(page)) + page)
        if wrong == "byte":
            value[-1] ^= 1
        elif wrong == "short":
            del value[-1]
        elif wrong == "long":
            value += b"\0"
        return {"code": self.client.put(name_of(self.identity(), key_of(key)), bytes(value))}

    def raw_remove(self, key: int) -> dict[str, Any]:
        return {"code": self.client.remove(name_of(self.identity(), key_of(key)))}

    def replicas(self, key: int) -> dict[str, Any]:
        return {"count": len(self.client.get_replica_desc(name_of(self.identity(), key_of(key))))}

    def breaker_state(self) -> dict[str, Any]:
        return {"open": self.breaker.is_open(time.monotonic()), "opened": self.breaker.num_opened}


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(key: int, fill: int, size: int) -> bytes:
    return (fill.to_bytes(4, "big") + key.to_bytes(4, "big")) * (size // 8)


def main() -> None:
    config = MooncakeStoreConfig(**json.loads(sys.argv[1]))
    worker = Worker(config, int(sys.argv[2]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        worker.slowest_s, started_s = 0.0, time.monotonic()
        found = getattr(worker, asked.pop("what"))(**asked)
        took_s = time.monotonic() - started_s
        print(
            json.dumps({**found, "seconds": took_s, "slowest_turn_s": worker.slowest_s, "moved_s": worker.moved_s}),
            flush=True,
        )


if __name__ == "__main__":
    main()
