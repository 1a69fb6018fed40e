"""A worker without a tokenizer (--skip-tokenizer-init): token ids in, token ids out, and what needs text is a 400 that names it."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine.frontend.apis.native.body import GenerateBody, SamplingBody
from engine.frontend.apis.openai.completions import CompletionBody
from engine.frontend.apis.shared import ids_only
from tests.frontend.conftest import Worker, byte_tokenizer, check_log, start_worker, write_checkpoint

IDS = [70, 71, 72]
TWO = {"max_new_tokens": 2}
MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {"model": "default", "messages": MESSAGES, "max_tokens": 4}
COMPLETION = {"prompt": IDS, "max_tokens": 2, "return_token_ids": True}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Its checkpoint has no file of a tokenizer."""
    folder = tmp_path_factory.mktemp("bare")
    checkpoint = write_checkpoint(folder / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).unlink()
    with start_worker(folder, engine={"skip_tokenizer_init": True}, warms_up=True) as w:
        yield w
        check_log(w)


def test_generate_has_no_text(bare: Worker) -> None:
    answer = bare.post("/generate", {"input_ids": IDS, "sampling_params": TWO}).json()
    assert answer.keys() == {"output_ids", "meta_info"} and answer["output_ids"] == [70, 71]
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 2}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 2, 4)
    batch = bare.post("/generate", {"input_ids": [IDS, [80]], "sampling_params": TWO, "rid": ["a", "b"]}).json()
    assert [one["output_ids"] for one in batch] == [[70, 71], [80, 80]]
    assert all(one.keys() == {"output_ids", "meta_info"} for one in batch)
    stopped = {**TWO, "stop_token_ids": [71], "skip_special_tokens": False, "no_stop_trim": True}
    answer = bare.post("/generate", {"input_ids": IDS, "sampling_params": {**stopped, "max_new_tokens": 9}}).json()
    assert answer["output_ids"] == [70, 71]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 71}


def test_streams_are_cumulative(bare: Worker) -> None:
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 6}, "stream": True}
    events = bare.events("/generate", body)
    assert events[-1]["output_ids"] == [*IDS, *IDS] and all(e.keys() == {"output_ids", "meta_info"} for e in events)
    for a, b in itertools.pairwise(events):
        assert b["output_ids"][: len(a["output_ids"])] == a["output_ids"] != b["output_ids"]
    events = bare.events("/generate", {**body, "input_ids": [IDS, [80]]})
    assert {event["index"] for event in events} == {0, 1} and not any("text" in event for event in events)


def test_logprobs_have_ids_and_no_text(bare: Worker) -> None:
    body = {"input_ids": IDS, "sampling_params": TWO, "return_logprob": True}
    meta = bare.post("/generate", {**body, "logprob_start_len": 0, "top_logprobs_num": 2}).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 70, None], [-0.5, 71, None], [-0.5, 72, None]]
    assert meta["output_token_logprobs"] == [[-0.5, 70, None], [-0.5, 71, None]]
    assert meta["output_top_logprobs"][0] == [[-0.5, 70, None], [-1.5, 71, None]]


def test_completions_show_token_ids(bare: Worker) -> None:
    (choice,) = bare.post("/v1/completions", COMPLETION).json()["choices"]
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("", [70, 71], IDS)
    chunks = bare.events("/v1/completions", {**COMPLETION, "max_tokens": 6, "stream": True})
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == [*IDS, *IDS]


def test_a_completion_streams_ids_before_its_end(bare: Worker) -> None:
    slow = byte_tokenizer().encode("SLOW", add_special_tokens=False)  # the stand-in samples three tokens of these
    body = {**COMPLETION, "prompt": slow, "max_tokens": 9, "stream": True}
    with bare.http.stream("POST", "/v1/completions", json=body) as response:
        first = json.loads(next(line for line in response.iter_lines() if line.startswith("data: "))[6:])
        assert first["choices"][0]["token_ids"][:1] == slow[:1]
    bare.wait_idle()


def test_what_a_worker_says_of_itself(bare: Worker) -> None:
    assert all(bare.http.get(path).status_code == 200 for path in ("/health", "/health_generate", "/v1/models"))
    assert bare.http.get("/server_info").json()["skip_tokenizer_init"] is True
    info = bare.http.get("/get_model_info").json()
    assert info["is_generation"] is True and info["model_path"].endswith("tiny")
    assert bare.http.get("/chat").status_code == 404 and "/chat" not in bare.http.get("/").text
    assert bare.http.post("/api/show", json={"model": "tiny"}).json()["template"] == ""


def asked(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"input_ids": IDS, **fields}


def native(**sampling: Any) -> tuple[str, dict[str, Any]]:
    return asked(sampling_params=sampling)


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {**COMPLETION, **fields}


