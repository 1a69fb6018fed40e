"""Schedulers of all DP ranks. A call goes to all and returns when all have replied."""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from engine.frontend.client.scheduler_link import (
    CALL_TIMEOUT_S,
    Reply,
    SchedulerLink,
    concerns_requests,
)
from engine.frontend.errors import not_ready
from engine.messages import (
    ControlMessage,
    ControlReply,
    JoinTrainer,
    LeaveTrainer,
    LoadAdapter,
    NewTensors,
    SchedulerReady,
    StartProfile,
    StateReply,
    StepReply,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
)
from engine.metric_names import sums
from service.http.errors import ApiError

# ---- Merges reports of DP ranks. Pure.

# Shares and times are averaged, the rest is summed.
_MEANS = (
    "new_token_ratio",
    "cache_hit_rate",
    "spec_accept_length",
    "spec_accept_rate",
    "kv_transfer_speed_gb_s",
    "kv_transfer_latency_ms",
    "kv_transfer_total_mb",
    "kv_transfer_bootstrap_ms",
    "pending_prealloc_token_usage",
    "storage_read_gb_s",
    "decode_share",
)
_ALL_OR_NOT = ("paused", "batch_is_full")  # 1: all ranks


def rank_name(rank: int, num_ranks: int) -> str:
    return f"DP rank {rank} of {num_ranks}"


def total_of(states: Sequence[StateReply]) -> StateReply:
    first = states[0]
    if len(states) == 1:
        return first
    num_ranks = len(states)
    return msgspec.structs.replace(
        first,
        running=sum(s.running for s in states),
        queues={name: int(value) for name, value in sums(*(s.queues for s in states)).items()},
        num_pages=sum(s.num_pages for s in states),
        pages={name: int(value) for name, value in sums(*(s.pages for s in states)).items()},
        counters=sums(*(s.counters for s in states)),
        gauges=_gauges([s.gauges for s in states]),
        problems=[f"{rank_name(r, num_ranks)}: {text}" for r, s in enumerate(states) for text in s.problems],
        transfer_paths=[path for s in states for path in s.transfer_paths],
        avoided_encoders=list(dict.fromkeys(control for s in states for control in s.avoided_encoders)),
    )


def longest_of(steps: Sequence[StepReply]) -> StepReply:
    """The most critical report: stalled, then longest step."""
    return max(steps, key=lambda step: (step.stalled, step.loading, -1.0 if step.busy_s is None else step.busy_s))


def joined(replies: Sequence[ControlReply]) -> ControlReply:
    """Sum counts, join different texts (files) of accepted replies."""
    first = replies[0]
    values = {name: _joined_values([r.values.get(name, "") for r in replies]) for name in first.values}
    return msgspec.structs.replace(first, values=values)


def _joined_values(values: Sequence[int | str]) -> int | str:
    counts = [value for value in values if isinstance(value, int)]
    return sum(counts) if len(counts) == len(values) else ", ".join(dict.fromkeys(map(str, values)))


