"""Streams that leave a worker, and answers that go on at one with the KV of another: a real frontend, a scheduler stand-in."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from engine.frontend.apis.shared.resumable import Frames
from engine.messages import KVSource, TokenOutput
from engine.text.sample import TextOutput
from service.http.guard import CALLER_HEADER
from service.http.resume import (
    FRAMES_HEADER,
    FRAMES_TYPE,
    RESUME_FIELD,
    RESUME_HEADER,
    Begun,
    FrameRecord,
    Resume,
    SampleSource,
    sign,
)
from tests.frontend.conftest import SECRET, Worker, start_worker, wait_for

META = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 5, "bootstrap_room": 7}
FRAMES = {FRAMES_HEADER: "1"}
KV = SampleSource(control="10.0.0.1:5000", incarnation="d0")


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    engine = {"enable_return_hidden_states": True}
    args: dict[str, Any] = {"allowed": ["10.0.0.1"], "engine": engine, "secret": SECRET.decode()}
    with start_worker(tmp_path_factory.mktemp("decode"), mode="decode", **args) as worker:
        yield worker


@contextmanager
def streaming(worker: Worker, path: str, body: dict[str, Any], **headers: str) -> Iterator[Any]:
    """A stream that has said all that it says before it hangs; the value reads the rest."""
    seen = len(worker.scheduler.seen)
    with worker.http.stream("POST", path, json={**META, **body, "stream": True}, headers=headers) as response:
        assert response.status_code == 200
        wait_for(lambda: len(worker.scheduler.seen) > seen)
        yield response


def signed(worker: Worker, path: str, body: dict[str, Any], words: dict[str, Any]) -> Any:
    """The answer to a body of its router, which signs `words`."""
    headers = {RESUME_HEADER: sign(SECRET, msgspec.json.encode(words)), "Content-Type": "application/json"}
    return worker.http.post(path, content=msgspec.json.encode(body), headers=headers)


def ordered(worker: Worker, order: dict[str, Any]) -> Any:
    return signed(worker, "/move_out", order, order)


def gone_on(worker: Worker, source: SampleSource | None) -> Any:
    """The answer to a request that goes on here with the KV of `source`."""
    resume = Resume(
        id="r", created=1, names=["r"], groups=["r"], seeds=[3], salt="s", output_ids=[[65, 66]], ended=[None],
        logprobs=[[]], prompt_logprobs=[[]], sources=[source],
    )  # fmt: skip
    words = msgspec.to_builtins(resume)
    return signed(worker, "/v1/completions", {**META, "prompt": "abc", "max_tokens": 4, RESUME_FIELD: words}, words)


def move(worker: Worker, rid: str, room: int = 9) -> list[str]:
    answer = ordered(worker, {"samples": [{"rid": rid, "room": room}]})
    assert answer.status_code == 200, answer.text
    return answer.json()["moving"]  # type: ignore[no-any-return]


def move_stuck(worker: Worker, rid: str) -> list[str]:
    """Moves it behind the third token of SLOW."""
    wait_for(lambda: sum(len(r.output) for r in worker.scheduler._running.values()) == 3)
    return move(worker, rid)


def record_of(data: bytes) -> tuple[FrameRecord, bytes]:
    record = FrameRecord()
    return record, record.take(data)


def test_a_stream_ends_with_where_its_kv_is_and_with_the_tokens_whose_text_it_holds_back(decode: Worker) -> None:
    body = {"prompt": "SLOW", "max_tokens": 50, "stop": ["LZ"], "rid": "one", "seed": 1}
    with streaming(decode, "/v1/completions", body, **FRAMES) as response:
        pieces = response.iter_raw()
        data = next(pieces)
        while b"S" not in shown(data):
            data += next(pieces)
        assert move_stuck(decode, "one") == ["one"]
        data += b"".join(pieces)
    record, events = record_of(data)
    assert b"DONE" not in events and b'finish_reason":"' not in events.replace(b" ", b"")
    assert record.moved == {0: KV} and record.has_sources()
    resume = msgspec.json.decode(record.resume(by_kv=True) or b"", type=Resume)
    assert resume.output_ids == [decode.scheduler.seen[-1].input_ids[:3]] and shown(data) == b"S"
    assert list(decode.scheduler.moved.values())[-1] == 9
    decode.wait_idle()


def test_a_stream_leaves_by_the_name_of_its_owner(decode: Worker) -> None:
    """Two clients of a router use one name; the router moves one's stream alone."""
    one, two = "1" * 64, "2" * 64
    body = {"prompt": "SLOW", "max_tokens": 50, "rid": "shared"}
    order = {"samples": [{"rid": "shared", "room": 9}]}
    path = "/v1/completions"
    with (
        streaming(decode, path, body, **FRAMES, **{CALLER_HEADER: one}) as first,
        streaming(decode, path, body, **FRAMES, **{CALLER_HEADER: two}),
    ):
        assert ordered(decode, order).json() == {"moving": []}
        assert ordered(decode, {**order, "owner": one}).json() == {"moving": ["shared"]}
        record, _ = record_of(first.read())
        assert record.moved == {0: KV} and decode.scheduler.num_running == 1
    decode.wait_idle()


