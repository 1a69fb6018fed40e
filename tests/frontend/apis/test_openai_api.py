"""The OpenAI APIs through the real `openai` client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.frontend.conftest import CONTEXT, Worker, byte_tokenizer, wait_for


@pytest.fixture(scope="module")
def client(worker: Worker) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as c:
        yield c


def chat(client: openai.OpenAI, content: Any, *, system: dict[str, str] | None = None, **more: Any) -> Any:
    messages = [*([system] if system else []), {"role": "user", "content": content}]
    return client.chat.completions.create(model="tiny", messages=messages, **more)


def complete(client: openai.OpenAI, prompt: Any, **more: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, **more)


def test_chat(client: openai.OpenAI, worker: Worker) -> None:
    answer = chat(client, "hello", system={"role": "system", "content": "S"}, max_tokens=9)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "<|system|", "length")
    assert worker.scheduler.seen[-1].sampling.max_new_tokens == 9
    assert answer.usage.prompt_tokens == len("<|system|>S<|user|>hello<|assistant|>")
    assert answer.usage.completion_tokens == 9 and answer.usage.total_tokens == answer.usage.prompt_tokens + 9
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == "tiny"


def test_chat_content_parts_and_developer_role(client: openai.OpenAI, worker: Worker) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    chat(client, parts, system={"role": "developer", "content": "D"}, max_tokens=1)
    assert worker.prompt == "<|system|>D<|user|>ab\ncd<|assistant|>"


def test_chat_stream_with_multibyte_text_and_usage(client: openai.OpenAI) -> None:
    text = "🎉 naïve 你好"
    wanted = f"<|user|>{text}"
    limit = len(wanted.encode())
    chunks = list(chat(client, text, max_tokens=limit, stream=True, stream_options={"include_usage": True}))
    deltas = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(deltas) == wanted and not any("�" in d for d in deltas)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == limit
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_answers_name_the_weights(worker: Worker) -> None:
    """As SGLang's do; a stream's chunks do not."""
    version = worker.http.get("/model_info").json()["weight_version"]
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, prompt in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", chat)):
        answer = worker.post(path, {**prompt, "max_tokens": 1}).json()
        assert answer["metadata"] == {"weight_version": version}


def test_continuous_usage(worker: Worker) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abc", "max_tokens": 4, "stream": True, "stream_options": options}
    events = worker.events("/v1/completions", body)
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts) and counts[-1] == 4


def test_chat_logprobs(client: openai.OpenAI) -> None:
    logprobs = chat(client, "é", max_tokens=10, logprobs=True, top_logprobs=3).choices[0].logprobs
    assert len(logprobs.content) == 10
    assert b"".join(bytes(t.bytes or []) for t in logprobs.content) == "<|user|>é".encode()
    assert logprobs.content[0].token == "<" and logprobs.content[0].logprob == -0.5
    assert [t.logprob for t in logprobs.content[0].top_logprobs] == [-0.5, -1.5, -2.5]
    streamed = chat(client, "é", max_tokens=10, logprobs=True, stream=True)
    tokens = [t for c in streamed if c.choices[0].logprobs for t in c.choices[0].logprobs.content or []]
    assert [t.bytes for t in tokens] == [t.bytes for t in logprobs.content]


def test_chat_n_samples_have_their_own_seeds(client: openai.OpenAI, worker: Worker) -> None:
    before = len(worker.scheduler.seen)
    answer = chat(client, "x", max_tokens=3, n=3, seed=7)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert [r.sampling.seed for r in worker.scheduler.seen[before:]] == [7, 8, 9]
    assert answer.usage.completion_tokens == 9


def test_requests_without_a_seed_get_different_ones(client: openai.OpenAI, worker: Worker) -> None:
    before = len(worker.scheduler.seen)
    for _ in range(2):
        complete(client, "a", max_tokens=1)
    seeds = [r.sampling.seed for r in worker.scheduler.seen[before:]]
    assert None not in seeds and seeds[0] != seeds[1]


def test_completions_batches_and_token_ids(client: openai.OpenAI) -> None:
    answer = complete(client, ["ab", "cd"], max_tokens=3, n=2)
    assert [c.text for c in answer.choices] == ["ab", "ab", "cd", "cd"]  # BOS comes first and is skipped
    ids = [1, 2, 3]
    one = complete(client, ids, max_tokens=3)
    two = complete(client, [ids, ids], max_tokens=3)
    assert [c.text for c in two.choices] == [one.choices[0].text] * 2
    assert two.usage.prompt_tokens == 6 and two.usage.completion_tokens == 6


def test_stop_strings_and_stop_tokens(client: openai.OpenAI, worker: Worker) -> None:
    answer = complete(client, "hello world", max_tokens=50, stop=["lo w", "zz"])
    assert answer.choices[0].text == "hel" and answer.choices[0].finish_reason == "stop"
    body = {"prompt": "hello world", "max_tokens": 50}
    events = worker.events("/v1/completions", {**body, "stop": "lo w", "stream": True})
    assert "".join(e["choices"][0]["text"] for e in events) == "hel"
    o = worker.scheduler.seen[-1].input_ids[5]
    for stop, text, matched in (({"stop": "lo w"}, "hel", "lo w"), ({"stop_token_ids": [o]}, "hell", o)):
        (choice,) = worker.post("/v1/completions", {**body, **stop}).json()["choices"]
        assert (choice["text"], choice["matched_stop"]) == (text, matched)


def test_echo_with_logprobs_and_no_new_tokens(client: openai.OpenAI) -> None:
    for limit in (0, 1):
        answer = complete(client, "abc", max_tokens=limit, echo=True, logprobs=2)
        choice, lp = answer.choices[0], answer.choices[0].logprobs
        assert choice.text == "abc" and choice.finish_reason == "length" and answer.usage.completion_tokens == limit
        assert lp.tokens[:4] == ["<s>", "a", "b", "c"] and len(lp.tokens) == len(lp.text_offset) == 4 + limit
        assert lp.token_logprobs[:2] == [None, -0.5]
        assert lp.top_logprobs[0] is None and len(lp.top_logprobs[1]) == 2


@pytest.mark.parametrize("stop", [None, "x鬱"])
def test_text_offsets_point_into_the_text(client: openai.OpenAI, worker: Worker, stop: str | None) -> None:
    prompt = "é 鬱 🫠 x"
    body = {"prompt": prompt, "max_tokens": 20, "echo": True, "logprobs": 2, "stop": stop}
    whole = worker.post("/v1/completions", body).json()["choices"][0]
    parts = [e["choices"][0] for e in worker.events("/v1/completions", {**body, "stream": True})]
    offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
    logprobs, text = whole["logprobs"], prompt * 2 + "é "  # behind BOS, which has no text
    assert whole["text"] == "".join(part["text"] for part in parts) == text
    assert logprobs["text_offset"] == offsets and len(offsets) == 14 + 20
    places = zip(logprobs["tokens"], offsets, strict=True)
    assert all(whole["text"].startswith(token, at) for token, at in places if token not in ("<s>", "\ufffd"))
    at = [at for token, at in places if token == "\ufffd"]
    assert all(not whole["text"][n].isascii() for n in at), "a part of a character is where the character is"


def test_alternatives_with_the_same_text_are_told_apart(worker: Worker) -> None:
    """Bytes of a character have no text of their own."""
    answer = worker.post("/v1/completions", {"prompt": "é", "max_tokens": 3, "logprobs": 3}).json()
    last = answer["choices"][0]["logprobs"]["top_logprobs"][-1]
    own = next(i for i in range(256) if byte_tokenizer().token_bytes(i) == b"\xa9")
    assert list(last) == ["\ufffd", f"token_id:{own + 1}", f"token_id:{own + 2}"]


def test_echo_of_token_ids_and_in_a_stream(client: openai.OpenAI, worker: Worker) -> None:
    ids = worker.post("/tokenize", {"prompt": "héllo", "add_special_tokens": False}).json()["tokens"]
    (choice,) = complete(client, ids, max_tokens=1, echo=True, logprobs=0).choices
    assert choice.text == "hélloh"
    assert choice.logprobs.text_offset == [0, 1, 1, 2, 3, 4, 5]
    events = worker.events("/v1/completions", {"prompt": "abc", "max_tokens": 3, "echo": True, "stream": True})
    assert "".join(e["choices"][0]["text"] for e in events) == "abcab"


def test_unset_limits_are_what_fits_and_nulls_are_unset(client: openai.OpenAI, worker: Worker) -> None:
    chat(client, "x", stop=["user"])
    assert worker.scheduler.seen[-1].sampling.max_new_tokens == CONTEXT - len("<|user|>x<|assistant|>")
    nulls = "model max_tokens temperature top_p n seed stop logit_bias stream stream_options user echo logprobs"
    nulls += " best_of suffix bootstrap_room response_format"
    body = {"prompt": "abc", "ignore_me": {"x": [1]}, **dict.fromkeys(nulls.split())}
    answer = worker.post("/v1/completions", body).json()
    assert answer["usage"]["completion_tokens"] == 16
    answer = worker.post("/v1/completions", {"prompt": "a" * (CONTEXT - 6)}).json()
    assert answer["usage"]["completion_tokens"] == 5


def test_extra_sampling_fields_reach_the_engine(client: openai.OpenAI, worker: Worker) -> None:
    same: dict[str, Any] = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True}
    extra = {**same, "min_tokens": 2, "stop_token_ids": [9], "skip_special_tokens": False}
    complete(client, "a", max_tokens=3, temperature=0.5, logit_bias={"5": 1}, extra_body=extra)
    s = worker.scheduler.seen[-1].sampling
    assert {name: getattr(s, name) for name in same} == same
    assert (s.min_new_tokens, s.stop_token_ids, s.skip_special_tokens) == (2, (9,), False)
    assert (s.temperature, s.logit_bias, s.n) == (0.5, {5: 1.0}, 1)


def test_errors_of_the_engine(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="no memory") as refused:
        complete(client, "REFUSE", max_tokens=8)
    assert refused.value.status_code == 503
    with pytest.raises(openai.InternalServerError, match="no memory"):
        complete(client, "REFUSE", max_tokens=8, stream=True)
    with pytest.raises(openai.InternalServerError, match="transfer broke"):
        complete(client, "BREAK", max_tokens=8)


def test_a_broken_stream_ends_with_an_error_event_and_no_done(worker: Worker) -> None:
    worker.scheduler.may_break.clear()
    body = {"prompt": "BREAK", "max_tokens": 8, "stream": True}
    with worker.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        worker.scheduler.may_break.set()
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["message"] == "the transfer broke"
    assert "data: [DONE]" not in rest


def test_a_failed_sample_aborts_the_others(worker: Worker) -> None:
    before = len(worker.scheduler.aborted)
    assert worker.post("/v1/completions", {"prompt": ["HANG", "REFUSE"], "max_tokens": 4}).status_code == 503
    wait_for(lambda: len(worker.scheduler.aborted) == before + 1)
    worker.wait_idle()


def test_user_abort_ends_with_reason_abort(client: openai.OpenAI, worker: Worker) -> None:
    stream = complete(client, "SLOW", max_tokens=8, stream=True)
    first = next(stream)
    assert worker.post("/abort_request", {"rid": first.id}).status_code == 200
    reasons: list[Any] = [c.choices[0].finish_reason for c in stream]
    assert reasons[-1] == "abort"
    worker.wait_idle()
