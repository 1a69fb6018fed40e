"""vLLM's POST /score: relevance of text_2 to text_1. SGLang's is /v1/score."""

import time

from aiohttp import web

from engine.frontend.apis.ranking.pairs import PairBody, judge
from engine.frontend.apis.shared.body_reader import BodyReader, Unserved
from service.http.errors import bad_field
from service.http.stream import json_response


class PairScoreBody(PairBody, kw_only=True):
    """`text_1`: one for all of `text_2`, or one each."""

    text_1: str | list[str]
    text_2: str | list[str]


_NAMES = Unserved("send them as text_1 and text_2")
READER = BodyReader(
    body=PairScoreBody,
    refused={
        **dict.fromkeys(("data_1", "data_2", "documents", "items", "queries", "query"), _NAMES),
        "label_token_ids": Unserved("send query, items and label_token_ids to /v1/score"),
        "truncate_prompt_tokens": Unserved("cut the texts before you send them"),
    },
)


async def score_pairs(request: web.BaseRequest) -> web.Response:
    body = await READER.read(request)
    first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if not second:
        raise bad_field("text_2", "must have at least one text")
    if len(first) not in (1, len(second)):
        raise bad_field("text_1", f"has {len(first)} texts, text_2 has {len(second)}; give one, or as many")
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    judged = await judge(request, body, pairs, fields=("text_1", "text_2"), prefix="score-")
    return json_response(
        {
            "id": judged.name,
            "object": "list",
            "created": int(time.time()),
            "model": judged.model,
            "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(judged.scores)],
            "usage": {"prompt_tokens": judged.num_tokens, "total_tokens": judged.num_tokens},
        }
    )
