"""Answers of one worker that go on at the next, cut at any byte: with what the client had before, they are the whole one.

The router's part is its own code: what takes frames out of a stream, and what it keeps of them.
"""

import base64
import itertools
import json
import re
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from engine.frontend.apis.shared import resumable
from router.requests.answer import StreamSplitter
from service.http.reconnect import KEEP_HEADER, RETAINED_PATH, Keep, RetainedRest
from service.http.resume import FRAMES_HEADER, FRAMES_TYPE, RESUME_FIELD, RESUME_HEADER, FrameRecord, Resume, sign
from tests.frontend.conftest import CALL, SECRET, TOOL, Worker, wait_for

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
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": LENGTH, "tools": [TOOL], "n": 2,
        "logprobs": True}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": LENGTH, "model": "tiny",
        "tools": [{"name": "add", "input_schema": {}}]}),
    "response": ("/v1/responses", {"input": TEXT, "max_output_tokens": LENGTH,
        "tools": [{**TOOL["function"], "type": "function"}]}),
    "ollama": ("/api/generate", {"prompt": "say it", "model": "tiny", "raw": True, "options": {"num_predict": 20}}),
}  # fmt: skip
VOLATILE = {"e2e_latency", "created_at", "total_duration", "prompt_eval_duration", "eval_duration", "cached_tokens"}
VOLATILE |= {"input_tokens", "cache_read_input_tokens", "cached_tokens_details"}  # what the second worker has cached
GROWING = (
    "text", "content", "reasoning_content", "arguments", "partial_json", "thinking", "delta", "response", "refusal",
)  # fmt: skip


def answered(
    worker: Worker, path: str, body: dict[str, Any], resume: bytes | None = None, *, stream: bool = True, **more: str
) -> tuple[bytes, str]:
    """An answer to a router, and its type. `resume`: what a worker says of an earlier one."""
    headers = FRAMES | more
    if resume is not None:
        body, headers[RESUME_HEADER] = {**body, RESUME_FIELD: msgspec.json.decode(resume)}, sign(SECRET, resume)
    options = {"stream_options": {"include_usage": True}} if "completions" in path and stream else {}
    response = worker.post(path, {**body, "stream": stream, **options}, headers=headers)
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


def are_numbered(events: list[Any], path: str) -> bool:
    return path != "/v1/responses" or [event["sequence_number"] for event in events] == list(range(len(events)))


