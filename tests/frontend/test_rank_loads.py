"""The client of two DP ranks: what it counts at each while requests run, and which it lets wait. No sockets."""

import pytest

from engine.frontend.client.dp_policy import RankLoad, RankPolicy, Rule
from engine.frontend.client.engine_client import ClientLimits, EngineClient
from engine.frontend.client.forecast import MIN_STARTED
from engine.frontend.client.leaders import Leaders
from engine.frontend.client.scheduler_link import SchedulerLink
from engine.messages import (
    AbortRequest,
    FinishReason,
    GenerateBatch,
    GenerateRequest,
    GetStep,
    SchedulerReady,
    TokenBatch,
    TokenOutput,
    ToScheduler,
)
from engine.sampling_params import SamplingParams
from engine.text.sample import TextOutput
from service.http.errors import ApiError


class NoText:
    def read(self, output: TokenOutput) -> TextOutput:
        return TextOutput(text="", tokens=output)


class NoFigures:
    def on_start(self, num_prompt_tokens: int) -> None: ...
    def on_reject(self) -> None: ...
    def on_tokens(self, *, num_tokens: int, gap_s: float, first: bool) -> None: ...
    def on_end(self, output: TextOutput | None, *, elapsed_s: float) -> None: ...


class Two:
    """`sent[r]`: what went to rank r."""

    def __init__(self, rule: Rule, *, early_rejection: bool = False) -> None:
        self.now_s = 0.0
        self.sent: list[list[ToScheduler | GetStep]] = [[], []]
        self.client = EngineClient(
            Leaders([SchedulerLink(sent.append, lambda: self.now_s) for sent in self.sent]),
            open_text=lambda request: NoText(),
            observer=NoFigures(),
            limits=ClientLimits(max_running=8, max_queued=0, early_rejection=early_rejection),
            policy=RankPolicy(rule, num_ranks=2),
        )
        for rank in range(2):
            self.client.on_message(SchedulerReady({}), rank)
        for messages in self.sent:
            messages.clear()

    def output(self, rank: int, rid: str, *, tokens: int, ends: bool = False) -> None:
        finish = FinishReason(kind="length") if ends else None
        self.client.on_message(TokenBatch([TokenOutput(rid=rid, new_ids=[5] * tokens, finish=finish)]), rank)


def request(name: str, num_tokens: int) -> GenerateRequest:
    return GenerateRequest(rid=name, input_ids=[7] * num_tokens, sampling=SamplingParams(max_new_tokens=9))


def test_a_rank_s_load_is_its_prompts_and_answers_until_they_end() -> None:
    two = Two(Rule.TOKENS)
    long, short = (two.client.generate([request(name, size)]) for name, size in (("long", 10), ("short", 4)))
    assert two.client.loads.of_all() == [RankLoad(1, 10), RankLoad(1, 4)]
    rid = short.samples[0].wire_rid
    two.output(1, rid, tokens=8)
    assert two.client.loads.of_all() == [RankLoad(1, 10), RankLoad(1, 12)]
    third = two.client.generate([request("third", 1)])
    assert isinstance(two.sent[0][-1], GenerateRequest) and two.client.loads.of_all()[0] == RankLoad(2, 11)
    two.output(1, rid, tokens=1, ends=True)
    for generation in (long, short, third, short):
        generation.__exit__(None, None, None)
    assert two.client.loads.of_all() == [RankLoad(), RankLoad()] and two.client.num_live == 0
    aborted = [[m.rid for m in sent if isinstance(m, AbortRequest)] for sent in two.sent]
    assert aborted == [[long.samples[0].wire_rid, third.samples[0].wire_rid], []], "each to its own rank, once"


def test_a_name_is_free_when_its_sample_has_ended_even_while_the_answer_is_written() -> None:
    two = Two(Rule.ROUND_ROBIN)
    with two.client.generate([request("name", 3)], groups=["group"]) as first:
        with pytest.raises(ApiError, match="'name' is running"):
            two.client.generate([request("name", 3)])
        two.output(0, first.samples[0].wire_rid, tokens=1, ends=True)
        assert not two.client.abort("name") and two.client.num_live == 1
        second = two.client.generate([request("name", 3)], groups=["group"])
    assert two.client.abort("group"), "the end of the first leaves the names to the second"
    second.__exit__(None, None, None)
    assert not two.client.abort("group")


def test_prompts_of_one_request_go_to_their_ranks_in_one_message_each() -> None:
    two = Two(Rule.ROUND_ROBIN)
    with two.client.generate([request(str(i), 3) for i in range(3)]):
        (first,), (second,) = two.sent
        assert isinstance(first, GenerateBatch) and len(first.requests) == 2 and isinstance(second, GenerateRequest)


def test_a_request_that_would_come_too_late_at_its_rank_may_be_in_time_at_another() -> None:
    two = Two(Rule.ROUND_ROBIN, early_rejection=True)
    for name in range(MIN_STARTED):  # rank 0 takes a second a token, rank 1 none
        for rank in range(2):
            with two.client.generate([request(f"{rank}-{name}", 4)], dp_rank=rank) as generation:
                two.now_s += 4.0 if rank == 0 else 0.001
                two.output(rank, generation.samples[0].wire_rid, tokens=1, ends=True)
    with pytest.raises(ApiError) as caught:
        two.client.generate([request("late", 4)], dp_rank=0, timeout_s=2.0)
    assert (caught.value.status, caught.value.code) == (503, "deadline")
    with two.client.generate([request("early", 4)], dp_rank=1, timeout_s=2.0):
        pass
