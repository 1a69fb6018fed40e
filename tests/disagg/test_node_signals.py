"""Signals to a machine's part of a worker: node 0, which may have received them too, keeps its ranks for its drain."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest

from disagg.config import DisaggConfig
from disagg.processes.children import Children
from disagg.processes.node import leaving_node_0_time, watch_node_0
from disagg.processes.rendezvous import Control, NodeBye
from disagg.processes.session_plan import SessionPlan
from disagg.processes.worker import undone_in_order
from engine.config import EngineConfig, ServerConfig
from engine.frontend.bootstraps import BootstrapAllowlist
from service.process.stop_signals import DRAIN, END, TO_GROUPS

ENGINE = EngineConfig(nnodes=2, node_rank=1, tp_size=2, dist_init_addr="10.0.0.1:5000")
PLAN = SessionPlan(
    given=ENGINE,
    engine=ENGINE,
    server=ServerConfig(),
    disagg=DisaggConfig(),
    control_host="",
    bootstrap_allowlist=BootstrapAllowlist(),
)


def signals(*numbers: int) -> list[Callable[[], object]]:
    return [lambda number=number: os.kill(os.getpid(), number) for number in numbers]  # type: ignore[misc]


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*TO_GROUPS, DRAIN, END)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def ends() -> Iterator[tuple[Control, Control]]:
    """Node 0's end of the connection, and the other machine's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = Control(socket.create_connection(server.getsockname()))
        node_0 = Control(server.accept()[0])
    yield node_0, there
    node_0.close()
    there.close()


def run(there: Control, *happens: Callable[[], object], drain_timeout_s: float = 600.0) -> int:
    """Its ranks live; at each look at them the next thing happens."""
    todo = iter(happens)

    def watch() -> int:
        with leaving_node_0_time(drain_timeout_s) as is_over, patch.object(Children, "first_dead", look):
            return watch_node_0(PLAN, there, Children(), is_over)

    def look(children: Children) -> None:
        next(todo, lambda: None)()

    return undone_in_order(watch)


@pytest.mark.parametrize("first", [(signal.SIGTERM,), (DRAIN, DRAIN), (DRAIN, signal.SIGTERM), (signal.SIGTERM, DRAIN)])
def test_a_signal_to_the_whole_group_leaves_node_0_its_ranks_until_it_ends(
    ends: tuple[Control, Control], first: tuple[int, ...]
) -> None:
    node_0, there = ends
    looked = list[int]()
    assert run(there, *signals(*first), lambda: looked.append(1), lambda: node_0.send(NodeBye())) == 0
    assert looked


@pytest.mark.parametrize("two", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM), (DRAIN, END)])
def test_a_second_signal_ends_it_at_once(ends: tuple[Control, Control], two: tuple[int, ...]) -> None:
    with pytest.raises(SystemExit) as end:
        run(ends[1], *signals(*two))
    assert end.value.code == 0


def test_a_node_0_that_does_not_end_has_the_time_of_a_drain(
    ends: tuple[Control, Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.processes.node.LEAVES_S", 0.0)
    assert run(ends[1], *signals(signal.SIGTERM), drain_timeout_s=0.01) == 0
