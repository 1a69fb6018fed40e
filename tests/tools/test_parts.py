"""The instruments of the matrix and the soak: they must see what they are there to see."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import product

import pytest

from deploy.launcher.probe import free_ports
from tests.e2e.cluster import wait_until
from tools.faults.cells import (
    BACKENDS,
    SILENCE_S,
    Cell,
    Fault,
    Phase,
    Size,
    Victim,
    all_cells,
    chosen,
    must_be_right,
    why_not,
)
from tools.faults.household import MARK, Household
from tools.faults.lane import hold_to_bounds
from tools.faults.load import Outcome, judge
from tools.faults.matrix import lanes
from tools.faults.memory import Curve, trend
from tools.faults.network import Link, Network
from tools.faults.report import BY_ROUTER, verdict
from tools.faults.run_cell import Result

ANSWER_S = 60.0


def test_every_cell_is_run_or_has_a_reason() -> None:
    cells = list(all_cells())
    assert (
        len({cell.name for cell in cells})
        == len(cells)
        == len(Size) * len(BACKENDS) * len(Fault) * len(Victim) * len(Phase)
    )
    assert set(chosen([])) == {cell for cell in cells if why_not(cell) is None}
    assert sorted(cell for lane in lanes(chosen([])) for cell in lane) == sorted(chosen([]))


def test_what_must_be_right() -> None:
    assert must_be_right(Cell(Fault.KILL, Victim.PREFILL, Phase.DECODING))
    assert must_be_right(Cell(Fault.KILL, Victim.PREFILL_SCHEDULER, Phase.DECODING))
    assert not must_be_right(Cell(Fault.KILL, Victim.DECODE, Phase.DECODING))
    assert all(must_be_right(cell) for cell in chosen(["*:pairs", "stop:router"]))
    assert not any(must_be_right(cell) for cell in chosen(["cut:router"]))


def test_pairs_lose_each_kind_of_worker_in_each_way_and_phase() -> None:
    lost = {(c.fault, c.victim, c.phase) for c in chosen(["*:nixl:pairs"])}
    workers = (Victim.PREFILL, Victim.DECODE)
    schedulers = (Victim.PREFILL_SCHEDULER, Victim.DECODE_SCHEDULER)
    assert lost == {
        *product((Fault.KILL, Fault.RESTART, Fault.STOP, Fault.FREEZE), (*workers, *schedulers), Phase),
        *product((Fault.UNPLUG, Fault.UNPLUG_FOR_GOOD, Fault.DRAIN), workers, Phase),
    }


def test_a_silent_stream_is_seen() -> None:
    outcome = Outcome("right", 9.0, events_s=[1.0, 2.0, 6.0, 6.5])
    assert outcome.silence_s(1.5) == 4.0 and outcome.silence_s(4.0) == 2.0
    assert outcome.silence_s(7.0) == Outcome("right", 9.0).silence_s(0.0) == 0.0
    cell = Cell(Fault.FREEZE, Victim.DECODE, Phase.DECODING, size=Size.PAIRS)
    for seconds, ok in ((SILENCE_S - 0.1, True), (SILENCE_S + 0.1, False)):
        result = Result(cell.name, ok=True, silence_s=seconds)
        hold_to_bounds(cell, result)
        assert result.ok is ok and len(result.problems) == (not ok)


# ---- the network


@pytest.fixture
def echo() -> Iterator[tuple[Network, Link]]:
    """A link to a server that sends back what it gets."""
    target, port = free_ports(2)
    code = f"""
import asyncio
async def serve(r, w):
    while chunk := await r.read(100):
        w.write(chunk)
    w.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", {target})
    await server.serve_forever()
