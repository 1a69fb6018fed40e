"""vLLM's POST /classify: classes of texts, and probabilities."""

import math
import time
from typing import Any

from aiohttp import web

from engine.frontend.apis.shared.alone import AloneBody, check_computes_prompts, label_logits, prompts_in
from engine.frontend.apis.shared.body_reader import BodyReader, Unserved
from engine.frontend.apis.shared.heads import check_classifies
from engine.frontend.services import SERVICES
from service.http.stream import json_response


class ClassifyBody(AloneBody, kw_only=True):
    input: str | list[str | int | list[int]]
    user: str | None = None


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
    prompts = await prompts_in(request, body, body.input, field="input", prefix="classify-")
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
            "model": prompts.model,
            "data": [shown(index, logits) for index, logits in enumerate(rows)],
            "usage": {"prompt_tokens": prompts.num_tokens, "total_tokens": prompts.num_tokens},
        }
    )


def class_shares(logits: list[float]) -> list[float]:
    """Softmax, or the sigmoid of a single logit."""
    values = [0.0, *logits] if len(logits) == 1 else logits
    top = max(values)
    weights = [math.exp(value - top) for value in values]
    return [weight / sum(weights) for weight in weights][-len(logits) :]
