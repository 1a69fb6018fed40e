"""vLLM's and SGLang's further wishes over real HTTP: which sampling they become, and what the answer shows."""

from typing import Any

import pytest

from engine.messages import ExpectReturn
from engine.sampling_params import GrammarSpec
from tests.frontend.conftest import Worker, byte_tokenizer, wait_for

CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}
COMPLETE = {"prompt": "abc", "max_tokens": 3}


def ids(text: str) -> list[int]:
    return byte_tokenizer().encode(text, add_special_tokens=False)


SCHEMA, ANY_OBJECT = {"type": "object"}, GrammarSpec("json_schema", '{"type": "object"}')
CONSTRAINTS: list[tuple[dict[str, Any], GrammarSpec]] = [
    ({"structured_outputs": {"json": SCHEMA}}, ANY_OBJECT),
    ({"structured_outputs": {"json": '{"a": 1}'}}, GrammarSpec("json_schema", '{"a": 1}')),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": False}}, ANY_OBJECT),
    ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+")),
    ({"structured_outputs": {"choice": ["a.b", "c|d", "é x"]}}, GrammarSpec("regex", r"(a\.b)|(c\|d)|(é x)")),
    ({"structured_outputs": {"grammar": "start: /a/"}}, GrammarSpec("ebnf", "start: /a/")),
    ({"structured_outputs": {"structural_tag": {"triggers": []}}}, GrammarSpec("structural_tag", '{"triggers": []}')),
    ({"guided_json": SCHEMA}, ANY_OBJECT),
    ({"guided_regex": "a+"}, GrammarSpec("regex", "a+")),
    ({"guided_choice": ["yes", "no"]}, GrammarSpec("regex", "(yes)|(no)")),
    ({"guided_grammar": 'root ::= "a"'}, GrammarSpec("ebnf", 'root ::= "a"')),
]


@pytest.mark.parametrize(("wish", "spec"), CONSTRAINTS)
def test_vllms_constraints(worker: Worker, wish: dict[str, Any], spec: GrammarSpec) -> None:
    assert worker.sent("/v1/completions", {**COMPLETE, **wish})[0].sampling.grammar == spec
    assert worker.sent("/v1/chat/completions", {**CHAT, **wish})[0].sampling.grammar == spec
    (name, inner), *_ = wish.items()
    field = f"{name}.{next(iter(inner))}" if name == "structured_outputs" else name
    assert worker.scheduler.seen[-1].grammar_field == field, "errors name what the client wrote"


ONE = {"sampling_params": {"max_new_tokens": 1}}


@pytest.mark.parametrize(
    ("path", "body", "namespaces"),
    [
        ("/generate", {"text": "a", **ONE}, [()]),
        ("/generate", {"text": "a", "extra_key": "k", **ONE}, [("k",)]),
        ("/generate", {"text": ["a", "b"], "extra_key": "k", "cache_salt": ["s", ""], **ONE}, [("s", "k"), ("k",)]),
        ("/generate", {"text": ["a", "b"], "extra_key": [None, "k"], **ONE}, [(), ("k",)]),
        ("/v1/completions", {"prompt": ["a", "b"], "cache_salt": ["s", "t"], "n": 2}, [("s",)] * 2 + [("t",)] * 2),
        ("/v1/chat/completions", {**CHAT, "cache_salt": "s", "extra_key": "k"}, [("s", "k")]),
        ("/v1/chat/completions", {**CHAT, "cache_salt": None}, [()]),
    ],
)
def test_the_namespace_of_each_sample(worker: Worker, path: str, body: dict[str, Any], namespaces: list[Any]) -> None:
    assert [request.namespace for request in worker.sent(path, body)] == namespaces


