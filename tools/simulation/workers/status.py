"""What a simulated worker of one process says of itself: health, heartbeats, load and its server info."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.frontend.apis.admin.health import HeartbeatLines
from engine.frontend.apis.admin.load import v1_loads_entry
from engine.frontend.client.engine_client import EngineClient
from engine.stamps import Stamped
from service.http import heartbeats
from service.http.errors import DRAINING
from tools.simulation.aio import VirtualLoop
from tools.simulation.http import Reply, Request
from tools.simulation.world import Process

HEARD_RECENTLY_S = 1.0
HEALTH_TIMEOUT_S = 1.0
BEAT_S = 0.1  # a quarter of the router's --health-silence


@dataclass(kw_only=True)
class Status:
    """`info`: what /server_info says. `num_requests`: that have come so far."""

    process: Process
    aio: VirtualLoop
    client: EngineClient
    role: str
    max_running: int
    info: Mapping[str, Any]
    num_requests: Callable[[], int]

    async def health(self, request: Request, reply: Reply) -> None:
        """As engine/frontend/apis/admin/health.py."""
        if self.client.is_draining:
            reply.whole(503, msgspec.json.encode({"status": DRAINING}), retry_after="1")
            return
        if self.aio.time() - self.client.leaders.last_message_s > HEARD_RECENTLY_S:
            await self.client.leaders.steps(timeout_s=HEALTH_TIMEOUT_S)
        reply.whole(200, b"{}")

    def begin_heartbeats(self, reply: Reply) -> None:
        """As engine/frontend/apis/admin/health.py, of a worker of one process."""
        lines = HeartbeatLines()

        def beat() -> None:
            if not reply.connected:
                return
            now_s, client = self.aio.time(), self.client
            stamps = [Stamped(self.process.name, now_s, busy_since_s=None, num_steps=self.num_requests())]
            reply.chunk(lines.next(stamps, now_s=now_s, num_live=client.num_live, fine=client.closed is None))
            self.process.after(BEAT_S, "heartbeat", beat)

        reply.head(200, heartbeats.TYPE)
        reply.chunk(heartbeats.first_line(BEAT_S))
        self.process.after(BEAT_S, "heartbeat", beat)

    async def server_info(self, request: Request, reply: Reply) -> None:
        reply.whole(200, msgspec.json.encode({**self.info, **self.client.leaders.updated}))

    async def loads(self, request: Request, reply: Reply) -> None:
        (state,) = await self.client.recent_states(timeout_s=HEALTH_TIMEOUT_S)
        entry = v1_loads_entry(
            state, mode=self.role, max_running_requests=self.max_running, num_live=self.client.num_live
        )
        reply.whole(200, msgspec.json.encode({"loads": [entry]}))
