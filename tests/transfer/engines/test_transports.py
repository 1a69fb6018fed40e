"""What carried a trial write, and why a GPU's is slow: tables over evidence, sockets of this process, and the driver's turn."""

import contextlib
import logging
import re
import socket
from dataclasses import replace
from typing import Any

import pytest

from tests.transfer.rig import Pair, until
from tests.transfer.ways import SlowEngine
from transfer_backends.contract import BackendUnavailable
from transfer_backends.engines import registry
from transfer_backends.prefill.paths import ConnectPeer
from transfer_backends.prefill.trials import MAX_REPORTED, Trials, delivered
from transfer_backends.sides import KVPoll
from transfer_backends.transports import (
    Evidence,
    RdmaFacts,
    Surroundings,
    explain_slow_gpu,
    name_transport,
    surroundings_of,
    tcp_bytes_acked,
)
from transfer_backends.wire import Origin

NO_RDMA, HOST_ONLY = RdmaFacts(False), RdmaFacts(True)
RDMA = RdmaFacts(True, modules="nvidia_peermem 16384 0 - Live 0x0\n")
SIZE = 1000


def around(near: bool | None = True, rdma: RdmaFacts = NO_RDMA, **facts: Any) -> Surroundings:
    return Surroundings(
        **{"near": near, "one_namespace": near, "rdma": rdma, "inside": "cma", "backend": "nixl"} | facts
    )


@pytest.mark.parametrize(
    ("new", "everything", "where", "name"),
    [
        (990, 990, around(), "tcp"),
        (990, 990, around(near=None), "tcp"),
        (0, 40, around(), "cma"),
        (0, 40, around(inside="cuda_ipc"), "cuda_ipc"),
        (0, 40, around(rdma=RDMA), "unknown"),  # RDMA may have looped back
        (0, 40, around(near=False, rdma=RDMA), "rdma"),
        (0, 40, around(near=False), "unknown"),
        (0, 40, around(near=False, inside="nvlink"), "nvlink"),
        (990, 990, around(inside="nvlink"), "tcp"),
        (0, 40, around(near=None, rdma=RDMA), "unknown"),
        (0, 5000, around(), "unknown"),  # older sockets: another transfer's, or this peer's
        (None, None, around(), "unknown"),
    ],
)
def test_a_transport_is_named_if_only_one_can_have_carried_the_bytes(
    new: int | None, everything: int | None, where: Surroundings, name: str
) -> None:
    assert name_transport(Evidence(SIZE, 1.0, new, everything), where) == name


@pytest.mark.parametrize(
    ("transport", "gb_s", "where", "text"),
    [
        ("cuda_ipc", 200, around(), None),
        ("rdma", 45, around(near=False, rdma=RDMA), None),
        ("unknown", 200, around(one_namespace=False), None),  # RDMA between two pods of a machine
        ("tcp", 2, around(one_namespace=False), "different PID namespaces.*shareProcessNamespace"),
        ("tcp", 2, around(ucx_tls="tcp,cuda_copy"), "UCX_TLS=tcp,cuda_copy leaves cuda_ipc out"),
        ("unknown", 2, around(ucx_tls="cuda_ipc,cuda_copy,tcp"), "nvidia-smi topo"),
        ("tcp", 9, around(backend="mooncake"), "protocol nvlink_intra, or --disaggregation-transfer-backend nixl"),
        ("nvlink", 2, around(inside="nvlink", backend="mooncake_nvlink_intra"), "nvidia-smi topo -m"),
        ("nvlink", 2, around(near=False, inside="nvlink"), "nvidia-smi topo -m"),
        ("tcp", 2, around(near=False), "no RDMA device"),
        ("rdma", 3, around(near=False, rdma=HOST_ONLY), "modprobe nvidia-peermem"),
        ("tcp", 2, around(near=False, rdma=RDMA), "memlock"),
    ],
)
def test_a_slow_way_of_a_gpu_s_pages_has_a_cause_and_a_remedy(
    transport: str, gb_s: float, where: Surroundings, text: str | None
) -> None:
    cause = explain_slow_gpu(transport, Evidence(int(gb_s * 1e9), 1.0, 0, 0), where)
    if text is None:
        assert cause is None
    else:
        assert cause is not None and re.search(text, cause)


def test_machines_and_namespaces_are_distinguished() -> None:
    def where(theirs: str) -> tuple[bool | None, bool | None]:
        found = surroundings_of("boot-1/pid:[1]", theirs, rdma=NO_RDMA, inside="cma", backend="nixl", ucx_tls="")
        return found.near, found.one_namespace

    assert where("boot-1/pid:[1]") == (True, True)
    assert where("boot-1/pid:[2]") == (True, False)
    assert where("boot-2/pid:[1]") == (False, False)
    assert where("") == (None, None)


