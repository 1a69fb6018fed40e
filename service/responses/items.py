"""Items of conversations as JSON text: ids, lists, references. Pure.

resp_HEX                  a response
msg_HEX_2, fc_HEX_2...    item 2 of its output
msg_HEX_in2...            item 2 of its input, without an id of the client's
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from service.http.errors import ApiError, bad_field, decode_or_none
from service.responses.store import StoredResponse

RESPONSE = "resp_"
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
REFERENCE = b"item_reference"

_ITEM_ID = re.compile(r"[a-z]+_([0-9a-zA-Z]+)_(in)?([0-9]{1,6})")
_encode = msgspec.json.Encoder().encode


class _Answer(msgspec.Struct):
    output: list[msgspec.Raw] = []


class _Reference(msgspec.Struct):
    type: Any = None
    id: Any = None


def item_id(kind: str, response_id: str, index: int, *, is_input: bool = False) -> str:
    prefix = PREFIXES.get(kind, "item")
    return f"{prefix}_{response_id.removeprefix(RESPONSE)}_{'in' if is_input else ''}{index}"


def response_of(item_id: str) -> str:
    match = _ITEM_ID.fullmatch(item_id)
    return "" if match is None else RESPONSE + match[1]


def inner_text(given: bytes) -> bytes:
    """`input` (text or list) as comma-separated items."""
    text = given.strip()
    if text[:1] == b'"':
        return b'{"type":"message","role":"user","content":' + text + b"}"
    return text[1:-1].strip() if text[:1] == b"[" else b""


def joined(parts: Iterable[bytes]) -> bytes:
    return b"[" + b",".join(part for part in parts if part) + b"]"


def history_of(conversation: Sequence[StoredResponse]) -> bytes:
    """A conversation's items as a JSON list, oldest first."""
    return joined(part for stored in reversed(conversation) for part in (stored.input, *_outputs(stored)))


def input_items(conversation: Sequence[StoredResponse]) -> list[dict[str, Any]]:
    """Items before the newest response, oldest first."""
    newest, found = conversation[0], []
    for stored in reversed(conversation):
        found += [_shown(raw, stored.id, index) for index, raw in enumerate(_inputs(stored))]
        if stored is not newest:
            found += [msgspec.json.decode(raw) for raw in _outputs(stored)]
    return found


def references(given: bytes) -> list[str]:
    """Ids that `input` refers to. Raises ApiError(400)."""
    ids = []
    for index, raw in enumerate(_split(given)):
        reference = _reference_in(raw)
        if reference is not None:
            if not isinstance(reference.id, str) or not response_of(reference.id):
                raise _unknown(index, reference.id)
            ids.append(reference.id)
    return ids


def resolved(given: bytes, responses: Mapping[str, StoredResponse]) -> bytes:
    """Replace references by items. Raises ApiError(400)."""
    items = []
    for index, raw in enumerate(_split(given)):
        reference = _reference_in(raw)
        items.append(bytes(raw) if reference is None else _item(str(reference.id), responses, index))
    return joined(items)


def _item(id: str, responses: Mapping[str, StoredResponse], index: int) -> bytes:
    match, stored = _ITEM_ID.fullmatch(id), responses.get(response_of(id))
    if match is None or stored is None:
        raise _unknown(index, id)
    items, at = _inputs(stored) if match[2] else _outputs(stored), int(match[3])
    if at >= len(items):
        raise _unknown(index, id)
    return items[at]


def _unknown(index: int, id: object) -> Exception:
    return bad_field(f"input[{index}].id", f"no item {str(id)[:100]!r} is stored; send the item itself")


def _inputs(stored: StoredResponse) -> list[bytes]:
    return [bytes(raw) for raw in msgspec.json.decode(joined([stored.input]), type=list[msgspec.Raw])]


def _outputs(stored: StoredResponse) -> list[bytes]:
    return [bytes(raw) for raw in msgspec.json.decode(stored.response, type=_Answer).output]


def _split(given: bytes) -> list[msgspec.Raw]:
    return decode_or_none(given, list[msgspec.Raw]) or []


def _reference_in(raw: msgspec.Raw) -> _Reference | None:
    reference: _Reference | None = decode_or_none(bytes(raw), _Reference) if REFERENCE in bytes(raw) else None
    return reference if reference is not None and reference.type == REFERENCE.decode() else None


def _shown(raw: bytes, response_id: str, index: int) -> dict[str, Any]:
    item = msgspec.json.decode(raw)
    item.setdefault("type", "message")
    id = item_id(item["type"], response_id, index, is_input=True)
    shown = {"id": id, **{name: value for name, value in item.items() if value is not None}}
    if shown["type"] != "message":
        return shown
    content, kind = shown.get("content"), "output_text" if shown.get("role") == "assistant" else "input_text"
    if isinstance(content, str):
        shown["content"] = [{"type": kind, "text": content, **({"annotations": []} if kind == "output_text" else {})}]
    return {"status": "completed", **shown}


# ---- The conversation before a body of /v1/responses. Pure.

# Finds a response and its stored ancestors, newest first.
Find = Callable[[str], Awaitable[list[StoredResponse]]]


class StoreFields(msgspec.Struct, kw_only=True):
    """Fields about the store, types unchecked."""

    input: msgspec.Raw = msgspec.Raw(b"")
    previous_response_id: Any = None
    store: Any = None


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """JSON list of earlier items, and the input with references resolved. `first`: oldest id."""

    previous: str
    first: str
    history: bytes
    input: bytes

    def to_keep(self) -> "Conversation":
        """Drop the (long) history."""
        return msgspec.structs.replace(self, history=b"")


class _StoredAnswer(msgspec.Struct):
    id: str


async def open_conversation(fields: StoreFields, find: Find) -> Conversation:
    """Find the conversation. Raises ApiError(400)."""
    previous, given, history, first = fields.previous_response_id, bytes(fields.input), b"[]", ""
    if previous is not None:
        if not isinstance(previous, str):
            raise bad_field("previous_response_id", "must be a string")
        found = whole(previous, await find(previous))
        history, first = history_of(found), found[-1].id
    if REFERENCE in given:
        named = dict.fromkeys(response_of(id) for id in references(given))
        given = resolved(given, {id: held[0] for id in named if (held := await find(id))})
    return Conversation(previous=previous or "", first=first, history=history, input=given)


def whole(id: str, found: list[StoredResponse]) -> list[StoredResponse]:
    """Check completeness. Raises ApiError(400)."""
    missing = id if not found else found[-1].previous
    if missing:
        raise not_found(missing, field="previous_response_id")
    return found


def to_store(conversation: Conversation, *, owner: str, answer: bytes) -> StoredResponse | None:
    """The entry of a final response, if valid."""
    decoded: _StoredAnswer | None = decode_or_none(answer, _StoredAnswer)
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