def _gauges(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    totals = sums(*tables)
    for name in totals.keys() & set(_MEANS):
        totals[name] /= len(tables)
    for name in totals.keys() & set(_ALL_OR_NOT):
        totals[name] = min(table.get(name, 0.0) for table in tables)
    return totals


# ---- changes on all DP ranks or none

_ADAPTERS = (LoadAdapter, UnloadAdapter)


class RankChanges:
    r"""`first`: initial model_path and weight_version. `lost`: why ranks differ.

    sent to all --> all accepted: done
          \--> all rejected: rejected
          \--> some rejected: others undo it, then rejected, naming a rank
              \--> an undo fails: `lost`, the worker ends, because answers would depend on the rank

    Pauses are not undone: a rank only rejects one during another, which holds there.
    """

    def __init__(self, links: Sequence[SchedulerLink]) -> None:
        self.first: dict[str, int | str] = {}
        self.lost: str | None = None
        self._links = links
        self._one_update = asyncio.Lock()
        self._one_adapter = asyncio.Lock()
        self._running: set[asyncio.Task[ControlReply]] = set()

    def weights_of(self, link: SchedulerLink) -> dict[str, int | str]:
        return {**self.first, **link.updated}

    async def carry_out(self, message: ControlMessage, *, timeout_s: float) -> ControlReply:
        """Apply a change, even if the caller leaves. Raises ApiError."""
        if isinstance(message, UpdateWeights) and self._one_update.locked():
            raise ApiError(409, "another update of the weights is running")
        task = asyncio.create_task(self._in_turn(message))
        self._running.add(task)
        task.add_done_callback(self._on_done)
        try:
            return await asyncio.wait_for(asyncio.shield(task), timeout_s)
        except TimeoutError:
            raise not_ready(f"the schedulers did not answer within {timeout_s:g} s") from None

    def _on_done(self, task: "asyncio.Task[ControlReply]") -> None:
        self._running.discard(task)
        with suppress(asyncio.CancelledError, ApiError):
            task.result()

    async def _in_turn(self, message: ControlMessage) -> ControlReply:
        if isinstance(message, UpdateWeights):
            async with self._one_update:
                return await self._carry_out(message)
        if isinstance(message, _ADAPTERS):
            async with self._one_adapter:
                return await self._carry_out(message)
        return await self._carry_out(message)

    async def _carry_out(self, message: ControlMessage) -> ControlReply:
        before = [self.weights_of(link) for link in self._links]
        answers = await self._send(message, range(len(self._links)))
        errors = {rank: answer for rank, answer in answers.items() if isinstance(answer, ApiError)}
        if not errors:
            return joined([answer for answer in answers.values() if isinstance(answer, ControlReply)])
        accepted = [rank for rank in answers if rank not in errors]
        rank, error = next(iter(errors.items()))
        if not accepted and len({e.message for e in errors.values()}) == 1:
            raise error
        await self._take_back(message, accepted, before)
        raise _with_rank(error, rank, len(self._links))

    async def _take_back(
        self, message: ControlMessage, ranks: Sequence[int], before: Sequence[dict[str, int | str]]
    ) -> None:
        failed: list[int] = []
        for rank in ranks:
            undo = self._undo_of(message, before[rank])
            if undo is None:
                continue
            answers = {} if _reads_the_same(undo, message) else await self._send(undo, [rank])
            if not isinstance(answers.get(rank), ControlReply):
                failed.append(rank)
        if failed and isinstance(message, UpdateWeights) and self._links[failed[0]].gone is None:
            name = rank_name(failed[0], len(self._links))
            self.lost = f"{name} took new weights, which others refused, and could not go back"

    def _undo_of(self, message: ControlMessage, before: dict[str, int | str]) -> ControlMessage | None:
        call_id = self._links[0].mint_call_id()
        match message:
            case UpdateWeights():
                version = str(before["weight_version"])
                path = str(before["model_path"])
                in_memory = message.tensors is not None or "weight_source" in before
                tensors = NewTensors(undo=True) if in_memory else None
                return UpdateWeights(call_id, path, version, message.abort_all, tensors)
            case JoinTrainer():
                return LeaveTrainer(call_id, message.name)
            case LoadAdapter():
                return UnloadAdapter(call_id, message.name)
            case StartProfile():
                return StopProfile(call_id)
        return None

    async def _send(self, message: ControlMessage, ranks: Sequence[int]) -> dict[int, ControlReply | ApiError]:
        """A dead rank ends the worker and every call."""

        async def ask(rank: int) -> ControlReply | ApiError:
            own = msgspec.structs.replace(message, dp_rank=rank) if isinstance(message, JoinTrainer) else message
            try:
                return await self._links[rank].control(own, timeout_s=None)
            except ApiError as error:
                return error

        return dict(zip(ranks, await asyncio.gather(*map(ask, ranks)), strict=True))


def _reads_the_same(undo: ControlMessage, message: ControlMessage) -> bool:
    """True for an update and its undoing by the same files, which may have changed."""
    if not isinstance(undo, UpdateWeights) or not isinstance(message, UpdateWeights):
        return False
    return undo.tensors is None and undo.model_path == message.model_path


# ---- leaders

R = TypeVar("R")


class Leaders:
    """All DP ranks as one. `links`: by DP rank. `adapters`, `updated`: only what all ranks have.

    `info`: facts of rank 0; others differ in measurements and addresses. `kv_tokens`: maximum
    sequence that fits every rank.
    """

    def __init__(self, links: Sequence[SchedulerLink]) -> None:
        self.links = tuple(links)
        self.num_ranks = len(self.links)
        self.ready = asyncio.Event()  # all ranks
        self.info: dict[str, int | float | str | bool | list[int] | None] = {}
        self.kv_tokens: int | None = None
        self.now_s = self.links[0].now_s
        self.mint_call_id = self.links[0].mint_call_id
        self.mint_wire_rid = self.links[0].mint_wire_rid
        self.updated: dict[str, int | str] = {}
        self.adapters: dict[str, str] = {}
        self._changes = RankChanges(self.links)

    def begin_with(self, *, model_path: str, weight_version: str, adapters: dict[str, str]) -> None:
        for link in self.links:
            link.adapters = dict(adapters)
        self.adapters = dict(adapters)
        self._changes.first = {"model_path": model_path, "weight_version": weight_version}

    @property
    def released(self) -> list[str]:
        return sorted({part for link in self.links for part in link.released})

    @property
    def paused(self) -> str:
        """The mode of a pause of any rank."""
        return next((link.paused for link in self.links if link.paused), "")

    @property
    def lost(self) -> str | None:
        """Why the ranks cannot serve as one worker."""
        return self._changes.lost

    @property
    def last_message_s(self) -> float:
        return min(link.last_message_s for link in self.links)

    async def states(self, *, check: bool = False, timeout_s: float = CALL_TIMEOUT_S) -> list[StateReply]:
        """Raises ApiError(503) on timeout."""
        return await self._all([link.state(check=check, timeout_s=timeout_s) for link in self.links])

    async def recent_states(self, *, timeout_s: float = CALL_TIMEOUT_S, closed: bool = False) -> list[StateReply]:
        return await self._all([link.recent_state(timeout_s=timeout_s, closed=closed) for link in self.links])

    async def steps(self, *, timeout_s: float = CALL_TIMEOUT_S) -> list[StepReply]:
        return await self._all([link.step(timeout_s=timeout_s) for link in self.links])

    async def flush_cache(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ControlReply:
        """A rank's rejection, if any."""
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

    def check_ready(self) -> None:
        """Raises ApiError(503) while the model is loading."""
        if not self.ready.is_set():
            raise not_ready("the model is still loading")

    def announce_drain(self) -> None:
        for link in self.links:
            link.announce_drain()

    def fail_calls(self, error: ApiError, *, gone: bool) -> None:
        for link in self.links:
            link.fail_calls(error, gone=gone)

    def on_message(self, message: SchedulerReady | Reply, rank: int = 0) -> None:
        self.links[rank].on_message(message)
        if isinstance(message, SchedulerReady):
            self._on_ready()
        if isinstance(message, ControlReply) and concerns_requests(message):
            self._agree()

    def _on_ready(self) -> None:
        found = [kv for link in self.links if isinstance(kv := link.info.get("max_total_num_tokens"), int)]
        self.info, self.kv_tokens = self.links[0].info, min(found, default=None)
        if all(link.ready.is_set() for link in self.links):
            self.ready.set()

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
            raise _with_rank(error, rank, self.num_ranks) from None


def _with_rank(error: ApiError, rank: int, num_ranks: int) -> ApiError:
    text = f"{rank_name(rank, num_ranks)}: {error.message}"
    return ApiError(error.status, text, field=error.field, code=error.code, retry_after_s=error.retry_after_s)
