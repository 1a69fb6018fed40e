"""A peer that sends what looks right and is not: to control planes, bootstrap servers, workers and the router.

It does not know the cluster's secret. Where there is none it does not use names and rooms of others that it could only
have learnt by listening in: without a secret a peer that knows both is a peer.
"""

import random
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from disagg.metadata import ROW
from tools.simulation.cluster import Cluster
from tools.simulation.http import Call, Request, call
from tools.simulation.network import End
from tools.simulation.workers.transfer_engine import AUX_BASE, KV_BASE
from tools.simulation.workers.worker import Worker
from tools.simulation.world import Process, Violation
from transfer_backends.contract import RankMemory, Region
from transfer_backends.liveness import ProcessMark
from transfer_backends.wire import (
    PROTOCOL_VERSION,
    Abort,
    Bye,
    Drained,
    Layout,
    Message,
    Ping,
    PollRequest,
    Pong,
    Refused,
    Register,
    Registered,
    Status,
    TransferInfo,
    encode,
    layout_of,
    pack_ids,
)

BAD_BODIES = [text.encode() for text in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["bodies"]]


class Hostile:
    def __init__(self, cluster: Cluster, process: Process) -> None:
        self._cluster = cluster
        self._process = process
        self._draw: random.Random = cluster.world.rng("hostile")
        self._ends: list[tuple[End, str]] = []  # connections to control planes, with the incarnation there
        self._names = 0

    def act(self) -> None:
        kind, act = self._draw.choice(
            [("control frames", self._frames), ("control frames", self._frames), ("http body", self._body),
             ("bootstrap body", self._bootstrap)]
        )  # fmt: skip
        act()
        self._cluster.world.injected[f"hostile {kind}"] += 1

    # ---- control plane

    def _frames(self) -> None:
        workers = self._cluster.workers()
        if not workers:
            return
        worker = self._draw.choice(workers)
        if not self._ends or self._draw.random() < 0.5:
            self._connect(worker)
        end, dst = self._draw.choice(self._ends)
        for _ in range(self._draw.randint(1, 6)):
            end.send(self._frame(dst), "hostile frame")
        if self._draw.random() < 0.2:
            end.close()
        self._ends = [(e, d) for e, d in self._ends if e.open][-8:]

    def _connect(self, worker: Worker) -> None:
        network, address = self._cluster.network, worker.managers.sender.control_address
        end = network.connect(self._process, address, on_data=lambda data: None, on_close=lambda: None)
        self._ends.append((end, worker.managers.sender.incarnation))
        if self._draw.random() < 0.7:
            self._names += 1
            end.send(encode(self._register(f"hostile-{self._names}", worker)), "hostile register")

    def _register(self, name: str, worker: Worker) -> Register:
        args, draw = worker.memory.kv_args, self._draw
        layout = layout_of(replace(args, kv_checksum="off"), backend="sim")
        if draw.random() < 0.3:
            layout = Layout(draw.choice([0, 99, PROTOCOL_VERSION]), "sim", "another model", args.page_size, args.dtype)
        size = draw.choice([args.kv.item_bytes, 1, 2**62])
        kv = Region(KV_BASE, draw.choice([0, 10, 2**62]), size, None)
        aux = Region(AUX_BASE, draw.choice([0, 4]), ROW.itemsize, None)
        victims = sorted(self._cluster.around.directory)
        descriptor = draw.choice([b"", b"junk", draw.choice(victims)])
        rank = RankMemory(kv, 0, args.kv_units, 0, len(args.layer_bytes), descriptor)
        return Register(name, draw.choice(["", worker.process.name, "p0.0"]), layout, (rank,), aux)

    def _frame(self, dst: str) -> bytes:
        draw = self._draw
        if draw.random() < 0.2:
            return draw.randbytes(draw.choice([0, 1, 31, 33, 200]))
        frame = encode(self._message(dst))
        if draw.random() < 0.2:
            cut = draw.randrange(len(frame))
            return frame[:cut] + draw.randbytes(draw.choice([0, 1])) + frame[cut + 1 :]
        return frame

    def _message(self, dst: str) -> Message:
        draw, src = self._draw, f"hostile-{self._names}"
        room, attempt = self._room(), draw.choice([0, 0, 0, 1])
        pages = np.array([draw.choice([0, 1, 2, 5, 2**31 - 1]) for _ in range(draw.randint(0, 9))], dtype=np.int64)
        makers: list[Callable[[], Message]] = [
            lambda: TransferInfo(src, dst, room, attempt, pack_ids(pages), draw.choice([0, 3, 10**9])),
            lambda: TransferInfo(src, dst, room, attempt, b"odd", 0),
            lambda: Abort(src, dst, room, attempt, "x" * draw.choice([0, 2000])),
            lambda: Drained(src, dst, room, attempt),
            lambda: Status(src, dst, room, attempt, draw.randint(0, 4), draw.choice([0, 2**62])),
            lambda: Status(
                src, dst, room, attempt, 4, draw.choice([0, 5]), "", 0, bytes(draw.choice([ROW.itemsize, 7]))
            ),
            lambda: PollRequest(src, dst),
            lambda: Ping(src, dst, draw.choice([0, 2**62])),
            lambda: Pong(src, dst, 1),
            lambda: Registered(src, dst, (ProcessMark("h", 1, 1),)),
            lambda: Refused(src, dst, "no", True),
            lambda: Bye(src, dst),
        ]
        return draw.choice(makers)()

    def _room(self) -> int:
        """Of others, where it may know them: any with a secret (its frames will not pass), else those in other hands."""
        rooms = [
            room.key[0]
            for worker in self._cluster.workers()
            for room in worker.managers.sender.core.rooms
            if self._cluster.options.secret or room.offer is not None
        ]
        return self._draw.choice([*rooms, 1, 2**63 - 1, self._draw.getrandbits(62) + 1])

    # ---- HTTP

    def _body(self) -> None:
        nodes = [n for n in self._cluster.nodes.values() if n.alive and n.kind != "bootstrap"]
        if nodes:
            address = f"{self._draw.choice(nodes).name}:80"
            request = Request(
                "POST", self._draw.choice(["/generate", "/generate", "/nowhere"]), self._draw.choice(BAD_BODIES)
            )
            call(self._cluster.network, self._process, address, request, Call())

    def _bootstrap(self) -> None:
        """Bodies that the protocol must refuse."""
        address = self._cluster.around.shared_bootstrap or "p0:8998"
        server = self._cluster.bootstrap_of(address)
        if server is None:
            return
        method, target, body = self._draw.choice(
            [
                ("PUT", "/route", b"{}"),
                ("PUT", "/route", msgspec.json.encode({"incarnation": "x" * 1000})),
                ("POST", "/rooms", b'{"incarnation": "nobody", "rooms": [1]}'),
                ("POST", "/rooms", b'{"incarnation": "nobody", "rooms": [0]}'),
                ("GET", "/route?room=1", b""),
            ]
        )
        status, _ = server.request(method, target, body)
        if status not in (200, 400, 404):
            raise Violation(f"the bootstrap server answers {status} to junk")
