"""Sends a conversation, streams its answer, finds its workers."""

import os
import re
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from deploy.openai_api import (
    DONE,
    SseParser,
    StreamChunk,
    StreamFailed,
    decode_event,
    hint_for,
    message_of,
    why_no_answer,
)
from service.flags import FlagSet, flag
from service.http.request import segment
from service.security.keys import bearer

# ---- The conversation, and commands in input lines. Pure.

Message = dict[str, str]

_COMMAND = re.compile(r"/[a-z]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ChatCommand(Enum):
    NEW = "/new"
    EXIT = "/exit"
    HELP = "/help"


HELP = """\
/new     forget the conversation
/exit    end (Ctrl-D, too)
/help    show this
Enter sends; Alt-Enter begins a line; Up brings back what you wrote.
Ctrl-C stops an answer. What has come stays in the conversation."""


@dataclass
class ChatHistory:
    system: str = ""
    messages: list[Message] = field(default_factory=list)

    def with_question(self, question: str) -> list[Message]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """The answer may be partial."""
        if answer:
            self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def forget(self) -> None:
        self.messages.clear()


def command_of(line: str) -> ChatCommand | str | None:
    """An error as text; None for a message."""
    words = line.split()
    if not words or not _COMMAND.fullmatch(words[0]):
        return None
    known: Sequence[str] = [command.value for command in ChatCommand]
    if words[0] not in known:
        return f"there is no {words[0]}; commands are {', '.join(known)}"
    return ChatCommand(words[0]) if len(words) == 1 else f"{words[0]} takes nothing after it"


def printable(text: str) -> str:
    return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n"))


# ---- Flags of `tandem chat`.

KEY_VARIABLE = "TANDEM_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ChatConfig(FlagSet):
    url: str = flag("http://127.0.0.1:8000", "router, worker or other server of the OpenAI API")
    model: str | None = flag(None, "model or adapter to talk to; default: the first of /v1/models")
    system: str | None = flag(None, "system prompt")
    temperature: float | None = flag(None, "sampling temperature; default: the server's", least=0, most=2)
    max_tokens: int | None = flag(None, "most tokens of an answer; default: the server's", least=1)
    api_key: str | None = flag(None, f"key to send as 'Authorization: Bearer KEY'; default: ${KEY_VARIABLE}")

    @property
    def key(self) -> str | None:
        return self.api_key or os.environ.get(KEY_VARIABLE) or None


# ---- client

CONNECT_S = 10.0
TRACE_S = 5.0
LEAST_S = 0.02  # shorter answers have no rate


class ChatFailed(Exception):
    """No whole answer came."""


@dataclass
class Answer:
    """`tokens`: by usage, else events."""

    request_id: str
    sent_s: float
    text: str = ""
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0

    def figures(self) -> list[str]:
        """Return "first token 84 ms", "41.2 tokens/s", "128 tokens"."""
        if self.first_s is None:
            return []
        figures, long_s = [f"first token {1e3 * (self.first_s - self.sent_s):.0f} ms"], self.last_s - self.first_s
        if self.tokens > 1 and long_s > LEAST_S:
            figures.append(f"{(self.tokens - 1) / long_s:.1f} tokens/s")
        return [*figures, f"{self.tokens} token{'' if self.tokens == 1 else 's'}"]


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    is_thought: bool = False


class ChatClient:
    def __init__(self, config: ChatConfig, *, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self.url, self.model = url.rstrip("/"), model
        self._session = session
        given = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        self._fields = {name: value for name, value in given.items() if value is not None}

    def begin(self) -> Answer:
        return Answer(secrets.token_hex(16), time.perf_counter())

    async def pieces(self, messages: Sequence[Message], answer: Answer) -> AsyncGenerator[Piece, None]:
        """Raises ChatFailed.

        Closing the generator aborts the request.
        """
        try:
            async with aclosing(self._events(messages, answer.request_id)) as events:
                async for event in events:
                    for piece in _noted(event, answer):
                        yield piece
        except StreamFailed as error:
            raise ChatFailed(str(error)) from None
        except aiohttp.ClientConnectorError as error:
            raise ChatFailed(f"{self.url} does not answer ({why_no_answer(error)}); is the server up?") from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ChatFailed(f"the connection to {self.url} broke ({type(error).__name__})") from None

    async def _events(self, messages: Sequence[Message], request_id: str) -> AsyncGenerator[StreamChunk, None]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        headers, parser = {"X-Request-Id": request_id}, SseParser()
        async with self._session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as reply:
            if reply.status != 200:
                raise ChatFailed(_refusal(reply.status, await reply.read()))
            async for chunk in reply.content.iter_any():
                for data in parser.feed(chunk):
                    if data == DONE:
                        return
                    yield _checked(data)
        raise ChatFailed("the answer broke off")

    async def workers_of(self, answer: Answer) -> str:
        """Return "127.0.0.1:1 → 127.0.0.1:2", if reported."""
        url, timeout = f"{self.url}/traces/{segment(answer.request_id)}", aiohttp.ClientTimeout(total=TRACE_S)
        try:
            async with self._session.get(url, timeout=timeout) as reply:
                attempt = answering_of((await reply.json(content_type=None))["record"]["attempts"])
                return " → ".join(urlsplit(u).netloc for u in (attempt["prefill"], attempt["answering"]) if u)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError):
            return ""


def answering_of(attempts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    going = [attempt for attempt in attempts if attempt["failure"] == ""]
    return (going or attempts)[-1]


def open_session(key: str | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers=bearer(key),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        connector=aiohttp.TCPConnector(force_close=True),
    )


def _noted(event: StreamChunk, answer: Answer) -> list[Piece]:
    pieces: list[Piece] = []
    for delta in (choice.delta for choice in event.choices if choice.delta is not None):
        pieces += [Piece(delta.reasoning_content, is_thought=True)] if delta.reasoning_content else []
        pieces += [Piece(delta.content)] if delta.content else []
    if pieces:
        answer.last_s = time.perf_counter()
        answer.first_s = answer.last_s if answer.first_s is None else answer.first_s
        answer.text += "".join(piece.text for piece in pieces if not piece.is_thought)
    if event.usage is not None and event.usage.completion_tokens:
        answer.tokens = event.usage.completion_tokens
    else:
        answer.tokens += bool(pieces)
    return pieces


def _checked(data: bytes) -> StreamChunk:
    try:
        return decode_event(data)
    except StreamFailed as error:
        raise ChatFailed(message_of(b'{"error":' + str(error).encode() + b"}")) from None


def _refusal(status: int, body: bytes) -> str:
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (msgspec.DecodeError, LookupError, TypeError):
        code = None
    remedy = "; /new begins a conversation that fits" if code == "context_length_exceeded" else hint_for(status)
    return f"HTTP {status}: {message_of(body)}{remedy}"


# ---- Chat without a terminal: stdin is one message, stdout gets the answer.


async def answer_once(client: ChatClient, conversation: ChatHistory) -> int:
    """1 without a whole answer."""
    question = sys.stdin.buffer.read().decode(errors="replace").strip()
    if not question:
        print("tandem chat: error: standard input holds no message", file=sys.stderr)
        return 1
    try:
        await _print_answer(client, conversation, question)
    except ChatFailed as error:
        print(f"\ntandem chat: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the rest at the final flush
        return 1
    return 0


async def _print_answer(client: ChatClient, conversation: ChatHistory, question: str) -> None:
    shown = printable if sys.stdout.isatty() else str
    async with aclosing(client.pieces(conversation.with_question(question), client.begin())) as pieces:
        async for piece in pieces:
            if not piece.is_thought:
                print(shown(piece.text), end="", flush=True)
    print(flush=True)
