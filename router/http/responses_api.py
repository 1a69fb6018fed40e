"""Routes of stored responses, for clients and peers."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from router.fleet.peer_processes import PeerProcesses
from router.requests.responses import PEER_PATH, PeerQuestion, SharedBook
from service.http.errors import decode_body
from service.http.stream import json_response
from service.responses import api
from service.responses.api import PATH, StoredHandler, named_response
from service.responses.conversation import not_found


@dataclass(eq=False)
class ResponsesApi:
    book: SharedBook | None
    peers: PeerProcesses

    def routes(self) -> list[web.RouteDef]:
        one = PATH + "/{id}"
        return [
            web.get(one, self._of(api.get_response)),
            web.delete(one, self._of(api.delete_response)),
            web.post(f"{one}/cancel", self._of(api.cancel_response)),
            web.get(f"{one}/input_items", self._of(api.list_input_items)),
            web.post(PEER_PATH, self.answer_peer),
        ]

    async def answer_peer(self, request: web.BaseRequest) -> web.Response:
        if self.book is None or not self.peers.is_peer(request):
            raise web.HTTPNotFound
        question = decode_body(await request.read(), PeerQuestion)
        acts = {"find": self.book.local.find, "remove": self.book.local.remove, "cancel": self.book.local.cancel}
        return json_response(await acts[question.act](question.id, question.owner))

    def _of(self, handler: StoredHandler) -> Callable[[web.BaseRequest], Awaitable[web.Response]]:
        async def handle(request: web.BaseRequest) -> web.Response:
            if self.book is None:
                raise not_found(named_response(request))
            return await handler(request, self.book)

        return handle
