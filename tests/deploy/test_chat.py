"""`tandem chat` as a real process, at a pseudo-terminal and in a pipe, in front of a router and dummy workers."""

import asyncio
import json
import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NoReturn

import pytest
from aiohttp import web

from deploy.chat import local_cluster
from deploy.chat.client import ChatCommand, ChatHistory, answering_of, command_of, printable
from deploy.commands import chat as chat_command
from service.flags import ConfigError
from tests.deploy.terminal import Terminal, terminal
from tests.router.dummies import Behaviour, Cluster, DummyWorker, always, cluster, stream, until

CONTEXT = "This model's maximum context length is 64 tokens."


def event(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def says(*texts: str, hold: asyncio.Event | None = None) -> Behaviour:
    """Streams the texts, and with `hold` waits for it behind the first."""

    async def behave(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/traces":
            return web.json_response({"records": []})
        events = [*map(event, texts), {"choices": [], "usage": {"completion_tokens": 7}}]
        if hold is None:
            return await stream(request, events)
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        await out.write(b"data: " + json.dumps(events[0]).encode() + b"\n\n")
        await hold.wait()
        return out

    return behave


@asynccontextmanager
async def chat(
    *flags: str, env: dict[str, str] | None = None, **router: Any
) -> AsyncIterator[tuple[Cluster, Terminal]]:
    async with cluster(**router) as c:
        answer_with(c, says("It is ", "Paris."))
        async with terminal("chat", "--url", c.url, *flags, env=env) as at:
            await at.until("Ctrl-D ends")
            yield c, at


def answer_with(c: Cluster, behave: Behaviour) -> None:
    for worker in (*c.prefills, *c.decodes):
        worker.behave = behave


def bodies(c: Cluster) -> list[dict[str, Any]]:
    return [seen.body for seen in c.decodes[0].seen if seen.path == "/v1/chat/completions"]


# What lines mean. Pure.


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("/new", ChatCommand.NEW),
        ("/exit", ChatCommand.EXIT),
        (" /help ", ChatCommand.HELP),
        ("/news", "there is no /news; commands are /new, /exit, /help"),
        ("/new topic", "/new takes nothing after it"),
        ("/etc/passwd has which fields?", None),
        ("what is /new?", None),
        ("", None),
    ],
)
def test_a_line_is_a_command_or_for_the_model(line: str, meant: ChatCommand | str | None) -> None:
    assert command_of(line) == meant


def test_what_commands_a_terminal_is_not_printed() -> None:
    assert printable("a\tb\r\nc") == "a\tb\nc"
    assert printable("\x1b]0;title\x07\x9b2J\r\x08\x00") == "\ufffd]0;title\ufffd\ufffd2J\ufffd\ufffd\ufffd"


def test_of_several_attempts_the_one_that_answers_is_named() -> None:
    failed, first, second = {"failure": "HTTP 500"}, {"failure": "", "try": 2}, {"failure": "", "try": 3}
    assert answering_of([failed, first, second]) is second
    assert answering_of([first, failed]) is first
    assert answering_of([failed]) is failed


def test_a_question_without_an_answer_leaves_the_conversation_as_it_was() -> None:
    conversation = ChatHistory("Be brief.")
    conversation.add("lost", "")
    conversation.add("one", "1")
    assert [m["content"] for m in conversation.with_question("two")] == ["Be brief.", "one", "1", "two"]
    conversation.forget()
    assert [m["content"] for m in conversation.with_question("two")] == ["Be brief.", "two"]


# At a terminal.


async def test_a_conversation_streams_remembers_and_forgets() -> None:
    flags = ("--system", "Be brief.", "--temperature", "0.5", "--max-tokens", "9")
    async with chat(*flags) as (c, at):
        await at.type("What is the capital of France?\r")
        await at.until("It is Paris.")
        prefill, decode = (worker.url.removeprefix("http://") for worker in (c.prefills[0], c.decodes[0]))
        await at.until(f"7 tokens · {prefill} → {decode}")
        await at.type("first line\x1b\rsecond line\x1b\rthird\r")  # Alt-Enter
        await at.until("7 tokens")
        await at.type("/new\r")
        await at.until("a new conversation")
        await at.type("hello\r")
        await at.until("7 tokens")
        await at.type("/help\r")
        await at.until("Ctrl-C stops an answer")
        await at.type("/exit\r")
        assert await at.ended() == 0
    first, second, third = bodies(c)
    assert first["temperature"] == 0.5 and first["max_tokens"] == 9 and first["stream"] is True
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][-1]["content"] == "first line\nsecond line\nthird"
    assert [m["content"] for m in third["messages"]] == ["Be brief.", "hello"]


async def test_ctrl_c_frees_the_request_at_the_workers_and_the_conversation_goes_on() -> None:
    async with chat() as (c, at):
        answer_with(c, says("It is ", "big", hold=asyncio.Event()))
        await at.type("What is Paris?\r")
        await at.until("It is ")
        await at.type("typed ahead\x03")
        await at.until("stopped")
        await until(lambda: c.decodes[0].cancelled == 1)
        await c.settled()
        answer_with(c, says("Yes."))
        await at.type("!\r")
        await at.until("Yes.")
        assert [m["content"] for m in bodies(c)[-1]["messages"]] == ["What is Paris?", "It is ", "typed ahead!"]
        await at.until("tokens")
        await at.type("\x03")  # at the line: nothing runs
        await at.until("Ctrl-D or /exit ends the chat")
        await at.type("\x04")
        assert await at.ended() == 0


