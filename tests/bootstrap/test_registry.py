"""The registry with literals only."""

import random
from typing import Any

import pytest

from bootstrap_server.protocol import Registration
from bootstrap_server.registry import BootstrapConfig, Registry
from service.http.errors import ApiError

CONFIG = BootstrapConfig(lease_s=10.0, room_ttl_s=5.0, max_workers=3, max_rooms=4)


def worker(incarnation: str, *, port: int = 1000, **more: Any) -> Registration:
    return Registration(
        incarnation=incarnation,
        control_host="10.0.0.1",
        control_port=port,
        protocol_version=1,
        page_size=16,
        signature="m",
        dtype="bfloat16",
        **more,
    )


def test_shared_goes_by_room() -> None:
    registry = Registry(CONFIG, shared=True)
    registry.register(worker("a", port=1), 0.0)
    registry.register(worker("b", port=2), 0.0)
    registry.register_rooms("a", [5], 0.0)
    registry.register_rooms("b", [6], 0.0)
    assert [registry.look_up(room).worker.incarnation for room in (5, 6)] == ["a", "b"]
    assert registry.look_up(5).shared
    with pytest.raises(ApiError, match="registered 7"):
        registry.look_up(7)
    registry.leave("a")
    with pytest.raises(ApiError, match="owned 5 is gone"):
        registry.look_up(5)
    for call in (lambda: registry.leave("a"), lambda: registry.register_rooms("a", [1], 0.0)):
        with pytest.raises(ApiError, match="'a' is not registered"):
            call()
    registry.check()


def test_any_worker_but_those_that_are_gone() -> None:
    """Who had the room comes first; the others are spread by room, in the order of their names."""
    registry = Registry(CONFIG, shared=True)
    with pytest.raises(ApiError, match="no other prefill worker"):
        registry.look_up_any(5, but=())
    for i, name in enumerate("cab"):
        registry.register(worker(name, port=1 + i), 0.0)
    registry.register_rooms("b", [6], 0.0)

    def chosen(room: int, *but: str) -> str:
        return registry.look_up_any(room, but=but).worker.incarnation

    assert [chosen(6), chosen(6, "b"), chosen(7, "b")] == ["b", "a", "c"]
    assert [chosen(9), chosen(10), chosen(11)] == ["a", "b", "c"]
    registry.leave("b")
    assert chosen(6) == "a"
    with pytest.raises(ApiError, match="no other"):
        chosen(6, "a", "c")
    embedded = Registry(CONFIG, shared=False)
    embedded.register(worker("x"), 0.0)
    assert embedded.look_up_any(5, but=("y",)).worker.incarnation == "x"


def test_a_room_of_one_worker_is_at_the_rank_that_its_number_names() -> None:
    """Without sharing, and before all ranks have registered; the ranks of an earlier start are replaced."""
    registry = Registry(CONFIG, shared=False)
    registry.register(worker("old"), 0.0)
    second = worker("b", port=1, dp_size=2, dp_rank=1)
    registry.register(second, 1.0)
    with pytest.raises(ApiError, match="DP rank 0 of 2 of this prefill worker is not registered") as caught:
        registry.look_up(4)
    assert caught.value.field is None, "the server knows rooms by their numbers, not one by one"
    registry.register(worker("a", port=2, dp_size=2, dp_rank=0), 1.0)
    registry.register(second, 2.0)  # renewed
    registry.check()
    found = [registry.look_up(room) for room in (4, 5, 6)]
    assert [(r.worker.incarnation, r.shared) for r in found] == [("a", False), ("b", False), ("a", False)]
    chosen = [registry.look_up_any(5, but=but).worker.incarnation for but in ((), ("b",), ("a",))]
    assert chosen == ["b", "a", "b"]


def test_a_rank_is_one_of_its_worker() -> None:
    with pytest.raises(ValueError, match="dp_rank: must be below dp_size 2, got 2"):
        worker("a", dp_size=2, dp_rank=2)


def test_leases_and_rooms_expire() -> None:
    registry = Registry(CONFIG, shared=True)
    registry.register(worker("a", port=1), 0.0)
    registry.register(worker("b", port=2), 1.0)
    registry.register(worker("a", port=1), 5.0)  # renewed
    registry.register_rooms("a", [1], 6.0)
    registry.check()
    registry.expire(11.0)
    assert (registry.num_workers, registry.num_rooms) == (1, 0)
    registry.expire(14.9)
    assert registry.num_workers == 1
    registry.expire(15.0)
    assert registry.num_workers == 0


def test_rooms_are_bounded() -> None:
    registry = Registry(CONFIG, shared=True)
    registry.register(worker("a"), 0.0)
    registry.register_rooms("a", list(range(1, 8)), 0.0)
    assert registry.num_rooms == 4
    assert registry.look_up(7)
    with pytest.raises(ApiError):
        registry.look_up(3)


@pytest.mark.parametrize("seed", range(4))
def test_many_workers_come_and_go_as_in_a_plain_list(seed: int) -> None:
    """What the registry finds by its tables is what a look at every worker finds."""
    rng, listed, full = random.Random(seed), dict[str, tuple[Registration, float]](), 0
    registry = Registry(BootstrapConfig(lease_s=2.0, max_workers=6), shared=True)
    for step in range(800):
        now_s = step * 0.1
        registry.expire(now_s)
        listed = {name: entry for name, entry in listed.items() if entry[1] > now_s}
        new = worker(f"w{rng.randrange(16)}", port=1 + rng.randrange(20))
        if rng.random() < 0.2 and listed:
            registry.leave(gone := rng.choice(sorted(listed)))
            del listed[gone]
        elsewhere = {name: entry for name, entry in listed.items() if entry[0].control != new.control}
        kept = {name: entry for name, entry in elsewhere.items() if name != new.incarnation}
        if len(kept) < 6:
            registry.register(new, now_s)
            kept[new.incarnation] = (new, now_s + 2.0)
        else:
            full += 1
            with pytest.raises(ApiError, match="no more fit"):
                registry.register(new, now_s)
        listed = kept
        registry.check()
        assert registry.num_workers == len(listed)
        but = rng.sample([f"w{i}" for i in range(16)], rng.randrange(5))
        others = sorted(set(listed) - set(but))
        if others:
            assert registry.look_up_any(step, but=but).worker is listed[others[step % len(others)]][0]
    assert full
