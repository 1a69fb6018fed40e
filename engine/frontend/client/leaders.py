"""Schedulers of all DP ranks. A call goes to all and returns when all have replied."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from engine.frontend.client.dp_reports import joined, rank_name
from engine.frontend.client.rank_changes import RankChanges
from engine.frontend.client.scheduler_link import (
    CALL_TIMEOUT_S,
    ControlMessage,
    Reply,
    SchedulerLink,
    concerns_requests,
)
from engine.messages import ControlReply, SchedulerReady, StateReply, StepReply
from service.http.errors import ApiError

R = TypeVar("R")


class Leaders:
    """All DP ranks as one. `links`: by DP rank. `adapters`, `updated`: only what all ranks have."""

    def __init__(self, links: Sequence[SchedulerLink]) -> None:
        self.links = tuple(links)
        self.ready = asyncio.Event()  # all ranks
        self.updated: dict[str, int | str] = {}
        self.adapters: dict[str, str] = {}
        self._changes = RankChanges(self.links)

    def begin_with(self, *, model_path: str, weight_version: str, adapters: dict[str, str]) -> None:
        for link in self.links:
            link.adapters = dict(adapters)
        self.adapters = dict(adapters)
        self._changes.first = {"model_path": model_path, "weight_version": weight_version}

    @property
    def num_ranks(self) -> int:
        return len(self.links)

    @property
    def info(self) -> dict[str, int | float | str | bool | list[int] | None]:
        """Facts of rank 0; others differ in measurements and addresses."""
        return self.links[0].info

    @property
    def kv_tokens(self) -> int | None:
        """Maximum sequence that fits every rank."""
        found = [kv for link in self.links if isinstance(kv := link.info.get("max_total_num_tokens"), int)]
        return min(found, default=None)

    @property
    def released(self) -> list[str]:
        return sorted({part for link in self.links for part in link.released})

    @property
    def lost(self) -> str | None:
        """Why the ranks cannot serve as one worker."""
        return self._changes.lost

    @property
    def last_message_s(self) -> float:
        return min(link.last_message_s for link in self.links)

    def now_s(self) -> float:
        return self.links[0].now_s()

    def mint_call_id(self) -> str:
        return self.links[0].mint_call_id()

    def mint_wire_rid(self, name: str) -> str:
        return self.links[0].mint_wire_rid(name)

    async def states(self, *, check: bool = False, timeout_s: float = CALL_TIMEOUT_S) -> list[StateReply]:
        """Raises ApiError(503) on timeout."""
        return await self._all([link.state(check=check, timeout_s=timeout_s) for link in self.links])

    async def recent_states(self, *, timeout_s: float = CALL_TIMEOUT_S, closed: bool = False) -> list[StateReply]:
        return await self._all([link.recent_state(timeout_s=timeout_s, closed=closed) for link in self.links])

    async def steps(self, *, timeout_s: float = CALL_TIMEOUT_S) -> list[StepReply]:
        return await self._all([link.step(timeout_s=timeout_s) for link in self.links])

    async def flush_cache(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ControlReply:
        """Flush all; return a rank's rejection, if any."""
        replies = await self._all([link.flush_cache(timeout_s=timeout_s) for link in self.links])
        for rank, reply in enumerate(replies):
            if not reply.ok and self.num_ranks > 1:
                text = f"{rank_name(rank, self.num_ranks)}: {reply.message}"
                return ControlReply(reply.call_id, False, text, status=reply.status)
        return joined(replies)

    async def control(self, message: ControlMessage, *, timeout_s: float = CALL_TIMEOUT_S) -> ControlReply:
        """Raises ApiError: a rejection, which names the rank, or 503 on timeout."""
        if self.num_ranks == 1:
            return await self.links[0].control(message, timeout_s=timeout_s)
        return await self._changes.carry_out(message, timeout_s=timeout_s)

    def announce_drain(self) -> None:
        for link in self.links:
            link.announce_drain()

    def fail_calls(self, error: ApiError, *, gone: bool) -> None:
        for link in self.links:
            link.fail_calls(error, gone=gone)

    def on_message(self, message: SchedulerReady | Reply, rank: int = 0) -> None:
        self.links[rank].on_message(message)
        if isinstance(message, SchedulerReady) and all(link.ready.is_set() for link in self.links):
            self.ready.set()
        if isinstance(message, ControlReply) and concerns_requests(message):
            self._agree()

    def _agree(self) -> None:
        first, *others = self.links
        if all(self._changes.weights_of(link) == self._changes.weights_of(first) for link in others):
            self.updated = first.updated
        self.adapters = {
            name: path
            for name, path in first.adapters.items()
            if all(link.adapters.get(name) == path for link in others)
        }

    async def _all(self, calls: Sequence[Awaitable[R]]) -> list[R]:
        if len(calls) == 1:
            return [await calls[0]]
        return list(await asyncio.gather(*(self._named(rank, call) for rank, call in enumerate(calls))))

    async def _named(self, rank: int, call: Awaitable[R]) -> R:
        try:
            return await call
        except ApiError as error:
            raise named(error, rank, self.num_ranks) from None


def named(error: ApiError, rank: int, num_ranks: int) -> ApiError:
    text = f"{rank_name(rank, num_ranks)}: {error.message}"
    return ApiError(error.status, text, field=error.field, code=error.code, retry_after_s=error.retry_after_s)
