"""Which machine holds which ranks, what connects them, and flags that cannot be. Pure."""

import pytest

from engine.config import EngineConfig
from engine.flags.nodes import ENGINE, PLAN, address_of, check_nodes, leader_of, node_of, ranks_of, wires, wires_at
from service.flags import ConfigError

MEETING = {"nnodes": 2, "dist_init_addr": "10.0.0.1:5000"}


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "nnodes"),
    [(2, 1, 2), (8, 1, 2), (1, 2, 2), (2, 2, 2), (4, 4, 2), (3, 2, 2), (8, 1, 4), (8, 1, 8), (2, 4, 4), (1, 6, 3)],
)
def test_node_0_leads_and_every_rank_has_its_connections(tp_size: int, pp_size: int, nnodes: int) -> None:
    config = EngineConfig(tp_size=tp_size, pp_size=pp_size, nnodes=nnodes, dist_init_addr="10.0.0.1:5000")
    nodes = [ranks_of(node, config) for node in range(nnodes)]
    assert leader_of(config) in nodes[0]
    assert sorted(rank for ranks in nodes for rank in ranks) == list(range(tp_size * pp_size))
    assert [{node_of(rank, config) for rank in ranks} for ranks in nodes] == [{node} for node in range(nnodes)]
    found = wires(config, transfers=True)
    for kind in (PLAN, ENGINE):
        ends = [(wire.first, wire.second) for wire in found if wire.kind == kind]
        assert ends == [(leader_of(config), rank) for ranks in nodes[1:] for rank in ranks]
    assert [wire for wire in found if wire.kind != ENGINE] == wires(config, transfers=False)
    rest = [wire for wire in found if not wire.is_the_leaders]
    assert all(node_of(wire.first, config) != node_of(wire.second, config) for wire in rest)
    if pp_size == 1:  # over all rounds each rank can reach the same rank of every machine
        for rank in range(tp_size):
            reached = {rank}
            for wire in rest:
                reached |= {wire.first, wire.second} if reached & {wire.first, wire.second} else set()
            assert reached == set(range(rank % config.ranks_here, tp_size, config.ranks_here))
    else:  # each rank of the stage before a cut gives its states to the same of the next
        assert [(wire.end_of(wire.first), wire.end_of(wire.second)) for wire in rest] == [("after", "before")] * len(
            rest
        )
        assert {wire.second - wire.first for wire in rest} == {tp_size} and len(rest) == tp_size * (nnodes - 1)
    both = [wires_at(node, config, transfers=True) for node in range(nnodes)]
    assert sorted(wire for mine in both for wire in mine) == sorted(found * 2)
    for node, mine in enumerate(both):
        for wire, other in mine.items():
            assert both[other][wire] == node


def test_one_machine_connects_nothing() -> None:
    config = EngineConfig(tp_size=4, pp_size=2)
    assert wires(config, transfers=True) == [] and list(ranks_of(0, config)) == list(range(8))
    check_nodes(config)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"node_rank": 1}, "--node-rank 1: --nnodes 1 has nodes 0 to 0"),
        ({**MEETING, "dist_init_addr": None, "tp_size": 2}, "--dist-init-addr None: --nnodes 2 needs HOST:PORT"),
        ({**MEETING, "dist_init_addr": "10.0.0.1", "tp_size": 2}, "--dist-init-addr 10.0.0.1: "),
        ({**MEETING, "dist_init_addr": "10.0.0.1:0", "tp_size": 2}, "--dist-init-addr 10.0.0.1:0: "),
        (MEETING, "--nnodes 2: does not divide the 1 ranks of --tp-size 1, --pp-size 1"),
        ({**MEETING, "tp_size": 3}, "--nnodes 2: does not divide the 3 ranks"),
        ({**MEETING, "tp_size": 2, "pp_size": 3}, "--nnodes 2: --tp-size 2, --pp-size 3 would cut a stage; "),
        ({**MEETING, "nnodes": 3, "tp_size": 6}, "--nnodes 3: sums over machines need 2, 4, 8 or more powers of two"),
        (
            {**MEETING, "nnodes": 4, "tp_size": 4, "pp_size": 2},
            "--nnodes 4: --tp-size 4, --pp-size 2 would cut a stage; ",
        ),
        ({**MEETING, "tp_size": 6}, "--nnodes 2: 3 ranks a node of --tp-size 6"),
        ({**MEETING, "tp_size": 2, "dp_size": 2}, "--dp-size 2: not with --nnodes 2"),
        ({**MEETING, "tp_size": 2, "device": "cuda"}, "--nnodes 2: ranks on several machines are for CPUs yet"),
        ({**MEETING, "tp_size": 2, "stream": "threaded"}, "--stream threaded: "),
    ],
)
def test_what_machines_cannot_divide_is_refused(flags: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_nodes(EngineConfig(**flags))  # type: ignore[arg-type]
    assert str(refused.value).startswith(said)


def test_what_works() -> None:
    check_nodes(EngineConfig(tp_size=2, pp_size=2, stream="threaded", **MEETING))
    check_nodes(EngineConfig(tp_size=4, stream="threaded", disable_overlap_schedule=True, **MEETING))
    assert address_of(EngineConfig(nnodes=2, dist_init_addr="[fd00::1]:5000")) == ("fd00::1", 5000)
