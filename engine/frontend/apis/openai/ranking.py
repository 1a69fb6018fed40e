"""Relevance of a text to a query: a one-label classifier, or Qwen3-Reranker's "yes".

Prompt: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B.
"""

import math
from collections.abc import Sequence
from typing import Any

from fastapi import Response

from engine.frontend.apis.shared.body_reader import BodyReader, Unserved
from engine.frontend.apis.shared.fields import check_num_samples
from engine.frontend.apis.shared.prefill_only import (
    PrefillOnlyBody,
    Prompts,
    PromptSender,
    fitting_lists,
    fitting_texts,
    label_logits,
    named_prompts,
    next_logprobs,
    prompts_in,
    shares,
)
from engine.frontend.apis.shared.routes import RouteTags, token_route
from engine.frontend.services import SERVICES, Services
from service.http.api import ApiRouter
from service.http.body import Body, optional, required
from service.http.errors import ApiError, bad_field
from service.http.request import HttpRequest
from service.http.routes import json_response

API = ApiRouter(RouteTags.SCORES)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_YES_NO = ("yes", "no")
_MARKS = ("<|im_start|>", "<|im_end|>")
_QUESTION = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


class PairBody(PrefillOnlyBody):
    instruct: str | None = optional(
        "What relevance means, for Qwen3-Reranker (SGLang). Default: passages that answer a web search.",
        "Given a question, find the passage that answers it",
    )
    user: str | None = optional("Name of the client's own user. Not used.", "user-1")


async def judge(
    sender: PromptSender,
    body: PairBody,
    pairs: Sequence[tuple[str, str]],
    *,
    fields: tuple[str, str],
    prefix: str,
) -> tuple[Prompts, list[float]]:
    """The prompts of `pairs` (query, text) of `fields`, and scores. Raises ApiError(400, 404)."""
    s = sender.s
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
    prompts = named_prompts(sender, body, ids, prefix=prefix)
    if answers is None:
        scores = [_sigmoid(row[0]) for row in await label_logits(sender, prompts)]
    else:
        rows = await next_logprobs(sender, prompts, token_ids=answers, priority=0)
        scores = [_sigmoid(yes - no) for yes, no in rows]
    return prompts, scores


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


# ---- vLLM's POST /classify: classes of texts, and probabilities.


class ClassifyBody(PrefillOnlyBody):
    input: str | list[str | int | list[int]] = required(
        "A text, several texts, token ids, or several lists of them.", "I like it."
    )
    user: str | None = optional("Name of the client's own user. Not used.", "user-1")


CLASSIFY_READER = BodyReader(
    body=ClassifyBody,
    refused={
        "messages": Unserved("send the text as input"),
        "text": Unserved("send it as input"),
        "truncate_prompt_tokens": Unserved("cut the input before you send it"),
    },
)


@API.on(token_route, "/classify", ClassifyBody)
async def classify(request: HttpRequest) -> Response:
    """Return the probabilities of labels for texts."""
    s = request[SERVICES]
    body = await CLASSIFY_READER.read(request)
    if not s.model.head.labels:
        message = "this model has no labels: /classify needs one whose architecture is ...ForSequenceClassification"
        raise ApiError(404, f"{message}; a chat with structured_outputs.choice names a class", code="model_has_no_head")
    sender = PromptSender.of(request)
    prompts = await prompts_in(sender, body, body.input, field="input", prefix="classify-")
    labels = s.model.head.labels

    def shown(index: int, logits: list[float]) -> dict[str, Any]:
        probs = class_shares(logits)
        label = labels[probs.index(max(probs))]
        return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}

    rows = await label_logits(sender, prompts)
    return json_response(prompts.listed([shown(index, logits) for index, logits in enumerate(rows)]))


def class_shares(logits: list[float]) -> list[float]:
    """Softmax, or the sigmoid of a single logit."""
    return shares([0.0, *logits] if len(logits) == 1 else logits)[-len(logits) :]


# ---- POST /v1/rerank: documents by relevance, as in Cohere, Jina and vLLM (`instruct`: SGLang).


class Document(Body):
    text: str = required("Text of the document.", "Paris is the capital of France.")


class RerankBody(PairBody):
    query: str = required("What the documents are compared with.", "capital of France")
    documents: list[str | Document] = required(
        "Texts, or objects with a text, at least one.", ["Paris is the capital.", "It rains."]
    )
    top_n: int | None = optional("Number of the best documents to return, at least 1. Default: all.", 3)
    return_documents: bool | None = optional("False: the results have no texts. Default true.", True)


_CUT = Unserved("cut the documents before you send them")
RERANK_READER = BodyReader(
    body=RerankBody,
    refused=dict.fromkeys(("max_chunks_per_doc", "max_tokens_per_doc", "truncate_prompt_tokens"), _CUT),
)


@API.on(token_route, "/v1/rerank", RerankBody)
async def rerank(request: HttpRequest) -> Response:
    """Rank documents by a query."""
    body = await RERANK_READER.read(request)
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    if not texts:
        raise bad_field("documents", "must have at least one document")
    if body.top_n is not None and body.top_n < 1:
        raise bad_field("top_n", f"must be 1 or more, got {body.top_n}")
    pairs = [(body.query, text) for text in texts]
    prompts, scores = await judge(
        PromptSender.of(request), body, pairs, fields=("query", "documents"), prefix="rerank-"
    )
    order = sorted(range(len(texts)), key=lambda i: (-scores[i], i))[: body.top_n]
    with_text = body.return_documents is not False

    def shown(index: int) -> dict[str, Any]:
        document = {"document": {"text": texts[index]}} if with_text else {}
        return {"index": index, "relevance_score": scores[index], **document}

    return json_response(
        {
            "id": prompts.name,
            "model": prompts.model,
            "usage": prompts.usage,
            "results": [shown(index) for index in order],
        }
    )


# ---- vLLM's POST /score: relevance of text_2 to text_1. SGLang's is /v1/score.


class PairScoreBody(PairBody):
    text_1: str | list[str] = required("The query: one for all texts of text_2, or one each.", "capital of France")
    text_2: str | list[str] = required("A text to score, or several.", ["Paris is the capital.", "It rains."])


_NAMES = Unserved("send them as text_1 and text_2")
SCORE_READER = BodyReader(
    body=PairScoreBody,
    refused={
        **dict.fromkeys(("data_1", "data_2", "documents", "items", "queries", "query"), _NAMES),
        "label_token_ids": Unserved("send query, items and label_token_ids to /v1/score"),
        "truncate_prompt_tokens": Unserved("cut the texts before you send them"),
    },
)


@API.on(token_route, "/score", PairScoreBody)
async def score_pairs(request: HttpRequest) -> Response:
    """Score pairs of texts."""
    body = await SCORE_READER.read(request)
    first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if not second:
        raise bad_field("text_2", "must have at least one text")
    if len(first) not in (1, len(second)):
        raise bad_field("text_1", f"has {len(first)} texts, text_2 has {len(second)}; give one, or as many")
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    prompts, scores = await judge(PromptSender.of(request), body, pairs, fields=("text_1", "text_2"), prefix="score-")
    rows = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    return json_response(prompts.listed(rows))