def shown_of(raw: bytes, kind: str) -> bytes:
    """What a router shows of a stream."""
    return StreamSplitter(kind, record=FrameRecord()).feed(raw)


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_cut_anywhere_goes_on_without_a_gap_or_a_doubled_event(thinker: Worker, name: str) -> None:
    path, body = BODIES[name]
    raw, kind = answered(thinker, path, body)
    right = told(events_of(shown_of(raw, kind), kind), path)
    for cut in (*range(1, len(raw), max(1, len(raw) // 30)), len(raw) - 1, len(raw)):
        record = FrameRecord()
        splitter = StreamSplitter(kind, record=record)
        shown = splitter.feed(raw[:cut])
        resume = record.resume()
        if resume is None:
            assert shown == b"", cut
            continue
        splitter.restart()
        rest, _ = answered(thinker, path, body, resume)
        assert rest, "a router would take it for lost"
        events = events_of(shown + splitter.feed(rest) + splitter.rest(), kind)
        assert told(events, path) == right, cut
        assert are_numbered(events, path)
        if path == "/generate":
            for index in {event.get("index") for event in events}:
                lengths = [len(event["output_ids"]) for event in events if event.get("index") == index]
                assert all(a < b for a, b in itertools.pairwise(lengths)), (cut, lengths)


@pytest.mark.parametrize("name", BODIES)
def test_a_whole_answer_cut_anywhere_goes_on(thinker: Worker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = BODIES[name]
    plain, kind = answered(thinker, path, body, stream=False)
    assert kind.startswith("application/json"), "a short answer is as it would be without frames"
    monkeypatch.setattr(resumable, "FRAMES_EVERY_S", 0.0)
    monkeypatch.setattr(thinker.scheduler, "step_s", 0.001)
    # A slow machine may have all of it before a frame is due.
    raw, _ = wait_for(lambda: (one := answered(thinker, path, body, stream=False))[1] == FRAMES_TYPE and one)
    right = json.loads(FrameRecord().take_head(raw))
    assert lasting(right) == lasting(json.loads(plain))
    num_resumed = 0
    for cut in range(1, len(raw), max(1, len(raw) // 15)):
        record = FrameRecord()
        record.take_head(raw[:cut])
        if (resume := record.resume()) is not None:
            num_resumed += any(msgspec.json.decode(resume)["output_ids"])
            rest, _ = answered(thinker, path, body, resume, stream=False)
            assert lasting(json.loads(record.take_head(rest)), but=()) == lasting(right, but=()), cut
    assert num_resumed > 3


def lasting(value: Any, but: Collection[str] = ("id", "created", "call_id")) -> Any:
    """An answer without what differs from run to run."""
    if isinstance(value, dict):
        return {k: lasting(v, but) for k, v in value.items() if k not in VOLATILE and k not in but}
    return [lasting(v, but) for v in value] if isinstance(value, list) else value


def test_an_error_after_frames_has_its_status(thinker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "FRAMES_EVERY_S", 0.0)
    thinker.scheduler.may_break.clear()
    body, record = {"text": "BREAK it", "sampling_params": NEW}, FrameRecord()
    with thinker.http.stream("POST", "/generate", json=body, headers=FRAMES) as response:
        pieces = response.iter_bytes()
        first = next(pieces)
        thinker.scheduler.may_break.set()
        error = json.loads(record.take_head(first + b"".join(pieces)))
    assert response.headers["content-type"] == FRAMES_TYPE
    assert (record.failed, error["error"]["message"]) == (500, "the transfer broke")
    assert json.loads(record.resume() or b"")["output_ids"][0][:1] == [256]


KEEP = msgspec.json.encode(Keep(window_s=60.0, owner="me", body="b"))
KEPT = {KEEP_HEADER: f"{sign(SECRET, KEEP)} {KEEP.decode()}", "X-Request-Id": "r-1"}
EVENT_ID = re.compile(rb"\nid: (\S+)\n\n")


def asked(worker: Worker, after: str, **more: str) -> Any:
    question = {"request_id": "r-1", "owner": "me", "body": "b", "after": after, **more}
    raw = msgspec.json.encode(question)
    headers = {RESUME_HEADER: sign(SECRET, raw), "Content-Type": "application/json"}
    return worker.http.post(RETAINED_PATH, content=raw, headers=headers)


def ids_of(shown: bytes) -> list[str]:
    return [found.decode() for found in EVENT_ID.findall(shown)]


@pytest.mark.parametrize("name", [name for name in BODIES if name != "ollama"])
def test_a_client_that_comes_again_gets_what_is_behind_its_last_event(thinker: Worker, name: str) -> None:
    path, body = BODIES[name]
    raw, kind = answered(thinker, path, body, **KEPT)
    shown = shown_of(raw, kind)
    right, events = told(events_of(shown, kind), path), shown.split(b"\n\n")
    for at in range(0, len(ids_of(shown)), max(1, len(events) // 15)):
        had = b"\n\n".join(events[: at + 1]) + b"\n\n"
        found = asked(thinker, ids_of(had)[-1])
        assert found.status_code == 200, (at, found.text)
        rest = msgspec.convert(found.json(), RetainedRest)
        raw, _ = answered(thinker, path, body, rest.resume, **KEPT)
        all_of_it = had + rest.events + shown_of(raw, kind)
        found_events = events_of(all_of_it, kind)
        assert told(found_events, path) == right and are_numbered(found_events, path), at
        assert len(set(ids_of(all_of_it))) == len(ids_of(all_of_it)) > at


def test_a_kept_stream_is_for_its_own_client_request_and_body(thinker: Worker) -> None:
    raw, _ = answered(thinker, *BODIES["native"], **KEPT)
    last = ids_of(raw)[-1]
    assert asked(thinker, last).status_code == 200
    for more in ({"owner": "another"}, {"request_id": "r-2"}, {"body": "c"}, {"after": last + "0"}, {"after": "x"}):
        assert asked(thinker, **{"after": last, **more}).status_code == 404, more


def test_a_stream_that_still_runs_ends_where_its_client_comes_again(thinker: Worker) -> None:
    body = {"text": "SLOW", "stream": True}
    with thinker.http.stream("POST", "/generate", json=body, headers=FRAMES | KEPT) as response:
        pieces = response.iter_bytes()
        text = next(pieces)
        while not (found := ids_of(text)):
            text += next(pieces)
        assert asked(thinker, found[0]).status_code == 200
        record = FrameRecord()
        StreamSplitter(record=record).feed(text + b"".join(pieces))
    assert record.failed == 409 and b"asked for the rest" in record.last_event
    thinker.wait_idle()


def test_only_a_router_has_streams_kept_or_asks_for_them(thinker: Worker) -> None:
    for signature in ("-", sign(b"another secret", KEEP)):
        headers = {**FRAMES, KEEP_HEADER: f"{signature} {KEEP.decode()}"}
        assert (
            "only a router"
            in thinker.error("/generate", {"text": "x", "stream": True}, 403, headers=headers)["message"]
        )
        words = {"request_id": "r-1", "owner": "me", "body": "b", "after": "0123456789abcdef-1"}
        assert thinker.post(RETAINED_PATH, words, headers={RESUME_HEADER: signature}).status_code == 403


RESUME = Resume(
    id="c", created=1, names=["c"], groups=["c"], seeds=[3], salt="s", output_ids=[[65]], ended=[None],
    logprobs=[[]], prompt_logprobs=[[]],
)  # fmt: skip
LOGPROB = [[-1.0, 65, [[-1.0, 260]], []]]
HARM: dict[str, dict[str, Any]] = {
    "id": {"output_ids": [[99_999_999]]},
    "id-just-outside": {"output_ids": [[260]]},
    "negative-id": {"output_ids": [[-1]]},
    "long-id": {"output_ids": [[2**70]]},
    "more-than-asked-for": {"output_ids": [[65] * 6]},
    "samples": {"output_ids": [[65], [66]]},
    "stop-id": {"ended": [["stop", 99_999_999]]},
    "end": {"ended": [["stop", {}, 5]]},
    "no-base64": {"logprobs": [["\xfc"]]},
    "no-msgpack": {"logprobs": [["/////w=="]]},
    "logprob-of-no-token": {"logprobs": [[base64.b64encode(msgspec.msgpack.encode(LOGPROB)).decode()]]},
    "seed": {"seeds": [2**63]},
    "created": {"created": -1},
    "salt": {"salt": "s" * 65},
    "name": {"names": ["n" * 600]},
    "kv": {"sources": [{"control": "10.0.0.1:5000", "incarnation": "d"}]},  # a unified worker gets none
}


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize("harm", HARM)
def test_what_a_router_signs_is_read_like_a_stranger_s_words(thinker: Worker, path: str, harm: str) -> None:
    resume = msgspec.json.encode({**msgspec.to_builtins(RESUME), **HARM[harm]})
    native = {"text": "a", "sampling_params": {"max_new_tokens": 5}}
    body = native if path == "/generate" else {"prompt": "a", "max_tokens": 5}
    raw = msgspec.json.encode({**body, RESUME_FIELD: msgspec.Raw(resume)})
    headers = {RESUME_HEADER: sign(SECRET, resume), "Content-Type": "application/json"}
    answer = thinker.http.post(path, content=raw, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == RESUME_FIELD, answer.text
    assert thinker.post("/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 3}}).json()["text"] == "ab"


def test_without_a_secret_a_worker_takes_no_router_s_orders(worker: Worker) -> None:
    """The words of anyone who reaches it are refused; a stream that is to be kept is a plain one."""
    resume = msgspec.to_builtins(msgspec.structs.replace(RESUME, output_ids=[[99_999_999]]))
    for signature in ("-", "", sign(SECRET, msgspec.json.encode(resume))):
        answer = worker.post("/generate", {"text": "a", RESUME_FIELD: resume}, headers={RESUME_HEADER: signature})
        assert answer.status_code == 403 and "--cluster-secret-file" in answer.text
        question = {"request_id": "r-1", "owner": "me", "body": "b", "after": "0123456789abcdef-1"}
        assert worker.post(RETAINED_PATH, question, headers={RESUME_HEADER: signature}).status_code == 403
        assert worker.post("/move_out", {"samples": []}, headers={RESUME_HEADER: signature}).status_code == 403
    answer = worker.post("/generate", {"text": "x", "stream": True}, headers=FRAMES | KEPT)
    assert answer.status_code == 200 and not answer.content.startswith(b":") and b"\nid:" not in answer.content


def test_metrics_count_what_is_kept(thinker: Worker) -> None:
    answered(thinker, *BODIES["native"], **KEPT)
    text = thinker.http.get("/metrics").text
    assert re.search(r"^tandem_kept_streams\{.*\} [1-9]", text, re.MULTILINE)
    assert re.search(r"^tandem_kept_stream_bytes\{.*\} [1-9]", text, re.MULTILINE)
