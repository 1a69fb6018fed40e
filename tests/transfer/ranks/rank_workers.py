"""Workers of several ranks in a test: leaders here (or in a process of their own), followers in processes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from service.process.message_stream import socket_pair
from tests.transfer.ranks.rank_child import NUM_ROWS, ROW_BYTES, START_S, Bytes, kv_args
from tests.transfer.ranks.rank_memory import Model, Side
from tests.transfer.rig import ROOT
from transfer_backends.contract import KVArgs, Route, TransferConfig
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.engines.registry import make_engine
from transfer_backends.ports import Engine
from transfer_backends.prefill.manager import PrefillManager
from transfer_backends.ranks.engines import RankEngines
from transfer_backends.ranks.remote import RemoteEngine

SEED = 7
CONFIG = TransferConfig(heartbeat_interval_s=0.2)


class RankProcess:
    """`with` ends it whatever happens."""

    def __init__(self, **env: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.transfer.ranks.rank_child", str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, pass_fds=[theirs.fileno()]
            )
        self._control.settimeout(60.0)

    def call(self, socks: list[socket.socket] | None = None, **spec: Any) -> bytes:
        socket.send_fds(self._control, [json.dumps(spec).encode()], [sock.fileno() for sock in socks or []])
        for sock in socks or []:
            sock.close()
        return self._control.recv(1 << 18)

    def do(self, what: str, *values: Any) -> Any:
        """Of the leader in it."""
        return json.loads(self.call(call=[what, *values]))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "RankProcess":
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        self.kill()
        self._control.close()


class Ranks:
    """All ranks of a worker: this process has the first one, `processes` the others."""

    def __init__(
        self, processes: list[RankProcess], model: Model, side: Side, units: int, *, backend: str, seed: int | None
    ) -> None:
        self.name, self.seed = f"{side}-{units}-{backend}-{seed}", seed
        self.model, self.units = model, units
        self.first = Bytes(model, side, units, 0, seed)
        self.rows = np.full((NUM_ROWS, ROW_BYTES), 1 if seed is not None else 0, np.uint8)
        self.processes = processes[: side.tp * side.pp - 1]
        self.remotes = [
            RemoteEngine(
                connect(process, model, side, units, number, backend, seed), name=f"rank {number}", timeout_s=START_S
            )
            for number, process in enumerate(self.processes, 1)
        ]
        own = make_engine(backend)
        self.engine: Engine = RankEngines([own, *self.remotes]) if self.remotes else own
        self.args: KVArgs = kv_args(
            model, units, (self.first.rank, *(remote.memory for remote in self.remotes)), self.rows
        )
        self._names = [name_of(side, units, number, backend, seed) for number in range(1, 1 + len(self.remotes))]

    def all_bytes(self) -> Iterator[Bytes]:
        """The memory of each rank, as it is now."""
        yield self.first
        for process, name, rank in zip(self.processes, self._names, self.args.ranks[1:], strict=True):
            copy = object.__new__(Bytes)
            copy.rank = rank
            data = np.frombuffer(process.call(read=name), np.uint8)
            copy.kv = data.reshape(-1, rank.num_units, rank.kv.item_bytes)
            yield copy


def name_of(side: Side, units: int, number: int, backend: str, seed: int | None) -> str:
    return f"{side}-{units}-{number}-{backend}-{seed}"


def connect(
    process: RankProcess, model: Model, side: Side, units: int, number: int, backend: str, seed: int | None
) -> socket.socket:
    """Let `process` serve rank `number`; return the leader's end."""
    mine, theirs = socket_pair()
    process.call([theirs], **spec_of(model, side, units, number, backend, seed))
    return mine


def spec_of(model: Model, side: Side, units: int, number: int, backend: str, seed: int | None) -> dict[str, Any]:
    return {
        "name": name_of(side, units, number, backend, seed),
        "backend": backend,
        "model": asdict(model),
        "side": asdict(side),
        "units": units,
        "number": number,
        "seed": seed,
    }


class RankPair:
    """A prefill and a decode worker whose leaders are in this process."""

    def __init__(self, prefill: Ranks, decode: Ranks) -> None:
        self.ranks = prefill, decode
        followers = [remote.mark for remote in prefill.remotes]
        self.prefill = PrefillManager(prefill.args, prefill.engine, CONFIG, followers=followers)
        route = Route(self.prefill.control_address, self.prefill.incarnation)
        self.decode = DecodeManager(decode.args, decode.engine, CONFIG, lookup=lambda *_: route)
        self.prefill.start()
        self.decode.start()

    def close(self) -> None:
        self.prefill.check()
        self.decode.check()
        assert self.decode.close()
        self.prefill.close()