def test_a_stream_that_leaves_shows_no_event_twice(decode: Worker) -> None:
    body = {"text": "SLOW", "sampling_params": {"max_new_tokens": 50}, "rid": "native"}
    with streaming(decode, "/generate", body, **FRAMES) as response:
        assert move_stuck(decode, "native") == ["native"]
        record, events = record_of(response.read())
    counts = [len(json.loads(line[6:])["output_ids"]) for line in events.split(b"\n") if line.startswith(b"data: {")]
    assert record.moved == {0: KV} and counts == sorted(set(counts)) and counts[-1] == 3
    decode.wait_idle()


def shown(data: bytes) -> bytes:
    _, events = record_of(data[: data.rfind(b"\n\n") + 2])
    lines = [line[6:] for line in events.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"]).encode()


def test_logprobs_of_what_is_held_back_are_computed_again() -> None:
    """They are known here alone: the rest goes through a prefill worker, behind what the client has."""
    begun = Begun(id="c", created=1, names=["c"], groups=["c"], seeds=[1], salt="s")
    for has_logprobs, shown, known in ((True, True, [5, 6]), (True, False, [5]), (False, False, [5, 6])):
        frames, data = Frames(begun, has_logprobs=has_logprobs), b""
        for token, is_shown in ((5, True), (6, shown)):
            output = TextOutput(text="", tokens=TokenOutput(rid="c", new_ids=[token]))
            data += frames.before(0, output, [b"data: x\n\n"] if is_shown else [])
        record, _ = record_of(data + frames.leave({0: KVSource(KV.control, KV.incarnation)}))
        assert record.has_sources() is (known == [5, 6])
        assert msgspec.json.decode(record.resume() or b"", type=Resume).output_ids == [known]


def test_what_no_router_can_continue_stays(decode: Worker) -> None:
    with streaming(decode, "/v1/completions", {"prompt": "SLOW and", "max_tokens": 50, "rid": "three"}):
        assert move(decode, "three") == [] and move(decode, "nobody") == []
    body = {"text": "SLOW", "rid": "hidden", "return_hidden_states": True}
    with streaming(decode, "/generate", body, **FRAMES):
        assert move(decode, "hidden") == []
    decode.wait_idle()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"samples": [{"rid": "x", "room": 0}]}, "samples[0].room"),
        ({"samples": [{"rid": "x"}]}, "samples[0].room"),
        ({"samples": 5}, "samples"),
        ({}, "samples"),
    ],
)
def test_what_is_no_order_is_refused(decode: Worker, body: dict[str, Any], field: str) -> None:
    answer = ordered(decode, body)
    assert answer.status_code == 400 and field in answer.text


def test_an_answer_that_is_not_streamed_ends_with_all_that_it_has(decode: Worker) -> None:
    body = {**META, "prompt": "SLOW", "max_tokens": 50, "rid": "whole"}
    with ThreadPoolExecutor(1) as pool:
        posted = pool.submit(decode.post, "/v1/completions", body, headers=FRAMES)
        assert move_stuck(decode, "whole") == ["whole"]
        answer = posted.result(30)
    record = FrameRecord()
    assert answer.headers["content-type"] == FRAMES_TYPE and record.take_head(answer.content) == b""
    assert record.moved == {0: KV}
    resume = msgspec.json.decode(record.resume(by_kv=True) or b"", type=Resume)
    assert resume.output_ids == [decode.scheduler.seen[-1].input_ids[:3]] and resume.sources == [KV]
    decode.wait_idle()


def test_only_a_router_has_streams_move(decode: Worker) -> None:
    """A worker without a secret takes no orders at all: test_going_on.py."""
    order = {"samples": [{"rid": "x", "room": 1}]}
    for signature in ("", "-", sign(b"another", msgspec.json.encode(order))):
        assert "only a router" in decode.error("/move_out", order, 403, headers={RESUME_HEADER: signature})["message"]
    assert move(decode, "x") == []


def test_other_workers_have_nothing_that_moves(thinker: Worker) -> None:
    answer = ordered(thinker, {"samples": [{"rid": "x", "room": 1}]})
    assert answer.status_code == 409 and "decode worker" in answer.text


def test_the_scheduler_gets_the_address_of_the_kv(decode: Worker) -> None:
    answer = gone_on(decode, KV)
    assert answer.status_code == 200, answer.text
    request = decode.scheduler.seen[-1]
    assert request.source == KVSource(KV.control, KV.incarnation) and request.output_ids == [65, 66]


@pytest.mark.parametrize(
    "control", ["10.0.0.1", "nonsense", "10.0.0.1:x", ":5", "10.0.0.1:0", "10.0.0.1:70000", "\u0661:\u0661"]
)
def test_what_is_no_address_is_not_dialled(decode: Worker, control: str) -> None:
    answer = gone_on(decode, SampleSource(control=control, incarnation="d0"))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "resume"
