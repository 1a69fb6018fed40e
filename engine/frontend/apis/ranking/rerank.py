"""POST /v1/rerank: documents by relevance, as in Cohere, Jina and vLLM (`instruct`: SGLang)."""

from typing import Any

import msgspec
from aiohttp import web

from engine.frontend.apis.ranking.pairs import PairBody, judge
from engine.frontend.apis.shared.body_reader import BodyReader, Unserved
from service.http.errors import bad_field
from service.http.stream import json_response


class Document(msgspec.Struct):
    text: str


class RerankBody(PairBody, kw_only=True):
    """Body of a rerank.

    `top_n`: best ones to return, default all. `return_documents`: include texts (default).
    """

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None


_CUT = Unserved("cut the documents before you send them")
READER = BodyReader(
    body=RerankBody,
    refused=dict.fromkeys(("max_chunks_per_doc", "max_tokens_per_doc", "truncate_prompt_tokens"), _CUT),
)


async def rerank(request: web.BaseRequest) -> web.Response:
    body = await READER.read(request)
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    if not texts:
        raise bad_field("documents", "must have at least one document")
    if body.top_n is not None and body.top_n < 1:
        raise bad_field("top_n", f"must be 1 or more, got {body.top_n}")
    judged = await judge(
        request,
        body,
        [(body.query, text) for text in texts],
        fields=("query", "documents"),
        prefix="rerank-",
    )
    order = sorted(range(len(texts)), key=lambda i: (-judged.scores[i], i))[: body.top_n]
    with_text = body.return_documents is not False

    def shown(index: int) -> dict[str, Any]:
        document = {"document": {"text": texts[index]}} if with_text else {}
        return {"index": index, "relevance_score": judged.scores[index], **document}

    return json_response(
        {
            "id": judged.name,
            "model": judged.model,
            "usage": {"prompt_tokens": judged.num_tokens, "total_tokens": judged.num_tokens},
            "results": [shown(index) for index in order],
        }
    )
