"""Which machine holds which ranks, what connects them, and flags that cannot be. Pure."""

import msgspec
import pytest

from engine.config import EngineConfig
from engine.nodes import address_of, check_nodes, check_same, leader_of, ranks_of, wires
from service.flags import ConfigError

MEETING = {"nnodes": 2, "dist_init_addr": "10.0.0.1:5000"}


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (8, 1), (1, 2), (2, 2), (4, 4), (3, 2)])
def test_node_0_leads_and_every_rank_has_a_node(tp_size: int, pp_size: int) -> None:
    config = EngineConfig(tp_size=tp_size, pp_size=pp_size, **MEETING)
    near, far = ranks_of(0, config), ranks_of(1, config)
    assert leader_of(config) in near
    assert sorted([*near, *far]) == list(range(tp_size * pp_size)) and len(near) == len(far)
    plans = [wire for wire in wires(config) if wire.kind == "plan"]
    assert [(wire.on_node_0, wire.on_node_1) for wire in plans] == [(leader_of(config), rank) for rank in far]
    rest = [wire for wire in wires(config) if wire.kind != "plan"]
    assert all(wire.on_node_0 in near and wire.on_node_1 in far for wire in rest)
    if pp_size == 1:  # rank i of one machine exchanges with rank i of the other
        assert [wire.at(1) for wire in rest] == [(rank, "sum") for rank in far]
    else:  # each rank of the stage before the cut gives its states to the same of the next
        assert [(wire.at(1), wire.at(0)) for wire in rest] == [
            ((rank, "after"), (rank + tp_size, "before")) for rank in far[-tp_size:]
        ]


def test_one_machine_connects_nothing() -> None:
    config = EngineConfig(tp_size=4, pp_size=2)
    assert wires(config) == [] and list(ranks_of(0, config)) == list(range(8))
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
        ({**MEETING, "tp_size": 2, "pp_size": 3}, "--nnodes 2: --tp-size 2, --pp-size 3 would cut a stage in two"),
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


def test_nodes_differ_in_what_is_their_machines_alone() -> None:
    def flags(**given: object) -> dict[str, object]:
        return msgspec.to_builtins(EngineConfig(tp_size=2, **MEETING, **given))  # type: ignore[arg-type, no-any-return]

    check_same(
        flags(random_seed=1, model_path="/a"), flags(random_seed=2, model_path="/b", node_rank=1), ranks=range(1, 2)
    )
    with pytest.raises(ConfigError, match=r"--page-size: node 0 has 16, node 1 \(rank 1\) 32; give all nodes the same"):
        check_same(flags(), flags(page_size=32), ranks=range(1, 2))
    with pytest.raises(ConfigError, match=r"--max-total-tokens: node 0 has 64, node 1 \(ranks 2 to 3\) none"):
        check_same(flags(max_total_tokens=64), flags(), ranks=range(2, 4))
