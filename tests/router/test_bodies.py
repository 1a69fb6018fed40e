"""Bodies in and out: rewriting for both legs, merging of answers, event boundaries; long ones beside the event loop."""

import gzip
import io
import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.body import Api, BadBody, named_model, parse_body, write_bodies
from router.choice.policies import Chooser
from router.http import fan_out
from router.parts import images, reconnect
from router.requests import dispatch, responses
from router.requests.answer import StreamSplitter
from router.requests.merge import Merger
from service.http.errors import MAX_FIELDS, MAX_PARTS
from tests.router.dummies import Cluster, cluster


def parsed(api: Api, body: dict[str, Any]) -> Any:
    return parse_body(api, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("api", "body", "samples"),
    [
        (Api.CHAT, {"messages": []}, 1),
        (Api.CHAT, {"messages": [], "n": 3}, 3),
        (Api.CHAT, {"messages": [], "n": None}, 1),
        (Api.CHAT, {"messages": [], "n": "3"}, 1),
        (Api.CHAT, {"messages": [], "n": True}, 1),
        (Api.COMPLETIONS, {"prompt": "a, b"}, 1),
        (Api.COMPLETIONS, {"prompt": ["a", "b, c"], "n": 2}, 4),
        (Api.COMPLETIONS, {"prompt": [1, 2, 3], "n": 2}, 2),
        (Api.COMPLETIONS, {"prompt": [[1, 2], [3]]}, 2),
        (Api.COMPLETIONS, {"prompt": []}, 1),
        (Api.COMPLETIONS, {}, 1),
        (Api.GENERATE, {"text": "a"}, 1),
        (Api.GENERATE, {"text": ["a"]}, 1),
        (Api.GENERATE, {"text": ["a", "b"], "sampling_params": {"n": 2}}, 4),
        (Api.GENERATE, {"text": ["a", "b"], "sampling_params": [{"n": 2}, {}]}, 3),
        (Api.GENERATE, {"text": ["a", "b"], "sampling_params": []}, 2),
        (Api.GENERATE, {"text": None, "input_ids": [[1], [2], [3]]}, 3),
        (Api.GENERATE, {"input_ids": [1, 2], "sampling_params": {"n": 2}}, 2),
        (Api.GENERATE, {"input_ids": [1], "sampling_params": "bad"}, 1),
        (Api.MESSAGES, {"system": "s", "messages": [], "n": 3}, 1),
        (Api.OLLAMA_CHAT, {"messages": [{}, {}], "n": 3}, 1),
        (Api.OLLAMA_GENERATE, {"prompt": ["a", "b"], "options": {"n": 3}}, 1),
    ],
)
def test_samples_are_counted(api: Api, body: dict[str, Any], samples: int) -> None:
    assert parsed(api, body).num_samples == samples


def test_token_estimates() -> None:
    ids = parsed(Api.GENERATE, {"input_ids": list(range(50)), "sampling_params": {"max_new_tokens": 7}})
    assert (ids.prompt_tokens, ids.output_tokens) == (50, 7)
    text = parsed(Api.COMPLETIONS, {"prompt": "x" * 400, "max_tokens": 100_000, "n": 2})
    assert 95 <= text.prompt_tokens <= 105 and text.output_tokens == 2 * 512
    chat = parsed(Api.CHAT, {"messages": [{"role": "user", "content": "x" * 400}], "max_completion_tokens": 3})
    assert chat.prompt_tokens >= 100 and chat.output_tokens == 3
    assert parsed(Api.CHAT, {"messages": []}).output_tokens == 128
    long = [{"role": "user", "content": "x" * 400}]
    message = parsed(Api.MESSAGES, {"system": "x" * 400, "messages": long, "max_tokens": 5})
    assert message.prompt_tokens >= 200 and message.output_tokens == 5
    chat = parsed(Api.OLLAMA_CHAT, {"messages": long, "options": {"num_predict": 6}})
    assert chat.prompt_tokens >= 100 and chat.output_tokens == 6
    for options in (None, {}, {"num_predict": -1}, {"num_predict": "x"}, [1]):
        assert parsed(Api.OLLAMA_GENERATE, {"prompt": "a", "options": options}).output_tokens == 128