async def test_errors_are_a_line_and_the_conversation_goes_on() -> None:
    async with chat() as (c, at):
        answer_with(c, always(400, {"error": {"message": CONTEXT, "code": "context_length_exceeded"}}))
        await at.type("long\r")
        await at.until(f"error: HTTP 400: {CONTEXT}; /new begins a conversation that fits (Up brings")
        answer_with(c, says("\x1b]0;owned\x07hostile\x1b[2J"))
        await at.type("\x1b[A\r")  # Up, Enter
        await at.until("hostile")
        assert "\x1b]0;owned" not in at.raw
        assert [m["content"] for m in bodies(c)[-1]["messages"]] == ["long"]
        await at.until("tokens")
        await c.router.monitor.close()
        for worker in (*c.prefills, *c.decodes):
            await worker.stop()
        await at.type("there?\r")
        await at.until("error: HTTP 50")
        await at.type("/nwe\r")
        await at.until("there is no /nwe")
        await at.type("\x04")
        assert await at.ended() == 0


async def test_a_server_that_goes_away_and_comes_back() -> None:
    async with AsyncExitStack() as serving:
        url = (await serving.enter_async_context(cluster())).url
        async with terminal("chat", "--url", url) as at:
            await at.until("Ctrl-D ends")
            await serving.aclose()
            await at.type("hello?\r")
            await at.until("does not answer")
            async with cluster(port=int(url.rpartition(":")[2])) as c:
                answer_with(c, says("Here again."))
                await at.type("\x1b[A\r")
                await at.until("Here again.")
            await at.type("\x04")
            assert await at.ended() == 0


async def test_a_key_comes_from_the_environment_and_a_lost_one_is_said() -> None:
    async with chat(env={"TANDEM_API_KEY": "sesame"}, api_key="sesame") as (c, at):
        await at.type("hello\r")
        await at.until("It is Paris.")
        await at.type("\x04")
        assert await at.ended() == 0
        async with terminal("chat", "--url", c.url, "--api-key", "wrong", env={"TANDEM_API_KEY": "sesame"}) as refused:
            assert await refused.ended() == 1
            assert "HTTP 401" in refused.raw and "(--api-key)" in refused.raw and "Traceback" not in refused.raw


# In a pipe.


async def piped(question: str, *argv: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "deploy", "chat", *argv]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate(question.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_pipe_is_one_message_and_its_answer() -> None:
    async with cluster() as c:
        answer_with(c, says("It is ", "Paris."))
        assert await piped("What is\nthe capital?\n", "--url", c.url) == (0, "It is Paris.\n", "")
        assert bodies(c)[0]["messages"] == [{"role": "user", "content": "What is\nthe capital?"}]
        status, out, err = await piped(" \n", "--url", c.url)
        assert (status, out) == (1, "") and "holds no message" in err
        answer_with(c, always(400, {"error": {"message": CONTEXT}}))
        status, _, err = await piped("long", "--url", c.url)
        assert status == 1 and err.strip() == f"tandem chat: error: HTTP 400: {CONTEXT}"
    status, out, err = await piped("hello", "--url", c.url)
    assert (status, out) == (1, "") and "no answer from /v1/models (Connection refused)" in err and err.count("\n") == 1


async def test_bytes_that_are_no_text_are_sent_and_a_reader_may_leave() -> None:
    async with cluster() as c:
        answer_with(c, says("It is ", "Paris." * 50_000))
        command = f"printf 'caf\\351' | {sys.executable} -m deploy chat --url {c.url} | head -c 5"
        process = await asyncio.create_subprocess_shell(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert await process.communicate() == (b"It is", b"")
        assert bodies(c)[0]["messages"][0]["content"] == "caf\ufffd"


def test_a_terminal_with_output_to_a_pipe_names_the_remedy() -> None:
    leader, follower = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "deploy", "chat"], stdin=follower, capture_output=True, text=True, timeout=60
        )
    finally:
        os.close(leader)
        os.close(follower)
    assert done.returncode == 1 and "pipe the message in, too" in done.stderr and done.stderr.count("\n") == 1


def test_a_wrong_address_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^--url: 'localhost:8000' is no address"):
        chat_command.run(["--url", "localhost:8000"])


@pytest.mark.parametrize(
    ("argv", "started"),
    [
        (["smollm2"], ["smollm2"]),
        (["--temperature", "0", "smollm2", "--up", "--decode", "2"], ["smollm2", "--decode", "2"]),
        (["--up", "smollm2", "--decode", "2"], ["smollm2", "--decode", "2"]),
    ],
)
def test_a_model_as_a_word_starts_a_cluster_with_it(
    argv: list[str], started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(flags: Sequence[str]) -> NoReturn:
        assert list(flags) == started
        raise local_cluster.NotStarted(7)

    monkeypatch.setattr(local_cluster, "local_cluster", refused)
    assert chat_command.run(argv) == 7


def test_a_model_to_start_and_another_server_are_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"MODEL 'smollm2': starts a cluster .* or leave --url out"):
        chat_command.run(["smollm2", "--url", "http://127.0.0.1:9000"])
