"""Changes on all DP ranks or none: weights, adapters, profiles, pauses.

sent to all --> all accepted: done
      \\--> all rejected: rejected
      \\--> some rejected: others undo it, then rejected, naming a rank
          \\--> an undo fails: `lost`, the worker ends, because answers would depend on the rank

Pauses are not undone: a rank only rejects one during another, which holds there.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from engine.frontend.client.dp_reports import joined, rank_name
from engine.frontend.client.scheduler_link import ControlMessage, SchedulerLink
from engine.frontend.errors import not_ready
from engine.messages import ControlReply, LoadAdapter, StartProfile, StopProfile, UnloadAdapter, UpdateWeights
from service.http.errors import ApiError

_ADAPTERS = (LoadAdapter, UnloadAdapter)


class RankChanges:
    """Changes of the model on all ranks.

    `first`: initial model_path and weight_version. `lost`: why ranks differ.
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
        text = f"{rank_name(rank, len(self._links))}: {error.message}"
        raise ApiError(error.status, text, field=error.field, code=error.code, retry_after_s=error.retry_after_s)

    async def _take_back(
        self, message: ControlMessage, ranks: Sequence[int], before: Sequence[dict[str, int | str]]
    ) -> None:
        failed: list[int] = []
        for rank in ranks:
            undo = self._undo_of(message, before[rank])
            if undo is None:
                continue
            same_files = isinstance(undo, UpdateWeights) and undo.model_path == getattr(message, "model_path", None)
            answers = {} if same_files else await self._send(undo, [rank])
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
                return UpdateWeights(call_id, path, weight_version=version, abort_all=message.abort_all)
            case LoadAdapter():
                return UnloadAdapter(call_id, message.name)
            case StartProfile():
                return StopProfile(call_id)
        return None

    async def _send(self, message: ControlMessage, ranks: Sequence[int]) -> dict[int, ControlReply | ApiError]:
        """A dead rank ends the worker and every call."""

        async def ask(rank: int) -> ControlReply | ApiError:
            try:
                return await self._links[rank].control(message, timeout_s=None)
            except ApiError as error:
                return error

        return dict(zip(ranks, await asyncio.gather(*map(ask, ranks)), strict=True))
