"""Answers of one worker that go on at the next, cut at any byte: with what the client had before, they are the whole one.

The router's part is its own code: what takes frames out of a stream, and what it keeps of them.
"""

import itertools
import json
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import pytest

from engine.frontend.apis.shared import whole
from router.requests.relay import StreamSplitter
from service.http.resume import FRAMES_HEADER, FRAMES_TYPE, RESUME_FIELD, RESUME_HEADER, FrameRecord, sign
from tests.frontend.conftest import Worker, start_worker
from tests.frontend.test_tools import CALL, TOOL

FRAMES = {FRAMES_HEADER: "1"}
TEXT = f"Hm, so.</think>One{CALL}"
MESSAGES = [{"role": "user", "content": TEXT}]
LENGTH = len(f"<|user|>{TEXT}") + 5
NEW = {"max_new_tokens": 24}
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("/generate", {"text": "né🎉 and more of it", "sampling_params": NEW}),
    "logprobs": ("/generate", {"text": "é and more", "sampling_params": NEW, **LOGPROBS}),
    "batch": ("/generate", {"text": ["one", "two"], "sampling_params": [{"max_new_tokens": 5}, NEW], **LOGPROBS}),
    "completion": ("/v1/completions", {"prompt": "once 🎉", "max_tokens": 30, "n": 2, "logprobs": 1, "echo": True}),
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": LENGTH, "tools": [TOOL], "n": 2, "logprobs": True},
    ),
    "messages": (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": LENGTH, "model": "tiny", "tools": [{"name": "add", "input_schema": {}}]},
    ),
    "response": (
        "/v1/responses",
        {"input": TEXT, "max_output_tokens": LENGTH, "tools": [{**TOOL["function"], "type": "function"}]},
    ),
    "ollama": ("/api/generate", {"prompt": "say it", "model": "tiny", "raw": True, "options": {"num_predict": 20}}),
}
VOLATILE = {"e2e_latency", "created_at", "total_duration", "prompt_eval_duration", "eval_duration", "cached_tokens"}
VOLATILE |= {"input_tokens", "cache_read_input_tokens", "cached_tokens_details"}  # what the second worker has cached
GROWING = (
    "text",
    "content",
    "reasoning_content",
    "arguments",
    "partial_json",
    "thinking",
    "delta",
    "response",
    "refusal",
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    engine = {"reasoning_parser": "deepseek-r1", "tool_call_parser": "qwen25"}
    with start_worker(tmp_path_factory.mktemp("thinker"), engine=engine) as w:
        yield w


def streamed(worker: Worker, path: str, body: dict[str, Any], resume: bytes | None = None) -> tuple[bytes, str]:
    headers = dict(FRAMES)
    if resume is not None:
        body, headers[RESUME_HEADER] = {**body, RESUME_FIELD: msgspec.json.decode(resume)}, sign(None, resume)
    options = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    response = worker.post(path, {**body, "stream": True, **options}, headers=headers)
    assert response.status_code == 200, response.text
    return response.content, response.headers["content-type"]


def events_of(shown: bytes, kind: str) -> list[Any]:
    assert not any(line.startswith(b":") for line in shown.splitlines()), "a frame reached the client"
    if "ndjson" in kind:
        return [json.loads(line) for line in shown.splitlines()]
    lines = [line[6:] for line in shown.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def told(events: list[Any], path: str) -> Any:
    """What a client makes of a stream: what grows is joined, what repeats counts once."""
    if path == "/generate":
        last = {event.get("index"): event for event in events}
        return {index: flat(event) for index, event in last.items()}
    found: dict[Any, Any] = {}
    for event in events:
        for key, value in flat(event).items():
            if key[:3] == ("message_start", "message", "usage"):
                continue  # of the tokens that came first
            if key[-1] in GROWING and isinstance(value, str):
                found[key] = found.get(key, "") + value
            elif "logprobs" in key and isinstance(value, list):
                found[key] = found.get(key, []) + value
            elif value is not None and found.setdefault(key, [value])[-1] != value:
                found[key].append(value)
    return found


def flat(value: Any, at: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Paths to values. Choices and calls have their index in the path."""
    if isinstance(value, dict):
        kind = (value["type"],) if isinstance(value.get("type"), str) and not at else ()
        parts = [flat(v, (*kind, *at, k)) for k, v in value.items() if k not in VOLATILE | {"sequence_number"}]
        return {k: v for part in parts for k, v in part.items()}
    if isinstance(value, list) and at and at[-1] in ("choices", "tool_calls"):
        return {k: v for one in value for k, v in flat(one, (*at, one["index"])).items()}
    return {at: value}


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_cut_anywhere_goes_on_without_a_gap_or_a_doubled_event(thinker: Worker, name: str) -> None:
    path, body = BODIES[name]
    raw, kind = streamed(thinker, path, body)
    right = told(events_of(StreamSplitter(kind, record=FrameRecord()).feed(raw), kind), path)
    step = max(1, len(raw) // 60)
    for cut in (*range(1, len(raw), step), len(raw) - 1):
        record = FrameRecord()
        splitter = StreamSplitter(kind, record=record)
        shown = splitter.feed(raw[:cut])
        resume = record.resume()
        if resume is None:
            assert shown == b"", cut
            continue
        splitter.restart()
        rest, _ = streamed(thinker, path, body, resume)
        events = events_of(shown + splitter.feed(rest) + splitter.rest(), kind)
        assert told(events, path) == right, cut
        if path == "/v1/responses":
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
        if path == "/generate":
            for index in {event.get("index") for event in events}:
                lengths = [len(event["output_ids"]) for event in events if event.get("index") == index]
                assert all(a < b for a, b in itertools.pairwise(lengths)), (cut, lengths)


def answered(worker: Worker, path: str, body: dict[str, Any], resume: bytes | None = None) -> tuple[bytes, str]:
    """A whole answer, and its type."""
    headers = dict(FRAMES)
    if resume is not None:
        body, headers[RESUME_HEADER] = {**body, RESUME_FIELD: msgspec.json.decode(resume)}, sign(None, resume)
    response = worker.post(path, {**body, "stream": False}, headers=headers)
    assert response.status_code == 200, response.text
    return response.content, response.headers["content-type"]


def body_of(raw: bytes, record: FrameRecord) -> Any:
    return json.loads(record.take_head(raw))


@pytest.mark.parametrize("name", BODIES)
def test_a_whole_answer_cut_anywhere_goes_on(thinker: Worker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = BODIES[name]
    plain, kind = answered(thinker, path, body)
    assert kind.startswith("application/json"), "a short answer is as it would be without frames"
    monkeypatch.setattr(whole, "FRAMES_EVERY_S", 0.0)
    monkeypatch.setattr(thinker.scheduler, "step_s", 0.001)
    raw, kind = answered(thinker, path, body)
    assert kind == FRAMES_TYPE
    right = body_of(raw, FrameRecord())
    assert lasting(right) == lasting(json.loads(plain))
    num_resumed = 0
    for cut in range(1, len(raw), max(1, len(raw) // 40)):
        record = FrameRecord()
        record.take_head(raw[:cut])
        if (resume := record.resume()) is not None:
            num_resumed += any(msgspec.json.decode(resume)["output_ids"])
            rest, _ = answered(thinker, path, body, resume)
            assert lasting(body_of(rest, record), but=()) == lasting(right, but=()), cut
    assert num_resumed > 5


def lasting(value: Any, but: Collection[str] = ("id", "created", "call_id")) -> Any:
    """An answer without what differs from run to run."""
    if isinstance(value, dict):
        return {k: lasting(v, but) for k, v in value.items() if k not in VOLATILE and k not in but}
    return [lasting(v, but) for v in value] if isinstance(value, list) else value


def test_an_error_after_frames_has_its_status(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "FRAMES_EVERY_S", 0.0)
    worker.scheduler.may_break.clear()
    body, record = {"text": "BREAK it", "sampling_params": NEW}, FrameRecord()
    with worker.http.stream("POST", "/generate", json=body, headers=FRAMES) as response:
        pieces = response.iter_bytes()
        first = next(pieces)
        worker.scheduler.may_break.set()
        error = body_of(first + b"".join(pieces), record)
    assert response.headers["content-type"] == FRAMES_TYPE
    assert (record.failed, error["error"]["message"]) == (500, "the transfer broke")
    assert json.loads(record.resume() or b"")["output_ids"][0][:1] == [256]
