"""Checks of the model's head."""

from engine.frontend.services import Services
from service.http.errors import ApiError


def check_generates(s: Services) -> None:
    if s.model.head.kind != "tokens":
        able = "/classify, /v1/rerank, /score and /v1/embeddings" if s.model.head.labels else "/v1/embeddings"
        raise ApiError(404, f"this model has no head that generates tokens; it serves {able}", code="model_has_no_head")


def check_classifies(s: Services) -> None:
    if not s.model.head.labels:
        message = "this model has no labels: /classify needs one whose architecture is ...ForSequenceClassification"
        raise ApiError(404, f"{message}; a chat with structured_outputs.choice names a class", code="model_has_no_head")
