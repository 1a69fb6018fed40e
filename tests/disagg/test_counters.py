"""Every counter and queue of every role has a metric, from the start: none appears with its first event."""

from collections.abc import Callable
from typing import Any

import pytest

from disagg.features.moving import Moves
from engine.metric_names import check_exported
from tests.disagg.features.feature_roles import EncodeCluster
from tests.disagg.moving_roles import Trio
from tests.disagg.prefix_roles import PrefixCluster
from tests.disagg.two_roles import Cluster, RoleEngine, part_of

ENGINES: dict[str, Callable[[], RoleEngine]] = {
    "prefill": lambda: Cluster(pages=(9, 9)).prefill,
    "decode": lambda: Cluster(pages=(9, 9)).decode,
    "prefix": lambda: PrefixCluster().prefill,
    "moving": lambda: Trio(pages=(9, 9, 9)).by_name["a"],
    "encode": lambda: EncodeCluster().encoder,
    "fetching": lambda: EncodeCluster().engine,
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_role_counts_only_what_is_exported(name: str) -> None:
    role = ENGINES[name]().role
    assert set(role.counters().values()) == {0}
    check_exported(role.counters(), role.queues())


def _of_role(engine: RoleEngine) -> tuple[dict[str, int], RoleEngine]:
    role: Any = engine.role
    return role._manager.counters, engine


def _with_moves() -> tuple[dict[str, int], RoleEngine]:
    engine = Trio(pages=(9, 9, 9)).by_name["a"]
    counters: dict[str, int] = part_of(engine.role, Moves)._manager.counters  # type: ignore[assignment]
    return counters, engine


MANAGERS: dict[str, Callable[[], tuple[dict[str, int], RoleEngine]]] = {
    "prefill": lambda: _of_role(Cluster(pages=(9, 9)).prefill),
    "decode": lambda: _of_role(Cluster(pages=(9, 9)).decode),
    "moving": _with_moves,
    "prefix": lambda: ((cluster := PrefixCluster()).gets.counters, cluster.prefill),
    "fetching": lambda: ((cluster := EncodeCluster()).gets.counters, cluster.engine),
}


@pytest.mark.parametrize("name", MANAGERS)
def test_what_a_manager_counts_is_exported(name: str) -> None:
    counted, engine = MANAGERS[name]()
    counted["junk_frames"] = 7
    assert engine.role.counters().get("junk_frames") == 7
