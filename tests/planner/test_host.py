"""Cores that all share: never more work than they can do, and nobody is slowed down where there are enough."""

import random

import pytest

from planner.host import Host, Threads


def test_enough_cores_or_none_named_slow_nobody_down() -> None:
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
