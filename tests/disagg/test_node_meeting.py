"""Machines meet at --dist-init-addr, over loopback: what each gets, and what keeps them apart in one line."""

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from disagg.config import DisaggConfig
from disagg.processes.node import own_host
from disagg.processes.rendezvous import (
    CONTROL,
    Control,
    Met,
    NodeBye,
    NodeHello,
    NodeRefused,
    _version,
    check_same,
    flags_of,
    gathered,
    joined,
)
from disagg.processes.session_plan import SessionPlan
from engine.config import EngineConfig, ServerConfig
from engine.flags.nodes import wires, wires_at
from engine.frontend.bootstraps import BootstrapAllowlist
from engine.parallel.region_plan import RegionPlan
from engine.parallel.rendezvous import LOST_S, dial
from service.flags import ConfigError
from service.process.message_stream import ChannelClosed

SECRET = b"a secret of the cluster"
REGION = RegionPlan(ranks=2, stages=2, vocab=10)
UNIFIED, PREFILL = DisaggConfig(), DisaggConfig(disaggregation_mode="prefill")


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def config(node: int, address: str, **flags: object) -> EngineConfig:
    sizes = {"tp_size": 2, "pp_size": 2, "nnodes": 2, "dist_timeout_s": 60.0, **flags}
    return EngineConfig(node_rank=node, dist_init_addr=address, **sizes)  # type: ignore[arg-type]


@contextmanager
def met(configs: Sequence[EngineConfig], disagg: DisaggConfig) -> Iterator[list[Met]]:
    """What each machine has; they come in the reverse order."""
    with ThreadPoolExecutor(len(configs)) as pool, ExitStack() as stack:
        joining = [pool.submit(stack.enter_context, joined(own, disagg, secret=SECRET)) for own in configs[:0:-1]]
        near = stack.enter_context(gathered(configs[0], disagg, REGION, secret=SECRET))
        yield [near, *(future.result() for future in reversed(joining))]


def refusals(near: EngineConfig, far: EngineConfig, *, far_secret: bytes = SECRET) -> list[str]:
    """What each of the two says."""

    def wait() -> str:
        with pytest.raises(ConfigError) as refused, gathered(near, UNIFIED, REGION, secret=SECRET):
            pass
        return str(refused.value)

    def join() -> str:
        with pytest.raises(ConfigError) as refused, joined(far, UNIFIED, secret=far_secret):
            pass
        return str(refused.value)

    with ThreadPoolExecutor(2) as pool:
        return [said.result() for said in (pool.submit(wait), pool.submit(join))]


@pytest.mark.parametrize(
    ("sizes", "disagg"),
    [
        ({"tp_size": 2, "pp_size": 2, "nnodes": 2}, UNIFIED),
        ({"tp_size": 4, "pp_size": 1, "nnodes": 4}, PREFILL),
        ({"tp_size": 1, "pp_size": 4, "nnodes": 4}, PREFILL),
    ],
)
def test_every_rank_gets_its_connections_and_the_end_is_said(sizes: dict[str, int], disagg: DisaggConfig) -> None:
    address = free_address()
    configs = [config(node, address, **sizes) for node in range(sizes["nnodes"])]
    transfers = disagg is PREFILL
    with met(configs, disagg) as machines:
        for own, machine in zip(configs, machines, strict=True):
            assert machine.region == REGION
            assert set(machine.wires) == set(wires_at(own.node_rank, own, transfers=transfers))
        for wire in wires(configs[0], transfers=transfers):
            one, other = (machine.wires[wire] for machine in machines if wire in machine.wires)
            one.sendall(wire.name.encode())
            assert other.recv(100) == wire.name.encode()
            for end in (one, other):  # a machine that is gone without a word ends it
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == LOST_S * 1000
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and end.gettimeout() is None
        for node, control in machines[0].controls.items():
            control.send(NodeBye())
            control.close()
            far = machines[node].controls[0]
            assert far.receive(within_s=60) == NodeBye()
            with pytest.raises(ChannelClosed):
                far.receive(within_s=60)


def test_ranks_have_the_ends_that_they_use() -> None:
    address = free_address()
    with met([config(node, address) for node in (0, 1)], PREFILL) as (near, far):
        assert set(near.of_rank(2)) == set(near.of_rank(3)) == {"before"} and near.host is None
        assert set(far.of_rank(0)) == set(far.of_rank(1)) == {"after"} and far.host == "127.0.0.1"
        ends = (near.plan_of(1), far.plan_of(1)), (near.engine_of(1), far.engine_of(1))
        for one, other in ends:
            assert one.getsockname() == other.getpeername()


def test_other_flags_are_refused_by_both_with_both_values() -> None:
    address = free_address()
    near, far = refusals(config(0, address), config(1, address, page_size=32))
    assert near == far and near.startswith("--page-size: node 0 has 16, node 1 (ranks 0 to 1) 32; ")
    near, far = refusals(config(0, address), config(1, address, tp_size=4))
    assert near == far and near.startswith("--tp-size: node 0 has 2, node 1 (ranks 0 to 1) 4; ")
    near, far = refusals(config(0, address), config(3, address, pp_size=4, nnodes=4))
    assert near == far and near.startswith("--nnodes: node 0 has 2, a node with --node-rank 3 has 4; ")


