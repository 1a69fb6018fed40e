"""Which DP rank gets a request, and what several ranks report as one worker. Pure."""

from itertools import pairwise

import msgspec
import pytest

from engine.config import LOAD_BALANCE_METHODS
from engine.frontend.apis.shared.fields import routed_rank
from engine.frontend.apis.shared.request_body import RequestFields
from engine.frontend.client.dp_policy import RankLoad, RankPolicy, Rule, rule_of
from engine.frontend.client.leaders import joined, longest_of, total_of
from engine.messages import FAKE_BOOTSTRAP_HOST, Bootstrap, ControlReply, GenerateRequest, StateReply, StepReply
from engine.sampling_params import SamplingParams
from service.flags import ConfigError
from service.http.errors import ApiError


def request(num_tokens: int = 4, *, room: int | None = None, host: str = "h") -> GenerateRequest:
    at = None if room is None else Bootstrap(host, 1, room)
    return GenerateRequest(rid="r", input_ids=[7] * num_tokens, sampling=SamplingParams(), bootstrap=at)


def idle(num_ranks: int) -> list[RankLoad]:
    return [RankLoad() for _ in range(num_ranks)]


def policy(rule: Rule, num_ranks: int = 3, **more: int | bool) -> RankPolicy:
    return RankPolicy(rule, num_ranks=num_ranks, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", [Rule.ROUND_ROBIN, Rule.REQUESTS, Rule.TOKENS])
def test_a_burst_spreads_without_a_report(rule: Rule) -> None:
    """SGLang's issue 22614: 21 requests went to one rank. One request at a time, and as one batch."""
    chooses, loads = policy(rule), idle(3)
    ranks = chooses.place([request() for _ in range(21)], loads)
    assert [ranks.count(rank) for rank in range(3)] == [7, 7, 7]
    assert loads == idle(3), "what is placed is the caller's to count"
    for _ in range(21):
        (rank,) = chooses.place([request()], loads)
        loads[rank].requests += 1
        loads[rank].tokens += 4
    assert [load.requests for load in loads] == [7, 7, 7]


def test_the_fewest_requests_or_tokens_win_and_ties_have_an_order() -> None:
    loads = [RankLoad(2, 10), RankLoad(1, 90), RankLoad(1, 10)]
    assert policy(Rule.REQUESTS).place([request()], loads) == [1]
    assert policy(Rule.TOKENS).place([request()], loads) == [2]
    assert policy(Rule.TOKENS).place([request()], idle(3)) == [0]
    long_and_short = [request(100), request(3), request(3), request(3)]
    assert policy(Rule.TOKENS, 2).place(long_and_short, idle(2)) == [0, 1, 1, 1]


def test_turns_go_on_over_requests_and_begin_where_the_frontend_says() -> None:
    chooses = policy(Rule.ROUND_ROBIN, first=4)
    turns = [chooses.place([request()], idle(3))[0] for _ in range(7)]
    assert turns[0] == 1 and all(after == (before + 1) % 3 for before, after in pairwise(turns))


def test_samples_of_one_prompt_stay_together() -> None:
    one = request()
    samples = [msgspec.structs.replace(one, rid=str(i)) for i in range(4)]
    assert policy(Rule.ROUND_ROBIN).place([*samples, request(), request()], idle(3)) == [0, 0, 0, 0, 1, 2]


def test_a_room_names_its_rank_and_a_request_without_one_takes_its_turn() -> None:
    chooses = policy(Rule.ROOM)
    assert chooses.place([request(room=room) for room in (3, 4, 8)], idle(3)) == [0, 1, 2]
    assert chooses.place([request(), request(), request()], idle(3)) == [0, 1, 2]


def test_a_named_rank_wins_unless_the_room_has_another() -> None:
    for rule in Rule:
        assert policy(rule).place([request(room=3), request()], idle(3), routed=2) == [2, 2]
    fixed = policy(Rule.ROOM, is_fixed=True)
    assert fixed.place([request(room=5)], idle(3), routed=2) == [2]
    assert fixed.place([request(room=3, host=FAKE_BOOTSTRAP_HOST), request()], idle(3), routed=2) == [2, 2]
    with pytest.raises(ApiError, match="routed_dp_rank: is 2, and bootstrap_room 3 belongs to DP rank 0") as caught:
        fixed.place([request(room=3)], idle(3), routed=2)
    assert (caught.value.status, caught.value.field) == (400, "routed_dp_rank")


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_that_is_not_there_is_refused_by_field(rank: int) -> None:
    with pytest.raises(ApiError, match="routed_dp_rank: must be between 0 and 2") as caught:
        policy(Rule.ROUND_ROBIN).place([request()], idle(3), routed=rank)
    assert (caught.value.status, caught.value.field) == (400, "routed_dp_rank")


def test_both_names_of_the_field_say_the_same() -> None:
    assert routed_rank(RequestFields(), {}) is None
    assert routed_rank(RequestFields(data_parallel_rank=1), {}) == 1
    assert routed_rank(RequestFields(data_parallel_rank=1, routed_dp_rank=1), {}) == 1
    with pytest.raises(ApiError, match="data_parallel_rank: is 1, and routed_dp_rank is 0"):
        routed_rank(RequestFields(data_parallel_rank=1, routed_dp_rank=0), {})


def test_every_method_of_sglang_is_a_rule() -> None:
    rules = {method: rule_of(method, mode="decode") for method in LOAD_BALANCE_METHODS}
    assert rules["auto"] is rules["decode_round_robin"] is rules["round_robin"] is Rule.ROUND_ROBIN
    assert rules["shortest_queue"] is rules["total_requests"] is Rule.REQUESTS
    assert rules["minimum_tokens"] is rules["total_tokens"] is Rule.TOKENS
    assert rules["follow_bootstrap_room"] is rule_of("auto", mode="prefill") is Rule.ROOM
    assert rule_of("decode_round_robin", mode="prefill") is Rule.ROOM
    assert rule_of("auto", mode="null") is Rule.ROUND_ROBIN
    with pytest.raises(ConfigError, match="--load-balance-method follow_bootstrap_room: requests of a unified"):
        rule_of("follow_bootstrap_room", mode="null")


def state(
    running: int, *, free: int = 5, ratio: float = 0.5, paused: float = 0.0, length: float = 1.0, problem: str = ""
) -> StateReply:
    return StateReply(
        call_id="c",
        role="unified",
        running=running,
        queues={"waiting": running},
        num_pages=10,
        page_size=16,
        pages={"free": free, "held": 10 - free},
        counters={"steps": 3.0},
        gauges={"new_token_ratio": ratio, "waiting_tokens": 7.0, "paused": paused, "spec_accept_length": length},
        problems=[problem] if problem else [],
    )


def test_one_worker_is_the_sum_of_its_ranks() -> None:
    other = state(2, free=3, ratio=0.4, length=2.0, problem="pages: lost one")
    total = total_of([state(1, ratio=0.2, paused=1.0, length=3.0), other])
    assert (total.running, total.queues, total.num_pages) == (3, {"waiting": 3}, 20)
    assert total.pages == {"free": 8, "held": 12}
    assert total.counters == {"steps": 6.0} and total.gauges["waiting_tokens"] == 14.0
    assert total.gauges["new_token_ratio"] == pytest.approx(0.3) and total.gauges["paused"] == 0.0
    assert total.gauges["spec_accept_length"] == 2.5
    assert total.problems == ["DP rank 1 of 2: pages: lost one"]
    alone = state(1)
    assert total_of([alone]) is alone


def test_the_longest_step_speaks_for_the_worker() -> None:
    rests, works, hangs = (StepReply("a", None), StepReply("b", 2.0), StepReply("c", 1.0, stalled=True))
    assert longest_of([rests, works]) is works and longest_of([works, hangs, rests]) is hangs


def test_values_of_answers_add_up_or_follow_one_another() -> None:
    values = [{"retracted": n, "file": f"/{n}", "version": "v"} for n in (1, 2)]
    assert joined([ControlReply("c", True, "done", values=one) for one in values]).values == {
        "retracted": 3,
        "file": "/1, /2",
        "version": "v",
    }
