"""POST /v1/embeddings: one vector per prompt, its pooled hidden states. Not on decode workers; no KV stays."""

import array
import base64
import math
import sys

import msgspec
from aiohttp import web

from engine.frontend.apis.shared.alone import Prompts, check_computes_prompts, embed, fitting_ids, vector_of
from engine.frontend.apis.shared.body_reader import BodyReader
from engine.frontend.apis.shared.fields import check_num_samples, prompts_of
from engine.frontend.apis.shared.models import choose_model
from engine.frontend.apis.shared.namespaces import PerPrompt, namespaces_of
from engine.frontend.apis.shared.refused import EMBEDDING
from engine.frontend.apis.shared.routed import routed_rank
from engine.frontend.services import SERVICES, Services
from service.http.errors import bad_field
from service.http.stream import json_response


class EmbeddingBody(msgspec.Struct, kw_only=True):
    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    rid: str | None = None
    lora_path: str | None = None
    cache_salt: PerPrompt = None
    extra_key: PerPrompt = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None


READER = BodyReader(body=EmbeddingBody, refused=EMBEDDING)


async def embeddings(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    body = await READER.read(request)
    model = choose_model(s, body.model, body.lora_path)
    _check(s, body)
    several = prompts_of(body.input, field="input")
    check_num_samples(len(several), 1, field="input")
    prompts = Prompts(
        ids=[await fitting_ids(s, one, field="input") for one in several],
        name=body.rid or s.mint_id("embd-"),
        lora=model.lora,
        namespaces=namespaces_of(body, len(several)),
        dp_rank=routed_rank(body, request.headers),
    )
    answers = await embed(request, prompts)
    vectors = [_shown(shortened(vector_of(answer), body.dimensions), body.encoding_format) for answer in answers]
    return json_response(
        {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)],
            "model": model.shown,
            "usage": {"prompt_tokens": prompts.num_tokens, "total_tokens": prompts.num_tokens},
        }
    )


def shortened(vector: "array.array[float]", dimensions: int | None) -> "array.array[float]":
    """Its first `dimensions`, again of unit length (Matryoshka, arXiv:2205.13147). Raises ApiError(400)."""
    if dimensions is None:
        return vector
    if not 0 < dimensions <= len(vector):
        raise bad_field("dimensions", f"must be 1 to {len(vector)}, the size of this model's vectors, got {dimensions}")
    head = vector[:dimensions]
    norm = math.sqrt(math.fsum(x * x for x in head)) or 1.0
    return array.array("f", [x / norm for x in head])


def _check(s: Services, body: EmbeddingBody) -> None:
    check_computes_prompts(s)
    if body.encoding_format not in (None, "float", "base64"):
        raise bad_field("encoding_format", f"must be float or base64, got {body.encoding_format!r}")


def _shown(vector: "array.array[float]", encoding_format: str | None) -> list[float] | str:
    if encoding_format != "base64":
        return vector.tolist()
    if sys.byteorder == "big":
        vector.byteswap()  # the OpenAI client reads little-endian float32
    return base64.b64encode(vector.tobytes()).decode()
