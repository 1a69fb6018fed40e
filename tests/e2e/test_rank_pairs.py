"""A worker of two ranks and one of one rank share KV, in both directions; all shapes over real processes: `make rank-shapes`."""

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from bootstrap_server.config import BootstrapConfig
from bootstrap_server.server import BootstrapServer
from disagg.config import DisaggConfig, SchedulerSpec
from disagg.transfer_engine import engine_of, memory_of
from engine.config import EngineConfig
from engine.kv.held import HeldKV
from engine.kv.kv_pool import KVPool
from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.e2e.two_engines import HOST, Pair, WorkerInProcess, run
from tests.e2e.workload import recall_prompt
from tests.engine.ranks_in_process import ranks
from tools.recall.oracle import continuation
from transfer_backends.ranks.serve import serve_engine

FLAGS: dict[str, Any] = {"max_total_tokens": 4096, "kv_units": 2, "chunked_prefill_size": 32, "num_threads": 1}


@pytest.mark.parametrize(("backend", "prefill", "decode"), [("nixl", 2, 1), ("mooncake", 1, 2)])
def test_each_rank_gets_its_units(backend: str, prefill: int, decode: int) -> None:
    rng = random.Random(5)
    asked = [(f"r{i}", recall_prompt(rng, 40), 12) for i in range(4)]
    with _pair(backend, prefill, decode) as pair:
        assert run(pair, asked, turns_between=3) == {
            rid: continuation(prompt, new, ignore_eos=True) for rid, prompt, new in asked
        }
        sent, received = (worker.peered.counters() for worker in pair.workers if worker.peered is not None)
    assert received["kv_checksum_verified"] == sent["kv_transfers"] == len(asked)
    assert (sent.get("posts_of_followers", 0) > 0) == (prefill > 1)


@contextmanager
def _pair(backend: str, prefill: int, decode: int) -> Iterator[Pair]:
    disagg: dict[str, Any] = {"disaggregation_transfer_backend": backend, "disaggregation_kv_checksum": True}
    with ExitStack() as stack:
        server = BootstrapServer(BootstrapConfig(port=0), shared=False, secret=None)
        server.start()
        stack.callback(server.close)
        workers = []
        for mode, tp_size in (("prefill", prefill), ("decode", decode)):
            make = partial(WorkerInProcess, mode=mode, bootstrap=server.port, disagg=disagg)
            if tp_size == 1:
                workers.append(stack.enter_context(make(WIDE_MODEL_PATH, **FLAGS)))
                continue
            own = DisaggConfig(disaggregation_mode=mode, **disagg)
            group = ranks(WIDE_MODEL_PATH, tp_size=tp_size, make=make, serve=partial(_serve, own), **FLAGS)
            worker = stack.enter_context(group).engine
            assert isinstance(worker, WorkerInProcess)
            workers.append(worker)
        yield Pair(*workers, port=server.port)


def _serve(disagg: DisaggConfig, pool: KVPool, held: HeldKV, sock: socket.socket) -> None:
    spec = SchedulerSpec(
        engine=EngineConfig(model_path=WIDE_MODEL_PATH), disagg=disagg, ipc_dir="", control_host=HOST, bootstrap=None
    )
    receives = disagg.disaggregation_mode == "decode"
    serve_engine(engine_of(spec, pool), memory_of(pool, held), sock, receives=receives, host=HOST)
