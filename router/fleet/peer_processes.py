"""Messages between the processes of a router: pool changes, and counts for /metrics.

Over unix sockets with a shared key; requests of peers are not forwarded again.
"""

import hmac
from typing import Any

import msgspec
from aiohttp import web

from router.fleet.processes import ProcessSlot
from router.pool.worker import Role
from router.pool.workers import WorkerTable
from service.http.unix_peers import TIMEOUT_S, UnixPeers

KEY_HEADER = "X-Tandem-Sibling"
SUMMED_GAUGES = (
    *("_inflight_requests", "_inflight_tokens", "_waiting_requests", "_assigned", "_active"),
    *("_stored_responses", "_stored_response_bytes"),
)


class PeerProcesses:
    def __init__(self, slot: ProcessSlot | None) -> None:
        self._slot = slot
        self._peers = UnixPeers(
            () if slot is None else slot.peers, headers={} if slot is None else {KEY_HEADER: slot.key}
        )

    @property
    def num(self) -> int:
        return self._peers.num

    def is_peer(self, request: web.BaseRequest) -> bool:
        key = request.headers.get(KEY_HEADER, "")
        if self._slot is None or not key:
            return False
        return hmac.compare_digest(key.encode(errors="surrogateescape"), self._slot.key.encode())

    async def forward(self, request: web.BaseRequest, body: dict[str, Any], *, timeout_s: float = TIMEOUT_S) -> None:
        """A starting peer catches up later."""
        if self.num and not self.is_peer(request):
            await self.request(request.method, request.path, body, timeout_s=timeout_s)

    async def request(self, method: str, path: str, body: Any = None, *, timeout_s: float = TIMEOUT_S) -> list[bytes]:
        return await self._peers.request(method, path, body, timeout_s=timeout_s)

    async def catch_up(self, table: WorkerTable, *, now_s: float) -> None:
        """Copy a peer's pool, which may have changed since the start."""
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
        await self._peers.close()
