"""KV of a prompt between workers of equal and of unequal numbers of ranks, through the managers and a real engine."""

import argparse
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.transfer_rate import receive, say, until
from deploy.bench.report import table
from service.process.message_stream import socket_pair
from service.process.start import die_with_parent
from transfer_backends.contract import KVArgs, RankMemory, Region, Route, TransferConfig
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.engines.registry import make_engine
from transfer_backends.kvpoll import KVPoll
from transfer_backends.ports import Engine
from transfer_backends.prefill.manager import PrefillManager
from transfer_backends.ranks.engines import RankEngines
from transfer_backends.ranks.remote import RemoteEngine
from transfer_backends.ranks.serve import serve_engine

TITLE = "KV between numbers of ranks"
TEXT = (
    "A prompt's KV from a prefill to a decode worker, whose KV is two units: a rank of two has one of them. Every rank is a process, the"
    " pairs of workers are asked in turns. GB/s: from `send` to Success at the other side, medians over the rounds; the aim: 90 % of equal"
    " ranks. Pages do not adjoin, so an operation has a piece for each unit of a page."
)

SHAPES = ((1, 1), (2, 2), (1, 2), (2, 1))  # ranks of prefill, of decode
BACKENDS = ("nixl", "mooncake")
UNITS = 2
LAYERS = 28
LAYER_BYTES = 2 * 16 * 4 * 128 * 2  # K and V of 16 tokens, 4 heads of 128, bf16
PAGES = 64
WARM_UP = 1
START_S = 60.0
HOST = "127.0.0.1"
MODULE = "benchmarks.rank_parts.transfers"
ROOT = Path(__file__).resolve().parents[2]


class Memory:
    """The pages of rank `rank` of `of`, and metadata rows."""

    def __init__(self, rank: int, of: int) -> None:
        units = UNITS // of
        unit_bytes = LAYERS * LAYER_BYTES
        self.kv = np.ones((2 * PAGES + 2) * units * unit_bytes, np.uint8)
        self.rows = np.zeros(4096, np.uint8)
        region = Region(self.kv.ctypes.data, (2 * PAGES + 2) * units, unit_bytes, None)
        self.rank = RankMemory(region, rank * units, units, 0, LAYERS)

    def args(self, others: Sequence[RankMemory]) -> KVArgs:
        return KVArgs(
            self.rank.kv,
            Region(self.rows.ctypes.data, 1, len(self.rows), None),
            signature="bench",
            page_size=16,
            dtype="uint8",
            kv_units=UNITS,
            layer_bytes=(LAYER_BYTES,) * LAYERS,
            ranks=(self.rank, *others),
        )


def measure(*, rounds: int) -> list[dict[str, Any]]:
    """One row a (backend, shape)."""
    rows = []
    for backend in BACKENDS:
        with ExitStack() as stack:
            pairs = {shape: stack.enter_context(_pair(backend, *shape)) for shape in SHAPES}
            rates: dict[tuple[int, int], list[float]] = {shape: [] for shape in SHAPES}
            for n in range(rounds + WARM_UP):
                for shape, pair in pairs.items():
                    seconds = pair.transfer(seed=n)
                    if n >= WARM_UP:
                        rates[shape].append(PAGES * UNITS * LAYERS * LAYER_BYTES / seconds / 1e9)
        rows += [
            {"backend": backend, "prefill": prefill, "decode": decode, "gb_s": median(found)}
            for (prefill, decode), found in rates.items()
        ]
    return rows


def render(rows: list[dict[str, Any]]) -> str:
    equal = {row["backend"]: row["gb_s"] for row in rows if row["prefill"] == row["decode"] == UNITS}
    return table(
        ["engine, ranks of prefill and decode", "GB/s", "beside 2 and 2"],
        [
            [
                f"{row['backend']}, {row['prefill']} and {row['decode']}",
                f"{row['gb_s']:.2f}",
                f"{row['gb_s'] / equal[row['backend']]:.2f}",
            ]
            for row in rows
        ],
    )


