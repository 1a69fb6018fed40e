"""Text to token ids and back."""

import msgspec
from aiohttp import web

from engine.frontend.services import SERVICES
from service.http.errors import bad_field, decode_body
from service.http.stream import json_response


class TokenizeBody(msgspec.Struct, kw_only=True):
    prompt: str | list[str]
    model: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = None


async def tokenize(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    body = decode_body(await request.read(), TokenizeBody)
    add = body.add_special_tokens is not False
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    tokens = [await s.encode(t, field="prompt", add_special_tokens=add) for t in texts]
    counts = [len(t) for t in tokens]
    single = isinstance(body.prompt, str)
    return json_response(
        {
            "tokens": tokens[0] if single else tokens,
            "count": counts[0] if single else counts,
            "max_model_len": s.context_length,
        }
    )


async def detokenize(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    body = decode_body(await request.read(), DetokenizeBody)
    flat = [t for t in body.tokens if isinstance(t, int)]
    nested = [t for t in body.tokens if not isinstance(t, int)]
    if flat and nested:
        raise bad_field("tokens", "must be a list of token ids or a list of such lists")
    for token in [*flat, *(t for ids in nested for t in ids)]:
        if not 0 <= token < s.model.vocab_size:
            raise bad_field("tokens", f"{token} is not a token id (0 to {s.model.vocab_size - 1})")
    skip = body.skip_special_tokens is not False
    texts = [s.model.tokenizer.decode(ids, skip_special_tokens=skip) for ids in nested or [flat]]
    return json_response({"text": texts if nested else texts[0]})
