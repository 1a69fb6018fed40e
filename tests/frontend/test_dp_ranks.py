"""A worker's frontend over the schedulers of two DP ranks: real sockets and HTTP, stand-ins for the schedulers."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from engine.frontend.client.leaders import Leaders
from engine.frontend.client.scheduler_link import SchedulerLink
from engine.messages import (
    ContinueGeneration,
    ControlMessage,
    ControlReply,
    GetStep,
    JoinTrainer,
    LeaveTrainer,
    LoadAdapter,
    NewTensors,
    PauseGeneration,
    StartProfile,
    StopProfile,
    ToScheduler,
    UnloadAdapter,
    UpdateWeights,
)
from service.http.errors import ApiError
from tests.frontend.conftest import Worker, start_worker, wait_for


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    engine = {"dp_size": 2, "max_running_requests": 3, "max_queued_requests": 2}
    with start_worker(tmp_path_factory.mktemp("two"), engine=engine) as w:
        yield w


def num_seen(w: Worker) -> list[int]:
    return [len(scheduler.seen) for scheduler in w.schedulers]


def test_requests_take_turns_and_a_named_rank_wins(two: Worker) -> None:
    before = num_seen(two)
    for _ in range(4):
        assert two.post("/generate", {"text": "hello"}).status_code == 200
    assert [now - was for now, was in zip(num_seen(two), before, strict=True)] == [2, 2]
    for path, body in (
        ("/generate", {"text": "hello", "routed_dp_rank": 1}),
        ("/v1/completions", {"model": "tiny", "prompt": "hello", "data_parallel_rank": 1, "n": 2}),
    ):
        before = num_seen(two)
        assert two.post(path, body).status_code == 200
        after = num_seen(two)
        assert after[0] == before[0] and after[1] > before[1], path


def test_a_header_names_a_rank_and_may_not_contradict_the_body(two: Worker) -> None:
    named = {"X-data-parallel-rank": "1"}
    before = num_seen(two)
    for body in ({"text": "hello"}, {"text": "hello", "routed_dp_rank": 1}):
        assert two.post("/generate", body, headers=named).status_code == 200
    assert num_seen(two) == [before[0], before[1] + 2]
    for headers, body, said in (
        (named, {"routed_dp_rank": 0}, "routed_dp_rank: is 0, and the header x-data-parallel-rank is 1; give one"),
        (named, {"data_parallel_rank": 0}, "data_parallel_rank: is 0, and the header x-data-parallel-rank is 1"),
        ({"X-data-parallel-rank": "-1"}, {}, "x-data-parallel-rank: must be the number of a DP rank, got '-1'"),
        ({"X-data-parallel-rank": "2"}, {}, "routed_dp_rank: must be between 0 and 1"),
    ):
        assert said in two.error("/generate", {"text": "hello", **body}, headers=headers)["message"]


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/embeddings", "/v1/messages"])
def test_a_rank_that_is_not_there_is_a_400_that_names_the_field(two: Worker, path: str) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "model": "tiny"}
    body = {"/generate": {"text": "a"}, "/v1/embeddings": {"input": "a"}}.get(path, chat)
    assert "routed_dp_rank: must be between 0 and 1" in two.error(path, {**body, "routed_dp_rank": 2})["message"]


def test_an_abort_goes_to_the_rank_that_has_the_request(two: Worker) -> None:
    with two.stream("SLOW", rid="slow", routed_dp_rank=1) as last_event:
        before = [len(scheduler.aborted) for scheduler in two.schedulers]
        assert two.post("/abort_request", {"rid": "slow"}).status_code == 200
        assert last_event()["meta_info"]["finish_reason"]["type"] == "abort"
    assert [len(s.aborted) for s in two.schedulers] == [before[0], before[1] + 1]
    two.wait_idle()


def test_a_record_names_the_rank_that_computed_it(two: Worker) -> None:
    for rank in (1, 0):
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 1}, "routed_dp_rank": rank}
        assert two.post("/generate", body, headers={"X-Request-Id": f"at {rank}"}).status_code == 200
        (record,) = two.post("/traces", {"ids": [f"at {rank}"]}).json()["records"]
        assert record["attributes"]["tandem.dp_rank"] == rank


def test_a_flush_needs_every_rank_and_names_the_one_that_is_busy(two: Worker) -> None:
    assert two.post("/flush_cache", None).status_code == 200
    with two.stream("SLOW", routed_dp_rank=1):
        assert "DP rank 1 of 2: requests are running" in two.error("/flush_cache", None)["message"]
    two.wait_idle()


def test_reports_show_the_ranks_and_the_worker_is_their_sum(two: Worker) -> None:
    with two.stream("SLOW", routed_dp_rank=1):
        rows = two.http.get("/v1/loads").json()["loads"]
        assert [[row[f"num_{kind}_reqs"] for kind in ("running", "live")] for row in rows] == [[0, 0], [1, 1]]
        assert [row["dp_rank"] for row in rows] == [0, 1]
        assert [row["dp_rank"] for row in two.http.get("/get_load").json()] == [0, 1]
        info = two.http.get("/server_info").json()
        assert (info["dp_size"], info["num_running_reqs"], info["max_total_num_tokens"]) == (2, 1, 2 * 1600)
        assert [(s["dp_rank"], s["num_running_reqs"]) for s in info["internal_states"]] == [(0, 0), (1, 1)]
        assert info["kv_events_config"] is None and info["rank_pids"] == []
        metrics = two.http.get("/metrics").text.splitlines()
        (_family,) = [line for line in metrics if line.startswith("# TYPE sglang:num_running_reqs ")]
        figures = [line for line in metrics if line.startswith("sglang:num_running_reqs{")]
        assert [line.split()[-1] for line in figures] == ["0.0", "1.0"]
        assert all(f'dp_rank="{rank}"' in line for rank, line in enumerate(figures))
        check = two.http.get("/check").json()
        assert check["running"] == 1 and [rank["running"] for rank in check["ranks"]] == [0, 1]
    two.wait_idle()


def test_the_worker_takes_as_many_as_all_ranks_may(two: Worker) -> None:
    sampling = {"max_new_tokens": 9, "n": 10}
    with two.stream("SLOW", rid="many", sampling_params=sampling):
        full = two.post("/generate", {"text": "more"})
        assert full.status_code == 503 and full.headers["retry-after"] == "1"
        assert full.json()["error"]["code"] == "queue_full"
    two.wait_idle()
    assert two.post("/generate", {"text": "more"}).status_code == 200
    assert two.post("/generate", {"text": "x", "sampling_params": {"n": 11}}).status_code == 400


def test_health_is_that_of_the_worst_rank(two: Worker) -> None:
    wait_for(lambda: two.http.get("/health").status_code == 200)
    two.schedulers[1].silent = True
    try:
        wait_for(lambda: two.http.get("/health").status_code == 503)
    finally:
        two.schedulers[1].silent = False
    before = num_seen(two)
    assert two.http.get("/health_generate").status_code == 200
    assert num_seen(two) == [before[0] + 1, before[1] + 1], "every rank computes a token"


def test_a_worker_is_ready_when_every_rank_is_and_drains_when_all_have_drained(tmp_path: object) -> None:
    with start_worker(tmp_path, ready=False, engine={"dp_size": 2}, warms_up=True) as w:  # type: ignore[arg-type]
        w.schedulers[1].say_ready()
        wait_for(lambda: w.http.get("/health").status_code == 503)
        assert w.post("/generate", {"text": "a"}).status_code == 503
        w.schedulers[0].say_ready()
        wait_for(lambda: w.http.get("/health").status_code == 200)
        assert num_seen(w) == [1, 1], "the warm-up computed on both"
    assert all(scheduler.was_told_to_drain for scheduler in w.schedulers)


# ---- Changes reach all DP ranks or none: real links, whose schedulers are lists of what was sent
# to them.

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


@pytest.mark.parametrize("before", [{}, {"weight_source": "tensors"}], ids=["files", "tensors"])
@pytest.mark.parametrize("of_tensors", [True, False])
async def test_tensors_are_taken_back_from_memory(before: dict[str, str], of_tensors: bool) -> None:
    def take(rank: int, m: Any) -> ControlReply:
        return refuse(m) if rank == 1 and m.weight_version == "v2" else done(m)

    ranks = Ranks(2, take)
    ranks.leaders.links[0].updated = {**FIRST, **before}
    new = NewTensors(data=b"x") if of_tensors else None
    with pytest.raises(ApiError, match="DP rank 1 of 2"):
        await ranks.control(UpdateWeights("c9", "" if of_tensors else "/new", weight_version="v2", tensors=new))
    ((rank, undo),) = ranks.sent[2:]
    in_memory = of_tensors or bool(before)
    assert (rank, undo.model_path, undo.weight_version) == (0, "/old", "v1") and ranks.leaders.lost is None
    assert undo.tensors == (NewTensors(undo=True) if in_memory else None)


async def test_dp_ranks_join_a_trainer_s_group_one_after_the_other_or_leave_it() -> None:
    ranks = Ranks(3, lambda rank, m: refuse(m) if rank == 2 and isinstance(m, JoinTrainer) else done(m))
    with pytest.raises(ApiError, match="DP rank 2 of 3"):
        await ranks.control(JoinTrainer("c9", "g", "h", 1, rank_offset=1, world_size=4, backend="gloo"))
    assert [(rank, m.dp_rank) for rank, m in ranks.sent[:3]] == [(0, 0), (1, 1), (2, 2)]
    assert [(rank, type(m), m.name) for rank, m in ranks.sent[3:]] == [(0, LeaveTrainer, "g"), (1, LeaveTrainer, "g")]


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
