"""Relevance of a text to a query: a one-label classifier, or Qwen3-Reranker's "yes".

Prompt: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from engine.frontend.apis.shared.alone import (
    AloneBody,
    check_computes_prompts,
    fitting_lists,
    fitting_texts,
    label_logits,
    named_prompts,
    next_logprobs,
)
from engine.frontend.apis.shared.fields import check_num_samples
from engine.frontend.services import SERVICES, Services
from service.http.errors import ApiError, bad_field

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_YES_NO = ("yes", "no")
_MARKS = ("<|im_start|>", "<|im_end|>")
_QUESTION = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


class PairBody(AloneBody, kw_only=True):
    """Common fields. `instruct`: Qwen3-Reranker's instruction."""

    instruct: str | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """Result of judging pairs. `scores`: per pair. `name`, `model`: for the answer."""

    scores: list[float]
    name: str
    model: str
    num_tokens: int


async def judge(
    request: web.BaseRequest,
    body: PairBody,
    pairs: Sequence[tuple[str, str]],
    *,
    fields: tuple[str, str],
    prefix: str,
) -> Judged:
    """Score `pairs` (query, text) from `fields` of the body. Raises ApiError(400, 404)."""
    s = request[SERVICES]
    check_computes_prompts(s)
    check_num_samples(len(pairs), 1, field=fields[1])
    answers = None if s.model.head.labels else _yes_no(s)
    if s.model.head.labels:
        _check_one_label(s)
        if body.instruct is not None:
            raise bad_field("instruct", "this classifier reads query and text alone; leave it out")
        ids = await _joined(s, pairs, fields=fields)
    else:
        named = INSTRUCTION if body.instruct is None else body.instruct
        asked = (question(query, text, named) for query, text in pairs)
        ids = await fitting_texts(s, asked, field=fields[1], room=1)
    prompts = named_prompts(request, body, ids, prefix=prefix)
    if answers is None:
        scores = [_sigmoid(row[0]) for row in await label_logits(request, prompts)]
    else:
        rows = await next_logprobs(request, prompts, token_ids=answers, priority=0)
        scores = [_sigmoid(yes - no) for yes, no in rows]
    return Judged(scores, prompts.name, prompts.model, prompts.num_tokens)


def question(query: str, text: str, instruction: str) -> str:
    return _QUESTION.format(instruction=instruction, query=query, text=text)


async def _joined(s: Services, pairs: Sequence[tuple[str, str]], *, fields: tuple[str, str]) -> list[list[int]]:
    queries = list(dict.fromkeys(query for query, _ in pairs))
    found = await fitting_texts(s, queries, field=fields[0], add_special_tokens=False)
    asked = dict(zip(queries, found, strict=True))
    texts = await fitting_texts(s, (text for _, text in pairs), field=fields[1], add_special_tokens=False)
    before, between, behind = s.model.tokenizer.pair_marks
    joined = ([*before, *asked[query], *between, *ids, *behind] for (query, _), ids in zip(pairs, texts, strict=True))
    return fitting_lists(s, joined, field=fields[1])


def _check_one_label(s: Services) -> None:
    if len(s.model.head.labels) > 1:
        raise ApiError(
            404,
            f"this model names one of {len(s.model.head.labels)} classes; a score of pairs needs one label, "
            "so ask /classify",
            code="model_has_no_head",
        )


def _yes_no(s: Services) -> tuple[int, int]:
    """Ids of "yes" and "no". Raises ApiError(404) if the model cannot read the prompt."""
    tokenizer = s.model.tokenizer
    found = [tokenizer.encode(text, add_special_tokens=False) for text in (*_YES_NO, *_MARKS)]
    if s.model.head.kind != "tokens" or any(len(ids) != 1 for ids in found):
        raise ApiError(
            404,
            "pairs need a model that scores them: Qwen3-Reranker, or a classifier of one label "
            "(...ForSequenceClassification); /v1/embeddings makes vectors to compare",
            code="model_has_no_head",
        )
    return found[0][0], found[1][0]


def _sigmoid(x: float) -> float:
    """The sigmoid, also of infinities; 0.5 if both answers are impossible."""
    if math.isnan(x):
        return 0.5
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(max(x, -700.0)) / (1.0 + math.exp(max(x, -700.0)))
