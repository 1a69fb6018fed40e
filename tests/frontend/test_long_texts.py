"""Long texts and long bodies: refused by their length before any work, else worked on beside the event loop, in turns."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine.frontend.apis.openai.completions import READER
from engine.frontend.apis.shared.body_reader import BodyReader
from engine.frontend.apis.shared.prefill_only import TURN_PROMPTS, turns_of
from engine.frontend.served_model import GROUP_CHARS, INLINE_CHARS, MAX_TEXT_BYTES, Texts
from engine.messages import GenerateRequest
from engine.sampling_params import SamplingParams
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from service.http.errors import MAX_FIELDS, MAX_VALUES
from tests.frontend.conftest import CONTEXT, Worker, wait_for

CHARS = CONTEXT * len("<s>")  # that can fit, by the longest token
ALONE = ("/v1/embeddings", "/v1/score")
Noted = list[tuple[Any, str]]  # what was worked on, and the thread that did it


def noted(patch: pytest.MonkeyPatch, owner: type, name: str, what: Callable[[Any], Any]) -> Noted:
    """Calls of a method: `what` of its first argument, and the thread."""
    found, method = Noted(), getattr(owner, name)

    def noting(self: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        found.append((what(given), threading.current_thread().name))
        return method(self, given, *args, **kwargs)

    patch.setattr(owner, name, noting)
    return found


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Lengths of the texts that are tokenized."""
    return noted(monkeypatch, Tokenizer, "encode", len)


def body_of(path: str, text: str) -> dict[str, Any]:
    chat = {"messages": [{"role": "user", "content": text}], "model": "default"}
    return {
        "/api/chat": {**chat, "stream": False},
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/generate": {"text": text},
        "/v1/responses": {"input": text, "max_output_tokens": 16},
        "/v1/embeddings": {"input": text},
        "/v1/score": {"query": text, "items": ["a"], "label_token_ids": [1]},
    }.get(path, {**chat, "max_tokens": 1})


