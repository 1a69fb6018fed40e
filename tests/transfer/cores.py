"""Pure cores for tests: their memory and limits, and two of them joined by hand."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from transfer_backends.contract import Caps, Gate, KVArgs, PeerWork, Region, Route, TargetPages, TransferConfig
from transfer_backends.decode.manager import DecodeCore
from transfer_backends.liveness import ProcessMark
from transfer_backends.prefill.core import PrefillCore
from transfer_backends.prefill.inbox import Chunk, Post
from transfer_backends.prefill.paths import ConnectPeer
from transfer_backends.sides import KVPoll
from transfer_backends.wire import Register, Registered, layout_of

CAPS = Caps(
    name="sim",
    max_inflight=8,
    max_inflight_bytes=1 << 20,
    max_post_pieces=2,
    max_post_bytes=1 << 20,
    max_piece_bytes=2048,
    target_must_poll=False,
    settle_s=0.5,
    resend_s=30.0,
)
TIMES: dict[str, Any] = {
    "bootstrap_timeout_s": 8.0,
    "waiting_timeout_s": 6.0,
    "transfer_timeout_s": 4.0,
    "handshake_timeout_s": 3.0,
    "heartbeat_interval_s": 0.3,
    "drain_timeout_s": 5.0,
}
CONFIG = TransferConfig(**TIMES)
ARGS = KVArgs(Region(1 << 20, 64, 1024, None), Region(1 << 30, 16, 64, None), "m", 16, "f32")
MARK = ProcessMark("host", 1, 1)
KEY = (7, 0)
SRC, PAGES = [1, 8, 2, 9], [5, 6, 20, 3]


def no_row(row: int, data: bytes) -> None:
    raise AssertionError(f"a message brought metadata row {row}")


def decode_core(
    args: KVArgs = ARGS,
    *,
    caps: Caps = CAPS,
    land_row: Callable[[int, bytes], None] = no_row,
    is_apart: bool = False,
    **config: Any,
) -> DecodeCore:
    settings = TransferConfig(**{**TIMES, **config})
    return DecodeCore(
        incarnation="d",
        kv_args=args,
        caps=caps,
        descriptor=b"",
        config=settings,
        land_row=land_row,
        is_apart=is_apart,
    )


def connected_decode_core() -> DecodeCore:
    """Room `KEY` is open at a worker that has registered on link 1."""
    core = decode_core()
    core.open(*KEY, "b", 0.0)
    core.finder.on_route("b", KEY[0], Route("p:1", "p"), 0.0)
    core.on_message(1, Registered("p", "d", (MARK,)), 0.0)
    return core


def prefill_core(
    args: KVArgs = ARGS, *, caps: Caps = CAPS, takes: PeerWork = PeerWork.ANY, **config: Any
) -> PrefillCore:
    settings = TransferConfig(**{**TIMES, **config})
    return PrefillCore(incarnation="p", marks=(MARK,), kv_args=args, caps=caps, config=settings, takes=takes)


def registration(name: str) -> Register:
    return Register(name, "p", layout_of(ARGS, backend=CAPS.name), ARGS.ranks, ARGS.aux)


def posts_of(core: PrefillCore, now_s: float) -> list[Post]:
    """Take all that the window has room for."""
    found: list[Post] = []
    while (post := core.outbox.next_post(now_s)) is not None:
        found.append(post)
    return found


class JoinedCores:
    """A prefill core with decode's `pages` of room `KEY`. `sends`: all is handed over.

    `connects`: prefill has reached decode's memory; else call `begin` when it has. `row`: bytes of the metadata row, if the engine carries no host memory. `landed`: such rows at decode, and what the room was.
    """

    def __init__(
        self,
        args: KVArgs = ARGS,
        *,
        sends: bool = True,
        caps: Caps = CAPS,
        pages: Sequence[int] = PAGES,
        row: bytes | None = None,
        connects: bool = True,
    ) -> None:
        self.row = row
        self.landed: list[tuple[int, bytes, KVPoll]] = []
        self.decode = decode_core(replace(args, groups=()), caps=caps, land_row=self._land)
        self.core = prefill_core(args, caps=caps)
        self.decode.open(*KEY, "b", 0.0)
        self.decode.finder.on_route("b", KEY[0], Route("p:1", "p"), 0.0)
        self.pages = pages
        self.exchange()
        if connects:
            assert isinstance(self.core.paths.commands.popleft(), ConnectPeer)
            self.core.admission.on_connected("d", 0.0)
            self.begin()
        if sends:
            self.send(SRC, row=1)

    def begin(self) -> None:
        """Open the room at prefill, and give it decode's pages."""
        self.exchange()
        self.core.rooms.open(*KEY, 0.0)
        self.decode.rooms.provide(self.decode.rooms[KEY], TargetPages(self.pages, 1), 0.0)
        self.exchange()

    def send(
        self, pages: list[int], *, start: int = 0, row: int | None = None, gate: Gate | None = None, now_s: float = 0.0
    ) -> None:
        chunk = Chunk(np.array(pages, np.int64), start, row, gate, None if row is None else self.row)
        self.core.rooms.send(self.core.rooms[KEY], chunk, now_s)

    def _land(self, row: int, data: bytes) -> None:
        self.landed.append((row, data, self.decode.rooms[KEY].state))

    def exchange(self) -> None:
        for item in list(self.decode.effects.queue):
            if isinstance(item, tuple):
                self.core.on_message("link", item[1], 0.0)
        self.decode.effects.queue.clear()
        for _, message in list(self.core.effects.queue):
            self.decode.on_message(1, message, 0.0)
        self.core.effects.queue.clear()

    def posts(self) -> list[Post]:
        return posts_of(self.core, 0.0)

    def final(self, post: Post, *, ok: bool) -> None:
        self.core.completions.on_op_final(post, ok=ok, error="injected", now_s=0.0)
        self.exchange()

    @property
    def states(self) -> tuple[Any, Any]:
        return self.core.rooms[KEY].state, self.decode.rooms[KEY].state