SCHEMA = {"type": "object"}
CONSTRAINTS = {
    **{"response_format": {"type": "json_object"}, "guided_json": SCHEMA, "guided_regex": "a", "guided_choice": ["a"]},
    **{"guided_grammar": "a", "structured_outputs": {"regex": "a"}},
}
CHAT_PATHS = ("/v1/chat/completions", "/v1/chat/completions/render", "/invocations", "/v1/messages", "/tokenize")
CHAT_PATHS += ("/v1/messages/count_tokens",)
INPUTS = [("/v1/responses", "hello"), ("/v1/responses", MESSAGES)]
INPUTS += [("/v1/embeddings", "hello"), ("/v1/embeddings", ["hello"])]
REFUSED: list[tuple[tuple[str, dict[str, Any]], str, str]] = [
    *((("/generate", {"text": text}), "text", "send input_ids") for text in ("hello", ["hello", "there"])),
    (native(stop="x"), "sampling_params.stop", "send stop_token_ids"),
    (native(stop_regex=["x+"]), "sampling_params.stop_regex", "send stop_token_ids"),
    (native(bad_words=["x"]), "sampling_params.bad_words", "logit_bias"),
    *((native(**{name: value}), f"sampling_params.{name}", "allowed_token_ids")
      for name, value in {"json_schema": SCHEMA, "regex": "a+", "ebnf": 'root ::= "a"', "structural_tag": {}}.items()),
    (asked(sampling_params=[{"stop": ["x"]}]), "sampling_params.stop", "send stop_token_ids"),
    *((asked(**{name: True}), name, "leave it out") for name in ("return_text_in_logprobs", "require_reasoning")),
    (asked(max_thinking_tokens=0), "max_thinking_tokens", "leave it out"),
    *((completion(prompt=prompt), "prompt", "send token ids") for prompt in ("hello", ["hello", "there"])),
    (completion(stop=["x"]), "stop", "send stop_token_ids"),
    (completion(echo=True), "echo", "leave it out"),
    (completion(logprobs=0), "logprobs", "ask /generate with return_logprob"),
    (completion(return_token_ids=None), "return_token_ids", "set it to true"),
    *((completion(**{name: value}), name, "allowed_token_ids") for name, value in CONSTRAINTS.items()),
    *(((path, CHAT), "messages", "send input_ids to /generate") for path in CHAT_PATHS),
    *(((path, {"input": given}), "input", "send token ids") for path, given in INPUTS),
    (("/api/chat", {"model": "tiny", "messages": MESSAGES}), "messages", "send input_ids to /generate"),
    (("/api/generate", {"model": "tiny", "prompt": "hello"}), "prompt", "send token ids"),
    (("/encode", {"text": "hello"}), "text", "send input_ids"),
    (("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1]}), "query", "send token ids"),
    (("/v1/score", {"query": IDS, "items": ["b"], "label_token_ids": [1]}), "items", "send token ids"),
    (("/v1/rerank", {"query": "a", "documents": ["b"]}), "documents", "/v1/score"),
    (("/score", {"text_1": "a", "text_2": "b"}), "text_1", "/v1/score"),
    (("/tokenize", {"prompt": "hello"}), "prompt", "tokenize it yourself"),
    (("/detokenize", {"tokens": IDS}), "tokens", "decode them yourself"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "field", "remedy"), REFUSED)
def test_what_needs_text_is_refused_by_name(asked: tuple[str, Any], field: str, remedy: str, bare: Worker) -> None:
    sent = len(bare.scheduler.seen)
    error = bare.error(*asked)
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"{field}: this server has no tokenizer (--skip-tokenizer-init); "), message
    assert remedy in message and len(bare.scheduler.seen) == sent


@pytest.mark.parametrize("body", [{"input": []}, {"input": [], "return_token_ids": True}])
def test_no_chat_slips_through_without_a_prompt(body: dict[str, Any], bare: Worker) -> None:
    sent = len(bare.scheduler.seen)
    assert bare.post("/v1/responses", body).status_code == 400 and len(bare.scheduler.seen) == sent


def test_what_asks_for_nothing_is_served(bare: Worker) -> None:
    harmless = {"stop": [], "bad_words": [], "regex": None, "stop_regex": None, "allowed_token_ids": [70, 71, 72]}
    body = {"input_ids": IDS, "sampling_params": {**TWO, **harmless}, "return_text_in_logprobs": False}
    assert bare.post("/generate", body).json()["output_ids"] == [70, 71]
    answer = bare.post("/v1/completions", {**COMPLETION, "stop": None, "response_format": {"type": "text"}})
    assert answer.status_code == 200, answer.text


# Of fields: they mean the same without a tokenizer.
PLAIN = {
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed"),
    *("sampling_seed", "logit_bias", "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim", "n"),
    *("include_stop_str_in_output", "stream_interval", "allowed_token_ids", "max_new_tokens", "min_new_tokens"),
    *("input_ids", "sampling_params", "rid", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    *("token_ids_logprob", "priority", "return_hidden_states", "lora_path", "cache_salt", "extra_key", "best_of"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "data_parallel_rank", "model", "user"),
    *("stream_options", "max_tokens", "min_tokens", "image_data", "video_data", "spaces_between_special_tokens"),
    *("session_id", "prompt_cache_key", "expected_return_s", "returns_within_s"),
}


def test_each_field_needs_text_or_does_not() -> None:
    """A new field must be put on one side."""
    for body in (GenerateBody, SamplingBody, CompletionBody):
        fields = set(body.model_fields)
        assert fields - PLAIN <= ids_only._RULES.keys(), fields - PLAIN - ids_only._RULES.keys()
    assert not PLAIN & ids_only._RULES.keys()