asyncio.run(main())
"""
    server, network = subprocess.Popen([sys.executable, "-c", code]), Network()
    try:
        wait_until(lambda: _reaches(target), within_s=ANSWER_S, what="the echo server listens")
        yield network, network.link(port=port, target=target)
    finally:
        network.close()
        server.kill()
        server.wait()


def _reaches(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def _said(sock: socket.socket, data: bytes, *, within_s: float = ANSWER_S) -> bytes:
    sock.settimeout(within_s)
    sock.sendall(data)
    return sock.recv(100)


def test_a_cut_link_is_silent_and_healing_resets_it(echo: tuple[Network, Link]) -> None:
    _, link = echo
    with socket.create_connection(("127.0.0.1", link.port)) as old:
        assert _said(old, b"a") == b"a" and link.num_answered == 1
        link.cut()
        with pytest.raises(TimeoutError):
            _said(old, b"b", within_s=0.1)
        with socket.create_connection(("127.0.0.1", link.port)) as late, pytest.raises(TimeoutError):
            _said(late, b"c", within_s=0.1)
        link.heal()
        with pytest.raises(ConnectionResetError):
            _said(old, b"d")
    with socket.create_connection(("127.0.0.1", link.port)) as new:
        assert _said(new, b"e") == b"e"


def test_a_loosened_link_has_lost_nothing(echo: tuple[Network, Link]) -> None:
    _, link = echo
    with socket.create_connection(("127.0.0.1", link.port)) as sock:
        link.clog()
        sock.sendall(b"a")
        link.loosen()
        assert _said(sock, b"") == b"a"
        link.clog()
        link.cut()
        link.loosen()
        with pytest.raises(TimeoutError):
            _said(sock, b"b", within_s=0.1)


def test_a_link_without_a_server_is_reset() -> None:
    port, target = free_ports(2)
    network = Network()
    try:
        link = network.link(port=port, target=target)
        with socket.create_connection(("127.0.0.1", link.port)) as sock, pytest.raises(ConnectionResetError):
            _said(sock, b"a")
    finally:
        network.close()


# ---- what is left behind, what was answered


def test_left_over_processes_and_directories_are_seen() -> None:
    household = Household()
    orphan = subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: household.mark})
    folder = household.temp / "tandem-ipc-1-x"
    folder.mkdir()
    try:
        # The kernel shows a process's environment a moment after exec has succeeded.
        wait_until(lambda: orphan.pid in {p.pid for p in household.marked()}, within_s=60, what="marked")
        left = household.left_behind(within_s=0.0)
        assert len(left) == 2 and str(orphan.pid) in left[0] and folder.name in left[1]
    finally:
        orphan.kill()
        orphan.wait()
    folder.rmdir()
    assert household.close() == []


def test_an_answer_is_judged_by_the_oracle() -> None:
    prompt, right = [1, 20, 300, 20], b'{"output_ids": [300, 20], "meta_info": {}}'
    assert judge(200, right, prompt, 2) == ("right", "")
    first, both = b'data: {"output_ids": [300]}\n\n', b'data: {"output_ids": [300, 20]}\n\n'
    assert judge(200, first + both + b"data: [DONE]\n\n", prompt, 2)[0] == "right"
    for events in (first + both + both, first + first + both):  # one comes twice
        assert judge(200, events + b"data: [DONE]\n\n", prompt, 2)[0] == "wrong"
    assert judge(200, right, prompt, 3)[0] == "wrong"
    assert judge(200, b'{"output_ids": [300, 21]}', prompt, 2)[0] == "wrong"
    assert judge(200, b"", prompt, 2)[0] == "wrong"
    assert judge(503, b'{"error": {"message": "why"}}', prompt, 2) == ("error", "why")
    assert judge(500, b'{"error": {"message": ""}}', prompt, 2)[0] == "wrong"


# ---- memory


def test_a_leak_is_seen_and_warm_up_is_not_one() -> None:
    at_s = [float(t) for t in range(0, 900, 2)]
    warm = [100_000 + min(t, 100.0) * 500 for t in at_s]
    flat = trend(Curve("flat", at_s, warm))
    leak = trend(Curve("leak", at_s, [kib + t * 30 for kib, t in zip(warm, at_s, strict=True)]))
    assert flat is not None and leak is not None and trend(Curve("short", at_s[:180], warm[:180])) is None
    assert abs(flat.kib_a_minute) < 1 and leak.kib_a_minute == pytest.approx(1800)
    result = {"wrong": [], "problems": [], "requests": 20_000, "took_s": 600.0, "ends": {"right": 19_999, BY_ROUTER: 1}}
    assert verdict({**result, "trends": [vars(flat)]}) == []
    assert "1 requests" in verdict({**result, "ends": {"error": 1}, "trends": [vars(flat)]})[0]
    assert "leak" in verdict({**result, "trends": [vars(flat), vars(leak)]})[0]
    assert verdict({**result, "trends": []})