def test_nodes_differ_in_what_is_their_machines_alone() -> None:
    near, far = config(0, "a:1", random_seed=1, model_path="/a"), config(1, "a:1", random_seed=2, model_path="/b")
    elsewhere = DisaggConfig(disaggregation_mode="prefill", disaggregation_control_host="10.0.0.2")
    check_same(near, PREFILL, flags_of(far, elsewhere), node=1)
    backend = DisaggConfig(disaggregation_mode="prefill", disaggregation_transfer_backend="mooncake")
    for theirs, said in (
        (
            flags_of(config(1, "a:1", max_total_tokens=64), PREFILL),
            r"--max-total-tokens: node 0 has none, node 1 .* 64;",
        ),
        (flags_of(far, backend), r"--disaggregation-transfer-backend: node 0 has nixl, node 1 .* mooncake;"),
        (flags_of(far, UNIFIED), r"--disaggregation-mode: node 0 has prefill, node 1 .* null;"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_same(near, PREFILL, theirs, node=1)


def test_another_secret_is_named_by_both() -> None:
    address = free_address()
    short = {"dist_timeout_s": 0.5}
    near, far = refusals(config(0, address, **short), config(1, address, **short), far_secret=b"another one")
    assert f"node 1 of 2 (ranks 0 to 1) did not come to --dist-init-addr {address}" in near
    assert f"node 0 is not at --dist-init-addr {address}" in far
    assert all(said.startswith("--dist-timeout 0.5: ") and "(--cluster-secret-file)" in said for said in (near, far))


def test_a_node_that_does_not_come_is_named_beside_those_that_did() -> None:
    address = free_address()
    sizes = {"tp_size": 1, "pp_size": 4, "nnodes": 4, "dist_timeout_s": 1.0}
    near, far = refusals(config(0, address, **sizes), config(2, address, **sizes))
    assert "node 1 of 4 (rank 0), node 3 of 4 (rank 2) did not come" in near
    assert "or another node did not come" in far


def test_two_nodes_of_one_number_are_distinguished() -> None:
    """The last one counts: it may have been started again."""
    address = free_address()
    sizes = {"tp_size": 1, "pp_size": 4, "nnodes": 4}
    own = config(0, address, **sizes)
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        waiting = pool.submit(stack.enter_context, gathered(own, UNIFIED, REGION, secret=SECRET))
        host, port = address.split(":")
        twins = []
        for _ in range(2):
            twins.append(Control(dial(host, int(port), secret=SECRET, group=CONTROL, within_s=60)))
            stack.callback(twins[-1].close)
            twins[-1].send(NodeHello(_version(), 1, 0, flags_of(config(1, address, **sizes), UNIFIED)))
        said = twins[0].receive(within_s=60)
        assert isinstance(said, NodeRefused) and said.text.startswith("--node-rank 1: another node (127.0.0.1) came")
        Control(dial(host, int(port), secret=SECRET, group=CONTROL, within_s=60)).close()
        with pytest.raises(ConfigError, match="did not come"):
            waiting.result()


def test_a_port_that_is_taken_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(
                ConfigError, match=f"--dist-init-addr {address}: node 0 cannot listen there: Address already"
            ),
            gathered(config(0, address), UNIFIED, REGION, secret=SECRET),
        ):
            pass


def test_an_address_of_another_machine_is_named() -> None:
    """As where all nodes get the same --disaggregation-control-host."""
    disagg = DisaggConfig(disaggregation_mode="decode", disaggregation_control_host="192.0.2.1")
    met_there = Met({}, REGION, {}, "10.0.0.2")
    plan = SessionPlan(
        given=config(1, "10.0.0.1:5000"),
        engine=config(1, "10.0.0.1:5000"),
        server=ServerConfig(),
        disagg=disagg,
        control_host="",
        bootstrap_allowlist=BootstrapAllowlist(),
    )
    said = "--disaggregation-control-host 192.0.2.1: not an address of node 1 .* without the flag it is 10.0.0.2, "
    with pytest.raises(ConfigError, match=said):
        own_host(plan, met_there)
    everywhere = DisaggConfig(disaggregation_mode="decode", disaggregation_control_host="0.0.0.0")
    with pytest.raises(ConfigError, match=r"--disaggregation-control-host 0\.0\.0\.0: peers need one address"):
        own_host(replace(plan, disagg=everywhere), met_there)
    unnamed = replace(plan, disagg=DisaggConfig(disaggregation_mode="decode"))
    assert own_host(unnamed, replace(met_there, host="127.0.0.1")) == "127.0.0.1"


def test_node_0_waits_for_its_name_to_have_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pod's, which DNS learns after the pod has started."""
    address, known, asked = free_address(), socket.getaddrinfo, list[str]()
    port = address.partition(":")[2]

    def resolve(host: str, *args: Any, **how: Any) -> Any:
        if host == "leader.group" and host not in asked:
            asked.append(host)
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known("127.0.0.1" if host == "leader.group" else host, *args, **how)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with met([config(node, f"leader.group:{port}") for node in (0, 1)], UNIFIED) as (near, far):
        assert near.wires.keys() == far.wires.keys() and asked
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolve("leader.group") if not asked.clear() else None)
    with (
        pytest.raises(
            ConfigError, match=r"--dist-init-addr leader\.group:1: node 0 cannot listen there: Name or service"
        ),
        gathered(config(0, "leader.group:1", dist_timeout_s=0.1), UNIFIED, REGION, secret=SECRET),
    ):
        pass


def test_a_node_that_goes_while_they_meet_is_named() -> None:
    address = free_address()
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        waiting = pool.submit(stack.enter_context, gathered(config(0, address), UNIFIED, REGION, secret=SECRET))
        host, port = address.split(":")
        dial(host, int(port), secret=SECRET, group=CONTROL, within_s=60).close()
        with pytest.raises(ConfigError, match=r"node 1 of 2 .* did not come .*end of file"):
            waiting.result()
