"""POST /v1/embeddings: pooled hidden states; keeps no KV."""

import array
import base64
import math
import sys
from typing import Any

from fastapi import Response

from engine.frontend.apis.shared.body_reader import EMBEDDING, BodyReader
from engine.frontend.apis.shared.prefill_only import (
    PrefillOnlyBody,
    PromptSender,
    embed,
    prompts_in,
    size_of,
    vector_of,
)
from engine.frontend.apis.shared.routes import RouteTags, token_route
from engine.frontend.services import SERVICES
from engine.text.sample import TextOutput
from service.http.api import ApiRouter
from service.http.body import optional, required
from service.http.errors import bad_field
from service.http.request import HttpRequest
from service.http.routes import json_response, json_rows

API = ApiRouter(RouteTags.SCORES)


class EmbeddingBody(PrefillOnlyBody):
    input: str | list[str | int | list[int]] = required(
        "A text, several texts, token ids, or several lists of them.", "The weather is nice."
    )
    encoding_format: str | None = optional("float, or base64 (little-endian float32). Default float.", "float")
    dimensions: int | None = optional("Keeps the first numbers of a vector. Default: all of them.", 256)
    user: str | None = optional("Name of the client's own user. Not used.", "user-1")


READER = BodyReader(body=EmbeddingBody, refused=EMBEDDING)


@API.on(token_route, "/v1/embeddings", EmbeddingBody)
async def embeddings(request: HttpRequest) -> Response:
    """Return embeddings of texts or token ids."""
    body = await READER.read(request)
    if body.encoding_format not in (None, "float", "base64"):
        raise bad_field("encoding_format", f"must be float or base64, got {body.encoding_format!r}")
    sender = PromptSender.of(request)
    prompts = await prompts_in(sender, body, body.input, field="input", prefix="embd-")
    answers = await embed(sender, prompts)
    unit = request[SERVICES].model.head.unit

    def shown(index: int, answer: TextOutput) -> dict[str, Any]:
        head = shortened(vector_of(answer), body.dimensions, unit=unit)
        return {"object": "embedding", "index": index, "embedding": _shown(head, body.encoding_format)}

    return json_response(
        {
            "object": "list",
            "data": await json_rows((shown(*one) for one in enumerate(answers)), size=size_of(answers)),
            "model": prompts.model,
            "usage": prompts.usage,
        }
    )


def shortened(vector: "array.array[float]", dimensions: int | None, *, unit: bool) -> "array.array[float]":
    """The first, renormalized if `unit` (Matryoshka, arXiv:2205.13147). Raises ApiError(400)."""
    if dimensions is None:
        return vector
    if not 0 < dimensions <= len(vector):
        raise bad_field("dimensions", f"must be 1 to {len(vector)}, the size of this model's vectors, got {dimensions}")
    head = vector[:dimensions]
    if not unit:
        return head
    norm = math.sqrt(math.fsum(x * x for x in head)) or 1.0
    return array.array("f", [x / norm for x in head])


def _shown(vector: "array.array[float]", encoding_format: str | None) -> list[float] | str:
    if encoding_format != "base64":
        return vector.tolist()
    if sys.byteorder == "big":
        vector.byteswap()  # the OpenAI client reads little-endian float32
    return base64.b64encode(vector.tobytes()).decode()