@pytest.mark.parametrize(
    ("api", "body", "streams"),
    [
        (Api.CHAT, {}, False),
        (Api.MESSAGES, {"stream": None}, False),
        (Api.MESSAGES, {"stream": True}, True),
        (Api.OLLAMA_CHAT, {}, True),
        (Api.OLLAMA_CHAT, {"stream": None}, True),
        (Api.OLLAMA_GENERATE, {"stream": False}, False),
        (Api.OLLAMA_GENERATE, {"stream": "no"}, False),
    ],
)
def test_what_streams_and_never_from_prefill(api: Api, body: dict[str, Any], streams: bool) -> None:
    got = parsed(api, body)
    prefill, decode = map(json.loads, write_bodies(got, host="h", port=5, rooms=(1,)))
    assert got.streams is streams and decode.items() >= body.items()
    assert parse_body(api, json.dumps(prefill).encode()).streams is False


def test_a_model_may_have_a_tag_where_ollamas_clients_write_one() -> None:
    for api, named in ((Api.OLLAMA_CHAT, "m"), (Api.CHAT, "m:latest")):
        assert named_model(parsed(api, {"model": "m:latest", "messages": []})) == named


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"null", b'{"n": NaN}', b"\xff", b'{"a":' + b"[" * 100_000, b'{"prompt": "\xff', b"{} {}"],
)
def test_bodies_that_cannot_be_routed(body: bytes) -> None:
    with pytest.raises(BadBody):
        parse_body(Api.COMPLETIONS, body)


@pytest.mark.parametrize("body", [{"n": 10**9}, {"n": 100, "prompt": ["a"] * 50}, {"prompt": ["a"] * 5000}])
def test_a_request_has_a_bounded_number_of_samples(body: dict[str, Any]) -> None:
    with pytest.raises(BadBody, match="at most 4096"):
        parsed(Api.COMPLETIONS, body)


def test_what_is_not_ours_keeps_its_very_bytes() -> None:
    body = b'{"model":"m","messages":[ {"x":1.0e5} ],"new_field":{"deep":[1e400,-0,123456789012345678901]},"u":"\\u00e9\xc3\xa9"}'
    prefill, decode = write_bodies(parse_body(Api.CHAT, body), host="h", port=1, rooms=(9,))
    ours = b',"bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":9}'
    assert prefill == decode == body[:-1] + ours


def test_several_samples_get_lists_and_prefill_is_never_streamed() -> None:
    body = {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}}
    prefill, decode = map(json.loads, write_bodies(parsed(Api.COMPLETIONS, body), host="h", port=5, rooms=(1, 2)))
    added = {"bootstrap_host": ["h", "h"], "bootstrap_port": [5, 5], "bootstrap_room": [1, 2]}
    assert decode == {**body, **added}
    assert prefill == {"prompt": ["a", "b"], "stream": False, **added}


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_names = st.sampled_from(
    ["prompt", "text", "input_ids", "n", "max_tokens", "sampling_params", "logprobs", "echo", "return_logprob"]
) | st.text(max_size=6)


@settings(max_examples=200)
@given(st.sampled_from(list(Api)), st.dictionaries(_names, _json, max_size=6))
def test_any_object_is_passed_on_whole_or_refused(api: Api, body: dict[str, Any]) -> None:
    try:
        got = parsed(api, body)
    except BadBody:
        return
    rooms = tuple(range(1, got.num_samples + 1))
    _, decode = write_bodies(got, host="h", port=1, rooms=rooms)
    out = json.loads(decode)
    assert {k: out[k] for k in body} == body and out["bootstrap_room"] == (list(rooms) if len(rooms) > 1 else 1)


@pytest.mark.parametrize(
    ("api", "body", "expected"),
    [
        (Api.GENERATE, {"return_logprob": True}, False),
        (Api.GENERATE, {"return_logprob": True, "logprob_start_len": -1}, False),
        (Api.GENERATE, {"return_logprob": True, "logprob_start_len": 0}, True),
        (Api.GENERATE, {"return_logprob": [False, True], "logprob_start_len": [-1, 3]}, True),
        (Api.GENERATE, {"return_logprob": False, "logprob_start_len": 0}, False),
        (Api.COMPLETIONS, {"echo": True, "logprobs": 0}, True),
        (Api.COMPLETIONS, {"echo": True, "logprobs": None}, False),
        (Api.COMPLETIONS, {"logprobs": 1}, False),
        (Api.CHAT, {"logprobs": True, "echo": True}, False),
    ],
)
def test_which_answers_need_merging(api: Api, body: dict[str, Any], expected: bool) -> None:
    assert parsed(api, body).wants_input_logprobs is expected


IN = [[None, 1, "a"], [-0.5, 2, "b"]]


def native(text: str, **meta: Any) -> dict[str, Any]:
    return {"text": text, "meta_info": {"input_token_logprobs": [], **meta}}


def merge(api: Api, prefill: Any, decode: Any) -> Any:
    return json.loads(Merger(api, json.dumps(prefill).encode()).merge_answer(json.dumps(decode).encode()))


