"""The conversation before a body of /v1/responses. Pure."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from service.http.errors import ApiError, bad_field
from service.http.json_depth import decode_or_none
from service.responses.items import REFERENCE, history_of, inner_text, references, resolved, response_of
from service.responses.store import StoredResponse

# Finds a response and its stored ancestors, newest first.
Find = Callable[[str], Awaitable[list[StoredResponse]]]


class StoreFields(msgspec.Struct, kw_only=True):
    """Fields about the store, types unchecked."""

    input: msgspec.Raw = msgspec.Raw(b"")
    previous_response_id: Any = None
    store: Any = None


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """The conversation of a body: JSON list of earlier items, and the input with references
    resolved.
    """

    previous: str
    history: bytes
    input: bytes

    def to_keep(self) -> "Conversation":
        """Drop the (long) history."""
        return msgspec.structs.replace(self, history=b"")


class _Answer(msgspec.Struct):
    id: str


async def open_conversation(fields: StoreFields, find: Find) -> Conversation:
    """Find the conversation. Raises ApiError(400)."""
    previous, given, history = fields.previous_response_id, bytes(fields.input), b"[]"
    if previous is not None:
        if not isinstance(previous, str):
            raise bad_field("previous_response_id", "must be a string")
        history = history_of(whole(previous, await find(previous)))
    if REFERENCE in given:
        named = dict.fromkeys(response_of(id) for id in references(given))
        given = resolved(given, {id: found[0] for id in named if (found := await find(id))})
    return Conversation(previous=previous or "", history=history, input=given)


def whole(id: str, found: list[StoredResponse]) -> list[StoredResponse]:
    """Check completeness. Raises ApiError(400)."""
    missing = id if not found else found[-1].previous
    if missing:
        raise not_found(missing, field="previous_response_id")
    return found


def to_store(conversation: Conversation, *, owner: str, answer: bytes) -> StoredResponse | None:
    """Return the entry of a final response, if valid."""
    decoded: _Answer | None = decode_or_none(answer, _Answer)
    if decoded is None:
        return None
    return StoredResponse(
        id=decoded.id,
        owner=owner,
        previous=conversation.previous,
        input=inner_text(conversation.input),
        response=answer,
    )


def not_found(id: str, *, field: str | None = None) -> ApiError:
    text = f"no response {id[:100]!r} is stored for this key; it may not have ended, or may be deleted or evicted"
    if field is None:
        return ApiError(404, text, code="response_not_found")
    return bad_field(field, f"{text}: send the conversation as input", code="previous_response_not_found")
