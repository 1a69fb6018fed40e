"""Stored responses of a standalone worker."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from engine.frontend.services import SERVICES
from service.responses import api
from service.responses.api import StoredHandler, named_response
from service.responses.conversation import not_found

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def _of_worker(handler: StoredHandler) -> Handler:
    async def handle(request: web.BaseRequest) -> web.Response:
        book = request[SERVICES].responses
        if book is None:
            raise not_found(named_response(request))
        return await handler(request, book)

    return handle


get_response = _of_worker(api.get_response)
delete_response = _of_worker(api.delete_response)
cancel_response = _of_worker(api.cancel_response)
list_input_items = _of_worker(api.list_input_items)
