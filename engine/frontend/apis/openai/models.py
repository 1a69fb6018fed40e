"""GET /v1/models."""

from typing import Any

from aiohttp import web

from engine.frontend.apis.shared.models import adapter_cards, choose_model
from engine.frontend.services import SERVICES, Services
from service.http.stream import json_response


async def list_models(request: web.BaseRequest) -> web.Response:
    return json_response({"object": "list", "data": _model_cards(request[SERVICES])})


async def get_model(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    chosen = choose_model(s, request.path.removeprefix("/v1/models/"), None)
    return json_response(next(card for card in _model_cards(s) if card["id"] == chosen.shown))


def _model_cards(s: Services) -> list[dict[str, Any]]:
    base = {
        "id": s.model.served_name,
        "object": "model",
        "created": s.session.started_unix_s,
        "owned_by": "tandem",
        "root": s.model.path,
        "parent": None,
        "max_model_len": s.context_length,
    }
    return [base, *adapter_cards(s, base)]
