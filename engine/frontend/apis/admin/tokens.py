"""Text to token ids and back."""

import msgspec
from aiohttp import web

from engine.frontend.apis.shared.fields import check_token_ids, id_lists
from engine.frontend.apis.shared.ids_only import check_ids_only
from engine.frontend.services import SERVICES
from service.http.errors import decode_body
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
    check_ids_only(s, body)
    add = body.add_special_tokens is not False
    single = isinstance(body.prompt, str)
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    tokens = [await s.encode(t, field="prompt", add_special_tokens=add) for t in texts]
    counts = [len(t) for t in tokens]
    shown = {"tokens": tokens[0], "count": counts[0]} if single else {"tokens": tokens, "count": counts}
    return json_response({**shown, "max_model_len": s.context_length})


async def detokenize(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    body = decode_body(await request.read(), DetokenizeBody)
    check_ids_only(s, body)
    lists, single = id_lists(body.tokens, field="tokens")
    for ids in lists:
        check_token_ids(ids, field="tokens", vocab_size=s.model.vocab_size)
    skip = body.skip_special_tokens is not False
    texts = [s.model.tokenizer.decode(ids, skip_special_tokens=skip) for ids in lists]
    return json_response({"text": texts[0] if single else texts})
