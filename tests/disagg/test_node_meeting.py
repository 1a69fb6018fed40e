"""Two machines meet at --dist-init-addr, over loopback: what each gets, and what keeps them apart in one line."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from disagg.node_meeting import CONTROL, NodeBye, gathered, joined
from engine.config import EngineConfig
from engine.nodes import wires
from engine.parallel.meeting import LOST_S, dial
from engine.parallel.region_plan import RegionPlan
from service.flags import ConfigError
from service.process.message_stream import ChannelClosed

SECRET = b"a secret of the cluster"
REGION = RegionPlan(ranks=2, stages=2, vocab=10)


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def config(node: int, address: str, **flags: object) -> EngineConfig:
    sizes = {"tp_size": 2, "pp_size": 2, "nnodes": 2, "dist_timeout_s": 60.0, **flags}
    return EngineConfig(node_rank=node, dist_init_addr=address, **sizes)  # type: ignore[arg-type]


def refusals(near: EngineConfig, far: EngineConfig, *, far_secret: bytes = SECRET) -> list[str]:
    """What each of the two says."""

    def wait() -> str:
        with pytest.raises(ConfigError) as refused, gathered(near, REGION, secret=SECRET):
            pass
        return str(refused.value)

    def join() -> str:
        with pytest.raises(ConfigError) as refused, joined(far, secret=far_secret):
            pass
        return str(refused.value)

    with ThreadPoolExecutor(2) as pool:
        return [said.result() for said in (pool.submit(wait), pool.submit(join))]


def test_every_rank_gets_its_connections_and_the_end_is_said() -> None:
    address = free_address()
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        joining = pool.submit(stack.enter_context, joined(config(1, address), secret=SECRET))
        with gathered(config(0, address), REGION, secret=SECRET) as near:
            far = joining.result()
            assert far.region == REGION and list(far.wires) == list(near.wires) == wires(config(0, address))
            for wire, sock in near.wires.items():
                sock.sendall(wire.name.encode())
                assert far.wires[wire].recv(100) == wire.name.encode()
                for end in (sock, far.wires[wire]):  # a machine that is gone without a word ends it
                    assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == LOST_S * 1000
                    assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and end.gettimeout() is None
            assert set(near.of_rank(2, 0)) == set(near.of_rank(3, 0)) == {"before"} and near.of_rank(0, 0) == {}
            assert set(far.of_rank(0, 1)) == set(far.of_rank(1, 1)) == {"after"}
            near.control.send(NodeBye())
        assert far.control.receive(within_s=60) == NodeBye()
        with pytest.raises(ChannelClosed):
            far.control.receive(within_s=60)


def test_other_flags_are_refused_by_both_with_both_values() -> None:
    address = free_address()
    near, far = refusals(config(0, address), config(1, address, page_size=32))
    assert near == far and near.startswith("--page-size: node 0 has 16, node 1 (ranks 0 to 1) 32; ")
    near, far = refusals(config(0, address), config(1, address, tp_size=4))
    assert near == far and near.startswith("--tp-size: node 0 has 2, node 1 (ranks 0 to 1) 4; ")


def test_another_secret_is_named_by_both() -> None:
    address = free_address()
    short = {"dist_timeout_s": 0.5}
    near, far = refusals(config(0, address, **short), config(1, address, **short), far_secret=b"another one")
    assert f"node 1 of 2 (ranks 0 to 1) did not come to --dist-init-addr {address}" in near
    assert f"node 0 is not at --dist-init-addr {address}" in far
    assert all(said.startswith("--dist-timeout 0.5: ") and "(--cluster-secret-file)" in said for said in (near, far))


def test_a_port_that_is_taken_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(
                ConfigError, match=f"--dist-init-addr {address}: node 0 cannot listen there: Address already"
            ),
            gathered(config(0, address), REGION, secret=SECRET),
        ):
            pass


def test_a_node_that_goes_while_they_meet_is_named() -> None:
    address = free_address()
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        waiting = pool.submit(stack.enter_context, gathered(config(0, address), REGION, secret=SECRET))
        host, port = address.split(":")
        dial(host, int(port), secret=SECRET, group=CONTROL, within_s=60).close()
        with pytest.raises(ConfigError, match=r"node 1 of 2 .* did not come .*end of file"):
            waiting.result()
