"""Steps of a mixture's two ranks, whole and in two halves in turns: over shared memory, and as between machines with a slow link."""

import argparse
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_model import Experts, write_model
from deploy.bench.report import table
from engine.config import EngineConfig
from engine.core.two_batches import Splitter
from engine.device.measure import largest_steps
from engine.device.split_times import ALWAYS, StepSize, measured
from engine.flags.nodes import wires
from engine.flags.resolve import attention_tokens, resolve
from engine.kv.kv_pool import KVPool
from engine.model_files.model_config import load_model_config
from engine.parallel.region import SharedRegion
from engine.ranks.links import links_of, region_plan
from engine.ranks.rank_parts import rank_parts, steps_of_rank
from engine.ranks.share import loader
from service.process.start import die_with_parent

TITLE = "Steps in two halves"
TEXT = (
    "`--enable-two-batch-overlap`: a random bf16 mixture (8 layers of 512, 8 experts of 512 of which a token takes two), `--tp-size 2"
    " --ep-size 2`, in two processes of one thread each. Each size runs whole and in halves in turns; medians of rank 0. Ranks share"
    " memory, or exchange over TCP through a relay that delivers bytes so many ms later. A layer exchanges twice, and halves wait as often as whole"
    " steps, but compute meanwhile: so they hide at most what a layer computes."
)
SHAPE: dict[str, Any] = {"layers": 8, "hidden": 512, "intermediate": 512, "experts": Experts(8, 2)}
LINKS: tuple[float | None, ...] = (None, 0.0, 2.0, 5.0, 10.0)  # ms one way; None: shared memory
DECODES, PROMPTS = (4, 16, 64), (64, 256, 1024)
CONTEXT = 2048
END_S = 600.0


def measure(*, rounds: int) -> list[dict[str, Any]]:
    """One row a link and size of step."""
    with tempfile.TemporaryDirectory(prefix="tandem-halves-") as folder:
        write_model(Path(folder), **SHAPE)
        return [row for link in LINKS for row in _of_link(folder, link, rounds)]


def render(rows: list[dict[str, Any]]) -> str:
    return table(
        ["link", "step", "rows", "whole, ms", "in halves, ms", "halves / whole"],
        [
            [
                "shared memory" if row["delay_ms"] is None else f"TCP, {row['delay_ms']:g} ms",
                row["step"],
                str(row["rows"]),
                f"{row['whole_ms']:.2f}",
                f"{row['halves_ms']:.2f}",
                f"{row['halves_ms'] / row['whole_ms']:.2f}",
            ]
            for row in rows
        ],
    )


def _config(folder: str, *, nodes: int) -> EngineConfig:
    return EngineConfig(
        model_path=folder,
        tp_size=2,
        ep_size=2,
        dtype="bfloat16",
        enable_two_batch_overlap="on",
        max_running_requests=max(DECODES),
        chunked_prefill_size=max(PROMPTS),
        context_length=CONTEXT,
        num_threads=1,
        nnodes=nodes,
        dist_init_addr="127.0.0.1:1" if nodes > 1 else None,
    )


