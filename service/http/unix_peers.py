"""Calls to a server's other processes at unix sockets."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0


class UnixPeers:
    def __init__(self, paths: Iterable[Path], *, headers: Mapping[str, str]) -> None:
        self._headers = {**headers, "Content-Type": "application/json"}
        self._sessions = [
            aiohttp.ClientSession("http://peer", connector=aiohttp.UnixConnector(path=str(path))) for path in paths
        ]

    @property
    def num(self) -> int:
        return len(self._sessions)

    async def request(self, method: str, path: str, body: Any = None, *, timeout_s: float = TIMEOUT_S) -> list[bytes]:
        """Send to all peers; return bodies of timely 200 answers."""
        data = None if body is None else msgspec.json.encode(body)
        calls = (self._request(session, method, path, data, timeout_s) for session in self._sessions)
        answers = await asyncio.gather(*calls)
        return [answer for answer in answers if answer is not None]

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()

    async def _request(
        self, session: aiohttp.ClientSession, method: str, path: str, data: bytes | None, timeout_s: float
    ) -> bytes | None:
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with session.request(method, path, data=data, headers=self._headers, timeout=timeout) as response:
                answer = await response.read()
                return answer if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            log.debug("a peer did not answer %s %s: %s", method, path, err)
            return None