@pytest.mark.parametrize(
    ("facts", "reaches"),
    [
        (RDMA, True),
        (RdmaFacts(True, modules="nv_peer_mem 1 0 - Live 0x0\n"), True),
        (
            RdmaFacts(
                True, kernel="6.8.0-45-generic", driver="NVRM version: NVIDIA UNIX Open Kernel Module for x86_64 580"
            ),
            True,
        ),
        (RdmaFacts(True, kernel="5.4.0", driver="NVRM version: NVIDIA UNIX Open Kernel Module for x86_64 580"), False),
        (RdmaFacts(True, kernel="6.8.0", driver="NVRM version: NVIDIA UNIX x86_64 Kernel Module 535"), False),
        (RdmaFacts(True, modules="mlx5_ib 1 0 - Live 0x0\nuses nvidia_peermem 1\n"), False),
    ],
)
def test_rdma_devices_without_a_way_into_a_gpu_are_a_shortfall(facts: RdmaFacts, reaches: bool) -> None:
    assert facts.reaches_gpu is reaches
    assert (facts.shortfall is None) is reaches
    assert NO_RDMA.shortfall is None


def test_bytes_of_this_process_s_sockets_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        known = tcp_bytes_acked()
        with socket.create_connection(server.getsockname()) as ours, server.accept()[0] as theirs:
            before = tcp_bytes_acked()
            for _ in range(16):
                ours.sendall(bytes(10_000))
                assert len(theirs.recv(10_000, socket.MSG_WAITALL)) == 10_000
            assert until(lambda: delivered(known, before, tcp_bytes_acked()))[0] == 160_000
            assert delivered(before, before, tcp_bytes_acked())[0] == 0  # known sockets
            assert (delivered(before, before, tcp_bytes_acked())[1] or 0) >= 160_000
    assert delivered(None, before, known) == (None, None)


def trials_of(engine: SlowEngine, *, on_gpu: bool) -> Trials:
    return Trials(
        caps=engine.caps,
        machine="boot-1/pid:[1]",
        on_gpu=on_gpu,
        clock=lambda: engine.now_s,
        sockets=lambda: {},
        rdma=lambda: NO_RDMA,
    )


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_slow_way_is_a_warning_for_a_gpu_alone(caplog: pytest.LogCaptureFixture, on_gpu: bool) -> None:
    caplog.set_level(logging.INFO)
    engine = SlowEngine(trial_s=0.5)
    engine.caps = replace(engine.caps, name="nixl")
    trials = trials_of(engine, on_gpu=on_gpu)
    for number in range(MAX_REPORTED + 3):
        command = ConnectPeer(f"life-{number}", b"", Origin("boot-1/pid:[2]", "10.0.0.7"))
        trials.before_connect(command.incarnation)
        started = trials.start(command, engine, "peer")
        assert started is not None
        trials.end(started[0])
    assert engine.calls["trial"] == MAX_REPORTED + 3 and len(trials.paths) == MAX_REPORTED
    assert [path.bytes_a_s for path in trials.paths] == [2e9] * MAX_REPORTED
    trials.forget("life-66")
    assert trials.paths[-1].peer == "life-65"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == on_gpu * (MAX_REPORTED + 3)
    assert all("'10.0.0.7' at 2.00 GB/s" in text and "shareProcessNamespace" in text for text in warnings)
    assert "transport unknown, 2.00 GB/s" in caplog.text


def test_a_path_opens_after_its_trial_and_a_refused_one_is_tried_again(pairs: Any) -> None:
    pair: Pair = pairs(SlowEngine(trial_s=0.5, trial=1), handshake_timeout_s=5.0)
    receiver = pair.decode.receiver(1, bootstrap="b")
    until(lambda: receiver.poll() is KVPoll.WaitingForInput)
    assert pair.engine.calls["trial"] == 2 and pair.prefill.counters["connect_failures"] == 1
    receiver.abort("enough")
    pair.works(2)
    pair.works(3)
    assert pair.engine.calls["trial"] == 2, "a request entered the code of a connection"
    assert len(pair.prefill.paths) == 1
    until(receiver.drained)
    receiver.close()


def test_a_worker_says_at_its_start_that_rdma_cannot_reach_its_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "rdma_facts", lambda: HOST_ONLY)
    for backend, device in (("fake", 0), ("none such", None), ("none such", 0)):
        with contextlib.suppress(BackendUnavailable):
            registry.make_engine(backend, device=device)
    (record,) = caplog.records
    assert "nvidia-peermem" in record.getMessage() and record.levelno == logging.WARNING
