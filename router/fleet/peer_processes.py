"""What the processes of one router send each other: changes of the pool, and their counts for one /metrics.

Each serves its ordinary routes at a unix socket as well; what comes from there carries the key that only they know, and is
passed on no further. Owns that client. A process that has just started asks a peer for the workers.
"""

import asyncio
import hmac
import logging
from collections.abc import Iterable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from router.fleet.processes import ProcessSlot
from router.pool.worker import Role
from router.pool.workers import WorkerTable
from service.telemetry.records import TracesQuery

log = logging.getLogger(__name__)

KEY_HEADER = "X-Tandem-Sibling"
TIMEOUT_S = 5.0
_ADDED = (
    "_total",
    "_bucket",
    "_count",
    "_sum",
    "_inflight_requests",
    "_inflight_tokens",
    "_waiting_requests",
    "_assigned",
    "_active",
)


class PeerProcesses:
    """The other processes; none without a slot."""

    def __init__(self, slot: ProcessSlot | None) -> None:
        self._slot = slot
        self._sessions: list[aiohttp.ClientSession] = []
        for path in () if slot is None else slot.peers:
            connector = aiohttp.UnixConnector(path=str(path))
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            self._sessions.append(aiohttp.ClientSession("http://router", connector=connector, timeout=timeout))

    @property
    def num(self) -> int:
        """Processes of this router besides this one."""
        return len(self._sessions)

    def is_peer(self, request: web.BaseRequest) -> bool:
        """Whether a peer asks."""
        said = request.headers.get(KEY_HEADER, "")
        if self._slot is None or not said:
            return False
        return hmac.compare_digest(said.encode(errors="surrogateescape"), self._slot.key.encode())

    async def forward(self, request: web.BaseRequest, asked: dict[str, Any]) -> None:
        """Pass on what was asked for and done here, unless a peer asked. One that does not answer is just starting: it will ask."""
        if self._sessions and not self.is_peer(request):
            await self._ask_all(request.method, request.path, msgspec.json.encode(asked))

    async def announce(self, path: str, said: dict[str, Any]) -> None:
        """POST to each what it cannot know: something is done here that no request asked for."""
        await self._ask_all("POST", path, msgspec.json.encode(said))

    async def answers(self, path: str) -> list[bytes]:
        """What each that answers says to GET `path`."""
        return await self._ask_all("GET", path, b"")

    async def expositions(self) -> list[str]:
        """/metrics of each that answers."""
        return [body.decode() for body in await self.answers("/metrics")]

    async def traces(self, query: TracesQuery) -> list[bytes]:
        """/traces of each that answers."""
        return await self._ask_all("POST", "/traces", msgspec.json.encode(query))

    async def catch_up(self, table: WorkerTable, *, now_s: float) -> None:
        """The pool as the peers have it by now, which may not be what the flags said."""
        for body in (await self._ask_all("GET", "/workers", b""))[:1]:
            known = {w["url"]: w for w in msgspec.json.decode(body)["workers"] if not w["discovered"]}
            for worker in table.workers():
                if worker.url not in known:
                    table.remove(worker.url)
            for url, said in known.items():
                if all(worker.url != url for worker in table.workers()):
                    port = said["bootstrap_port"]
                    table.add(url, role=Role(said["role"]), bootstrap_port=port, now_s=now_s)

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()

    async def _ask_all(self, method: str, path: str, body: bytes) -> list[bytes]:
        answers = await asyncio.gather(*(self._ask(session, method, path, body) for session in self._sessions))
        return [answer for answer in answers if answer is not None]

    async def _ask(self, session: aiohttp.ClientSession, method: str, path: str, body: bytes) -> bytes | None:
        assert self._slot is not None
        headers = {KEY_HEADER: self._slot.key, "Content-Type": "application/json"}
        try:
            async with session.request(method, path, data=body or None, headers=headers) as response:
                answer = await response.read()
                return answer if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            log.debug("a peer did not answer %s %s: %s", method, path, err)
            return None


def merge_expositions(texts: Iterable[str]) -> str:
    """One exposition of many: counts are added; of times of creation the first stands, of other gauges the largest."""
    lines: list[str] = []
    values: dict[str, float] = {}
    heads: dict[str, tuple[str, str, str]] = {}
    order: dict[str, list[str]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            heads.setdefault(family.name, (family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = ",".join(f'{k}="{_escaped(v)}"' for k, v in sample.labels.items())
                key = sample.name + (f"{{{labels}}}" if labels else "")
                if key not in values:
                    order.setdefault(family.name, []).append(key)
                    values[key] = sample.value
                elif sample.name.endswith(_ADDED):
                    values[key] += sample.value
                elif sample.name.endswith("_created"):
                    values[key] = min(values[key], sample.value)
                else:
                    values[key] = max(values[key], sample.value)
    for name, documentation, kind in heads.values():
        shown = f"{name}_total" if kind == "counter" else name
        lines += [f"# HELP {shown} {documentation}", f"# TYPE {shown} {kind}"]
        lines += [f"{key} {values[key]}" for key in order.get(name, ())]
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
