"""How outputs of samples become results, and how many samples are in flight."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.frontend.services import Services
from engine.messages import FinishReason, TokenLogprob, TokenOutput
from engine.text.sample import Arguments, CallBegins, Part, PlainText, ReasoningText, TextAnswers, TextOutput
from service.http.errors import ApiError
from tandem.outputs import Logprob, RequestOutput, ResultBuilder
from tandem.params import WantedLogprobs
from tandem.requests import Slots, in_order, plan_conversation, plan_prompt

NO_LOGPROBS = WantedLogprobs()


def output(text: str, ids: list[int], finish: str = "", **more: Any) -> TextOutput:
    texts = {name: more.pop(name, []) for name in ("logprob_texts", "input_logprob_texts")}
    tokens = TokenOutput(rid="r", new_ids=ids, finish=FinishReason(kind=finish, matched=7) if finish else None, **more)
    return TextOutput(text=text, tokens=tokens, **texts)


def reading(*, n: int = 1, wanted: WantedLogprobs = NO_LOGPROBS, answers: TextAnswers | None = None) -> ResultBuilder:
    return ResultBuilder(RequestOutput("r", "p", [1, 2], []), n=n, wanted=wanted, answers=answers or TextAnswers())


def test_results_grow_and_their_deltas_do_not_overlap() -> None:
    growing = reading(n=2)
    growing.add(0, output("a", [5], cached_tokens=3))
    first = growing.result()
    assert (first.text, first.delta, first.token_ids, first.finished) == ("a", "a", [5], False)
    growing.add(0, output("b", [6], "stop"))
    assert (second := growing.result()).delta == "b" and not second.finished
    growing.add(1, output("c", [8], "length", cached_tokens=9))
    last = growing.result()
    assert (last.text, last.delta, last.token_ids, last.finish_reason) == ("ab", "", [5, 6], "stop")
    assert (last.outputs[0].stop_reason, last.outputs[1].text, last.finished, last.num_cached_tokens) == (
        7,
        "c",
        True,
        3,
    )
    assert (first.text, first.token_ids) == ("a", [5])  # what a consumer keeps does not change


def test_logprobs_have_ranks_and_as_many_alternatives_as_wanted() -> None:
    growing = reading(wanted=WantedLogprobs(1, 2))
    prompt = [TokenLogprob(None, 1), TokenLogprob(-3.0, 2, [(-0.5, 4), (-1.0, 5)])]
    growing.add(0, output("", [], input_logprobs=prompt, input_logprob_texts=[("p", []), ("q", ["s", "t"])]))
    answer = [TokenLogprob(-1.0, 5, [(-0.5, 4), (-1.0, 5)]), TokenLogprob(-0.25, 6, [(-0.25, 6), (-2.0, 4)])]
    texts = [("t", ["s", "t"]), ("u", ["u", "s"])]
    growing.add(0, output("tu", [5, 6], "length", logprobs=answer, logprob_texts=texts))
    found = growing.result()
    assert found.prompt_logprobs == [
        None,
        {4: Logprob(-0.5, 1, "s"), 5: Logprob(-1.0, 2, "t"), 2: Logprob(-3.0, None, "q")},
    ]
    assert found.logprobs == [{4: Logprob(-0.5, 1, "s"), 5: Logprob(-1.0, None, "t")}, {6: Logprob(-0.25, 1, "u")}]
    assert found.outputs[0].cumulative_logprob == -1.25


def test_without_wanted_logprobs_there_are_none() -> None:
    growing = reading(wanted=WantedLogprobs(None, 0))
    growing.add(0, output("a", [5], "stop", logprobs=[TokenLogprob(-1.0, 5)], logprob_texts=[("a", [])]))
    assert growing.result().logprobs is None


class Calls(TextAnswers):
    """Reads a thought, then a call in two parts, then text."""

    def read(self, index: int, output: TextOutput) -> list[Part]:
        parts: dict[str, list[Part]] = {
            "1": [ReasoningText("hm"), CallBegins(0, "add", "call_1"), Arguments(0, '{"a"')],
            "2": [Arguments(0, ": 1}"), PlainText("done")],
        }
        return parts[output.text]

    def has_called(self, index: int) -> bool:
        return True


def test_reasoning_and_calls_stand_beside_the_text() -> None:
    growing = reading(answers=Calls())
    growing.add(0, output("1", [5]))
    before = growing.result()
    growing.add(0, output("2", [6], "stop"))
    found = growing.result().outputs[0]
    assert (found.text, found.delta, found.reasoning, found.finish_reason) == ("done", "done", "hm", "tool_calls")
    assert [(call.name, call.id, call.arguments) for call in found.tool_calls] == [("add", "call_1", '{"a": 1}')]
    assert before.outputs[0].tool_calls[0].arguments == '{"a"'


def slots(limit: int) -> Slots:
    client = SimpleNamespace(max_live=limit, max_running=limit, leaders=SimpleNamespace(num_ranks=1))
    return Slots(cast(Services, SimpleNamespace(client=client)))


async def test_without_a_tokenizer_texts_are_refused() -> None:
    model = SimpleNamespace(has_text=False, template_names=frozenset[str]())
    s = cast(Services, SimpleNamespace(model=model))
    with pytest.raises(ApiError, match="tokenize it yourself, and send token ids") as wrong:
        await plan_prompt(s, "k1", {})
    assert wrong.value.field == "prompt"
    with pytest.raises(ApiError, match="render and tokenize it yourself") as wrong:
        await plan_conversation(s, [{"role": "user", "content": "k1"}], {})
    assert wrong.value.field == "messages"


async def test_samples_in_flight_are_bounded_and_results_in_order() -> None:
    now, peak = 0, 0

    async def job(number: int, count: int) -> int:
        nonlocal now, peak
        now += count
        peak = max(peak, now)
        for _ in range(9 - number):  # earlier ones end later
            await asyncio.sleep(0)
        now -= count
        return number

    done: list[int] = []
    jobs = [(1 + i % 2, lambda i=i: job(i, 1 + i % 2)) for i in range(9)]
    assert await in_order(slots(3), jobs, on_done=lambda: done.append(1)) == list(range(9))
    assert (peak, len(done)) == (3, 9)


@pytest.mark.parametrize(("max_live", "limit"), [(10, 10), (100, 12)])
def test_twice_what_runs_is_in_flight(max_live: int, limit: int) -> None:
    client = SimpleNamespace(max_live=max_live, max_running=3, leaders=SimpleNamespace(num_ranks=2))
    assert Slots(cast(Services, SimpleNamespace(client=client))).limit == limit


async def test_more_samples_than_the_limit_go_alone() -> None:
    few = slots(2)
    await asyncio.wait_for(few.take(5), 1)
    waiting = asyncio.create_task(few.take(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    few.give(5)
    await asyncio.wait_for(waiting, 1)


async def test_the_first_error_ends_the_others() -> None:
    ended: list[str] = []

    async def lasts() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("lasts")

    async def fails() -> None:
        raise ValueError("this one")

    few = slots(2)
    with pytest.raises(ValueError, match="this one"):
        await in_order(few, [(1, lasts), (1, fails), (1, lasts)], on_done=lambda: None)
    assert ended and few._taken == 0
