"""What a prompt is in token ids, without computing it: /tokenize with messages, and vLLM's render routes."""

from typing import Any

import pytest

from engine.frontend.apis.admin.tokens import OF_CHATS
from tests.frontend.conftest import CONTEXT, Worker

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "né"}]
BEGUN = [*MESSAGES, {"role": "assistant", "content": "so"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BOS = 256


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"add_generation_prompt": False},
        {"messages": BEGUN, "continue_final_message": True},
        {"tools": [TOOL], "chat_template_kwargs": {"add_generation_prompt": False}},
    ],
    ids=["plain", "no generation prompt", "continued", "tools and kwargs"],
)
def test_tokens_of_messages_are_those_that_are_computed(worker: Worker, more: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": MESSAGES, **more}
    wanted = worker.sent(CHAT, {**body, "max_tokens": 1})[0].input_ids
    seen = len(worker.scheduler.seen)
    answer = worker.post("/tokenize", body).json()
    assert answer == {"tokens": wanted, "count": len(wanted), "max_model_len": CONTEXT}
    assert worker.post(f"{CHAT}/render", body).json()["token_ids"] == wanted
    assert len(worker.scheduler.seen) == seen


def test_special_tokens_and_names_of_tokens(worker: Worker) -> None:
    plain = worker.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    body = {"messages": MESSAGES, "add_special_tokens": True, "return_token_strs": True}
    more = worker.post("/tokenize", body).json()
    assert more["tokens"] == [BOS, *plain] and more["token_strs"][:2] == ["<s>", "<"]
    assert len(more["token_strs"]) == more["count"]
    two = worker.post("/tokenize", {"prompt": ["n", " é"], "return_token_strs": True}).json()
    assert two["token_strs"] == [["<s>", "n"], ["<s>", "Ġ", "Ã", "©"]] and two["count"] == [2, 4]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "prompt: is missing: give prompt, or messages"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt: give prompt or messages, not both"),
        ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template: is not supported by this server; "),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role: "),
        ({"messages": MESSAGES, "model": 5}, "model: "),
        *(({"prompt": "a", name: [TOOL] if name == "tools" else {"a": 1} if name.endswith("kwargs") else True}, f"{name}: is for messages") for name in OF_CHATS),
    ],
)  # fmt: skip
def test_what_cannot_be_tokenized_is_named(worker: Worker, body: dict[str, Any], said: str) -> None:
    assert worker.error("/tokenize", body)["message"].startswith(said)


def test_a_rendered_chat_says_how_it_would_be_sampled(worker: Worker) -> None:
    same = {"temperature": 0.5, "top_k": 4, "seed": 7, "min_tokens": 2, "bad_words": ["no"], "logit_bias": {"70": 1.5}}
    other = {"stop": "Z", "logprobs": True, "top_logprobs": 3, "guided_regex": "[ab]+", "rid": "r1"}
    beside = {"model": "tiny", "stream": True, "cache_salt": "mine"}
    options = {"stream_options": {"include_usage": True}}
    answer = worker.post(f"{CHAT}/render", {"messages": MESSAGES, **same, **other, **beside, **options}).json()
    room = CONTEXT - len(answer.pop("token_ids"))
    as_others = {"stop": ["Z"], "logprobs": 3, "structured_outputs": {"regex": "[ab]+"}, "max_tokens": room}
    assert answer.pop("sampling_params") == {**same, **as_others}
    shown_options = {"include_usage": True, "continuous_usage_stats": None}
    whole = {"request_id": "r1", "features": None, "priority": 0, "stream_options": shown_options}
    assert answer == {**whole, **beside}


def test_rendered_prompts_are_a_list(worker: Worker) -> None:
    body = {"model": "tiny", "prompt": [[70, 71], [72]], "cache_salt": ["x", "y"]}
    first, second = worker.post("/v1/completions/render", body).json()
    assert (first["token_ids"], second["token_ids"]) == ([70, 71], [72])
    assert (first["cache_salt"], second["cache_salt"]) == ("x", "y")
    assert first["sampling_params"] == {"max_tokens": 16}
    assert first["request_id"].removesuffix("-0") == second["request_id"].removesuffix("-1")
    (alone,) = worker.post("/v1/completions/render", {"prompt": "a", "max_tokens": 3, "ignore_eos": True}).json()
    assert alone["token_ids"] == worker.post("/tokenize", {"prompt": "a"}).json()["tokens"]
    assert alone["sampling_params"] == {"max_tokens": 3, "ignore_eos": True} and alone["model"] == "tiny"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (f"{CHAT}/render", {"messages": []}, "messages"),
        (f"{CHAT}/render", {"messages": MESSAGES, "max_tokens": CONTEXT}, "messages"),
        (f"{CHAT}/render", {"messages": MESSAGES, "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ("/v1/completions/render", {"prompt": [70] * CONTEXT}, "prompt"),
        ("/v1/completions/render", {"prompt": "a", "temperature": -1}, "temperature"),
    ],
)
def test_what_would_be_refused_is_not_rendered(worker: Worker, path: str, body: dict[str, Any], field: str) -> None:
    assert worker.error(path, body)["param"] == field
