"""CPU collectives of several machines: shared memory inside, subtotals over TCP.

Machines, and ranks per machine, are powers of two, so a machine's subtotal is a subtree of the sum:
bits equal those of one machine. Rank i exchanges its slice with rank i of the machine that differs
in bit n, round by round (recursive doubling).
"""

import select
import socket
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.build import OUT_OF_STEP, RANKS_ENDED, failure
from engine.parallel.collectives import SharedMemoryCollectives, columns_of
from engine.parallel.region import SharedRegion

# ---- TCP connection of two ranks on different machines, which watches the abort word.

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


NOTHING = -0.0  # added to any number, even -0, it keeps that


class NetworkCollectives:
    """`Collectives` of a rank, not recordable."""

    def __init__(
        self,
        region: SharedRegion,
        *,
        local_rank: int,
        machine: int,
        others: Sequence[RankConnection],
    ) -> None:
        here = region.plan.ranks
        assert 0 <= machine < 1 << len(others) and here & (here - 1) == 0, (machine, here, len(others))
        self.rank, self.size = machine * here + local_rank, here << len(others)
        self._local = SharedMemoryCollectives(region, rank=local_rank)
        self._machine = machine
        self._others = tuple(others)

    def sum(self, partial: Tensor, *, dtype: torch.dtype) -> Tensor:
        subtotal = self._local.sum(partial, dtype=torch.float32).view(-1)
        mine = columns_of(self._local.rank, self._local.size, len(subtotal))
        own = subtotal[mine.start : mine.stop]
        for other in self._others:
            own = own + other.swap(own)  # the order of two numbers does not matter
        total = torch.full_like(subtotal, NOTHING)
        total[mine.start : mine.stop] = own
        return self._local.sum(total.view(partial.shape), dtype=dtype)  # all other slices are NOTHING

    def gather_columns(self, part: Tensor, *, columns: range, total: int) -> Tensor | None:
        """In round n machines with bit n set pass all columns they have."""
        mine = columns_of(self.rank, self.size, total)
        assert columns == mine, (columns, mine)
        whole = self._local.gather_columns(part, columns=columns, total=total)
        if whole is None:
            return None
        for number, other in enumerate(self._others):
            if self._machine >> number & 1:
                theirs = self._columns_from(self._machine, number, total)
                other.send(whole[:, theirs.start : theirs.stop].contiguous())
                return None
            theirs = self._columns_from(self._machine + (1 << number), number, total)
            came = torch.empty((len(part), len(theirs)))
            other.receive(came)
            whole[:, theirs.start : theirs.stop] = came
        return whole

    def share(self, x: Tensor, *, owner: int = 0) -> None:
        """In round n the 2 ** n machines with `x` double."""
        source, first = divmod(owner, self._local.size)
        apart = self._machine ^ source
        if apart == 0:
            self._local.share(x, owner=first)
        if self._local.rank == 0:
            for number, other in enumerate(self._others):
                if apart < 1 << number:
                    other.send(x)
                elif apart < 2 << number:
                    other.receive(x)
        if apart:
            self._local.share(x)

    def close(self) -> None:
        for other in self._others:
            other.close()
        self._local.close()

    def _columns_from(self, machine: int, number: int, total: int) -> range:
        first, last = machine * self._local.size, (machine + (1 << number)) * self._local.size - 1
        return range(columns_of(first, self.size, total).start, columns_of(last, self.size, total).stop)
