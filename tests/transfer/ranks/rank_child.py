"""A process that holds ranks of workers: it serves their engines to leaders in the test, or leads one itself.

python -m tests.transfer.ranks.rank_child FD     FD: a SEQPACKET socket; commands are JSON, with sockets of the ranks beside them
"""

import contextlib
import json
import os
import socket
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np

from tests.transfer.ranks.rank_memory import Model, Side, layer_bytes_of, ranks_of
from transfer_backends.contract import KVArgs, RankMemory, Region, TransferConfig
from transfer_backends.engines.registry import make_engine
from transfer_backends.prefill.manager import PrefillManager
from transfer_backends.ranks.engines import RankEngines
from transfer_backends.ranks.remote import RemoteEngine, serve_engine

CANARY = 0xA5
NUM_PAGES, NUM_ROWS, ROW_BYTES = 12, 4, 512
START_S = 30.0


class Bytes:
    """The memory of rank `number` of a worker. `seed`: of what its model's pages hold; None: canaries."""

    def __init__(self, model: Model, side: Side, units: int, number: int, seed: int | None) -> None:
        rank = ranks_of(model, side, units, num_pages=NUM_PAGES)[number]
        self.kv = np.full((NUM_PAGES, rank.num_units, rank.kv.item_bytes), CANARY, np.uint8)
        if seed is not None:
            self.kv[:] = part_of(pages_of(model, units, seed), model, units, rank)
        self.rank = RankMemory(region(self.kv, rank.num_units), *astuple(rank))

    def right(self, pages: np.ndarray, model: Model, units: int, dst: list[int], src: list[int]) -> bool:
        """`dst` hold what pages `src` of the model hold, and all others are as they were."""
        wanted = np.full_like(self.kv, CANARY)
        wanted[dst] = part_of(pages, model, units, self.rank)[src]
        return bool((self.kv == wanted).all())


def astuple(rank: RankMemory) -> tuple[int, int, int, int]:
    return rank.first_unit, rank.num_units, rank.first_layer, rank.num_layers


def region(array: np.ndarray, units: int = 1) -> Region:
    return Region(array.ctypes.data, array.shape[0] * units, array[0].nbytes // units, None)


def pages_of(model: Model, units: int, seed: int) -> np.ndarray:
    """[page, unit, byte]: what a model's pages hold."""
    shape = (NUM_PAGES, units, sum(layer_bytes_of(model, units)))
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def part_of(pages: np.ndarray, model: Model, units: int, rank: RankMemory) -> np.ndarray:
    sizes = layer_bytes_of(model, units)
    begin, end = sum(sizes[: rank.first_layer]), sum(sizes[: rank.layers.stop])
    return pages[:, rank.first_unit : rank.units.stop, begin:end]


def kv_args(model: Model, units: int, ranks: tuple[RankMemory, ...], rows: np.ndarray) -> KVArgs:
    layers = layer_bytes_of(model, units)
    return KVArgs(ranks[0].kv, region(rows), "m", 16, "uint8", kv_units=units, layer_bytes=layers, ranks=ranks)


class Leader:
    """A prefill worker whose first rank is here."""

    def __init__(self, spec: dict[str, Any], memory: Bytes, socks: list[socket.socket]) -> None:
        remotes = [RemoteEngine(sock, name=f"rank {i}", timeout_s=START_S) for i, sock in enumerate(socks, 1)]
        engine = RankEngines([make_engine(spec["backend"]), *remotes])
        self.rows = np.zeros((NUM_ROWS, ROW_BYTES), np.uint8)
        ranks = (memory.rank, *(remote.memory for remote in remotes))
        args = kv_args(Model(**spec["model"]), spec["units"], ranks, self.rows)
        config = TransferConfig(heartbeat_interval_s=0.2)
        self.manager = PrefillManager(args, engine, config, followers=[remote.mark for remote in remotes])
        self.manager.start()
        self.sender: Any = None

    def do(self, what: str, *values: Any) -> Any:
        match what:
            case "route":
                return [self.manager.control_address, self.manager.incarnation]
            case "open":
                self.sender = self.manager.sender(*values)
            case "send":
                self.sender.send(values[0], start=0, metadata_row=0)
            case "state":
                inflight = self.manager.core.outbox.num_inflight
                return [int(self.sender.poll()), self.sender.failure(), self.sender.released(), inflight]
        return None


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    held: dict[str, Bytes] = {}
    leader: Leader | None = None
    while True:
        data, fds, *_ = socket.recv_fds(control, 1 << 16, 8)
        if not data:
            os._exit(0)
        spec, socks = json.loads(data), [socket.socket(fileno=fd) for fd in fds]
        answer = b"null"
        if "side" in spec:
            model, side = Model(**spec["model"]), Side(**spec["side"])
            memory = held[spec["name"]] = Bytes(model, side, spec["units"], spec["number"], spec["seed"])
            if spec["number"] == 0:
                leader = Leader(spec, memory, socks)
            else:
                serve = serve_engine_of(spec, memory, socks[0])
                threading.Thread(target=serve, daemon=True).start()
        elif "read" in spec:
            answer = held[spec["read"]].kv.tobytes()
        else:
            assert leader is not None
            answer = json.dumps(leader.do(*spec["call"])).encode()
        with contextlib.suppress(OSError):
            control.send(answer)


def serve_engine_of(spec: dict[str, Any], memory: Bytes, sock: socket.socket) -> Any:
    def serve() -> None:
        engine: Any = make_engine(spec["backend"])
        if spec.get("settle_s") is not None:
            engine.caps = replace(engine.caps, settle_s=spec["settle_s"])
        serve_engine(engine, memory.rank, sock, receives=spec["seed"] is None, host="127.0.0.1")

    return serve


if __name__ == "__main__":
    main()
