"""Shared request fields with literals only: rooms, limits, usage, prompts."""

from typing import Any

import pytest

from engine.frontend.apis.native.body import GenerateBody
from engine.frontend.apis.shared.fields import check_prompt_ids, fit_to_context, prompts_of
from engine.frontend.apis.shared.samples import Usage
from engine.frontend.bootstraps import build_bootstraps
from engine.messages import TokenOutput
from engine.sampling_params import SamplingParams
from engine.text.sample import TextOutput
from service.http.errors import ApiError


def rooms(room: Any, *, num_prompts: int, n: int) -> list[int]:
    body = GenerateBody(bootstrap_host="h", bootstrap_port=1, bootstrap_room=room)
    got = build_bootstraps(body, mode="prefill", num_prompts=num_prompts, n=n, default_port=8998, mint_room=lambda: 77)
    return [b.room for b in got if b]


@pytest.mark.parametrize("room", [0, -1, 2**63, [0]])
def test_a_room_out_of_range_is_refused_with_the_range(room: Any) -> None:
    with pytest.raises(ApiError, match=r"bootstrap_room: must be between 1 and 2\*\*63 - 1") as refused:
        rooms(room, num_prompts=1, n=1)
    assert (refused.value.status, refused.value.field) == (400, "bootstrap_room")


def test_rooms_for_samples() -> None:
    assert rooms(5, num_prompts=2, n=2) == [5, 6, 7, 8]
    assert rooms([10, 20], num_prompts=2, n=2) == [10, 11, 20, 21]
    assert rooms([1, 2, 3, 4], num_prompts=2, n=2) == [1, 2, 3, 4]
    assert rooms([9], num_prompts=1, n=3) == [9, 10, 11]
    assert rooms(2**63 - 1, num_prompts=1, n=1) == [2**63 - 1]
    for bad in ([], [1, 2, 3], [None, 1], None, 2**63 - 1):
        with pytest.raises(ApiError, match="bootstrap_room"):
            rooms(bad, num_prompts=2, n=2)


def test_hosts_and_ports_may_be_lists_and_fake_needs_no_room() -> None:
    body = GenerateBody(bootstrap_host=["a", "2.2.2.2"], bootstrap_port=[1, None], bootstrap_room=[3, None])
    a, b = build_bootstraps(body, mode="decode", num_prompts=2, n=1, default_port=8998, mint_room=lambda: 77)
    assert a and b and (a.host, a.port, a.room) == ("a", 1, 3) and (b.host, b.port, b.room) == ("2.2.2.2", 8998, 77)
    lacking = GenerateBody(bootstrap_room=1)
    with pytest.raises(ApiError, match="bootstrap_host"):
        build_bootstraps(lacking, mode="decode", num_prompts=1, n=1, default_port=1, mint_room=lambda: 1)


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
def test_a_request_without_bootstrap_fields_has_no_other_half(mode: str) -> None:
    whole = GenerateBody()
    assert build_bootstraps(whole, mode=mode, num_prompts=2, n=2, default_port=1, mint_room=lambda: 1) == [None] * 4
    if mode != "null":
        half = GenerateBody(bootstrap_port=5)
        with pytest.raises(ApiError, match=f"bootstrap_room: is missing.*this {mode} worker serves the request whole"):
            build_bootstraps(half, mode=mode, num_prompts=1, n=1, default_port=1, mint_room=lambda: 1)


@pytest.mark.parametrize(
    ("limit", "prompt", "cut", "want"),
    [(None, 10, False, 90), (50, 10, False, 50), (90, 10, False, 90), (128, 10, True, 90), (0, 99, False, 0)],
)
def test_what_fits(limit: int | None, prompt: int, cut: bool, want: int) -> None:
    assert fit(limit, prompt, cut).max_new_tokens == want


def fit(limit: int | None, prompt: int, cut: bool) -> SamplingParams:
    params = SamplingParams(max_new_tokens=limit)
    return fit_to_context(params, num_prompt_tokens=prompt, context_length=100, field="prompt", cut=cut)


@pytest.mark.parametrize(
    ("limit", "prompt", "cut", "said"),
    [
        (91, 10, False, "you requested 101 tokens (10 in the messages, 91 in the completion)"),
        (None, 100, False, "the prompt has 100 tokens"),
        (1, 100, True, "the prompt has 100 tokens"),
        (0, 100, False, "the prompt has 100 tokens"),
    ],
)
def test_what_does_not_fit(limit: int | None, prompt: int, cut: bool, said: str) -> None:
    with pytest.raises(ApiError) as e:
        fit(limit, prompt, cut)
    assert e.value.code == "context_length_exceeded" and e.value.field == "prompt" and "(prompt)" in e.value.message
    # litellm 1.109 and others find it by these words, whatever its code.
    assert e.value.message.startswith(f"This model's maximum context length is 100 tokens. However, {said}")


def test_usage_counts_a_prompt_once() -> None:
    usage = Usage([10, 20], n=2)
    for index in range(4):
        usage.add(index, TextOutput(text="", tokens=TokenOutput(rid="r", new_ids=[1, 2, 3], cached_tokens=index + 1)))
    total = usage.total()
    assert (total.prompt, total.completion) == (30, 12)
    assert total.cached == 1 + 3
    assert usage.of_sample(2).prompt == 20


@pytest.mark.parametrize(
    ("value", "prompts"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]
)
def test_prompt_forms(value: Any, prompts: list[Any]) -> None:
    assert prompts_of(value, field="prompt") == prompts


EMPTY = ["", [], [""], ["a", ""], [[]], [[1], []]]
OF_TWO_KINDS = [["a", 1], [1, [2]], ["a", [1]]]


@pytest.mark.parametrize(
    ("value", "says"),
    [*((v, "must not be empty") for v in EMPTY), *((v, "must be a string, a list") for v in OF_TWO_KINDS)],
)
def test_what_is_no_prompt_is_named(value: Any, says: str) -> None:
    with pytest.raises(ApiError, match=f"^input: {says}"):
        prompts_of(value, field="input")


@pytest.mark.parametrize("ids", [[-1, 9], [3, 10, 0], [2**64]])
def test_the_token_id_that_is_none_is_named(ids: list[int]) -> None:
    (wrong,) = (i for i in ids if not 0 <= i < 10)
    with pytest.raises(ApiError, match=rf"^prompt: {wrong} is not a token id \(0 to 9\)"):
        check_prompt_ids(ids, field="prompt", vocab_size=10)
    assert check_prompt_ids([0, 9], field="prompt", vocab_size=10) == [0, 9]