@pytest.mark.parametrize(
    "path",
    [*("/v1/completions", "/generate", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"), *ALONE],
)
def test_a_text_that_can_never_fit_is_refused_before_it_is_tokenized(worker: Worker, encoded: Noted, path: str) -> None:
    """As one is whose tokens were counted: status, code and field are equal, and the limit is named."""
    answers = [worker.post(path, body_of(path, "a" * size)) for size in (CONTEXT + 100, CHARS + 100)]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert len(encoded) == 1, "the second one was tokenized"
    errors = [answer.json()["error"] for answer in answers]
    counted, unread = (error if isinstance(error, str) else error.pop("message") for error in errors)
    begin, _, what = unread.partition("However, ")
    most = CONTEXT if path in ALONE[:1] else CONTEXT - 1  # an answer needs room
    assert f"{CONTEXT} tokens" in begin and f"more than {most} tokens (it is " in what
    assert ("an answer needs room too" in what) is (path not in ALONE)
    assert counted.startswith(begin) and counted.rpartition("(")[2] == unread.rpartition("(")[2]
    assert isinstance(errors[0], str) or errors[0] == errors[1]


def test_long_texts_and_many_are_tokenized_by_threads(worker: Worker, encoded: Noted) -> None:
    for prompt in ("a" * (INLINE_CHARS - 1), "a" * INLINE_CHARS, ["a" * 100] * 50, "a" * (1 << 20)):
        assert worker.post("/tokenize", {"prompt": prompt}).status_code == 200
    names = [name.rpartition("_")[0] for _, name in encoded]
    assert "tokenize" not in names[0] and set(names[1:-1]) == {"tokenize"} and names[-1] == "tokenize-huge"


def test_many_texts_are_tokenized_in_turns(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = noted(monkeypatch, Texts, "_encode_group", lambda texts: sum(map(len, texts)))
    assert worker.post("/tokenize", {"prompt": ["a" * 1000] * 200}).json()["count"] == [1001] * 200
    assert len(groups) == 4 and max(size for size, _ in groups) < GROUP_CHARS + 1000


def test_a_text_that_is_too_long_to_tokenize_is_refused(worker: Worker, encoded: Noted) -> None:
    error = worker.error("/tokenize", {"prompt": "é" * (MAX_TEXT_BYTES // 2 + 1)})
    assert f"{MAX_TEXT_BYTES + 2} bytes" in error["message"]
    count = {"model": "default", "messages": [{"role": "user", "content": "a" * (MAX_TEXT_BYTES + 1)}]}
    assert f"at most {MAX_TEXT_BYTES}" in worker.post("/v1/messages/count_tokens", count).json()["error"]["message"]
    assert not encoded


def test_a_chat_beyond_the_context_is_counted(worker: Worker) -> None:
    count = {"model": "default", "messages": [{"role": "user", "content": "a" * 10_000}]}
    assert worker.post("/v1/messages/count_tokens", count).json()["input_tokens"] > 10_000


def test_long_lists_of_ids_are_decoded_and_checked_by_threads(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = noted(monkeypatch, Tokenizer, "decode", len)
    many, one = (worker.post("/detokenize", {"tokens": [65] * size}).json()["text"] for size in (200_000, 1))
    assert many == one * 200_000
    assert [name.startswith("tokenize") for _, name in decoded] == [True, False]


def test_long_chats_are_read_and_rendered_by_threads(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    read = noted(monkeypatch, BodyReader, "decode", len)
    rendered = noted(monkeypatch, ChatTemplate, "render", len)
    for count in (1, 2500):
        messages = [{"role": role, "content": "k17"} for role in ("user", "assistant") * count]
        assert worker.post("/v1/messages/count_tokens", {"model": "default", "messages": messages}).status_code == 200
    assert [name.rpartition("_")[0] for _, name in read[1:]] == ["bodies"] and "bodies" not in read[0][1]
    assert [name.rpartition("_")[0] for _, name in rendered[1:]] == ["render-huge"] and "render" not in rendered[0][1]


def test_a_conversation_that_can_never_fit_loses_its_oldest_turns(worker: Worker) -> None:
    items = [{"role": "user", "content": text} for text in ("a" * 2 * CHARS, "k17", "v42")]
    answer = worker.post("/v1/responses", {"input": items, "truncation": "auto", "max_output_tokens": 16})
    assert answer.status_code == 200 and answer.json()["usage"]["input_tokens"] < 60


def test_a_query_that_is_too_long_is_refused_at_the_first_of_its_items(worker: Worker, encoded: Noted) -> None:
    score = {"query": "a" * (CONTEXT + 1), "items": ["b"] * 1000, "label_token_ids": [1]}
    for body in (score, {**score, "query": [1] * CONTEXT, "items": [[1]] * 1000}):
        assert worker.error("/v1/score", body)["param"] == "items"
    assert len(encoded) <= GROUP_CHARS // CONTEXT + 1


def test_a_request_has_a_bound_of_tokens(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.frontend.apis.shared.prefill_only.MAX_VALUES", 2000)
    monkeypatch.setattr("engine.frontend.served_model.MAX_VALUES", 2000)
    scores = [{"query": query, "items": [query[:1]] * 20, "label_token_ids": [1]} for query in ("a" * 100, [1] * 100)]
    for path, body in (*(("/v1/score", score) for score in scores), ("/tokenize", {"prompt": ["a" * 100] * 20})):
        assert "at most 2000 tokens" in worker.error(path, body)["message"]
    assert MAX_VALUES > 1 << 20


def test_the_items_of_a_score_are_sent_in_turns(worker: Worker) -> None:
    seen = len(worker.scheduler.batches)
    body = {"query": "a", "items": ["b"] * (2 * TURN_PROMPTS + 5), "label_token_ids": [1, 2]}
    answer = worker.post("/v1/score", body)
    assert answer.status_code == 200 and len(answer.json()["scores"]) == 2 * TURN_PROMPTS + 5
    turns = worker.scheduler.batches[seen:]
    assert [len(turn) for turn in turns] == [TURN_PROMPTS, TURN_PROMPTS, 5]
    assert len({rid for turn in turns for rid in turn}) == 2 * TURN_PROMPTS + 5


def test_an_abort_ends_all_turns_of_a_score(worker: Worker) -> None:
    seen = len(worker.scheduler.batches)
    items = [*["b"] * TURN_PROMPTS, *["HANG"] * TURN_PROMPTS, "c"]
    body = {"rid": "all", "query": "a", "items": items, "label_token_ids": [1]}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(worker.post, "/v1/score", body)
        wait_for(lambda: len(worker.scheduler.batches) == seen + 2)
        assert worker.post("/abort_request", {"rid": "all"}).status_code == 200
        assert asked.result().status_code == 499
    worker.wait_idle()
    assert len(worker.scheduler.batches) == seen + 2


def test_a_turn_has_a_bound_of_tokens_and_one_prompt_at_least() -> None:
    sizes = [10, 90, 1, 500, 100, 1]
    requests = [GenerateRequest(rid=str(i), input_ids=[1] * n, sampling=SamplingParams()) for i, n in enumerate(sizes)]
    found = [[len(one.input_ids) for one in turn] for turn in turns_of(requests, max_prompts=2, most_tokens=500)]
    assert found == [[10, 90], [1], [500], [100, 1]]


def test_parameters_of_a_batch_are_made_once_and_many_by_a_thread(worker: Worker, encoded: Noted) -> None:
    words = {"bad_words": ["k17"], "max_new_tokens": 1}
    assert worker.post("/generate", {"text": ["a"] * 9, "sampling_params": words}).status_code == 200
    assert len(encoded) == 9 + 2
    del encoded[:]
    each = [{**words, "bad_words": [f"k{i}"]} for i in range(99)]
    assert worker.post("/generate", {"text": ["a"] * 99, "sampling_params": each}).status_code == 200
    assert {name.startswith("bodies") for size, name in encoded if size > 1} == {True}
    each = [{"bad_words": ["k"] * 1000}] * 5
    error = worker.error("/generate", {"text": ["a"] * 5, "sampling_params": each})
    assert error["param"] == "sampling_params.bad_words"


def test_a_body_of_too_many_fields_is_refused(worker: Worker) -> None:
    fields = dict.fromkeys(map(str, range(MAX_FIELDS)), 1)
    error = worker.error("/v1/completions", {"prompt": "a", "max_tokens": 1, **fields})
    assert f"{MAX_FIELDS + 2} fields" in error["message"]
    del fields["0"], fields["1"]
    _, ignored = READER.decode(json.dumps({"prompt": "a", "max_tokens": 1, **fields}).encode())
    assert len(ignored) == MAX_FIELDS - 2
