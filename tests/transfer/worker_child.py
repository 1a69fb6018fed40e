"""A worker in a process of its own: one manager over its own memory, driven by JSON lines on stdin and stdout.

python -m tests.transfer.worker_child '{"role": "decode", "backend": "nixl", ...}'
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.transfer.pool import Pool
from tests.transfer.ways import engine_of
from transfer_backends.contract import Route, SourcePages, TargetPages, TransferConfig
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.ports import KVReceiver, KVSender
from transfer_backends.prefill.manager import PrefillManager


class Child:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.pool = Pool(**spec["pool"])
        engine = engine_of(spec["backend"], **spec.get("engine", {}))
        config = TransferConfig(**spec.get("config", {}))
        self.routes: dict[str, Route] = {}
        self.rooms: dict[int, Any] = {}
        self.manager: Any
        if spec["role"] == "decode":
            self.manager = DecodeManager(self.pool.args, engine, config, lookup=lambda b, room, _: self.routes[b])
        else:
            self.manager = PrefillManager(self.pool.args, engine, config)
        self.manager.start()

    def address(self) -> list[str]:
        return [self.manager.control_address, self.manager.incarnation]

    def paths(self) -> list[list[Any]]:
        """[address, transport, bytes a second] of prefill's peers."""
        return [[path.address, path.transport, path.bytes_a_s] for path in self.manager.paths]

    def route(self, bootstrap: str, control: str, incarnation: str) -> None:
        self.routes[bootstrap] = Route(control, incarnation)

    def receiver(self, room: int, bootstrap: str) -> None:
        receiver: KVReceiver = self.manager.receiver(room, bootstrap=bootstrap)
        self.rooms[room] = receiver

    def sender(self, room: int) -> None:
        sender: KVSender = self.manager.sender(room)
        self.rooms[room] = sender

    def provide(self, room: int, pages: list[int], metadata_row: int) -> None:
        self.rooms[room].provide(TargetPages(pages, metadata_row))

    def send(self, room: int, pages: list[int], start: int, metadata_row: int | None) -> None:
        self.rooms[room].send(SourcePages(pages, start=start, metadata_row=metadata_row))

    def state(self, room: int) -> list[Any]:
        """[poll, failure, drained or released]"""
        transfer = self.rooms[room]
        safe = transfer.drained() if hasattr(transfer, "drained") else transfer.released()
        return [int(transfer.poll()), transfer.failure(), safe]

    def abort(self, room: int, reason: str) -> None:
        self.rooms[room].abort(reason)

    def close(self, room: int) -> None:
        self.rooms.pop(room).close()

    def counters(self) -> dict[str, int]:
        return self.manager.counters

    def __getattr__(self, name: str) -> Any:
        """Of its memory, or its manager."""
        return getattr(self.pool if hasattr(Pool, name) else self.manager, name)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints stays out of the answers
    child = Child(json.loads(sys.argv[1]))
    answer: Callable[[Any], None] = lambda value: print(json.dumps(value), file=answers, flush=True)  # noqa: E731
    answer("ready")
    for line in sys.stdin:
        name, *values = json.loads(line)
        try:
            answer([True, getattr(child, name)(*values)])
        except Exception as error:
            answer([False, f"{type(error).__name__}: {error}"])
    with contextlib.suppress(Exception):
        child.manager.close()


if __name__ == "__main__":
    main()
