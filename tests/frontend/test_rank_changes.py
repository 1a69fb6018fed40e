"""Changes reach all DP ranks or none: real links, whose schedulers are lists of what was sent to them."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from engine.frontend.client.leaders import Leaders
from engine.frontend.client.scheduler_link import ControlMessage, SchedulerLink
from engine.messages import (
    ContinueGeneration,
    ControlReply,
    GetStep,
    LoadAdapter,
    PauseGeneration,
    StartProfile,
    StopProfile,
    ToScheduler,
    UnloadAdapter,
    UpdateWeights,
)
from service.http.errors import ApiError

FIRST = {"model_path": "/old", "weight_version": "v1"}
TURNS = 20  # of the event loop, more than an answer needs


class Ranks:
    """`answer`: what each rank replies to a message at once; None: the test does it."""

    def __init__(self, num_ranks: int, answer: Callable[[int, Any], ControlReply | None]) -> None:
        self.sent: list[tuple[int, Any]] = []
        self._answer = answer
        self.leaders = Leaders([SchedulerLink(partial(self._send, rank), lambda: 0.0) for rank in range(num_ranks)])
        self.leaders.begin_with(**FIRST, adapters={"base": "/base"})

    def _send(self, rank: int, message: ToScheduler | GetStep) -> None:
        self.sent.append((rank, message))
        if (reply := self._answer(rank, message)) is not None:
            asyncio.get_running_loop().call_soon(self.leaders.on_message, reply, rank)

    def kinds(self) -> list[tuple[int, type]]:
        return [(rank, type(message)) for rank, message in self.sent]

    async def control(self, message: ControlMessage) -> ControlReply:
        return await self.leaders.control(message, timeout_s=5.0)


async def settled() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def done(message: Any, **more: Any) -> ControlReply:
    return ControlReply(message.call_id, True, "done", **more)


def refuse(message: Any, text: str = "model_path: it does not fit", status: int = 400) -> ControlReply:
    return ControlReply(message.call_id, False, text, status=status)


def weights(rank: int, message: Any) -> ControlReply:
    """Rank 1 takes none but the old ones."""
    if rank == 1 and message.model_path != "/old":
        return refuse(message)
    return done(message, values={"model_path": message.model_path, "weight_version": message.weight_version})


def update(path: str = "/new") -> UpdateWeights:
    return UpdateWeights("c9", path, weight_version="v2")


async def test_a_call_is_answered_when_all_have_answered() -> None:
    ranks = Ranks(3, lambda rank, message: None)
    call = asyncio.create_task(ranks.control(PauseGeneration("c9", "retract")))
    for rank in (2, 0, 1):
        await settled()
        assert not call.done()
        ranks.leaders.on_message(ControlReply("c9", True, "paused", values={"retracted": 2}), rank)
    assert (await call).values == {"retracted": 6}
    assert ranks.kinds() == [(rank, PauseGeneration) for rank in range(3)]


async def test_new_weights_that_one_rank_refuses_go_back_at_the_others() -> None:
    ranks = Ranks(3, weights)
    with pytest.raises(ApiError, match="DP rank 1 of 3: model_path: it does not fit") as caught:
        await ranks.control(update())
    assert (caught.value.status, caught.value.field) == (400, "model_path")
    undone = [(rank, m.model_path, m.weight_version) for rank, m in ranks.sent[3:]]
    assert undone == [(0, "/old", "v1"), (2, "/old", "v1")]
    assert ranks.leaders.lost is None
    assert {**FIRST, **ranks.leaders.updated} == FIRST, "no answer may name the weights of one rank"


async def test_weights_show_when_every_rank_has_them() -> None:
    seen: list[Any] = []

    def take(rank: int, message: Any) -> ControlReply:
        seen.append(dict(ranks.leaders.updated))
        return weights(0, message)

    ranks = Ranks(2, take)
    await ranks.control(update())
    assert seen == [{}, {}] and ranks.leaders.updated == {"model_path": "/new", "weight_version": "v2"}


async def test_weights_that_all_refuse_are_refused_in_one_voice() -> None:
    ranks = Ranks(2, lambda rank, message: refuse(message))
    with pytest.raises(ApiError, match=r"^model_path: it does not fit$"):
        await ranks.control(update())
    assert len(ranks.sent) == 2 and ranks.leaders.lost is None


@pytest.mark.parametrize("path", ["/new", "/old"])
async def test_a_rank_that_cannot_go_back_ends_the_worker(path: str) -> None:
    """/old: the files that the weights came from hold others now."""
    ranks = Ranks(2, lambda rank, m: refuse(m) if rank == 1 or m.weight_version == "v1" else done(m))
    with pytest.raises(ApiError, match="DP rank 1 of 2"):
        await ranks.control(update(path))
    assert ranks.leaders.lost is not None and ranks.leaders.lost.startswith("DP rank 0 of 2 took new weights")


async def test_a_second_update_is_refused_and_the_first_goes_on_without_its_caller() -> None:
    ranks = Ranks(2, lambda rank, message: None)
    first = asyncio.create_task(ranks.control(update()))
    await settled()
    with pytest.raises(ApiError, match="another update") as caught:
        await ranks.control(update())
    assert caught.value.status == 409
    first.cancel()
    for rank, reply in enumerate((done(update(), values={**FIRST, "weight_version": "v2"}), refuse(update()))):
        ranks.leaders.on_message(reply, rank)
    await settled()
    assert ranks.kinds()[2:] == [(0, UpdateWeights)], "rank 0 is sent back though the caller has gone"


async def test_an_adapter_is_named_only_while_every_rank_has_it() -> None:
    def load(rank: int, message: Any) -> ControlReply:
        have = {"base": "/base"}
        if isinstance(message, UnloadAdapter):
            return done(message, adapters=have)
        if rank == 1:
            return msgspec.structs.replace(refuse(message, "lora_path: broken"), adapters=have)
        return done(message, adapters={**have, message.name: message.path})

    ranks = Ranks(2, load)
    with pytest.raises(ApiError, match="DP rank 1 of 2: lora_path: broken"):
        await ranks.control(LoadAdapter("c9", "a", "/a"))
    assert ranks.kinds()[2:] == [(0, UnloadAdapter)]
    assert ranks.leaders.adapters == {"base": "/base"}


async def test_a_profile_that_one_rank_refuses_stops_at_the_others_and_a_pause_stays() -> None:
    ranks = Ranks(2, lambda rank, m: done(m) if rank == 0 else refuse(m, "busy", 409))
    with pytest.raises(ApiError, match="DP rank 1 of 2: busy"):
        await ranks.control(StartProfile("c9"))
    assert ranks.kinds()[2:] == [(0, StopProfile)]
    with pytest.raises(ApiError, match="DP rank 1 of 2: busy"):
        await ranks.control(PauseGeneration("c9", "abort"))
    assert ContinueGeneration not in dict(ranks.kinds()[3:]).values()


async def test_a_worker_that_ends_answers_changes_and_is_not_lost() -> None:
    ranks = Ranks(2, lambda rank, message: done(message) if rank == 0 else None)
    call = asyncio.create_task(ranks.control(update()))
    await settled()
    ranks.leaders.fail_calls(ApiError(503, "it ends"), gone=True)
    with pytest.raises(ApiError, match="it ends"):
        await call
    assert ranks.leaders.lost is None
