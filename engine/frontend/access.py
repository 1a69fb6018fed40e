"""A check of the caller's key for a handler that learns only from the body what is requested."""

from aiohttp import web

from engine.frontend.services import SERVICES
from service.http.guard import key_refusal
from service.security.keys import Access


def require(request: web.BaseRequest, need: Access) -> None:
    refusal = key_refusal(request, request[SERVICES].gate, need)
    if refusal is not None:
        raise refusal
