"""Name look-ups in daemon threads, so a hanging name server blocks nothing else."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence

from aiohttp.abc import AbstractResolver, ResolveResult

AT_A_TIME = 64  # lookups, abandoned ones included

_Found = Sequence[tuple[int, int, int, str, tuple[object, ...]]]


class NameLookup(AbstractResolver):
    """The system's resolver without a cache."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(AT_A_TIME)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
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
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, found)

        threading.Thread(target=look_up, name="image-name", daemon=True).start()
        return [_result(host, port, info) for info in await future]

    async def close(self) -> None:
        """Do nothing: sessions share this resolver."""


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
