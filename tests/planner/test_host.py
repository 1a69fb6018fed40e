"""Cores that all share: never more work than they can do, and nobody is slowed down where there are enough."""

import random

import pytest

from planner.executor import Host, Threads, core_shares


def test_enough_cores_or_none_named_slow_no_step() -> None:
    for host in (Host(2), Host(None)):
        assert host.finish("a", at_s=1.0, work_s=3.0) == pytest.approx(4.0)
        assert host.finish("b", at_s=2.0, work_s=3.0) == pytest.approx(5.0)


def test_two_on_one_core_share_it_and_the_first_pays_later() -> None:
    """ "a" was told 1.0 before "b" came, and had the core alone until then: it owes the half that it got too much."""
    host = Host(1)
    assert host.finish("a", at_s=0.0, work_s=1.0) == pytest.approx(1.0)
    assert host.finish("b", at_s=0.0, work_s=1.0) == pytest.approx(1.5)
    assert host.finish("a", at_s=2.0, work_s=1.0) == pytest.approx(3.5)
    assert host.finish("a", at_s=4.0, work_s=1.0) == pytest.approx(5.0)


def test_a_copy_takes_a_core_at_each_end() -> None:
    host = Host(2)
    host.finish("copy", at_s=0.0, work_s=1.0, threads=Threads(2))
    assert host.finish("step", at_s=0.0, work_s=1.0) == pytest.approx(
        1 + 1 / 3
    )  # 2 cores for 3 threads, one second long


@pytest.mark.parametrize(("cores", "others"), [(1, 1), (2, 2), (1.5, 1), (3, 5)])
def test_in_the_long_run_all_cores_are_used_and_no_more(cores: float, others: int) -> None:
    host, draw = Host(cores), random.Random(4)
    free_s = [0.0] * (others + 1)
    done_s = 0.0
    for _ in range(4000):
        who = free_s.index(min(free_s))
        work_s = draw.choice((0.01, 0.05, 0.7))
        free_s[who] = host.finish(who, at_s=free_s[who], work_s=work_s)
        done_s += work_s
    assert done_s / min(free_s) == pytest.approx(cores, rel=0.03)


def test_bound_work_has_its_own_cores_and_what_goes_anywhere_fills_the_rest() -> None:
    """Two workers of a core each: two threads on the first leave the second alone, and a third thread shares with all."""
    one, other, free = Threads(home="a"), Threads(home="b"), Threads()
    assert core_shares(2, 1, [one, one, other]) == [0.5, 0.5, 1.0]
    assert core_shares(2, 1, [one, other, free]) == pytest.approx([2 / 3] * 3)
    assert core_shares(2, 1, [one, one, one, free]) == pytest.approx([1 / 3] * 3 + [1.0])
    assert core_shares(4, 2, [Threads(4, "a"), Threads(2, "b")]) == [0.5, 1.0]
    assert core_shares(2, None, [free, free, free]) == pytest.approx([2 / 3] * 3)


@pytest.mark.parametrize("seed", range(20))
def test_shares_use_no_core_twice_and_leave_none_idle_that_is_wanted(seed: int) -> None:
    draw = random.Random(seed)
    homes = ["a", "b", "c"]
    running = [Threads(draw.randint(1, 3), draw.choice([None, *homes])) for _ in range(draw.randint(1, 7))]
    shares = core_shares(6, 2, running)
    used = {home: sum(t.num * s for t, s in zip(running, shares, strict=True) if t.home == home) for home in homes}
    assert all(part <= 2 + 1e-9 for part in used.values()) and max(shares) <= 1
    total, wanted = sum(t.num * s for t, s in zip(running, shares, strict=True)), sum(t.num for t in running)
    full = sum(part > 2 - 1e-9 for part in used.values())
    assert total <= 6 + 1e-9
    assert total == pytest.approx(min(6, wanted)) or full  # what is not used, no thread outside of a full home wants
    assert all(
        share == 1
        for t, share in zip(running, shares, strict=True)
        if total < 6 - 1e-9 and used.get(t.home, 0) < 2 - 1e-9
    )


def test_steps_slow_each_other_down_by_what_was_measured() -> None:
    """A tenth longer while the other core computes: both, whichever began first; alone nothing changes."""
    host = Host(2)
    slower = Threads(beside=0.1)
    assert host.finish("a", at_s=0.0, work_s=1.0, threads=slower) == pytest.approx(1.0)
    assert host.finish("b", at_s=0.0, work_s=1.0, threads=slower) == pytest.approx(1.0 + 0.1 * 1.0, rel=0.01)
    assert host.finish("a", at_s=5.0, work_s=1.0, threads=slower) == pytest.approx(6.0 + 0.0909, rel=0.01)
    assert host.finish("c", at_s=20.0, work_s=1.0, threads=slower) == pytest.approx(21.0)
