"""Load that the processes of a router share: one place a worker, sums over the others, places used again. Files, no processes."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import router.pool.shared_load
from router.config import BreakerFlags
from router.fleet import SUMMED_GAUGES
from router.pool.breaker import Event, State
from router.pool.shared_load import SharedLoad
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable
from service.telemetry.expositions import merge_expositions


def rows(path: Path, count: int) -> list[SharedLoad]:
    return [SharedLoad(path / "load", row=row, num_rows=count) for row in range(count)]


def takes(worker: Worker, now_s: float) -> bool:
    assert worker.peers is not None
    return worker.circuit.takes(now_s) and worker.slot not in worker.peers.others_open(now_s)


def test_a_circuit_that_one_process_opens_keeps_the_others_away_until_its_time_is_over(tmp_path: Path) -> None:
    breaker = BreakerFlags(cb_failure_threshold=1)
    tables = [WorkerTable(peers=view, breaker=breaker) for view in rows(tmp_path, 2)]
    (finder, other) = (table.add("http://a:1", role=Role.DECODE) for table in tables)
    bystander = tables[1].add("http://b:1", role=Role.DECODE)
    finder.circuit.record(Event.FAULT, 100.0)
    assert not takes(finder, 101.0) and not takes(other, 101.0) and takes(bystander, 101.0)
    assert other.circuit.state is State.CLOSED, "it was not this one's finding"
    assert not takes(other, 159.9) and takes(other, 160.0)
    finder.circuit.record(Event.FAULT, 200.0)  # open already: it is tried first
    assert takes(other, 201.0) and takes(finder, 202.0) and finder.circuit.send(202.0)
    assert finder.circuit.state is State.HALF_OPEN
    finder.circuit.record(Event.FAULT, 203.0)
    assert not takes(other, 204.0)
    finder.circuit.reset()  # another process answers there
    assert takes(other, 204.0)
    finder.circuit.record(Event.FAULT, 205.0)
    assert not takes(other, 206.0)
    tables[0].remove("http://a:1")
    assert takes(other, 206.0)


def test_a_process_that_starts_again_has_nothing_in_flight(tmp_path: Path) -> None:
    first, second = rows(tmp_path, 2)
    slot = first.take("http://a:1")
    second.take("http://a:1")
    second.publish(slot, tokens=5, requests=1)
    second.publish_live(1)
    assert (first.others_tokens(slot), first.others_live()) == (5, 1)
    SharedLoad(tmp_path / "load", row=1, num_rows=2)
    assert (first.others_tokens(slot), first.others_live()) == (0, 0)


def test_a_place_is_free_again_when_no_process_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.pool.shared_load, "NUM_SLOTS", 4)
    first, second = rows(tmp_path, 2)
    slots = {url: first.take(url) for url in "abcd"}
    assert sorted(slots.values()) == [0, 1, 2, 3]
    assert second.take("a") == slots["a"]
    first.give_back(slots["a"])
    with pytest.raises(RuntimeError, match="no more fit"):
        first.take("e")
    second.give_back(slots["a"])
    assert first.take("e") == slots["a"] == second.take("e")


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_any_order_of_joining_and_leaving(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    draw = random.Random(seed)
    members = rows(tmp_path_factory.mktemp("load"), 3)
    held: list[dict[str, tuple[int, int]]] = [{}, {}, {}]
    for _ in range(60):
        row, url = draw.randrange(3), f"http://{draw.randrange(12)}"
        if url not in held[row]:
            held[row][url] = (members[row].take(url), 0)
        elif draw.random() < 0.3:
            members[row].give_back(held[row].pop(url)[0])
        else:
            slot, tokens = held[row][url][0], draw.randrange(1000)
            members[row].publish(slot, tokens=tokens, requests=tokens)
            held[row][url] = (slot, tokens)
        for row, mine in enumerate(held):
            assert len({slot for slot, _ in mine.values()}) == len(mine)
            for url, (slot, _) in mine.items():
                others = [h[url] for other, h in enumerate(held) if other != row and url in h]
                assert all(s == slot for s, _ in others)
                assert members[row].others_tokens(slot) == sum(tokens for _, tokens in others)
                assert members[row].others_requests(slot) == members[row].others_tokens(slot)


def merged(texts: list[str]) -> list[str]:
    return merge_expositions((text.encode() for text in texts), summed=SUMMED_GAUGES).decode().splitlines()


def test_counts_are_added_and_states_are_not() -> None:
    one = (
        '# HELP requests Requests\n# TYPE requests counter\nrequests_total{path="/a\\"b",status="200"} 3.0\n'
        "# HELP up Up\n# TYPE up gauge\nup 1.0\n"
        '# HELP t T\n# TYPE t histogram\nt_bucket{le="1.0"} 1.0\nt_bucket{le="+Inf"} 2.0\nt_count 2.0\nt_sum 4.5\n'
    )
    lines = merged([one, one.replace("3.0", "4.0"), "# HELP other O\n# TYPE other gauge\nother 2.0\n"])
    assert 'requests_total{path="/a\\"b",status="200"} 7.0' in lines and "up 1.0" in lines and "other 2.0" in lines
    assert {'t_bucket{le="1.0"} 2.0', 't_bucket{le="+Inf"} 4.0', "t_count 4.0", "t_sum 9.0"} <= set(lines)


def test_of_times_of_creation_the_first_stands() -> None:
    """Prometheus reads `_created` as the time since when a counter counts."""
    text = "# TYPE a_total counter\na_total {}\n# TYPE a_created gauge\na_created {}\n"
    lines = merged([text.format(1.0, 1.795e9), text.format(2.0, 1.794e9), text.format(4.0, 1.796e9)])
    assert {"a_total 7.0", "a_created 1794000000.0"} <= set(lines)
