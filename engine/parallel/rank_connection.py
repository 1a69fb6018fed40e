"""TCP connection of two ranks on different machines, which watches the abort word."""

import select
import socket
import struct

import torch
from torch import Tensor

from engine.kernels.failures import OUT_OF_STEP, RANKS_ENDED, failure
from engine.parallel.region import SharedRegion

HEADER = struct.Struct("<QQ")  # message number, bytes
WAKE_MS = 4  # period of checks of the abort word


class RankConnection:
    """One end; each `send` pairs with a `receive` in the same order.

    If an end closes or dies, it aborts the other machine's region.
    """

    def __init__(self, connection: socket.socket, region: SharedRegion) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._region = region
        self._poll = select.poll()
        self._count = 0

    def swap(self, mine: Tensor) -> Tensor:
        """Raises RanksEnded."""
        theirs = torch.empty_like(mine)
        self._move(mine, theirs)
        return theirs

    def send(self, mine: Tensor) -> None:
        self._move(mine, None)

    def receive(self, theirs: Tensor) -> None:
        self._move(None, theirs)

    def close(self) -> None:
        self._connection.close()

    def _move(self, mine: Tensor | None, theirs: Tensor | None) -> None:
        self._count += 1
        header = bytearray(HEADER.size)
        out = [] if mine is None else [memoryview(HEADER.pack(self._count, mine.nbytes)), _bytes_of(mine)]
        into = [] if theirs is None else [memoryview(header), _bytes_of(theirs)]
        is_checked = theirs is None
        try:
            while out or into:
                self._wait(writes=bool(out), reads=bool(into))
                out, into = self._write(out), self._read(into)
                if not is_checked and theirs is not None and sum(map(len, into)) <= theirs.nbytes:
                    is_checked = True
                    if HEADER.unpack(header) != (self._count, theirs.nbytes):
                        raise failure(OUT_OF_STEP)
        except OSError as e:
            self._region.abort()
            raise failure(RANKS_ENDED) from e

    def _wait(self, *, writes: bool, reads: bool) -> None:
        self._poll.register(self._connection, (select.POLLOUT if writes else 0) | (select.POLLIN if reads else 0))
        while not self._poll.poll(WAKE_MS):
            if self._region.aborted:
                raise failure(RANKS_ENDED)

    def _write(self, parts: list[memoryview]) -> list[memoryview]:
        if not parts:
            return parts
        try:
            return _rest(parts, self._connection.sendmsg(parts))
        except BlockingIOError:
            return parts

    def _read(self, parts: list[memoryview]) -> list[memoryview]:
        if not parts:
            return parts
        try:
            size = self._connection.recvmsg_into(parts)[0]
        except BlockingIOError:
            return parts
        if size == 0:
            raise ConnectionResetError("the other machine's rank closed its connection")
        return _rest(parts, size)


def _bytes_of(x: Tensor) -> memoryview:
    assert x.is_contiguous(), x.stride()
    return x.view(-1).view(torch.uint8).numpy().data


def _rest(parts: list[memoryview], size: int) -> list[memoryview]:
    rest = []
    for part in parts:
        taken = min(size, len(part))
        size -= taken
        if taken < len(part):
            rest.append(part[taken:])
    return rest
