"""What a request was told against what the oracle says: tokens, logprobs, hidden states, and one end."""

import array

import pytest

from engine.core.outputs import NAN_MESSAGE
from engine.core.request import Request
from engine.messages import TokenOutput
from tests.core.proof.oracle import Wishes, answer_of, hidden_rows_of, input_logprobs_of, pooled_of
from tests.core.proof.story import Ask

ROW_BYTES = 8


def judge(
    request: Request,
    ask: Ask,
    wishes: Wishes,
    *,
    said: list[TokenOutput],
    weights: tuple[list[int], list[int]],
    landed: bool,
) -> None:
    """`weights`: (since which token, which). `landed`: its prompt was computed elsewhere (decode role)."""
    ends = [output.finish for output in said if output.finish is not None]
    assert len(ends) == 1 and said[-1].finish is ends[0], "a request ends once, and then says nothing more"
    _in_order(said)
    tokens = [t for output in said for t in output.new_ids]
    refused = ends[0].status in (400, 503)
    if refused:
        assert tokens == []
        return
    right = answer_of(wishes, *weights)
    cut = ends[0].kind == "abort" and ends[0].message != NAN_MESSAGE
    if cut:
        assert tokens == right.tokens[: len(tokens)]
        return
    assert tokens == right.tokens
    assert (ends[0].kind, ends[0].matched) == (right.why, right.matched)
    _logprobs(request, ask, said, right.logprobs, weights[1])
    if right.why != "abort":
        _hidden(request, ask, said, tokens, weights[1], landed=landed)


def _in_order(said: list[TokenOutput]) -> None:
    count = 0
    for output in said:
        count += len(output.new_ids)
        assert not output.new_ids or output.completion_tokens == count, "a token is lost or told twice"
        assert 0 <= output.cached_tokens <= max(0, output.prompt_tokens - 1)


def _logprobs(request: Request, ask: Ask, said: list[TokenOutput], right: list[float], weights: list[int]) -> None:
    entries = [entry for output in said for entry in output.logprobs]
    prompt = [entry for output in said for entry in output.input_logprobs]
    if request.logprobs is None:
        assert entries == prompt == []
        return
    assert [entry.logprob for entry in entries] == right
    wanted = input_logprobs_of(ask, weights[0]) if request.logprobs.start_len >= 0 else []
    assert [entry.token_id for entry in prompt] == [token for token, _ in wanted]
    if len(weights) == 1:
        assert [entry.logprob for entry in prompt] == [logprob for _, logprob in wanted]


def _hidden(
    request: Request, ask: Ask, said: list[TokenOutput], tokens: list[int], weights: list[int], *, landed: bool
) -> None:
    prompt, rows = b"".join(output.input_hidden for output in said), [row for output in said for row in output.hidden]
    if request.message.pooling:
        assert prompt == b"" and len(rows) == 1
        if len(weights) == 1:
            assert list(array.array("f", rows[0])) == pytest.approx(
                pooled_of(ask.read, request.message.pooling, weights[0])
            )
        return
    if not request.message.return_hidden_states:
        assert prompt == b"" and rows == []
        return
    right = hidden_rows_of([*ask.read, *tokens[:-1]], weights[0])
    if landed:
        right = right[ask.length * ROW_BYTES :]
    got = prompt + b"".join(rows)
    assert len(got) == len(right), "a hidden state is lost or told twice"
    assert len(weights) > 1 or got == right
