"""Every counter and queue of every role has a metric, from the start: none appears with its first event."""

from collections.abc import Callable

import pytest

from engine.metric_names import check_exported
from tests.disagg.features.feature_roles import EncodeCluster
from tests.disagg.moving_roles import Trio
from tests.disagg.prefix_roles import PrefixCluster
from tests.disagg.two_roles import Cluster, RoleEngine

ENGINES: dict[str, Callable[[], RoleEngine]] = {
    "prefill": lambda: Cluster(pages=(9, 9)).prefill,
    "decode": lambda: Cluster(pages=(9, 9)).decode,
    "prefix": lambda: PrefixCluster().prefill,
    "moving": lambda: Trio(pages=(9, 9, 9)).engines["a"],
    "encode": lambda: EncodeCluster().encoder,
    "fetching": lambda: EncodeCluster().engine,
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_role_counts_only_what_is_exported(name: str) -> None:
    role = ENGINES[name]().role
    assert set(role.counters().values()) == {0}
    check_exported(role.counters(), role.queues())