def test_native_single() -> None:
    prefill = native("x", input_token_logprobs=IN, output_token_logprobs=[[-9.0, 7, "x"]], cached_tokens=16)
    decode = native("xy", output_token_logprobs=[[-9.0, 7, "x"], [-8.0, 8, "y"]], cached_tokens=0)
    assert merge(Api.GENERATE, prefill, decode) == native(
        "xy", input_token_logprobs=IN, output_token_logprobs=[[-9.0, 7, "x"], [-8.0, 8, "y"]], cached_tokens=16
    )


def completion(tokens: list[str], logprobs: list[float | None], offsets: list[int], index: int = 0) -> dict[str, Any]:
    columns = {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": [None if lp is None else {t: lp} for t, lp in zip(tokens, logprobs, strict=True)],
        "text_offset": offsets,
    }
    return {"index": index, "text": "".join(tokens), "logprobs": columns}


def usage(completion_tokens: int, cached: int) -> dict[str, Any]:
    return {"completion_tokens": completion_tokens, "prompt_tokens_details": {"cached_tokens": cached}}


@pytest.mark.parametrize("own_offset", [0, 2])
def test_completion_with_echo_gets_the_prompts_columns(own_offset: int) -> None:
    prefill = {"choices": [completion(["a", "b", "c"], [None, -1.0, -2.0], [0, 1, 2])], "usage": usage(1, 8)}
    own = completion(["c", "d"], [-2.0, -3.0], [own_offset, own_offset + 1])
    merged = merge(Api.COMPLETIONS, prefill, {"choices": [own], "usage": usage(2, 0)})
    whole = completion(["a", "b", "c", "d"], [None, -1.0, -2.0, -3.0], [0, 1, 2, 3])
    assert merged["choices"][0]["logprobs"] == whole["logprobs"]
    assert merged["usage"] == usage(2, 8)


def test_completion_that_holds_the_prompt_already_is_left_alone() -> None:
    whole = completion(["a", "b", "c"], [None, -1.0, -2.0], [0, 1, 2])
    answer = {"choices": [whole]}
    assert merge(Api.COMPLETIONS, {"choices": [whole], "usage": usage(1, 0)}, answer) == answer


def test_completion_that_generates_nothing_takes_all_columns() -> None:
    prefill = {"choices": [completion(["a", "b"], [None, -1.0], [0, 1])], "usage": usage(0, 0)}
    merged = merge(Api.COMPLETIONS, prefill, {"choices": [{"index": 0, "text": "ab", "logprobs": None}]})
    assert merged["choices"][0]["logprobs"]["tokens"] == ["a", "b"]


def test_choices_are_matched_by_index() -> None:
    prefill = {
        "choices": [completion(["a", "x"], [None, -1.0], [0, 1]), completion(["b", "y"], [None, -2.0], [0, 1], 1)]
    }
    prefill["usage"] = usage(2, 0)  # type: ignore[assignment]
    decode = {"choices": [completion(["y"], [-2.0], [1], 1), completion(["x"], [-1.0], [1], 0)]}
    merged = merge(Api.COMPLETIONS, prefill, decode)
    assert [c["logprobs"]["tokens"] for c in merged["choices"]] == [["b", "y"], ["a", "x"]]


@pytest.mark.parametrize(
    "garbage", [b"", b"oops", b"[]", b"3", b'{"choices": 3}', b'{"meta_info": 3}', b'[{"text":"x"}, 7]']
)
def test_answers_of_unknown_shape_pass(garbage: bytes) -> None:
    good = json.dumps(native("x")).encode()
    for api in (Api.GENERATE, Api.COMPLETIONS):
        Merger(api, garbage).merge_answer(good)
        Merger(api, good).merge_answer(garbage)
        Merger(api, good).merge_event(garbage)


