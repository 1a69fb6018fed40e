"""Faults of a Mooncake Store, each against real processes: what must hold is asserted, what was seen is returned.

`make store-faults` writes all into docs/reports/store.md; the tests run them, those that take seconds as slow ones.
"""

import time
from collections.abc import Callable
from typing import Any

from tools.faults.stores.processes import Processes, StoreProcess

PAUSE_S = 0.3
REST_S = 60.0
MOST_TURN_S = 1.0  # far below a call that blocks for 4 seconds, far above what a busy machine adds

Row = Callable[[Processes], str]
FAST: dict[str, Row] = {}
SLOW: dict[str, Row] = {}


def row(name: str, *, slow: bool = False) -> Callable[[Row], Row]:
    def kept(act: Row) -> Row:
        (SLOW if slow else FAST)[name] = act
        return act

    return kept


def ends(store: StoreProcess, keys: list[int], fill: int = 1, **other: Any) -> dict[str, int]:
    found: dict[str, int] = store.ask("read", keys=keys, fill=fill, **other)["ends"]
    assert "WRONG" not in found, found
    return found


def until(found: Callable[[], bool], what: str) -> float:
    """Seconds until then."""
    began_s = time.monotonic()
    while not found():
        assert time.monotonic() - began_s < REST_S, what
        time.sleep(0.05)
    return time.monotonic() - began_s


@row("a key twice")
def a_key_twice(all_of: Processes) -> str:
    store = all_of.plain()
    assert store.ask("write", keys=[1], fill=1)["ok"] == store.ask("write", keys=[1], fill=2)["ok"] == 1
    assert ends(store, [1], fill=1) == {"right": 1}
    return "both writes end well, the first value stays"


@row("what is not there")
def what_is_not_there(all_of: Processes) -> str:
    store = all_of.plain()
    store.ask("write", keys=[1, 2], fill=1)
    assert ends(store, [1, 7, 2]) == {"none": 1, "right": 2}
    assert store.ask("find", keys=[1, 2, 7])["found"] == 2
    assert store.ask("breaker_state")["opened"] == 0
    return "a miss, told from a failure by its code: the breaker stays closed, other pages of the call are right"


@row("a lease")
def a_lease(all_of: Processes) -> str:
    store = all_of.plain()
    store.ask("write", keys=[1, 2], fill=1)
    assert ends(store, [1, 2]) == {"right": 2}
    code = store.ask("raw_remove", key=1)["code"]
    assert code < 0 and store.ask("find", keys=[1])["found"] == 1
    store.ask("delete", keys=[1])
    assert store.ask("find", keys=[1])["found"] == 0
    return f"a plain remove of a page that was read gives {code}; ours, by force, removes it"


@row("a full store")
def a_full_store(all_of: Processes) -> str:
    store, size, count = (
        all_of.store(all_of.master(), page_bytes=256 << 10, segment="16mb"),
        256 << 10,
        160,
    )
    taken = [key for key in range(count) if store.ask("write", keys=[key], fill=1)["ok"]]
    left = ends(store, list(range(count)))
    assert 0 < left["right"] < count and left["right"] * size <= 16 << 20
    assert ends(store, taken[-1:]) == {"right": 1}
    return (
        f"{len(taken)} of {count} pages of 256 KiB are taken by 16 MiB, {left['right']} are left, the newest among them"
    )


@row("two replicas, one holder dies")
def two_replicas(all_of: Processes) -> str:
    master = all_of.master()
    first = all_of.store(master, replica_num=2, pause_s=PAUSE_S)
    second = all_of.store(master)
    first.ask("write", keys=[1], fill=1)
    assert first.ask("replicas", key=1)["count"] == 2
    second.kill()
    took_s = until(lambda: ends(first, [1]) == {"right": 1}, "the other replica is not read")
    return f"the page is read again after {took_s:.1f} s"


@row("wrong values: a flipped byte, too short, too long")
def wrong_values(all_of: Processes) -> str:
    return [_planted(all_of, wrong) for wrong in ("byte", "short", "long")][-1]


@row("stale values: of another key, of other weights, dtype, layout or model")
def stale_values(all_of: Processes) -> str:
    for name in ("weights", "dtype", "layout", "model"):
        _planted(all_of, "", **{name: "other"})
    return _planted(all_of, "key")


def _planted(all_of: Processes, wrong: str, **other: str) -> str:
    store = all_of.plain()
    assert store.ask("plant", key=1, fill=1, wrong=wrong, **other)["code"] == 0
    assert ends(store, [1]) == {"bad": 1}
    assert store.ask("find", keys=[1])["found"] == 0
    store.ask("write", keys=[1], fill=1)
    assert ends(store, [1]) == {"right": 1} and store.ask("breaker_state")["opened"] == 0
    store.ask("delete", keys=[1])
    return "not read, counted, removed; the next write puts the right one"


