"""Sends and times one request: OpenAI's completions and chats, or SGLang's /generate."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from deploy.bench.config import CHAT, COMPLETIONS, GENERATE, BenchConfig
from deploy.bench.stats import RequestRecord
from deploy.bench.tokens import EVENTS, META_INFO, TOKEN_IDS, TOKENIZER, UNKNOWN, USAGE, WORDS, TokenCounter
from deploy.bench.workload import BenchRequest
from deploy.openai_api import DONE, SseParser, StreamFailed, decode_event, message_of, text_of, why_no_answer

DETAIL_CHARS = 300
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions", GENERATE: "/generate"}


class Target:
    """Errors are counted, not raised. Tokens are counted by the server, else by token ids, else by
    `tokens`, else by words and text events; the record names the source.
    """

    def __init__(
        self,
        url: str,
        *,
        session: aiohttp.ClientSession,
        config: BenchConfig,
        model: str,
        tokens: TokenCounter | None = None,
    ) -> None:
        self._endpoint = url.rstrip("/") + PATHS[config.api]
        self._session = session
        self._config = config
        self._model = model
        self._tokens = tokens or TokenCounter()
        self._piece_of = _generated_piece if config.api == GENERATE else _openai_piece
        self._extra = config.extra_fields()

    async def send(self, request: BenchRequest, *, started_at: float) -> RequestRecord:
        sent_at = time.perf_counter()
        record = RequestRecord(idx=request.idx, sent_s=sent_at - started_at)
        if request.at_s is not None:
            record.late_s = max(0.0, record.sent_s - request.at_s)
        answer = _Answer(record, sent_at)
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                await self._exchange(request, answer)
        except StreamFailed as error:
            record.error, record.detail = error.kind, str(error)[:DETAIL_CHARS]
        except TimeoutError:
            record.error = "timeout"
        except aiohttp.ClientConnectorError as error:
            record.error, record.detail = "connect", why_no_answer(error)
        except (aiohttp.ClientError, OSError) as error:
            record.error, record.detail = "disconnect", f"{type(error).__name__}: {error}"[:DETAIL_CHARS]
        record.e2e_s = time.perf_counter() - sent_at
        self._count(request, answer)
        if self._config.save_detailed or self._config.output_details:
            record.text = answer.text
        return record

    async def _exchange(self, request: BenchRequest, answer: "_Answer") -> None:
        async with self._session.post(self._endpoint, json=self.body(request)) as reply:
            if reply.status != 200:
                raise StreamFailed(f"http {reply.status}", message_of(await reply.read()))
            if self._config.stream:
                await _read_stream(reply, answer, self._piece_of)
            else:
                answer.take(self._piece_of(await reply.read(), answer), None)

    def body(self, request: BenchRequest) -> dict[str, Any]:
        config = self._config
        sampling: dict[str, Any] = {"temperature": config.temperature, **config.sampling()}
        if config.ignore_eos:  # so that special tokens also make events
            sampling |= {"ignore_eos": True, "skip_special_tokens": False}
        if config.api == GENERATE:
            key = "text" if isinstance(request.prompt, str) else "input_ids"
            sampling["max_new_tokens"] = request.output_len
            return {key: request.prompt, "sampling_params": sampling, "stream": config.stream, **self._extra}
        body: dict[str, Any] = {"model": self._model, "max_tokens": request.output_len, **sampling}
        if config.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if config.api == CHAT:
            messages = request.messages or [{"role": "user", "content": request.prompt}]
            return body | {"messages": messages, **self._extra}
        return body | {"prompt": request.prompt, **self._extra}

    def _count(self, request: BenchRequest, answer: "_Answer") -> None:
        record = answer.record
        if not record.prompt_source:
            record.prompt_tokens = request.prompt_len
            if isinstance(request.prompt, tuple):
                record.prompt_source = TOKEN_IDS
            elif self._tokens:
                record.prompt_source = TOKENIZER
                if not request.messages:
                    record.prompt_tokens = self._tokens.count(request.prompt, special=True)
            else:
                record.prompt_source = WORDS if request.prompt_len else UNKNOWN
        if not record.output_source:
            if answer.num_ids:
                record.output_tokens, record.output_source = answer.num_ids, TOKEN_IDS
            elif self._tokens:
                record.output_tokens, record.output_source = self._tokens.count(answer.text), TOKENIZER
            else:
                record.output_tokens, record.output_source = answer.num_events, EVENTS


@dataclass(slots=True, kw_only=True)
class _Piece:
    """A part of an answer: new text and ids; counts so far, if the server sent them."""

    text: str = ""
    num_ids: int = 0
    source: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    is_last: bool = False


@dataclass(slots=True)
class _Answer:
    """`last_at`: of the last piece with tokens."""

    record: RequestRecord
    sent_at: float
    texts: list[str] = field(default_factory=list)
    num_ids: int = 0
    num_events: int = 0
    last_at: float | None = None
    is_finished: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def take(self, piece: _Piece, now: float | None) -> None:
        """`now` is None without a stream."""
        record = self.record
        grew = bool(piece.text) or piece.num_ids > 0
        if piece.source:
            grew = grew or (piece.source == META_INFO and piece.output_tokens > record.output_tokens)
            record.prompt_tokens, record.output_tokens = piece.prompt_tokens, piece.output_tokens
            record.cached_tokens = piece.cached_tokens
            record.prompt_source = record.output_source = piece.source
        self.is_finished = self.is_finished or piece.is_last
        self.num_ids += piece.num_ids
        if piece.text:
            self.texts.append(piece.text)
        if not grew:
            return
        self.num_events += 1
        if now is None:
            return
        if self.last_at is None:
            record.ttft_s = now - self.sent_at
        else:
            record.itl_s.append(now - self.last_at)
        self.last_at = now


PieceOf = Callable[[bytes, _Answer], _Piece]  # (event, answer before it)


async def _read_stream(reply: aiohttp.ClientResponse, answer: _Answer, piece_of: PieceOf) -> None:
    parser = SseParser()
    async for chunk in reply.content.iter_any():
        now = time.perf_counter()
        for data in parser.feed(chunk):
            if data == DONE:
                if answer.last_at is None:
                    raise StreamFailed("empty answer", "the stream brought no text")
                return
            answer.take(piece_of(data, answer), now)
    # `transformers serve` sends a finish_reason, but no [DONE]
    if not (answer.is_finished and answer.last_at is not None):
        raise StreamFailed("cut short", "the stream ended without [DONE]")


# ---- events of OpenAI's APIs


def _openai_piece(data: bytes, before: _Answer) -> _Piece:
    event = decode_event(data)
    piece = _Piece(
        text="".join(text_of(choice) for choice in event.choices),
        num_ids=sum(len(choice.token_ids or ()) for choice in event.choices),
        is_last=any(choice.finish_reason for choice in event.choices),
    )
    if event.usage is not None:
        details = event.usage.prompt_tokens_details
        piece.source, piece.prompt_tokens = USAGE, event.usage.prompt_tokens
        piece.output_tokens = event.usage.completion_tokens or 0
        piece.cached_tokens = (details.cached_tokens or 0) if details else 0
    return piece


# ---- events of SGLang's /generate


class GenerateMetaInfo(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: Any = None


class GenerateEvent(msgspec.Struct):
    """The whole text so far, or what is new (a server with incremental output)."""

    text: str = ""
    meta_info: GenerateMetaInfo | None = None
    error: Any = None


_GENERATE = msgspec.json.Decoder(GenerateEvent)


def _generated_piece(data: bytes, before: _Answer) -> _Piece:
    try:
        event = _GENERATE.decode(data)
    except msgspec.MsgspecError as error:
        raise StreamFailed("bad reply", f"{error}: {data[:100]!r}") from None
    if event.error is not None:
        raise StreamFailed("stream error", message_of(data))
    piece = _Piece(text=event.text.removeprefix(before.text))
    if (meta := event.meta_info) is not None:
        if isinstance(meta.finish_reason, dict) and meta.finish_reason.get("type") == "abort":
            raise StreamFailed("stream error", str(meta.finish_reason.get("message", "aborted")))
        piece.source, piece.is_last = META_INFO, meta.finish_reason is not None
        piece.prompt_tokens, piece.output_tokens = meta.prompt_tokens, meta.completion_tokens
        piece.cached_tokens = meta.cached_tokens
    return piece
