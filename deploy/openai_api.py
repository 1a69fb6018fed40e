"""Client of any OpenAI API: models, events, errors."""

from urllib.parse import urlsplit

import aiohttp
import msgspec

from service.flags import ConfigError
from service.http.listening import why_unreachable

DONE = b"[DONE]"
MESSAGE_BYTES = 300


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class StreamUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class StreamChoice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    message: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class StreamChunk(msgspec.Struct):
    """Measured fields of a chunk or answer."""

    choices: list[StreamChoice] = []
    usage: StreamUsage | None = None
    error: msgspec.Raw = msgspec.Raw()


_DECODER = msgspec.json.Decoder(StreamChunk)


class StreamFailed(Exception):
    """`kind`: for counts."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(detail)
        self.kind = kind


class SseParser:
    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def decode_event(data: bytes) -> StreamChunk:
    try:
        event = _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise StreamFailed("bad reply", f"{error}: {data[:100]!r}") from None
    if bytes(event.error) not in (b"", b"null"):
        raise StreamFailed("stream error", bytes(event.error).decode("utf-8", "replace"))
    return event


def text_of(choice: StreamChoice) -> str:
    part = choice.delta or choice.message
    return choice.text or (part and (part.content or part.reasoning_content)) or ""


def why_no_answer(error: Exception) -> str:
    """An error's text without the address, which the caller names."""
    return (why_unreachable(error) if isinstance(error, OSError) else str(error)) or type(error).__name__


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first of /v1/models. Raises ConfigError."""
    try:
        async with session.get(url.rstrip("/") + "/v1/models", timeout=aiohttp.ClientTimeout(total=30)) as reply:
            body = await reply.read()
            if reply.status != 200:
                raise ConfigError(f"--url {url}: HTTP {reply.status}: {message_of(body)}{hint_for(reply.status)}")
            return str(msgspec.json.decode(body)["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--url {url}: no answer from /v1/models ({why_no_answer(error)}); is the server up? Else give --model"
        ) from None


def check_url(option: str, url: str) -> None:
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(f"{option}: {url!r} is no address; give http://HOST:PORT")


def message_of(body: bytes) -> str:
    """An error's message, else the body's start."""
    try:
        said = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.DecodeError, LookupError, TypeError):
        said = body[:MESSAGE_BYTES].decode(errors="replace")
    return " ".join(str(said).split())


def hint_for(status: int) -> str:
    return " (--api-key)" if status == 401 else ""