def _of_link(folder: str, delay_ms: float | None, rounds: int) -> list[dict[str, Any]]:
    nodes = 1 if delay_ms is None else 2
    given = _config(folder, nodes=nodes)
    model = load_model_config(folder)
    config = resolve(given, model, cuda=False)
    with ExitStack() as stack:
        regions = [SharedRegion.create(region_plan(config, model)) for _ in range(nodes)]
        for region in regions:
            stack.callback(region.close)
        ends = [wire.kind for wire in wires(config, transfers=False) if not wire.is_the_leaders]
        pairs = {end: stack.enter_context(relayed(delay_ms or 0.0)) for end in ends}
        ranks = [
            _start(folder, rank, nodes, rounds, regions[rank % nodes], {end: pair[rank] for end, pair in pairs.items()})
            for rank in range(2)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        printed, _ = ranks[0].communicate(timeout=END_S)
        assert [rank.wait(END_S) for rank in ranks] == [0, 0]
    return [{"delay_ms": delay_ms, **row} for row in json.loads(printed.splitlines()[-1])]


def _start(
    folder: str, rank: int, nodes: int, rounds: int, region: SharedRegion, ends: dict[str, socket.socket]
) -> "subprocess.Popen[str]":
    assert region.descriptor is not None
    named = [f"{end}={sock.fileno()}" for end, sock in ends.items()]
    args = [folder, rank, nodes, rounds, region.descriptor, *named]
    return subprocess.Popen(
        [sys.executable, "-m", __name__, *map(str, args)],
        pass_fds=[region.descriptor, *(sock.fileno() for sock in ends.values())],
        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        text=True,
        preexec_fn=die_with_parent(),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


# ---- a link


@contextmanager
def relayed(delay_ms: float) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two TCP sockets; what one sends the other gets `delay_ms` later."""
    (one, inner), (other, outer) = _tcp_pair(), _tcp_pair()
    threads = [
        thread for source, sink in ((inner, outer), (outer, inner)) for thread in _relay(source, sink, delay_ms / 1e3)
    ]
    for thread in threads:
        thread.start()
    try:
        yield one, other
    finally:
        for sock in (inner, outer):
            sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for sock in (one, inner, other, outer):
            sock.close()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here = server.accept()[0]
    for sock in (here, there):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, there


def _relay(source: socket.socket, sink: socket.socket, delay_s: float) -> list[threading.Thread]:
    under_way = queue.SimpleQueue[tuple[float, bytes]]()

    def receive() -> None:
        piece = b"first"
        while piece:
            piece = _received(source)
            under_way.put((time.monotonic() + delay_s, piece))

    def deliver() -> None:
        while (late := under_way.get())[1]:
            time.sleep(max(0.0, late[0] - time.monotonic()))
            with suppress(OSError):  # it has closed
                sink.sendall(late[1])

    return [threading.Thread(target=work, name="relay") for work in (receive, deliver)]


def _received(source: socket.socket) -> bytes:
    """b"": it has closed."""
    try:
        return source.recv(1 << 20)
    except OSError:
        return b""


# ---- a rank


def _rank(
    folder: str, rank: int, nodes: int, rounds: int, descriptor: int, ends: Sequence[str]
) -> list[dict[str, Any]]:
    model_config = load_model_config(folder)
    config = resolve(_config(folder, nodes=nodes), model_config, cuda=False)
    region = SharedRegion.open(descriptor, region_plan(config, model_config))
    named = (end.rsplit("=", 1) for end in ends)
    links = links_of(region, rank, config, {end: socket.socket(fileno=int(fd)) for end, fd in named})
    torch.set_num_threads(1)
    model = loader(config, model_config, links)(folder, model_config, progress=False)
    pool = KVPool(model.cache_specs(), num_pages=1, page_size=config.page_size, device="cpu", units=1)
    steps = largest_steps(config, model_config, positions=CONTEXT, decodes=True)
    splitter = Splitter(ALWAYS, attention_tokens=attention_tokens(model_config))
    sizes = [(False, rows) for rows in DECODES] + [(True, rows) for rows in PROMPTS]
    make = partial(rank_parts, config, model_config, model, links)
    with torch.inference_mode(), steps_of_rank(make, config, pool) as run:
        found = measured(run, [StepSize(config, steps, splitter, *size) for size in sizes], repeats=rounds)
    return [
        {
            "step": "prompt" if one.extend else "decode",
            "rows": one.rows,
            "whole_ms": 1e3 * one.whole_s,
            "halves_ms": 1e3 * one.halves_s,
        }
        for one in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    for name in ("rank", "nodes", "rounds", "descriptor"):
        parser.add_argument(name, type=int)
    parser.add_argument("ends", nargs="*", help="of the wires: NAME=DESCRIPTOR")
    args = parser.parse_args()
    print(json.dumps(_rank(args.folder, args.rank, args.nodes, args.rounds, args.descriptor, args.ends)))


if __name__ == "__main__":
    main()
