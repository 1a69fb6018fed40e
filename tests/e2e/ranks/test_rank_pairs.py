"""Workers of different shapes share KV, whole or layer by layer, and get back what was retracted; all shapes over real processes:
`make rank-shapes`."""

import math
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import pytest

from bootstrap_server.app import BootstrapServer
from bootstrap_server.registry import BootstrapConfig
from disagg.config import DisaggConfig, SchedulerSpec
from disagg.transfer_engine import engine_of, memory_of
from engine.config import EngineConfig
from engine.model_files.model_config import WIDE_MODEL_PATH
from engine.ranks.rank_parts import RankPools
from tests.e2e.models.group_models import Made
from tests.e2e.two_engines import HOST, Pair, WorkerInProcess, run
from tests.e2e.workload import recall_prompt
from tests.engine.ranks.ranks_in_process import ranks
from tools.recall.oracle import continuation
from transfer_backends.engines.remote import serve_engine

FLAGS: dict[str, Any] = {
    "chunked_prefill_size": 32,
    "kv_units": 4,
    "num_threads": 1,
    "schedule_conservativeness": 0.0,
    "max_total_tokens": 4096,
}
TIGHT = {"max_total_tokens": 464}  # of decode: what runs is retracted
Shape = tuple[int, int]  # --tp-size, --pp-size


@dataclass(frozen=True)
class Cell:
    """`backup`: where the KV of a retracted request comes from. `nnodes`: machines of each side. `checksum`: of KV."""

    backend: str
    prefill: Shape
    decode: Shape
    layerwise: str
    backup: str
    nnodes: tuple[int, int] = (1, 1)
    checksum: bool = True


def name_of(cell: Cell) -> str:
    """Its shapes and engine."""
    prefill, decode = (
        "one" if tp * pp == 1 else f"PP {pp}" if pp > 1 else f"TP {tp}" for tp, pp in (cell.prefill, cell.decode)
    )
    return f"{prefill} to {decode} by {cell.backend}"


def both_ways(what: str, made: Made, one: Shape, other: Shape) -> "dict[str, tuple[Made, Cell]]":
    """Each direction by each engine: by layers and through prefill, or whole and computed again."""
    ways = (("nixl", "on", "prefill"), ("mooncake", "off", "recompute"))
    directions = dict.fromkeys(((one, other), (other, one)))
    cells = [Cell(backend, *shapes, *how) for shapes, (backend, *how) in product(directions, ways)]
    return {f"{what}, {name_of(cell)}": (made, cell) for cell in cells}


# How decode computes it by itself: tests/engine/ranks/test_ranks.py
CELLS = {
    "TP 2 to TP 2": Cell("nixl", (2, 1), (2, 1), "on", "prefill"),
    "one to TP 2": Cell("mooncake", (1, 1), (2, 1), "off", "host"),
    "PP 2 to PP 2": Cell("nixl", (1, 2), (1, 2), "on", "prefill"),
    "TP 2 to PP 2": Cell("mooncake", (2, 1), (1, 2), "on", "host"),
    "two machines to one": Cell("nixl", (2, 1), (1, 1), "on", "prefill", (2, 1)),
    "one to four machines": Cell("mooncake", (1, 1), (4, 1), "off", "host", (1, 4)),
}


@pytest.mark.parametrize("name", CELLS)
def test_kv_crosses_between_all_ranks_and_comes_back(name: str) -> None:
    cell, rng = CELLS[name], random.Random(4)
    asked = [(f"r{i}", recall_prompt(rng, 40), 44 - 4 * i) for i in range(4)]
    with pair_of(cell) as pair:
        assert run(pair, asked, together=4, turns_between=6) == {
            rid: continuation(prompt, new, ignore_eos=True) for rid, prompt, new in asked
        }
        sent, received = (worker.role.counters() for worker in pair.workers)
        prefill, decode = (worker.parts for worker in pair.workers)
        layers = prefill.device.layers.watched
    again = received.get("resumed_through_prefill", 0)
    back = again if cell.backup == "prefill" else decode.scheduler.counters.resumed_restored
    assert back > 0 and decode.scheduler.counters.resumed_computed == 0
    assert received["kv_checksum_verified"] == sent["kv_transfers"] == len(asked) + again
    assert (sent.get("posts_of_followers", 0) > 0) == (cell.prefill != (1, 1))
    assert layers == (cell.layerwise == "on")
    whole = sent["kv_transfers"] * max(map(math.prod, (cell.prefill, cell.decode)))  # one each between ranks of a pair
    assert (sent["posts"] > 2 * whole) == layers, (sent["posts"], whole)


@contextmanager
def pair_of(
    cell: Cell,
    path: str = WIDE_MODEL_PATH,
    *,
    flags: Mapping[str, Any] = MappingProxyType(FLAGS),
    decode: Mapping[str, Any] = MappingProxyType(TIGHT),
) -> Iterator[Pair]:
    """`flags`: of both workers; `decode`: of that one alone."""
    disagg: dict[str, Any] = {
        "disaggregation_transfer_backend": cell.backend,
        "disaggregation_kv_checksum": cell.checksum,
        "disaggregation_layerwise_transfer": cell.layerwise,
        "disaggregation_decode_retraction_backup": cell.backup,
    }
    with ExitStack() as stack:
        server = BootstrapServer(BootstrapConfig(port=0), shared=False, secret=None)
        server.start()
        stack.callback(server.close)
        workers = []
        for mode, shape, nnodes, more in (
            ("prefill", cell.prefill, cell.nnodes[0], {}),
            ("decode", cell.decode, cell.nnodes[1], decode),
        ):
            make = partial(WorkerInProcess, mode=mode, bootstrap=server.port, disagg=disagg)
            all_flags = {**flags, **more, "nnodes": nnodes, "dist_init_addr": "127.0.0.1:1"}  # they meet by hand
            if shape == (1, 1):
                workers.append(stack.enter_context(make(path, **all_flags)))
                continue
            own, (tp_size, pp_size) = DisaggConfig(disaggregation_mode=mode, **disagg), shape
            serve = partial(_serve, own, path)
            group = ranks(path, tp_size=tp_size, pp_size=pp_size, make=make, serve=serve, **all_flags)
            worker = stack.enter_context(group).engine
            assert isinstance(worker, WorkerInProcess)
            workers.append(worker)
        yield Pair(*workers, port=server.port)


def _serve(disagg: DisaggConfig, path: str, pools: RankPools, sock: socket.socket) -> None:
    spec = SchedulerSpec(
        engine=EngineConfig(model_path=path), disagg=disagg, ipc_dir="", control_host=HOST, bootstrap=None
    )
    receives = disagg.disaggregation_mode == "decode"
    serve_engine(engine_of(spec, pools.kv), memory_of(pools), sock, receives=receives, host=HOST)
