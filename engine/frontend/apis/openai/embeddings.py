"""POST /v1/embeddings: one vector per prompt, its pooled hidden states. Not on decode workers; no KV stays."""

import array
import base64
import sys

import msgspec
from aiohttp import web

from engine.frontend.apis.shared.body_reader import BodyReader
from engine.frontend.apis.shared.fields import check_num_samples, prompt_ids, prompts_of, too_long
from engine.frontend.apis.shared.models import choose_model
from engine.frontend.apis.shared.namespaces import PerPrompt, namespaces_of
from engine.frontend.apis.shared.refused import EMBEDDING
from engine.frontend.services import SERVICES, Services
from engine.messages import GenerateRequest
from engine.sampling_params import SamplingParams
from engine.text.sample import TextOutput
from service.http.errors import ApiError, bad_field
from service.http.stream import json_response

NOTHING_NEW = SamplingParams(max_new_tokens=0, temperature=0.0, seed=0)


class EmbeddingBody(msgspec.Struct, kw_only=True):
    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    user: str | None = None
    rid: str | None = None
    lora_path: str | None = None
    cache_salt: PerPrompt = None
    extra_key: PerPrompt = None


READER = BodyReader(body=EmbeddingBody, refused=EMBEDDING)


async def embeddings(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    body = await READER.read(request)
    model = choose_model(s, body.model, body.lora_path)
    _check(s, body)
    prompts = prompts_of(body.input, field="input")
    check_num_samples(len(prompts), 1, field="input")
    ids = [await _fitting_ids(s, p) for p in prompts]
    namespaces = namespaces_of(body, len(ids))
    name = body.rid or s.mint_id("embd-")
    requests = [
        GenerateRequest(
            rid=name if len(ids) == 1 else f"{name}-{i}",
            input_ids=prompt,
            sampling=NOTHING_NEW,
            skip_cache_insert=True,
            pooling=s.spec.engine.embedding_pooling,
            lora=model.lora,
            namespace=namespaces[i],
        )
        for i, prompt in enumerate(ids)
    ]
    with s.client.generate(requests, groups=[name] * len(requests), timeout_s=s.timeout_of(request)) as generation:
        answers = await generation.collect()
    vectors = [_shown(_vector(answer), body.encoding_format) for answer in answers]
    num_tokens = sum(len(prompt) for prompt in ids)
    return json_response(
        {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)],
            "model": model.shown,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _check(s: Services, body: EmbeddingBody) -> None:
    if s.spec.mode == "decode":
        raise ApiError(400, "a decode worker makes no embeddings; send it to a prefill worker or to the router")
    if body.encoding_format not in (None, "float", "base64"):
        raise bad_field("encoding_format", f"must be float or base64, got {body.encoding_format!r}")


async def _fitting_ids(s: Services, prompt: str | list[int]) -> list[int]:
    ids = await prompt_ids(s, prompt, field="input")
    if len(ids) > s.context_length:
        raise too_long("input", f"a text has {len(ids)} tokens", context_length=s.context_length)
    return ids


def _vector(answer: TextOutput) -> "array.array[float]":
    if not answer.tokens.hidden or (answer.tokens.finish is not None and answer.tokens.finish.kind == "abort"):
        raise ApiError(499, "the request was aborted", code="aborted")
    return array.array("f", answer.tokens.hidden[-1])


def _shown(vector: "array.array[float]", encoding_format: str | None) -> list[float] | str:
    if encoding_format != "base64":
        return vector.tolist()
    if sys.byteorder == "big":
        vector.byteswap()  # the OpenAI client reads little-endian float32
    return base64.b64encode(vector.tobytes()).decode()
