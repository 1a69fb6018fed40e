"""What a worker keeps of streams for clients that come again: for how long, for whom, and how much."""

from typing import Any

import msgspec

from service.http.reconnect import OVERHEAD_BYTES, Keep, RetainedQuestion, StreamLog, StreamLogs
from service.http.resume import MOST_FRAME_BYTES, Begun, Resume, begin_frame, end_frame, ids_frame, known_frames

BEGUN = Begun(id="c", created=1, names=["c"], groups=["c"], seeds=[1], salt="s")
KEEP = Keep(window_s=10.0, owner="me", body="b")


def stream_of(tag: str = "0123456789abcdef", *, units: int = 0) -> StreamLog:
    ended: list[str] = []
    stream = StreamLog(tag=tag, request_id="r", keep=KEEP, head=begin_frame(BEGUN), end=lambda: ended.append(tag))
    for unit in range(units):
        stream.add(ids_frame(0, [unit]), [b"data: x\n\n"])
    return stream


def question(after: str, **more: str) -> RetainedQuestion:
    return RetainedQuestion(**{"request_id": "r", "owner": "me", "body": "b", "after": after, **more})


def resume_of(rest: Any) -> Resume:
    return msgspec.json.decode(rest.resume, type=Resume)


def test_events_are_named_and_the_rest_is_what_follows_the_named_one() -> None:
    stream = stream_of()
    assert stream.add(ids_frame(0, [7]), [b"data: a\n\n"]) == [b"data: a\nid: 0123456789abcdef-1\n\n"]
    two = stream.add(ids_frame(0, [8, 9]) + end_frame(0, b'["stop"]'), [b"event: e\ndata: b\n\n", b"data: c\n\n"])
    assert two[1] == b"data: c\nid: 0123456789abcdef-2.1\n\n"
    streams = StreamLogs()
    streams.open(stream)
    streams.ended(stream, 0.0)
    first, half, whole = (streams.rest(question(f"0123456789abcdef-{at}"), 1.0) for at in ("1", "2.0", "2.1"))
    assert resume_of(first).output_ids == [[7]] and first is not None and first.events == b""
    assert half is not None and half.events == two[1] and resume_of(half).output_ids == [[7, 8, 9]]
    assert whole is not None and whole.events == b"" and resume_of(whole).ended == [["stop"]]
    for after in ("0123456789abcdef-3", "0123456789abcdef-0", "0123456789abcdee-1", "1", "", "0123456789abcdef-1.0x"):
        assert streams.rest(question(after), 1.0) is None, after


def test_what_another_worker_had_said_counts() -> None:
    resume = Resume(
        **msgspec.structs.asdict(BEGUN),
        output_ids=[[1, 2]],
        ended=[None],
        logprobs=[["YQ==", "Yg=="]],
        prompt_logprobs=[["Yw=="]],
        num_events=4,
    )
    stream = StreamLog(tag="0123456789abcdef", request_id="r", keep=KEEP, head=known_frames(resume), end=lambda: None)
    stream.add(ids_frame(0, [3]), [b"data: x\n\n"])
    streams = StreamLogs()
    streams.open(stream)
    found = resume_of(streams.rest(question("0123456789abcdef-1"), 0.0))
    assert found == msgspec.structs.replace(resume, output_ids=[[1, 2, 3]])


def test_the_window_begins_with_the_end_and_a_stream_that_runs_is_ended_by_the_question() -> None:
    ended: list[int] = []
    stream = stream_of(units=2)
    stream.end = lambda: ended.append(1)
    streams = StreamLogs()
    streams.open(stream)
    assert streams.rest(question("0123456789abcdef-2"), 1000.0) is not None and ended == [1]
    streams.ended(stream, 1000.0)
    assert streams.rest(question("0123456789abcdef-2"), 1009.9) is not None and ended == [1]
    assert streams.rest(question("0123456789abcdef-2"), 1010.0) is None and len(streams) == streams.num_bytes == 0


def test_memory_is_bounded_the_oldest_go_first_and_one_that_is_too_long_is_not_kept() -> None:
    one = stream_of(units=10).num_bytes
    streams = StreamLogs(most_bytes=3 * one)
    tags = [f"{i:016x}" for i in range(5)]
    for i, tag in enumerate(tags):
        stream = stream_of(tag, units=10)
        streams.open(stream)
        streams.ended(stream, float(i))
    assert len(streams) == 3 and streams.num_bytes == 3 * one
    assert [streams.rest(question(f"{tag}-1"), 5.0) is not None for tag in tags] == [False, False, True, True, True]
    long = stream_of()
    assert long.add(ids_frame(0, [1]), [b"data: x\n\n", b"x" * MOST_FRAME_BYTES + b"\n\n"])[0].endswith(b"-1.0\n\n")
    assert long.num_bytes == OVERHEAD_BYTES and long.rest_after(1, None) is None
