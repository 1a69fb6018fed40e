"""POST /classify, vLLM's: the class of each text, and how probable each class is. One label has a probability of its own."""

import math
import time
from typing import Any

import msgspec
from aiohttp import web

from engine.frontend.apis.shared.alone import Prompts, check_computes_prompts, fitting_ids, label_logits
from engine.frontend.apis.shared.body_reader import BodyReader, Unserved
from engine.frontend.apis.shared.fields import check_num_samples, prompts_of
from engine.frontend.apis.shared.heads import check_classifies
from engine.frontend.apis.shared.models import choose_model
from engine.frontend.apis.shared.namespaces import PerPrompt, namespaces_of
from engine.frontend.apis.shared.routed import routed_rank
from engine.frontend.services import SERVICES
from service.http.stream import json_response


class ClassifyBody(msgspec.Struct, kw_only=True):
    input: str | list[str | int | list[int]]
    model: str | None = None
    user: str | None = None
    rid: str | None = None
    lora_path: str | None = None
    cache_salt: PerPrompt = None
    extra_key: PerPrompt = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None


READER = BodyReader(
    body=ClassifyBody,
    refused={
        "messages": Unserved("send the text as input"),
        "text": Unserved("send it as input"),
        "truncate_prompt_tokens": Unserved("cut the input before you send it"),
    },
)


async def classify(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    body = await READER.read(request)
    check_classifies(s)
    check_computes_prompts(s)
    model = choose_model(s, body.model, body.lora_path)
    several = prompts_of(body.input, field="input")
    check_num_samples(len(several), 1, field="input")
    prompts = Prompts(
        ids=[await fitting_ids(s, one, field="input") for one in several],
        name=body.rid or s.mint_id("classify-"),
        lora=model.lora,
        namespaces=namespaces_of(body, len(several)),
        dp_rank=routed_rank(body, request.headers),
    )
    labels = s.model.head.labels

    def shown(index: int, logits: list[float]) -> dict[str, Any]:
        probs = class_shares(logits)
        label = labels[probs.index(max(probs))]
        return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}

    rows = await label_logits(request, prompts)
    return json_response(
        {
            "id": prompts.name,
            "object": "list",
            "created": int(time.time()),
            "model": model.shown,
            "data": [shown(index, logits) for index, logits in enumerate(rows)],
            "usage": {"prompt_tokens": prompts.num_tokens, "total_tokens": prompts.num_tokens},
        }
    )


def class_shares(logits: list[float]) -> list[float]:
    """Their softmax, or the sigmoid of one alone."""
    values = [0.0, *logits] if len(logits) == 1 else logits
    top = max(values)
    weights = [math.exp(value - top) for value in values]
    return [weight / sum(weights) for weight in weights][-len(logits) :]
