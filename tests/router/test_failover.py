"""Streams whose worker is lost, through the router's own code: scripted workers write frames, and one of them breaks off."""

import asyncio
import json
import logging
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from router.pool.breaker import State
from service.flags import ConfigError
from service.http.reconnect import KEEP_HEADER
from service.http.resume import (
    FRAMES_HEADER,
    FRAMES_TYPE,
    RESUME_FIELD,
    RESUME_HEADER,
    Begun,
    FrameRecord,
    Resume,
    begin_frame,
    end_frame,
    failed_frame,
    ids_frame,
    is_signed,
    sign,
    unit_of,
    whole_frame,
)
from tests.router.behaviours import hang, later, resets
from tests.router.dummies import (
    CHAT,
    STREAM,
    Behaviour,
    Cluster,
    DummyWorker,
    always,
    answer_ok,
    begin_stream,
    cluster,
    until,
)
from tests.router.dummies import SECRET as ROUTERS

BEGUN = Begun(id="chat-1", created=7, names=["chat-1"], groups=["chat-1"], seeds=[42], salt="salt")
SECRET = b"a secret of the cluster"
DONE = b"data: [DONE]\n\n"
SAID = b'data: {"error": {"message": "as it said", "code": "deadline"}}\n\n'


def event(token: int) -> bytes:
    return ids_frame(0, [token]) + b'data: {"token": %d}\n\n' % token


def error(status: int) -> bytes:
    return failed_frame(status) + SAID


async def end_or_break(request: web.Request, out: web.StreamResponse, *, ends: bool) -> web.StreamResponse:
    if ends:
        await out.write_eof()
        return out
    await asyncio.sleep(0)
    assert request.transport is not None
    request.transport.abort()
    return out


