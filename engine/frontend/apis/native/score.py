"""SGLang's POST /v1/score: probabilities of label tokens after query and item.

The shape is SGLang's `ScoringRequest` (srt/entrypoints/openai/protocol.py); query and item are one
text, as there.
"""

import math
import time
from collections.abc import Iterator
from typing import Any

from fastapi import Response

from engine.frontend.apis.native.body import requested_ids, shown_finish
from engine.frontend.apis.shared.body_reader import EMBEDDING, NO_AUDIO, TEXT_ONLY, BodyReader, Unserved
from engine.frontend.apis.shared.fields import check_num_samples, check_priority, prompts_of
from engine.frontend.apis.shared.prefill_only import (
    PrefillOnlyBody,
    Prompts,
    PromptSender,
    embed,
    fitting_lists,
    fitting_texts,
    named_prompts,
    next_logprobs,
    prompts_in,
    shares,
    size_of,
    vector_of,
)
from engine.frontend.apis.shared.routes import RouteTags, put_route, token_route
from engine.frontend.services import SERVICES, Services
from engine.text.sample import TextOutput
from service.http.api import ApiRouter
from service.http.body import optional
from service.http.errors import bad_field, missing
from service.http.request import HttpRequest
from service.http.routes import json_response, json_rows

API = ApiRouter(RouteTags.SCORES)


class ScoreBody(PrefillOnlyBody):
    label_token_ids: list[int] | None = optional(
        "Token ids whose probabilities behind query and item are the scores, 1 to 128.", [9693, 2152]
    )
    query: str | list[int] | None = optional("Text, or token ids. Required.", "Is this a city? ")
    items: str | list[str | int | list[int]] | None = optional(
        "One or several, texts if query is one, else token ids. Required.", ["Paris", "blue"]
    )
    apply_softmax: bool | None = optional("True: the scores of an item add up to 1. Default false.", True)
    item_first: bool | None = optional("True: the item comes before the query. Default false.", False)
    priority: int | None = optional(
        "Higher goes first, with --enable-priority-scheduling. -2147483647 to 2147483647; default 0.", 0
    )
    user: str | None = optional("Name of the client's own user. Not used.", "user-1")


_PAIRS = Unserved(
    "send text_1 and text_2 to /score; here a score is the probability of a label token behind query and items"
)
READER = BodyReader(
    body=ScoreBody,
    refused=dict.fromkeys(("data_1", "data_2", "documents", "queries", "text_1", "text_2"), _PAIRS),
)


@API.on(token_route, "/v1/score", ScoreBody)
async def score(request: HttpRequest) -> Response:
    """Return the probabilities of labels behind a prompt."""
    prompts, scores = await label_scores(PromptSender.of(request), await READER.read(request))
    return json_response({"object": "scoring", "scores": scores, "model": prompts.model, "usage": prompts.usage})


async def label_scores(sender: PromptSender, body: ScoreBody) -> tuple[Prompts, list[list[float]]]:
    """The prompts, and the probabilities of each one's labels. Raises ApiError(400, 404)."""
    s = sender.s
    if not body.label_token_ids:
        raise bad_field("label_token_ids", "must have at least one token id")
    labels = requested_ids(body.label_token_ids, field="label_token_ids", vocab_size=s.model.vocab_size)
    ids = await _joined(s, body)
    prompts = named_prompts(sender, body, ids, prefix="score-")
    logprobs = await next_logprobs(sender, prompts, token_ids=labels, priority=check_priority(body.priority))
    shown = shares if body.apply_softmax else probabilities
    return prompts, [shown(row) for row in logprobs]


def probabilities(logprobs: list[float]) -> list[float]:
    return [math.exp(logprob) for logprob in logprobs]


async def _joined(s: Services, body: ScoreBody) -> list[list[int]]:
    """A too long prompt is rejected before the next is made."""
    query, given = body.query, body.items
    if query is None:
        raise missing("query")
    if given is None:
        raise missing("items")
    items = prompts_of(given, field="items")
    if {type(item) for item in items} != {type(query)}:
        raise bad_field("items", "must be texts if query is one, and lists of token ids if query is one")
    check_num_samples(len(items), 1, field="items")
    joined: Iterator[Any] = (item + query if body.item_first else query + item for item in items)  # type: ignore[operator]
    if isinstance(query, str):
        joined = iter(await fitting_texts(s, joined, field="items", room=1))
    return fitting_lists(s, joined, field="items", room=1)


# ---- SGLang's POST /encode (`EmbeddingReqInput`): the vectors of /v1/embeddings.


class EncodeBody(PrefillOnlyBody):
    text: str | list[str] | None = optional("A text, or several. Give this or input_ids.", "The weather is nice.")
    input_ids: list[int | list[int]] | None = optional(
        "Token ids, or several lists. Give this or text.", [1, 450, 7483]
    )


ENCODE_READER = BodyReader(
    body=EncodeBody,
    refused={
        **{name: entry for name, entry in EMBEDDING.items() if name != "messages"},
        "dimensions": Unserved("ask /v1/embeddings"),
        "audio_data": Unserved(NO_AUDIO),
        **dict.fromkeys(("image_data", "input_embeds", "video_data"), Unserved(TEXT_ONLY)),
    },
)


@API.on(put_route, "/encode", EncodeBody)
@API.on(token_route, "/encode", EncodeBody)
async def encode(request: HttpRequest) -> Response:
    """Return embeddings of texts or token ids."""
    s = request[SERVICES]
    started_s = time.monotonic()
    body = await ENCODE_READER.read(request)
    if (body.text is None) == (body.input_ids is None):
        raise bad_field("text", "give either text or input_ids")
    field, given = ("text", body.text) if body.text is not None else ("input_ids", body.input_ids)
    assert given is not None
    sender = PromptSender.of(request)
    prompts = await prompts_in(sender, body, given, field=field, prefix="encode-")
    answers = await embed(sender, prompts)
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
