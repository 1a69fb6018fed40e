"""POST /v1/responses: body -> chat -> plan -> view, and its storage."""

from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import msgspec
from fastapi import Response
from pydantic import TypeAdapter

from engine.frontend.apis.chat.body import ChatBody
from engine.frontend.apis.chat.plan import plan_chat
from engine.frontend.apis.responses.body import READER, Item, ResponseBody
from engine.frontend.apis.responses.chat import NAMES, to_chat, truncated_chat
from engine.frontend.apis.responses.view import ResponseView
from engine.frontend.apis.shared.body_reader import beside_loop, in_words_of
from engine.frontend.apis.shared.resumable import ids_of, resume_of
from engine.frontend.apis.shared.routes import ApiRoute, RouteTags, get_route, post_route
from engine.frontend.apis.shared.samples import AnswerFormat, answer_samples
from engine.frontend.apis.shared.stream import Framing
from engine.frontend.services import SERVICES, Services
from service.http.api import ApiRouter
from service.http.errors import bad_field, decode_body
from service.http.guard import owner_in
from service.http.request import Handler, HttpRequest
from service.http.routes import EVENTS_TYPE, typed_event
from service.responses import api
from service.responses.api import StoredHandler, caller_of, named_response
from service.responses.items import (
    REFERENCE,
    RESPONSE,
    Conversation,
    StoreFields,
    not_found,
    open_conversation,
    to_store,
)
from service.responses.store import LocalBook

API = ApiRouter(RouteTags.RESPONSES)

# ---- Stored responses of a standalone worker.


def _of_worker(handler: StoredHandler) -> Handler:
    @wraps(handler)
    async def handle(request: HttpRequest) -> Response:
        book = request[SERVICES].responses
        if book is None:
            raise not_found(named_response(request))
        return await handler(request, book)

    return handle


# ---- create


_FORMAT = AnswerFormat(id_prefix=RESPONSE, framing=Framing(encode=typed_event, numbers=True))

_ITEMS = TypeAdapter(list[Item])
_INPUT = TypeAdapter[str | list[Item]](str | list[Item])


@API.on(post_route, "/v1/responses", ResponseBody, streams=EVENTS_TYPE, computes=True)
async def create_response(request: HttpRequest) -> Response:
    """Answer, and remember the answer."""
    s, body = request[SERVICES], await READER.read(request)
    keeper = await _keeper(request, s, body)
    chat = await beside_loop(request, partial(to_chat, body))
    with in_words_of(NAMES):
        return await _answer(request, s, body, chat, keeper)


class _Keeper:
    def __init__(
        self, s: Services, book: LocalBook, conversation: Conversation, *, owner: str, names_owner: str
    ) -> None:
        self._client, self._book, self._owner, self._names_owner = s.client, book, owner, names_owner
        self._conversation = conversation.to_keep()

    def put(self, response: dict[str, Any]) -> None:
        stored = to_store(self._conversation, owner=self._owner, answer=msgspec.json.encode(response))
        if stored is not None:
            self._book.store.put(stored)

    def running(self, id: str) -> Any:
        return self._book.running(id, self._owner, abort=self._abort)

    async def _abort(self, id: str) -> None:
        self._client.abort(id, owner=self._names_owner)


async def _keeper(request: HttpRequest, s: Services, body: ResponseBody) -> _Keeper | None:
    """Open the continued conversation, unless stored elsewhere. Raises ApiError(400)."""
    if body.history is not None:  # a router stores it
        return None
    if s.responses is None:
        _refuse_stored(body, s.spec.mode)
        return None
    data, owner = await request.read(), caller_of(request)
    fields = await beside_loop(request, partial(decode_body, data, StoreFields))
    conversation = await open_conversation(fields, partial(s.responses.find, owner=owner))
    if body.previous_response_id is not None:
        body.history = _ITEMS.validate_python(msgspec.json.decode(conversation.history))
        body.first_response_id = conversation.first
    if REFERENCE in data:
        body.input = _INPUT.validate_python(msgspec.json.decode(conversation.input))
    if body.store is False:
        return None
    return _Keeper(s, s.responses, conversation, owner=owner, names_owner=owner_in(request))


def _refuse_stored(body: ResponseBody, mode: str) -> None:
    body.store = False
    if body.previous_response_id is not None:
        why = "--max-stored-responses is 0" if mode == "null" else f"a {mode} worker does not: ask the router"
        raise bad_field("previous_response_id", f"no responses are stored here ({why}); send the conversation as input")


async def _answer(
    request: HttpRequest, s: Services, body: ResponseBody, chat: ChatBody, keeper: _Keeper | None
) -> Response:
    resume = resume_of(request)
    chat.rid = s.mint_id(RESPONSE) if resume is None else resume.id
    plan = await (truncated_chat(s, chat) if body.truncation == "auto" else plan_chat(s, chat))
    view = partial(
        ResponseView,
        body,
        plan,
        tokenizer=s.model.tokenizer,
        answers=plan.answers(ids_of(request).mint, "call_"),
        on_done=(lambda response: None) if keeper is None else keeper.put,
    )
    with nullcontext() if keeper is None else keeper.running(chat.rid):
        return await answer_samples(request, chat, plan, _FORMAT, view=view)


API.add(get_route("/v1/responses/{id}", _of_worker(api.get_response)))
API.add(ApiRoute("DELETE", "/v1/responses/{id}", _of_worker(api.delete_response)))
API.add(post_route("/v1/responses/{id}/cancel", _of_worker(api.cancel_response)))
API.add(get_route("/v1/responses/{id}/input_items", _of_worker(api.list_input_items)))