@dataclass
class _Pair:
    manager: PrefillManager
    memory: Memory
    decode: "subprocess.Popen[str]"
    changed: threading.Event
    room: int = 0

    def transfer(self, *, seed: int) -> float:
        """Seconds from `send` to Success on the other side."""
        self.room += 1
        rng = np.random.default_rng(seed)
        src, dst = ((2 * rng.permutation(PAGES) + 1).tolist() for _ in range(2))  # odd ids: no two pages adjoin
        sender = self.manager.sender(self.room)
        self._ask(room=self.room, pages=dst)
        until(lambda: sender.poll() in (KVPoll.WaitingForInput, KVPoll.Failed), self.changed, what="indices")
        assert sender.poll() is KVPoll.WaitingForInput, sender.failure()
        begin_s = time.monotonic()
        sender.send(src, start=0, metadata_row=0)
        taken_s = float(self._answer("success_at")) - begin_s
        until(lambda: sender.poll() is KVPoll.Success and sender.released(), self.changed, what="release")
        sender.close()
        return taken_s

    def _ask(self, **command: Any) -> None:
        assert self.decode.stdin is not None
        self.decode.stdin.write(json.dumps(command) + "\n")
        self.decode.stdin.flush()

    def _answer(self, name: str) -> Any:
        assert self.decode.stdout is not None
        for line in self.decode.stdout:
            if name in (answer := json.loads(line)):
                return answer[name]
        raise RuntimeError("the decode process ended; its error stands above")


@contextmanager
def _pair(backend: str, prefill: int, decode: int) -> Iterator[_Pair]:
    memory = Memory(0, prefill)
    with ExitStack() as stack:
        remotes = [_follower(stack, backend, rank, prefill, receives=False) for rank in range(1, prefill)]
        engine = _engine(backend, remotes)
        manager = PrefillManager(
            memory.args([remote.memory for remote in remotes]),
            engine,
            TransferConfig(),
            followers=[remote.mark for remote in remotes],
        )
        stack.callback(manager.close)
        changed = threading.Event()
        manager.set_wakeup(changed.set)
        manager.start()
        args = ["--decode", str(decode), "--backend", backend]
        args += ["--control", manager.control_address, "--incarnation", manager.incarnation]
        child = _start(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(child.wait, 20)
        assert child.stdin is not None
        stack.callback(child.stdin.close)
        yield _Pair(manager, memory, child, changed)
        manager.check()


def _engine(backend: str, remotes: Sequence[RemoteEngine]) -> Engine:
    own = make_engine(backend, host=HOST)
    return RankEngines([own, *remotes]) if remotes else own


def _follower(stack: ExitStack, backend: str, rank: int, of: int, *, receives: bool) -> RemoteEngine:
    own, theirs = socket_pair()
    with theirs:
        args = ["--follower", str(rank), "--of", str(of), "--backend", backend, "--descriptor", str(theirs.fileno())]
        child = _start([*args, *(["--receives"] if receives else [])], pass_fds=[theirs.fileno()])
    stack.callback(child.wait, 20)
    return RemoteEngine(own, name=f"rank {rank}", timeout_s=START_S)


def _start(args: list[str], **how: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", MODULE, *args]
    return subprocess.Popen(command, cwd=ROOT, text=True, preexec_fn=die_with_parent(), **how)


def _decode(backend: str, decode: int, control: str, incarnation: str) -> None:
    """Receive one room a line of stdin, until it ends."""
    memory = Memory(0, decode)
    with ExitStack() as stack:
        remotes = [_follower(stack, backend, rank, decode, receives=True) for rank in range(1, decode)]
        manager = DecodeManager(
            memory.args([remote.memory for remote in remotes]),
            _engine(backend, remotes),
            TransferConfig(),
            lookup=lambda *_: Route(control=control, incarnation=incarnation),
        )
        stack.callback(manager.close)
        changed = threading.Event()
        manager.set_wakeup(changed.set)
        manager.start()
        for line in sys.stdin:
            command = json.loads(line)
            receive(manager, changed, command["room"], command["pages"])


def main() -> None:
    """A decode worker's leader, or a follower of either worker."""
    parser = argparse.ArgumentParser(description="A process of benchmarks.ranks' transfers")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--decode", type=int)
    parser.add_argument("--control")
    parser.add_argument("--incarnation")
    parser.add_argument("--follower", type=int)
    parser.add_argument("--of", type=int)
    parser.add_argument("--descriptor", type=int)
    parser.add_argument("--receives", action="store_true")
    args = parser.parse_args()
    if args.decode is not None:
        _decode(args.backend, args.decode, args.control, args.incarnation)
        say(ended=True)
    else:
        memory = Memory(args.follower, args.of)
        sock = socket.socket(fileno=args.descriptor)
        serve_engine(make_engine(args.backend, host=HOST), memory.rank, sock, receives=args.receives, host=HOST)


if __name__ == "__main__":
    main()
