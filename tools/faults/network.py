"""A network of our own on loopback: TCP links that can be cut and healed, one thread for all of them.

A cut link is a black hole: what is sent stays unread, new connections are accepted and stay silent. Healing resets what
was connected before, as a firewall that lost its state does; new connections work.
"""

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from deploy.launcher.probe import free_ports

Rewrite = Callable[[bytes], Awaitable[bytes]]
Address = tuple[str, int]
CHUNK_BYTES = 65536
LOOPBACK = "127.0.0.1"
_CONTROL_PORT = re.compile(rb'"control_port":(\d{5})\b')


class Link:
    """Listens at `port` (or on `sock`) and passes on to `target`. Made by `Network`; its coroutines run on that loop."""

    def __init__(
        self,
        network: "Network",
        *,
        port: int,
        target: Address,
        rewrite: Rewrite | None = None,
        sock: socket.socket | None = None,
    ) -> None:
        self.port, self.target = port, target
        self._sock = sock
        self.num_answered = 0  # connections that the other side answered on
        self._network = network
        self._rewrite = rewrite
        self._open = asyncio.Event()
        self._open.set()
        self._cut = self._clogged = False
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter | None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        if self._sock is not None:
            self._server = await asyncio.start_server(self._serve, sock=self._sock)
        else:
            self._server = await asyncio.start_server(self._serve, LOOPBACK, self.port, backlog=1024)

    def cut(self) -> None:
        self._network.call(self.set(cut=True))

    def heal(self) -> None:
        """Undo `cut`. Connections of before are reset."""
        self._network.call(self.set(cut=False))

    def clog(self) -> None:
        """As `cut` for now, but `loosen` loses nothing. A link may be both."""
        self._network.call(self.set(clogged=True))

    def loosen(self) -> None:
        self._network.call(self.set(clogged=False))

    async def set(self, *, cut: bool | None = None, clogged: bool | None = None) -> None:
        if cut is False and self._cut:
            for pair in list(self._pairs):
                _reset(pair)
        self._cut = self._cut if cut is None else cut
        self._clogged = self._clogged if clogged is None else clogged
        self._open.clear() if self._cut or self._clogged else self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter | None] = (writer, None)
        self._pairs.add(pair)
        try:
            await self._open.wait()
            far = await asyncio.open_connection(*self.target)
            self._pairs.discard(pair)
            pair = (writer, far[1])
            self._pairs.add(pair)
            await asyncio.gather(
                self._pump(reader, far[1], self._rewrite), self._pump(far[0], writer, None, is_answer=True)
            )
        except OSError:
            _reset(pair)
        finally:
            self._pairs.discard(pair)
            for end in (writer, far[1] if far else None):
                if end is not None:
                    end.close()

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        rewrite: Rewrite | None,
        *,
        is_answer: bool = False,
    ) -> None:
        answered = False
        while chunk := await source.read(CHUNK_BYTES):
            await self._open.wait()
            if is_answer and not answered:
                answered = True
                self.num_answered += 1
            sink.write(chunk if rewrite is None else await rewrite(chunk))
            await sink.drain()
        await self._open.wait()  # a cut hides the end of a connection too
        with contextlib.suppress(OSError, RuntimeError):
            sink.write_eof()

    async def close(self) -> None:
        for pair in list(self._pairs):
            _reset(pair)
        if self._server is not None:
            self._server.close()


def _reset(pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter | None]) -> None:
    for writer in pair:
        if writer is not None:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class Network:
    """Links and the thread that drives them. `close()` must be called."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()
        self._links: list[Link] = []
        self._controls: dict[int, Link] = {}
        self._is_control_cut = False

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    def link(self, *, port: int, target: int) -> Link:
        return self.call(self._make(port, (LOOPBACK, target)))  # type: ignore[no-any-return]

    def link_from(self, sock: socket.socket, *, target: Address) -> Link:
        """As `link`, where `sock` listens, to another address."""
        return self.call(self._make(sock.getsockname()[1], target, sock=sock))  # type: ignore[no-any-return]

    def registrations(self, *, port: int, target: int) -> Link:
        """The way from a prefill worker to its bootstrap server. The control plane it names there is put behind a link
        as well (`cut_control`): decode workers are told the link's port instead."""
        return self.call(self._make(port, (LOOPBACK, target), self._name_link))  # type: ignore[no-any-return]

    def cut_control(self) -> None:
        self._is_control_cut = True
        for link in self._controls.values():
            link.cut()

    def heal_control(self) -> None:
        self._is_control_cut = False
        for link in self._controls.values():
            link.heal()

    def close(self) -> None:
        self.call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    async def _make(
        self, port: int, target: Address, rewrite: Rewrite | None = None, *, sock: socket.socket | None = None
    ) -> Link:
        link = Link(self, port=port, target=target, rewrite=rewrite, sock=sock)
        await link.listen()
        self._links.append(link)
        return link

    async def _name_link(self, chunk: bytes) -> bytes:
        found = _CONTROL_PORT.search(chunk)
        if found is None:
            return chunk
        target = int(found[1])
        if target not in self._controls:
            (port,) = free_ports(1)
            self._controls[target] = await self._make(port, (LOOPBACK, target))
            await self._controls[target].set(cut=self._is_control_cut)
        return chunk[: found.start(1)] + b"%05d" % self._controls[target].port + chunk[found.end(1) :]

    async def _close(self) -> None:
        for link in self._links:
            await link.close()
        await asyncio.sleep(0)
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
