"""GET, DELETE, cancel and input items of stored responses."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import Response

from service.http.errors import ApiError, bad_field, check_choice, unsupported
from service.http.request import HttpRequest
from service.http.routes import json_response, no_such_path
from service.responses.items import input_items, not_found
from service.responses.store import ResponseBook, StoredResponse
from service.security.keys import authorization_of, owner_of

PATH = "/v1/responses"
DEFAULT_LIMIT, MAX_LIMIT = 20, 100  # of listed items, as in OpenAI's API

StoredHandler = Callable[[HttpRequest, ResponseBook], Awaitable[Response]]


async def get_response(request: HttpRequest, book: ResponseBook) -> Response:
    """Return a remembered answer."""
    if request.query.get("stream", "false") != "false":
        raise unsupported("stream", "a stored response is not streamed; leave it out")
    return _shown(await _find(request, book))


async def delete_response(request: HttpRequest, book: ResponseBook) -> Response:
    """Forget an answer."""
    id = named_response(request)
    if not await book.remove(id, caller_of(request)):
        raise not_found(id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def cancel_response(request: HttpRequest, book: ResponseBook) -> Response:
    """Stop an answer that runs in the background."""
    id = named_response(request)
    try:
        await book.cancel(id, caller_of(request))
    except TimeoutError:
        raise ApiError(504, f"{id}: it was cancelled and has not ended yet", code="cancel_timeout") from None
    return _shown(await _find(request, book))


async def list_input_items(request: HttpRequest, book: ResponseBook) -> Response:
    """Return the items before a response, newest first by default."""
    found = await _find(request, book)
    return json_response(page_of(input_items(found), request.query))


def page_of(items: list[dict[str, Any]], query: Any) -> dict[str, Any]:
    """Return a page by limit, order, after (item id). Raises ApiError(400)."""
    order, limit = query.get("order", "desc"), _limit(query.get("limit", str(DEFAULT_LIMIT)))
    check_choice("order", order, ("asc", "desc"))
    items = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise bad_field("after", f"no item {after[:100]!r} is listed here")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }


def named_response(request: HttpRequest) -> str:
    """Return the id in the path. Raises ApiError(404)."""
    id, _, rest = request.path.removeprefix(PATH + "/").partition("/")
    if rest not in ("", "cancel", "input_items"):
        raise no_such_path(request)
    return id


def caller_of(request: HttpRequest) -> str:
    return owner_of(authorization_of(request.headers))


def _limit(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MAX_LIMIT:
        raise bad_field("limit", f"must be between 1 and {MAX_LIMIT}, got {text[:20]!r}")
    return int(text)


async def _find(request: HttpRequest, book: ResponseBook) -> Sequence[StoredResponse]:
    id = named_response(request)
    found = await book.find(id, caller_of(request))
    if not found:
        raise not_found(id)
    return found


def _shown(found: Sequence[StoredResponse]) -> Response:
    return Response(content=found[0].response, media_type="application/json")
