"""Looks names up in threads of its own: a name server that never answers keeps none of the process's other threads, nor its end."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence

from aiohttp.abc import AbstractResolver, ResolveResult

AT_A_TIME = 64  # lookups; one that its fetch gave up still counts

_Found = Sequence[tuple[int, int, int, str, tuple[object, ...]]]


class NameLookup(AbstractResolver):
    """The system's resolver (hosts file, search domains) without a cache."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(AT_A_TIME)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises OSError for an unknown name."""
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Found] = loop.create_future()

        def end(found: _Found | Exception) -> None:
            self._slots.release()
            if future.cancelled():
                return
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(found)

        def look_up() -> None:
            found = _look_up(host, port, family)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end, found)

        threading.Thread(target=look_up, name="image-name", daemon=True).start()
        return [_result(host, port, info) for info in await future]

    async def close(self) -> None:
        """Sessions close their resolver; this one is for all of them."""


def _look_up(host: str, port: int, family: int) -> _Found | Exception:
    try:
        return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return OSError(str(error))


def _result(host: str, port: int, info: tuple[int, int, int, str, tuple[object, ...]]) -> ResolveResult:
    family, _, protocol, _, address = info
    return ResolveResult(
        hostname=host, host=str(address[0]), port=port, family=family, proto=protocol, flags=socket.AI_NUMERICHOST
    )
