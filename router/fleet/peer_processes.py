"""What the processes of one router send each other: changes of the pool, and their counts for one /metrics.

Each also serves its ordinary routes at a unix socket; requests of peers carry a key that only they know, and are not forwarded.
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

log = logging.getLogger(__name__)

KEY_HEADER = "X-Tandem-Sibling"
TIMEOUT_S = 5.0
_SUMMED = (
    *("_total", "_bucket", "_count", "_sum"),
    *("_inflight_requests", "_inflight_tokens", "_waiting_requests", "_assigned", "_active"),
    *("_stored_responses", "_stored_response_bytes"),
)


class PeerProcesses:
    def __init__(self, slot: ProcessSlot | None) -> None:
        self._slot = slot
        self._sessions: list[aiohttp.ClientSession] = []
        for path in () if slot is None else slot.peers:
            connector = aiohttp.UnixConnector(path=str(path))
            self._sessions.append(aiohttp.ClientSession("http://router", connector=connector))

    @property
    def num(self) -> int:
        return len(self._sessions)

    def is_peer(self, request: web.BaseRequest) -> bool:
        key = request.headers.get(KEY_HEADER, "")
        if self._slot is None or not key:
            return False
        return hmac.compare_digest(key.encode(errors="surrogateescape"), self._slot.key.encode())

    async def forward(self, request: web.BaseRequest, body: dict[str, Any], *, timeout_s: float = TIMEOUT_S) -> None:
        """Send a request that was done here to the peers, unless one sent it. A peer that does not answer is starting: it will ask."""
        if self._sessions and not self.is_peer(request):
            await self.request(request.method, request.path, body, timeout_s=timeout_s)

    async def request(self, method: str, path: str, body: Any = None, *, timeout_s: float = TIMEOUT_S) -> list[bytes]:
        data = None if body is None else msgspec.json.encode(body)
        calls = (self._request(session, method, path, data, timeout_s) for session in self._sessions)
        answers = await asyncio.gather(*calls)
        return [answer for answer in answers if answer is not None]

    async def catch_up(self, table: WorkerTable, *, now_s: float) -> None:
        """Take over the pool of a peer, which may differ from the flags."""
        for body in (await self.request("GET", "/workers"))[:1]:
            known = {w["url"]: w for w in msgspec.json.decode(body)["workers"] if not w["discovered"]}
            for worker in table.workers():
                if worker.url not in known:
                    table.remove(worker.url)
            for url, view in known.items():
                if all(worker.url != url for worker in table.workers()):
                    port = view["bootstrap_port"]
                    table.add(url, role=Role(view["role"]), bootstrap_port=port, now_s=now_s)

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()

    async def _request(
        self, session: aiohttp.ClientSession, method: str, path: str, data: bytes | None, timeout_s: float
    ) -> bytes | None:
        assert self._slot is not None
        headers = {KEY_HEADER: self._slot.key, "Content-Type": "application/json"}
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with session.request(method, path, data=data, headers=headers, timeout=timeout) as response:
                answer = await response.read()
                return answer if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            log.debug("a peer did not answer %s %s: %s", method, path, err)
            return None


def merge_expositions(texts: Iterable[bytes]) -> bytes:
    """One exposition of many: counts are summed; of times of creation the first is taken, of other gauges the largest."""
    lines: list[str] = []
    values: dict[str, float] = {}
    heads: dict[str, tuple[str, str, str]] = {}
    order: dict[str, list[str]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            heads.setdefault(family.name, (family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = ",".join(f'{k}="{_escaped(v)}"' for k, v in sample.labels.items())
                key = sample.name + (f"{{{labels}}}" if labels else "")
                if key not in values:
                    order.setdefault(family.name, []).append(key)
                    values[key] = sample.value
                elif sample.name.endswith(_SUMMED):
                    values[key] += sample.value
                elif sample.name.endswith("_created"):
                    values[key] = min(values[key], sample.value)
                else:
                    values[key] = max(values[key], sample.value)
    for name, documentation, kind in heads.values():
        shown = f"{name}_total" if kind == "counter" else name
        lines += [f"# HELP {shown} {documentation}", f"# TYPE {shown} {kind}"]
        lines += [f"{key} {values[key]}" for key in order.get(name, ())]
    return ("\n".join(lines) + "\n").encode()


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
