"""SGLang's POST /encode (`EmbeddingReqInput`): the vectors of /v1/embeddings."""

import time
from typing import Any

from aiohttp import web

from engine.frontend.apis.native.view import shown_finish
from engine.frontend.apis.shared.alone import AloneBody, check_computes_prompts, embed, prompts_in, size_of, vector_of
from engine.frontend.apis.shared.body_reader import BodyReader, Unserved
from engine.frontend.apis.shared.refused import EMBEDDING, NO_AUDIO, TEXT_ONLY
from engine.frontend.services import SERVICES
from engine.text.sample import TextOutput
from service.http.errors import bad_field
from service.http.stream import json_response, json_rows


class EncodeBody(AloneBody, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None


READER = BodyReader(
    body=EncodeBody,
    refused={
        **{name: entry for name, entry in EMBEDDING.items() if name != "messages"},
        "dimensions": Unserved("ask /v1/embeddings"),
        "audio_data": Unserved(NO_AUDIO),
        **dict.fromkeys(("image_data", "input_embeds", "video_data"), Unserved(TEXT_ONLY)),
    },
)


async def encode(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    started_s = time.monotonic()
    body = await READER.read(request)
    check_computes_prompts(s)
    if (body.text is None) == (body.input_ids is None):
        raise bad_field("text", "give either text or input_ids")
    field, given = ("text", body.text) if body.text is not None else ("input_ids", body.input_ids)
    assert given is not None
    prompts = await prompts_in(request, body, given, field=field, prefix="encode-")
    answers = await embed(request, prompts)
    is_list = isinstance(given, list) and not isinstance(given[0], int)

    def shown(rid: str, ids: list[int], answer: TextOutput) -> dict[str, Any]:
        meta_info = {
            "id": rid,
            "finish_reason": shown_finish(answer.tokens.finish, 0),
            "prompt_tokens": len(ids),
            "cached_tokens": answer.tokens.cached_tokens,
            "weight_version": s.weight_version,
            "e2e_latency": time.monotonic() - started_s,
        }
        return {"embedding": vector_of(answer).tolist(), "meta_info": meta_info}

    rows = await json_rows(map(shown, prompts.rids, prompts.ids, answers), size=size_of(answers))
    return json_response(rows if is_list else rows[0])
