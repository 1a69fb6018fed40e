r"""Migrates streams from decode workers to others, with their KV.

call.leave() --rooms--> POST /move_out --> the stream ends with the KV's address --> failover
    \___ other engine, no answer, no end in time ___/--> give_up: prefill recomputes it
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from router.client.credentials import Credentials
from router.client.session import call_worker
from router.pool.active_calls import ActiveCall
from router.pool.worker import Role, Worker
from service.http.errors import decode_or_none
from service.http.resume import MOVE_OUT, RESUME_HEADER, sign
from service.waiter import end_tasks

ANSWER_S = 5.0  # generation continues meanwhile
END_S = 5.0  # a step in flight, and buffered bytes of a slow client

log = logging.getLogger(__name__)


class _Answer(msgspec.Struct):
    moving: list[str]


@dataclass(eq=False)
class MoveOrders:
    session: aiohttp.ClientSession
    credentials: Credentials
    secret: bytes
    _orders: set[asyncio.Task[None]] = field(default_factory=set)

    def let_go(self, worker: Worker, calls: Sequence[ActiveCall], why: str) -> None:
        """Request that `worker` ends `calls`, for others to continue."""
        leaving = defaultdict[str, dict[ActiveCall, Mapping[str, int]]](dict)  # by the owner of their names
        for call in calls:
            if worker.role is Role.DECODE and (rooms := call.leave()):
                leaving[call.names_owner][call] = rooms
            else:
                worker.calls.pop(call, None)
                call.give_up(why)
        for owner, of_owner in leaving.items():
            order = self._order(worker, of_owner, why, owner=owner)
            task = asyncio.create_task(order, name=f"moves from {worker.url}")
            self._orders.add(task)
            task.add_done_callback(self._orders.discard)

    async def close(self) -> None:
        await end_tasks(self._orders)

    async def _order(
        self, worker: Worker, leaving: Mapping[ActiveCall, Mapping[str, int]], why: str, *, owner: str
    ) -> None:
        samples = [{"rid": rid, "room": room} for rooms in leaving.values() for rid, room in rooms.items()]
        body = msgspec.json.encode({"samples": samples, "owner": owner})
        headers = {**self.credentials.own(), RESUME_HEADER: sign(self.secret, body)}
        answer = await call_worker(self.session, "POST", f"{worker.url}{MOVE_OUT}", headers, body, timeout_s=ANSWER_S)
        found: _Answer | None = decode_or_none(answer.body, _Answer) if answer.status == 200 else None
        moving = frozenset() if found is None else frozenset(found.moving)
        if not moving:
            log.info("%s lets no stream go with its KV (status %d)", worker.url, answer.status)
        for call, rooms in leaving.items():
            if moving.isdisjoint(rooms):
                _give_up(worker, call, why)
        await asyncio.sleep(END_S)
        for call in leaving:
            _give_up(worker, call, why)


def _give_up(worker: Worker, call: ActiveCall, why: str) -> None:
    if call in worker.calls:
        del worker.calls[call]
        call.give_up(why)