MESSAGES = {**CHAT, "max_tokens": 1}
HOUR, EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}
SAID = [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": EPHEMERAL}]}]


@pytest.mark.parametrize(
    ("path", "body", "headers", "seen"),
    [
        ("/generate", {"text": "a", **ONE}, {}, ("", None, None)),
        ("/generate", {"text": "a", "session_id": "s", "expected_return_s": 4, **ONE}, {}, ("s", 4.0, None)),
        ("/generate", {"text": "a", "session_id": 7, "prompt_cache_key": "k", **ONE}, {}, ("7", None, None)),
        ("/generate", {"text": "a", "expected_return_s": 4, **ONE}, {}, ("", None, None)),
        ("/generate", {"text": "a", "session_id": "s", **ONE}, {"X-Session-Id": "h"}, ("h", None, None)),
        ("/v1/completions", {"prompt": "a", "session_id": "s", "returns_within_s": 9}, {}, ("s", None, 9.0)),
        ("/v1/chat/completions", {**CHAT, "prompt_cache_key": "k"}, {}, ("k", None, None)),
        ("/v1/responses", {"input": "a", "prompt_cache_key": "k", "max_output_tokens": 1}, {}, ("k", None, None)),
        ("/v1/responses", {"input": "a", "history": [], "first_response_id": "resp_1"}, {}, ("resp_1", None, None)),
        ("/v1/messages", {**MESSAGES, "metadata": {"user_id": "u"}}, {}, ("u", None, None)),
        ("/v1/messages", {**MESSAGES, "session_id": "s", "metadata": {"user_id": "u"}}, {}, ("s", None, None)),
        ("/v1/messages", {**MESSAGES, "session_id": "s", "messages": SAID}, {}, ("s", None, 300.0)),
        (
            "/v1/messages",
            {**MESSAGES, "session_id": "s", "messages": SAID, "cache_control": HOUR},
            {},
            ("s", None, 3600.0),
        ),
    ],
)
def test_the_conversation_of_a_request(
    worker: Worker, path: str, body: dict[str, Any], headers: dict[str, str], seen: tuple[Any, ...]
) -> None:
    (sent,) = worker.sent(path, body, headers=headers)
    assert (sent.conversation, sent.expected_return_s, sent.returns_within_s) == seen


def test_what_a_client_announces_of_a_conversation(worker: Worker) -> None:
    closed, awaited = (
        {"session_id": 7},
        {"session_id": "s", "cache_salt": "t", "extra_key": "k", "expected_return_s": 9},
    )
    assert (
        worker.post("/close_session", closed).status_code == worker.post("/expect_return", awaited).status_code == 200
    )
    told = [ExpectReturn("7", (), None), ExpectReturn("s", ("t", "k"), 9.0)]
    wait_for(lambda: worker.scheduler.expected[-2:] == told)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/close_session", {}, "session_id"),
        ("/close_session", {"session_id": "s" * 1025}, "session_id"),
        ("/expect_return", {"session_id": "s"}, "expected_return_s"),
        ("/expect_return", {"session_id": "s", "expected_return_s": -1}, "expected_return_s"),
        ("/expect_return", {"session_id": "s", "expected_return_s": 1, "cache_salt": ["t"]}, "cache_salt"),
    ],
)
def test_an_announcement_that_is_wrong(worker: Worker, path: str, body: dict[str, Any], field: str) -> None:
    assert field in worker.error(path, body)["message"]


def test_rules_of_tokens(worker: Worker) -> None:
    rules = {"bad_words": ["ab", " c"], "allowed_token_ids": [5, 6]}
    expected = ((5, 6), tuple(tuple(ids(text)) for text in ("ab", " ab", "c", " c")))
    native = {"text": "x", "sampling_params": {**rules, "max_new_tokens": 1}}
    for path, body in (("/v1/completions", {**COMPLETE, **rules}), ("/generate", native)):
        sampling = worker.sent(path, body)[0].sampling
        assert (sampling.allowed_token_ids, sampling.bad_token_ids) == expected
    (plain,) = worker.sent("/v1/completions", {**COMPLETE, "bad_words": [], "allowed_token_ids": None})
    assert not plain.sampling.has_token_rules


@pytest.mark.parametrize(
    ("name", "text"), [("include_stop_str_in_output", "ab"), ("no_stop_trim", "ab"), ("user", "a")]
)
def test_a_stop_string_may_stay(worker: Worker, name: str, text: str) -> None:
    answer = worker.post("/v1/completions", {**COMPLETE, "stop": "b", name: name if name == "user" else True})
    assert answer.json()["choices"][0]["text"] == text


def test_token_ids_of_a_completion(worker: Worker) -> None:
    body = {**COMPLETE, "prompt": [ids("abc"), ids("de")], "n": 2, "return_token_ids": True, "max_tokens": 2}
    whole = worker.post("/v1/completions", body).json()["choices"]
    assert [choice["token_ids"] for choice in whole] == [ids("ab")] * 2 + [ids("de")] * 2
    assert [choice["prompt_token_ids"] for choice in whole] == [ids("abc")] * 2 + [ids("de")] * 2
    events = worker.events("/v1/completions", {**body, "stream": True})
    for index, expected in enumerate(["ab", "ab", "de", "de"]):
        choices = [c for event in events for c in event["choices"] if c["index"] == index]
        assert [t for choice in choices for t in choice["token_ids"]] == ids(expected)
        assert [i for i, choice in enumerate(choices) if "prompt_token_ids" in choice] == [0]


def test_token_ids_of_a_chat(worker: Worker) -> None:
    body = {**CHAT, "return_token_ids": True}
    (whole,) = worker.post("/v1/chat/completions", body).json()["choices"]
    assert len(whole["token_ids"]) == 3 and whole["prompt_token_ids"][:3] == whole["token_ids"]
    choices = [c for event in worker.events("/v1/chat/completions", {**body, "stream": True}) for c in event["choices"]]
    assert [t for choice in choices for t in choice.get("token_ids", [])] == whole["token_ids"]
    assert "token_ids" not in worker.post("/v1/chat/completions", CHAT).json()["choices"][0]


def test_hidden_states_need_the_servers_flag(worker: Worker) -> None:
    for path, body in (("/v1/completions", COMPLETE), ("/v1/chat/completions", CHAT)):
        error = worker.error(path, {**body, "return_hidden_states": True})
        assert error["param"] == "return_hidden_states" and "--enable-return-hidden-states" in error["message"]