def lost_after(*tokens: int, last: bytes = b"", begins: bool = True) -> Any:
    """Streams these tokens; then the connection breaks, in the middle of an event, or `last` ends it."""

    async def behave(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.headers[FRAMES_HEADER] == "1"
        head = begin_frame(BEGUN) if begins else b""
        out = await begin_stream(
            request, head + b"".join(map(event, tokens)) + (last or ids_frame(0, [99]) + b"data: {")
        )
        return await end_or_break(request, out, ends=bool(last))

    return behave


async def goes_on(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Two tokens behind what the client has, and the end."""
    resume = msgspec.convert(body[RESUME_FIELD], Resume)
    begin = resume.output_ids[0][-1] + 1 if resume.output_ids[0] else 1
    rest = event(begin) + event(begin + 1)[: len(ids_frame(0, [begin + 1]))] + end_frame(0, b'["stop"]')
    rest += event(begin + 1)[len(ids_frame(0, [begin + 1])) :] + DONE
    out = await begin_stream(request, begin_frame(BEGUN) + rest)
    await out.write_eof()
    return out


async def begins(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """One token, and no more."""
    await begin_stream(request, begin_frame(BEGUN) + event(1))
    return await hang(worker, request, body)


async def read(c: Cluster, body: dict[str, Any] = STREAM, **headers: str) -> bytes:
    async with (
        aiohttp.ClientSession() as http,
        http.post(c.url + "/v1/chat/completions", json=body, headers=headers) as got,
    ):
        assert got.status == 200
        return await got.read()


def tokens_of(text: bytes) -> list[int]:
    assert b":" not in [line[:1] for line in text.split(b"\n")], text  # no frame reaches a client
    return [json.loads(line[6:])["token"] for line in text.split(b"\n") if line.startswith(b'data: {"token"')]


def then_goes_on(lost: Behaviour) -> Behaviour:
    """As `lost`, until a router brings what the client has."""

    async def behave(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (goes_on if RESUME_FIELD in body else lost)(worker, request, body)

    return behave


async def test_an_answer_that_was_whole_when_its_worker_was_lost_ends_well() -> None:
    """The next worker has no event to add, and some APIs no mark of the end."""

    async def behave(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if RESUME_FIELD in body:
            return await end_or_break(request, await begin_stream(request, whole_frame()), ends=True)
        last = ids_frame(0, [2]) + end_frame(0, b'["stop"]') + b'data: {"token": 2}\n\n'
        return await end_or_break(
            request, await begin_stream(request, begin_frame(BEGUN) + event(1) + last), ends=False
        )

    async with cluster(decode=[behave] * 2) as c:
        text = await read(c)
        assert tokens_of(text) == [1, 2] and b"error" not in text


async def test_the_rest_comes_from_another_worker_and_nothing_is_seen_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(decode=[then_goes_on(lost_after(1, 2, 3))] * 2, prefill=2) as c:
        caplog.clear()
        text = await read(c, **{"X-Request-Id": "who"})
        urls = [next(w.url for w in c.decodes if (RESUME_FIELD in w.seen[0].body) == rest) for rest in (False, True)]
        (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        said = f"failover of request who from {urls[0]} to {urls[1]}, 3 tokens kept: the stream broke off: "
        assert line.getMessage().startswith(said), line.getMessage()
        assert tokens_of(text) == [1, 2, 3, 4, 5] and text.endswith(DONE)
        (second,) = [w.seen[0] for w in c.decodes if RESUME_FIELD in w.seen[0].body]
        resume = msgspec.convert(second.body[RESUME_FIELD], Resume)
        assert resume.output_ids == [[1, 2, 3]] and resume.ended == [None] and resume.seeds == [42]
        asked = [seen for w in c.prefills for seen in w.seen if RESUME_FIELD in seen.body]
        assert len(asked) == 1 and asked[0].body["bootstrap_room"] == second.body["bootstrap_room"]
        raw = msgspec.json.encode(second.body[RESUME_FIELD])
        assert is_signed(second.headers[RESUME_HEADER.lower()], ROUTERS.encode(), raw)


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_a_worker_that_ends_its_stream_with_a_fault_is_lost_too(status: int) -> None:
    async with cluster(decode=[then_goes_on(lost_after(1, last=error(status)))] * 2) as c:
        assert tokens_of(await read(c)) == [1, 2, 3] and all(worker.seen for worker in c.decodes)


@pytest.mark.parametrize("decode", [1, 3])
async def test_a_stream_that_fails_by_itself_goes_on_at_one_other_worker_at_most(decode: int) -> None:
    """Behind the same tokens the model gives no token there, too: the request's client has one error, and no worker is blamed."""
    own = failed_frame(500) + b'data: {"error": {"message": "NaN", "code": "model_error"}}\n\n'
    async with cluster(prefill=3 if decode > 1 else 1, decode=decode, cb_failure_threshold=1) as c:
        for worker in c.decodes:
            worker.behave = lost_after(1, last=own)
        text = await read(c)
        assert tokens_of(text)[:1] == [1] and text.count(b'"error"') == 1 and b"NaN" in text
        assert sum(len(worker.seen) for worker in c.decodes) == min(2, decode)
        assert all(worker.circuit.state is State.CLOSED for worker in c.router.table.workers())
        for worker in c.decodes:
            worker.behave = then_goes_on(lost_after(1, last=own))
        if decode > 1:
            assert tokens_of(await read(c)) == [1, 2, 3]
            assert any(worker.circuit.state is State.OPEN for worker in c.router.table.workers())


ANSWER = {"tokens": [1, 2, 3, 4, 5]}


def framed(*tokens: int) -> bytes:
    return begin_frame(BEGUN) + b"".join(unit_of(ids_frame(0, [token])) for token in tokens)


async def begin_framed(request: web.Request, first: bytes) -> web.StreamResponse:
    out = web.StreamResponse(headers={"Content-Type": FRAMES_TYPE})
    await out.prepare(request)
    await out.write(first)
    return out


def lost_whole(*tokens: int, more: bytes = b":unit 99\n:ids 0 9", last: bytes = b"") -> Any:
    """Frames of these tokens; then the connection breaks, or `last` ends it."""

    async def behave(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.headers[FRAMES_HEADER] == "1"
        out = await begin_framed(request, framed(*tokens) + (last or more))
        return await end_or_break(request, out, ends=bool(last))

    return behave


async def answers_the_rest(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """All of it, behind what the router has; slowly where that is less than three tokens."""
    resume = msgspec.convert(body[RESUME_FIELD], Resume)
    answer = {"tokens": [*resume.output_ids[0], 4, 5]}
    if len(resume.output_ids[0]) == 3:
        return web.json_response(answer)
    out = await begin_framed(request, begin_frame(BEGUN))
    await out.write(json.dumps(answer).encode())
    await out.write_eof()
    return out


def then_answers(lost: Behaviour) -> Behaviour:
    async def behave(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (answers_the_rest if RESUME_FIELD in body else lost)(worker, request, body)

    return behave


@pytest.mark.parametrize("tokens", [(1, 2, 3), (1, 2)])
async def test_a_whole_answer_goes_on_at_another_worker(tokens: tuple[int, ...]) -> None:
    async with cluster(decode=[then_answers(lost_whole(*tokens))] * 2, prefill=2) as c:
        status, headers, answer = await c.post("/v1/chat/completions", CHAT)
        assert (status, json.loads(answer)) == (200, {"tokens": [*tokens, 4, 5]})
        assert headers["Content-Type"].startswith("application/json")
        assert sum(len(w.seen) for w in c.decodes) == 2


async def test_a_whole_answer_whose_frames_are_too_many_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.http.resume.MOST_FRAME_BYTES", 8)
    async with cluster(decode=2) as c:
        lost = c.decodes[0]
        lost.behave, c.decodes[1].behave = lost_whole(1, 2, 3), always(200, ANSWER)
        for _ in range(2):  # one of them goes to the first
            status, _, answer = await c.post("/v1/chat/completions", CHAT)
            assert (status, json.loads(answer)) == (200, ANSWER)
        assert lost.seen and all(RESUME_FIELD not in seen.body for w in c.decodes for seen in w.seen)


async def test_an_error_behind_frames_is_an_error_with_its_status() -> None:
    async with cluster(decode=[lost_whole(1, last=failed_frame(400) + b'{"error": {"message": "no"}}')]) as c:
        status, headers, answer = await c.post("/v1/chat/completions", CHAT)
        assert (status, json.loads(answer)["error"]["message"]) == (400, "no")
        c.decodes[0].behave = lost_whole(1, last=failed_frame(429, 7) + b'{"error": {"message": "full"}}')
        status, headers, answer = await c.post("/v1/chat/completions", CHAT)
        assert (status, headers["Retry-After"], len(c.decodes[0].seen)) == (429, "7", 2)


async def test_a_whole_answer_of_a_frozen_worker_goes_on_at_another() -> None:
    async def freezes(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await begin_framed(request, framed(1, 2))
        worker.frozen = True
        return await hang(worker, request, body)

    async with cluster(decode=[then_answers(freezes)] * 2, health_check_interval_s=0.02, health_silence_s=0.05) as c:
        status, _, answer = await c.post("/v1/chat/completions", CHAT)
        assert (status, json.loads(answer)["tokens"]) == (200, [1, 2, 4, 5])


async def test_logprobs_and_hidden_states_of_the_prompt_are_in_an_answer_that_goes_on() -> None:
    """The logprobs as the first prefill worker computed them; the hidden states of all that was known, of the second."""
    asked = {"text": "x", "return_logprob": True, "logprob_start_len": 0, "return_hidden_states": True}

    def prefill(logprob: float, *states: Any) -> Behaviour:
        return always(200, {"meta_info": {"input_token_logprobs": [[logprob, 1]], "hidden_states": [*states]}})

    async def by_resume(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        states = [[[1.0]], [2.0]] if RESUME_FIELD in body else [[[1.0]]]
        return await prefill(-2.0 if RESUME_FIELD in body else -1.0, *states)(worker, request, body)

    meta: dict[str, Any] = {"meta_info": {"input_token_logprobs": [], "hidden_states": [[3.0]]}}

    async def rest(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if RESUME_FIELD in body:
            return web.json_response(meta)
        return await lost_whole(1)(worker, request, body)  # type: ignore[no-any-return]

    async with cluster(prefill=[by_resume], decode=[rest] * 2) as c:
        status, _, answer = await c.post("/generate", asked)
        found = json.loads(answer)["meta_info"]
        assert status == 200 and found["input_token_logprobs"] == [[-1.0, 1]]
        assert found["hidden_states"] == [[[1.0]], [2.0], [3.0]]


async def test_an_error_of_the_request_ends_the_stream_as_its_worker_said() -> None:
    async with cluster(decode=[lost_after(1, last=error(400))] * 2) as c:
        text = await read(c)
        assert tokens_of(text) == [1] and text.endswith(SAID)
        assert sum(len(w.seen) for w in c.decodes) == 1


async def test_a_stream_without_frames_ends_with_an_error() -> None:
    """That of another maker's worker, or one that cannot go on elsewhere."""
    async with cluster(decode=[lost_after(1, begins=False)] * 2) as c:
        text = await read(c)
        assert tokens_of(text) == [1] and b"broke off" in text and DONE not in text


@pytest.mark.parametrize("kind", ["stream", "whole", "before its first byte"])
async def test_a_request_that_ends_its_workers_is_refused_at_the_third(kind: str) -> None:
    dies = {"stream": lost_after(1), "whole": lost_whole(1), "before its first byte": resets}[kind]
    async with cluster(decode=[dies] * 5, retry_max=9) as c:
        if kind == "stream":
            text = await read(c)
            assert tokens_of(text) == [1, 1, 1] and b"broke off" in text
        else:
            status, _, answer = await c.post("/v1/chat/completions", CHAT)
            assert status == 502 and json.loads(answer)["error"]["code"] == "worker_lost"
        assert sum(len(w.seen) for w in c.decodes) == 3


async def test_deaths_of_both_roles_count_together() -> None:
    """A prefill worker dies of the prompt, then two decode workers of the answer."""
    computed = asyncio.Event()

    async def dies_at_first(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if sum(len(w.seen) for w in c.prefills) == 1:
            return await resets(worker, request, body)
        computed.set()
        return await answer_ok(worker, request, body)

    async with cluster(prefill=[dies_at_first] * 2, decode=[later(computed, lost_after(1))] * 4) as c:
        text = await read(c)
        assert tokens_of(text) == [1, 1] and b"broke off" in text and DONE not in text


async def test_an_answer_goes_on_where_its_prefill_worker_says_that_decode_died() -> None:
    """Of two samples one has begun, and the room of the other has lost its decode worker: the prefill worker says so first."""
    begun = asyncio.Event()

    async def complains(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if RESUME_FIELD in body:
            return await answer_ok(worker, request, body)
        await begun.wait()
        return web.json_response({"error": {"message": "the decode worker's connection was lost"}}, status=500)

    async def begins(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await begin_framed(request, framed(1, 2))
        begun.set()
        return await hang(worker, request, body)

    async with cluster(prefill=[complains] * 2, decode=[then_answers(begins)] * 2) as c:
        status, _, answer = await c.post("/v1/chat/completions", CHAT)
        assert (status, json.loads(answer)["tokens"]) == (200, [1, 2, 4, 5])


async def test_errors_of_workers_that_live_are_bounded_too() -> None:
    """By --retry-max (3), and where the other half is gone by the two attempts that its bootstrap server gets; an engine's death is a death."""
    for role, status, num_seen in (("unified", 502, 4), ("decode", 500, 4), ("decode", 503, 3), ("decode", 502, 2)):
        given: dict[str, Any] = {role: [lost_whole(last=failed_frame(status) + SAID)] * 6}
        async with cluster(**given) as c:
            assert (await c.post("/v1/chat/completions", CHAT))[0] == status
            assert sum(len(w.seen) for w in c.decodes) == num_seen, status


async def test_workers_that_drain_are_no_deaths() -> None:
    """A long answer outlives a rolling restart, however many workers there are."""
    async with cluster(decode=6, health_check_interval_s=0.02, failover_max=1) as c:
        drained: list[DummyWorker] = []

        async def drains(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if len(drained) == 5:
                return await goes_on(worker, request, body)
            drained.append(worker)
            await begin_stream(request, begin_frame(BEGUN) + event(len(drained)))
            worker.draining = True
            return await hang(worker, request, body)

        for worker in c.decodes:
            worker.behave = drains
        assert tokens_of(await read(c)) == [1, 2, 3, 4, 5, 6, 7]


async def test_without_failover_no_worker_is_asked_for_frames() -> None:
    async with cluster(failover_max=0) as c:
        assert b'"i": 2' in await read(c)
        assert FRAMES_HEADER.lower() not in c.decodes[0].seen[0].headers


async def test_a_router_without_a_secret_asks_for_nothing_that_workers_refuse() -> None:
    """No frames, no stream kept; a lost worker's stream ends with the error that it would have at workers of other makes."""

    async def dies(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await end_or_break(request, await begin_stream(request, b'data: {"token": 1}\n\n'), ends=False)

    async with cluster(decode=[dies] * 2, secret="") as c:
        text = await read(c)
        (seen,) = [seen for worker in c.decodes for seen in worker.seen]
        assert tokens_of(text) == [1] and b"error" in text
        assert not {name.lower() for name in (FRAMES_HEADER, RESUME_HEADER, KEEP_HEADER)} & seen.headers.keys()
    for flags in ({"resume_window_s": 7.0}, {"encode": 1}):
        with pytest.raises(ConfigError, match="needs --cluster-secret-file"):
            async with cluster(secret="", **flags):
                pass


async def test_a_worker_that_knows_no_secret_of_the_router_s_is_passed_over() -> None:
    async def refuses(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if RESUME_FIELD in body:
            return web.json_response({"error": {"message": "only a router of mine"}}, status=403)
        return await lost_after(1, 2)(worker, request, body)

    async with cluster(decode=[refuses] * 3) as c:
        c.decodes[-1].behave = then_goes_on(lost_after(1, 2))
        text = await read(c)
        assert tokens_of(text) == [1, 2, 3, 4] and b"error" not in text
        assert all(state.circuit.state.value == "closed" for state in map(c.state, c.decodes))


async def test_a_client_cannot_resume() -> None:
    async with cluster() as c:
        await read(c, **{RESUME_HEADER: "-", FRAMES_HEADER: "7"})
        headers = c.decodes[0].seen[0].headers
        assert RESUME_HEADER.lower() not in headers and headers[FRAMES_HEADER.lower()] == "1"


@pytest.mark.parametrize(
    ("why", "flags"),
    [("frozen", {"health_silence_s": 0.05}), ("draining", {}), ("an operator", {"health_check_interval_s": 0.05})],
)
async def test_streams_of_a_worker_that_freezes_drains_or_is_emptied_go_on_at_another(
    why: str, flags: dict[str, Any]
) -> None:
    async with cluster(decode=[begins] * 2, **{"health_check_interval_s": 0.02, **flags}) as c:
        running = asyncio.create_task(read(c))
        await until(lambda: any(w.seen for w in c.decodes))
        at, other = sorted(c.decodes, key=lambda w: not w.seen)
        other.behave = goes_on
        await c.first_byte()
        if why == "an operator":
            status, _, answer = await c.post("/workers/migrate", {"url": at.url})
            assert (status, json.loads(answer)["moved"]) == (200, 1)
        else:
            setattr(at, why, True)
        assert tokens_of(await running) == [1, 2, 3]


async def test_nothing_moves_from_the_only_worker() -> None:
    async with cluster() as c:
        status, _, answer = await c.post("/workers/migrate", {"url": c.decodes[0].url})
        assert status == 409 and b"no other decode worker answers" in answer


def test_what_a_router_keeps_is_what_a_worker_wrote() -> None:
    record = FrameRecord()
    assert record.resume() is None
    two = Begun(id="c", created=1, names=["c-0", "c-1"], groups=["c", "c"], seeds=[1, 2], salt="s")
    assert (
        record.take(begin_frame(two) + ids_frame(1, [5]) + b"data: x\n\n" + ids_frame(0, [6, 7]) + b"data: y\n\n")
        == b"data: x\n\ndata: y\n\n"
    )
    assert record.take(b"data: : no frame\n\n: beat\n\n") == b"data: : no frame\n\n: beat\n\n"
    assert record.take(ids_frame(1, [8]) + end_frame(1, b'["stop"]') + b"data: z\n\n") == b"data: z\n\n"
    resume = msgspec.json.decode(record.resume() or b"", type=Resume)
    assert (resume.output_ids, resume.ended, resume.names) == ([[6, 7], [5, 8]], [None, ["stop"]], ["c-0", "c-1"])


def test_a_signature_is_of_one_secret_and_one_text() -> None:
    assert is_signed(sign(SECRET, b"text"), SECRET, b"text")
    assert not is_signed(sign(SECRET, b"text"), SECRET, b"other") and not is_signed("-", SECRET, b"text")
    assert not any(is_signed(text, None, b"text") for text in ("", "-", "anything", sign(SECRET, b"text")))