def sse(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + b"data: [DONE]\n\n"


@settings(max_examples=50)
@given(st.lists(st.integers(1, 400), max_size=6))
def test_streams_are_merged_however_they_are_cut(cuts: list[int]) -> None:
    stream = sse(
        {"index": 1, **native("y")}, {"index": 0, **native("x")}, {"index": 0, "text": "xx", "meta_info": {"id": "r"}}
    )
    prefill = [native("x", input_token_logprobs=IN), native("y", input_token_logprobs=IN[:1])]
    merger = StreamSplitter(EVENTS, filters=[Merger(Api.GENERATE, json.dumps(prefill).encode()).merge_events])
    out, rest = b"", stream
    for cut in cuts:
        out += merger.feed(rest[:cut])
        rest = rest[cut:]
    out += merger.feed(rest) + merger.rest()
    lines = [line[6:] for line in out.split(b"\n\n") if line]
    assert lines.pop() == b"[DONE]"
    first, second, third = map(json.loads, lines)
    assert first["meta_info"]["input_token_logprobs"] == IN[:1]
    assert second["meta_info"]["input_token_logprobs"] == IN
    assert "input_token_logprobs" not in third["meta_info"]


EVENTS, LINES = "text/event-stream; charset=utf-8", "application/x-ndjson"


@given(
    st.lists(st.integers(1, 9), max_size=20),
    st.sampled_from([(EVENTS, b"\n\n"), (EVENTS, b"\r\n\r\n"), (LINES, b"\n")]),
)
def test_only_whole_events_pass_and_nothing_is_lost(cuts: list[int], kind: tuple[str, bytes]) -> None:
    content_type, end = kind
    stream = b"".join(b"data: " + str(i).encode() + end for i in range(8)) + b"data: half"
    splitter, out, rest = StreamSplitter(content_type), b"", stream
    for cut in [*cuts, len(stream)]:
        piece = splitter.feed(rest[:cut])
        assert piece == b"" or piece.endswith(end)
        out, rest = out + piece, rest[cut:]
    assert out + splitter.rest() == stream and not out.endswith(b"half")


TEXT = "k17 " * 100_000
COMPLETE = "/v1/completions"


def noted(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """The threads of its calls."""
    found, work = list[str](), getattr(owner, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        found.append(threading.current_thread().name)
        return work(*args, **kwargs)

    patch.setattr(owner, name, noting)
    return found


async def both(c: Cluster, path: str, body: dict[str, Any], field: str) -> None:
    """Post the body as it is, then with a long text in that field."""
    for text in ("k17", TEXT):
        status, _, answer = await c.post(path, {**body, field: text})
        assert status == 200, answer


async def test_a_thread_works_on_long_bodies_and_the_loop_on_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = noted(monkeypatch, dispatch, "parse_body")
    names = noted(monkeypatch, dispatch, "invoked_path")
    hints = noted(monkeypatch, Chooser, "hints_of")
    digests = noted(monkeypatch, reconnect, "digest_of")
    asked = noted(monkeypatch, fan_out, "decode_or_none")
    stored = noted(monkeypatch, responses, "with_fields")
    async with cluster(unified=1, policy="cache_aware", resume_window_s=7.0) as c:
        await both(c, COMPLETE, {"model": "m"}, "prompt")
        await both(c, COMPLETE, {"model": "m", "stream": True}, "prompt")
        await both(c, "/tokenize", {"model": "m"}, "prompt")
        await both(c, "/v1/responses", {"model": "m", "previous_response_id": None}, "input")
        await both(c, "/invocations", {"model": "m"}, "prompt")
    for found in (reads, names, hints, digests, asked, stored):
        kinds = [name.startswith("bodies") for name in found]
        assert kinds == [False, True] * (len(kinds) // 2) and kinds, found


async def test_long_images_are_found_and_hashed_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    found, hashed = (noted(monkeypatch, images, name) for name in ("_found", "_digest"))
    async with cluster(unified=1) as c:
        for url in ("data:image/png;base64,aaaa", "data:image/png;base64," + "a" * 200_000):
            part = {"type": "image_url", "image_url": {"url": url}}
            await c.post("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": [part]}]})
    assert [name.startswith("bodies") for name in (*found, *hashed)] == [False, True] * 2


async def test_bodies_that_hold_too_much_reach_no_worker() -> None:
    async with cluster(unified=1) as c:
        bomb = gzip.compress(json.dumps({"model": "m", "prompt": "a" * 45_000_000}).encode())
        for body, headers, wanted, said in (
            (bomb, {"Content-Encoding": "gzip"}, 413, b"inflates to more than"),
            (json.dumps({"prompt": [[]] * MAX_PARTS}).encode(), {}, 413, b"lists, objects and texts"),
            (json.dumps(dict.fromkeys(map(str, range(MAX_FIELDS + 1)), 1)).encode(), {}, 400, b"1025 fields"),
        ):
            sent = {"Content-Type": "application/json", **headers}
            async with c.client.post(c.url + COMPLETE, data=io.BytesIO(body), headers=sent) as response:
                status, answer = response.status, await response.read()
            assert status == wanted and said in answer
        whole = {"model": "m", "prompt": "k17 v42"}
        await c.post(COMPLETE, gzip.compress(json.dumps(whole).encode()), headers={"Content-Encoding": "gzip"})
        (seen,) = c.decodes[0].seen
        assert seen.body == whole and "content-encoding" not in seen.headers