@row("pages of other weights, dtype or layout")
def pages_of_others(all_of: Processes) -> str:
    store = all_of.plain()
    store.ask("write", keys=[1], fill=1)
    for name in ("weights", "dtype", "layout", "model"):
        other = {name: "other"}
        assert store.ask("find", keys=[1], **other)["found"] == 0 and ends(store, [1], **other) == {"none": 1}
        store.ask("write", keys=[1], fill=2, **other)
        assert ends(store, [1], fill=2, **other) == ends(store, [1]) == {"right": 1}
        store.ask("clear", **other)
        assert store.ask("find", keys=[1], **other)["found"] == 0 and ends(store, [1]) == {"right": 1}
    return "not found; each has its own place in the store, and a flush takes its own"


@row("a dead holder (kill -9)", slow=True)
def a_dead_holder(all_of: Processes) -> str:
    master = all_of.master()
    reader = all_of.store(master, segment="0", pause_s=PAUSE_S)
    holder = all_of.store(master)
    holder.ask("write", keys=list(range(20)), fill=1)
    living = all_of.store(master)
    holder.kill()
    asked = reader.ask("read", keys=list(range(20)), fill=1)
    assert asked["ends"] == {"none": 20} and asked["slowest_turn_s"] < MOST_TURN_S
    assert reader.ask("breaker_state")["opened"] == 1
    took_s = until(
        lambda: living.ask("write", keys=[30], fill=1)["ok"] == 1 and ends(reader, [30]) == {"right": 1}, "no other"
    )
    return (
        f"20 pages end as misses in {asked['seconds']:.2f} s, the breaker opens; another holder's are written and read "
        f"{took_s:.1f} s later"
    )


@row("the master is dead: reads")
def a_dead_master_read(all_of: Processes) -> str:
    master = all_of.master()
    store = all_of.store(master, pause_s=PAUSE_S)
    store.ask("write", keys=[1], fill=1)
    master.kill()
    asked = store.ask("read", keys=[1], fill=1)
    assert asked["ends"] == {"none": 1} and store.ask("breaker_state")["opened"] == 1
    return f"a miss after {1e3 * asked['seconds']:.0f} ms, the breaker opens"


@row("the master is dead (kill -9): writes, and it comes back", slow=True)
def a_dead_master_write(all_of: Processes) -> str:
    master = all_of.master()
    store = all_of.store(master, pause_s=PAUSE_S)
    store.ask("write", keys=[1], fill=1)
    master.kill()
    writes = []
    for key in range(10, 14):
        until(lambda: not store.ask("breaker_state")["open"], "the breaker does not close")
        writes.append(store.ask("write", keys=[key], fill=1))
        assert writes[-1]["ok"] == 0 and writes[-1]["slowest_turn_s"] < MOST_TURN_S, writes
        assert store.ask("breaker_state")["open"]
    stuck = max(writes, key=lambda write: write["seconds"])
    behind = store.ask("write", keys=[3, 4, 5], fill=1)
    assert behind["ok"] == 0
    master.start()
    took_s = until(lambda: bool(store.ask("write", keys=[6], fill=1)["ok"] == 1), "the store does not come back")
    assert ends(store, [1, 6]) == {"none": 1, "right": 1}, "its keys are forgotten"
    return (
        f"a write blocks its thread for {stuck['seconds']:.1f} s, the scheduler's slowest turn takes "
        f"{1e3 * stuck['slowest_turn_s']:.0f} ms, writes behind it fail after {1e3 * behind['seconds']:.0f} ms; the master is "
        f"back: written again after {took_s:.1f} s, old keys are misses"
    )


@row("a frozen holder (SIGSTOP)", slow=True)
def a_frozen_holder(all_of: Processes) -> str:
    master = all_of.master("--client_ttl=60")
    reader, holder = all_of.store(master, segment="0", pause_s=PAUSE_S), all_of.store(master)
    holder.ask("write", keys=list(range(20)), fill=1)
    holder.stop()
    asked = reader.ask("read", keys=[1], fill=1)
    assert asked["ends"] == {"none": 1} and asked["slowest_turn_s"] < MOST_TURN_S, asked
    assert reader.ask("breaker_state")["opened"] >= 1
    return (
        f"the read's thread is blocked for {asked['seconds']:.0f} s a page, the breaker opens after 1 s; the scheduler's slowest turn takes "
        f"{1e3 * asked['slowest_turn_s']:.0f} ms"
    )


@row("a frozen master (SIGSTOP)", slow=True)
def a_frozen_master(all_of: Processes) -> str:
    master = all_of.master()
    store = all_of.store(master, pause_s=PAUSE_S)
    store.ask("write", keys=[1], fill=1)
    master.stop()
    asked = store.ask("read", keys=[1], fill=1)
    assert asked["ends"] == {"none": 1} and asked["slowest_turn_s"] < MOST_TURN_S, asked
    master.go_on()
    took_s = until(lambda: bool(store.ask("write", keys=[6], fill=1)["ok"] == 1), "the store does not come back")
    return f"a read blocks its thread for {asked['seconds']:.1f} s and is a miss; after it goes on, a write ends well {took_s:.1f} s later"
