"""Errors of a model whose head does not fit the request."""

from engine.frontend.served_model import ServedModel
from service.http.errors import ApiError


def no_generation(model: ServedModel) -> ApiError:
    able = "/classify, /v1/rerank, /score and /v1/embeddings" if model.head.labels else "/v1/embeddings"
    return ApiError(404, f"this model has no head that generates tokens; it serves {able}", code="model_has_no_head")


def no_labels() -> ApiError:
    message = "this model has no labels: /classify needs one whose architecture is ...ForSequenceClassification"
    return ApiError(404, f"{message}; a chat with structured_outputs.choice names a class", code="model_has_no_head")
