"""The sockets between the processes of one worker: one msgspec struct a frame (frames.py), in a private directory.

Owns endpoints, what may be said on each, and the bound on every queue. Must not know what a message means.
The receiver binds, senders connect; several senders may share one receiver.
"""

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from engine.frontend.frames import FrameReader, FrameWriter, Full

M = TypeVar("M")

log = logging.getLogger(__name__)

IPC_PREFIX = "tandem-ipc-"
MAX_QUEUED_MESSAGES = 100_000  # at one sender; a peer this far behind is stuck


class PeerStalled(RuntimeError):
    """The receiver of a socket is dead or far behind: its queue is full."""


@dataclass(frozen=True)
class IpcPaths:
    """Endpoints of one worker. `dir` is 0700, so the file system is the access control."""

    dir: str

    @classmethod
    def create(cls, parent: str | None = None) -> "IpcPaths":
        """Make a fresh private directory (short: a unix socket path has at most 107 characters).

        Directories of owners that were killed before they could remove them go on this occasion.
        """
        folder = Path(parent or tempfile.gettempdir())
        for left in folder.glob(f"{IPC_PREFIX}*"):
            if _is_orphan(left):
                shutil.rmtree(left, ignore_errors=True)
        return cls(tempfile.mkdtemp(prefix=f"{IPC_PREFIX}{os.getpid()}-", dir=folder))

    @property
    def to_scheduler(self) -> str:
        return f"{self.dir}/scheduler"

    @property
    def to_detokenizer(self) -> str:
        return f"{self.dir}/detokenizer"

    @property
    def to_frontend(self) -> str:
        return f"{self.dir}/frontend"

    def remove(self) -> None:
        shutil.rmtree(self.dir, ignore_errors=True)


def _is_orphan(folder: Path) -> bool:
    """Ours by user, and the process that its name tells is gone."""
    pid = folder.name.removeprefix(IPC_PREFIX).partition("-")[0]
    try:
        mine = folder.stat().st_uid == os.getuid()
    except OSError:
        return False
    return mine and pid.isdigit() and not Path(f"/proc/{pid}").exists()


class PullSocket(Generic[M]):
    """Receives the closed union `union`. Whatever does not decode is logged, counted in `rejected` and dropped."""

    def __init__(self, endpoint: str, union: Any) -> None:
        self.rejected = 0
        self._reader = FrameReader(endpoint)
        self._decode = msgspec.msgpack.Decoder(union).decode
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler: Callable[[M], None] | None = None

    @property
    def fd(self) -> int:
        """Readable while there is something to receive."""
        return self._reader.fd

    def recv_all_nowait(self) -> list[M]:
        """Everything that has arrived, each sender's in order; never waits."""
        messages: list[M] = []
        while (frames := self._reader.take()) is not None:
            self._append(frames, messages)
        return messages

    def recv(self, timeout_s: float) -> list[M]:
        """Wait until something arrives or the time is over, then take what is there."""
        messages: list[M] = []
        self._append(self._reader.take(timeout_s) or [], messages)
        return messages

    def attach(self, loop: asyncio.AbstractEventLoop, handler: Callable[[M], None]) -> None:
        """Call `handler` in `loop` for each message, in order, from now on."""
        self._loop, self._handler = loop, handler
        loop.add_reader(self.fd, self._drain)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self.fd)
            self._loop = None
        self._reader.close()

    def _append(self, frames: list[bytes], messages: list[M]) -> None:
        for frame in frames:
            try:
                messages.append(self._decode(frame))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
                self.rejected += 1
                log.error("dropped a message that is not of this worker's protocol: %s", e)

    def _drain(self) -> None:
        """A piece at a time: the loop calls again while there is more, and looks at something else between."""
        for message in self.recv(0):
            self._handle(message)

    def _handle(self, message: M) -> None:
        assert self._handler is not None
        try:
            self._handler(message)
        except Exception:
            log.exception("handler failed for %s", type(message).__name__)


class PushSocket:
    """Sends structs to the process that binds `endpoint`; it need not be there yet."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._writer = FrameWriter(endpoint, max_kept=MAX_QUEUED_MESSAGES)
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message; never waits. Raises `PeerStalled` when too many are queued."""
        try:
            self._writer.send(self._encode(message))
        except Full:
            raise PeerStalled(f"{os.path.basename(self._endpoint)} takes no messages") from None

    def close(self) -> None:
        """Waits a moment for what is queued."""
        self._writer.close()
