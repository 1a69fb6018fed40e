"""The store of responses: bounds, order of eviction, owners; items, their ids and references. Pure."""

import asyncio
import json
import random

import msgspec
import pytest

from service.http.errors import ApiError
from service.responses.api import page_of
from service.responses.items import (
    StoreFields,
    history_of,
    inner_text,
    input_items,
    item_id,
    open_conversation,
    references,
    resolved,
    response_of,
    to_store,
)
from service.responses.store import OVERHEAD_BYTES, LocalBook, ResponseStore, StoredResponse


def stored(id: str, previous: str = "", *, owner: str = "a", input: str = "", size: int = 0) -> StoredResponse:
    output = [{"id": item_id("message", id, 0), "type": "message", "role": "assistant", "content": id + "." * size}]
    response = json.dumps({"id": id, "output": output}).encode()
    given = inner_text(json.dumps(input or f"to {id}").encode())
    return StoredResponse(id=id, owner=owner, previous=previous, input=given, response=response)


def _store_of(*given: StoredResponse) -> ResponseStore:
    store = ResponseStore(max_count=9, max_bytes=1 << 20)
    for one in given:
        store.put(one)
    return store


def ids_of(found: list[StoredResponse]) -> list[str]:
    return [each.id for each in found]


def test_a_conversation_is_read_from_its_last_response() -> None:
    store = _store_of(
        *(stored(*pair) for pair in (("resp_1", ""), ("resp_2", "resp_1"), ("resp_3", "resp_2"), ("resp_4", "resp_2")))
    )
    assert ids_of(store.conversation("resp_3", owner="a")) == ["resp_3", "resp_2", "resp_1"]
    assert ids_of(store.conversation("resp_4", owner="a")) == ["resp_4", "resp_2", "resp_1"]
    assert store.conversation("resp_9", owner="a") == []
    texts = [item["content"] for item in json.loads(history_of(store.conversation("resp_2", owner="a")))]
    assert texts == ["to resp_1", "resp_1", "to resp_2", "resp_2"]


def test_another_owner_finds_nothing() -> None:
    store = _store_of(stored("resp_1"))
    store.put(stored("resp_2", "resp_1", owner="b"))  # no server writes this; reading it must not leak either
    assert store.get("resp_1", owner="b") is None and not store.remove("resp_1", owner="b")
    assert ids_of(store.conversation("resp_2", owner="b")) == ["resp_2"]


def test_the_conversation_that_was_used_longest_ago_goes_first_and_from_its_end() -> None:
    store = ResponseStore(max_count=4, max_bytes=1 << 20)
    for id, previous in (("resp_1", ""), ("resp_2", "resp_1"), ("resp_8", ""), ("resp_9", "resp_8")):
        store.put(stored(id, previous))
    store.get("resp_2", owner="a")
    store.put(stored("resp_3", "resp_2"))
    assert ids_of(store.conversation("resp_3", owner="a")) == ["resp_3", "resp_2", "resp_1"]
    assert store.get("resp_9", owner="a") is None and store.get("resp_8", owner="a") is not None


def test_bytes_are_bounded_too() -> None:
    one = stored("resp_1", size=1000).num_bytes
    assert one > 1000 + OVERHEAD_BYTES
    store = ResponseStore(max_count=99, max_bytes=2 * one)
    for number in range(1, 6):
        store.put(stored(f"resp_{number}", size=1000))
    assert len(store) == 2 and store.num_bytes == 2 * one
    store.put(stored("resp_6", size=3000))
    assert store.get("resp_6", owner="a") is None, "larger than the whole store"
    store.check()


def test_a_response_does_not_change() -> None:
    store = ResponseStore(max_count=9, max_bytes=1 << 20)
    store.put(stored("resp_1", input="first"))
    store.put(stored("resp_1", owner="b", input="second"))
    (found,) = store.conversation("resp_1", owner="a")
    assert b"first" in found.input
    store.check()


def test_what_follows_a_removed_response_can_be_read_but_not_continued() -> None:
    store = _store_of(stored("resp_1"))
    store.put(stored("resp_2", "resp_1"))
    assert store.remove("resp_1", owner="a") and store.num_bytes == stored("resp_2", "resp_1").num_bytes
    assert store.get("resp_2", owner="a") is not None
    with pytest.raises(ApiError, match="previous_response_id: no response 'resp_1' is stored"):
        conversation_of(store, {"input": "x", "previous_response_id": "resp_2"})


@pytest.mark.parametrize("seed", range(20))
def test_no_eviction_breaks_a_conversation(seed: int) -> None:
    draw = random.Random(seed)
    store = ResponseStore(max_count=draw.randint(1, 12), max_bytes=draw.randint(1000, 20_000))
    known: list[str] = []
    for number in range(200):
        previous = draw.choice(known) if known and draw.random() < 0.8 else ""
        if previous and not store.conversation(previous, owner="a"):
            known.remove(previous)
            continue
        store.put(stored(f"resp_{number}", previous, size=draw.randint(0, 2000)))
        known.append(f"resp_{number}")
        store.check()
        for id in known:
            found = store.conversation(id, owner="a") if draw.random() < 0.1 else []
            assert not found or found[-1].previous == "", ids_of(found)


def conversation_of(store: ResponseStore, body: dict[str, object]) -> tuple[list[dict[str, object]], object]:
    async def find(id: str) -> list[StoredResponse]:
        return store.conversation(id, owner="a")

    fields = msgspec.json.decode(json.dumps(body), type=StoreFields)
    opened = asyncio.run(open_conversation(fields, find))
    return json.loads(opened.history), json.loads(opened.input)


@pytest.mark.parametrize(
    ("given", "inner"),
    [
        (b'"hi"', b'{"type":"message","role":"user","content":"hi"}'),
        (b' [ {"a":1}, {"b":2} ] ', b'{"a":1}, {"b":2}'),
        (b"[]", b""),
        (b"5", b""),
        (b"", b""),
    ],
)
def test_an_input_is_a_list_of_items(given: bytes, inner: bytes) -> None:
    assert inner_text(given) == inner


def test_ids_of_items_say_where_they_are() -> None:
    assert item_id("message", "resp_ab12", 3) == "msg_ab12_3" and response_of("msg_ab12_3") == "resp_ab12"
    assert response_of(item_id("function_call_output", "resp_ab12", 0, is_input=True)) == "resp_ab12"
    assert [response_of(id) for id in ("", "msg_", "msg_x_", "x", "msg_x_1_2", "resp_" + "a" * 99)] == [""] * 6


def test_references_are_replaced_by_their_items() -> None:
    store = _store_of(stored("resp_1"))
    refer = [{"type": "item_reference", "id": id} for id in ("msg_1_in0", "msg_1_0")]
    _, items = conversation_of(store, {"input": [*refer, {"role": "user", "content": "item_reference"}]})
    assert [item["content"] for item in items] == ["to resp_1", "resp_1", "item_reference"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("id", ["msg_1_1", "msg_1_in5", "msg_2_0", "nothing", 5, None])
def test_an_unknown_reference_names_its_place(id: object) -> None:
    store = _store_of(stored("resp_1"))
    with pytest.raises(ApiError, match=r"input\[1\]\.id: no item"):
        conversation_of(store, {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": id}]})


@pytest.mark.parametrize("given", [b"5", b"[", b'["item_reference"]', b'[{"type":["item_reference"]}]', b""])
def test_what_holds_no_items_is_left_to_the_worker(given: bytes) -> None:
    assert references(given) == []


def test_only_references_are_replaced() -> None:
    given = b'[{"type":"message","content":"item_reference"}]'
    assert resolved(given, {}) == given


def test_listed_items_have_the_apis_shape() -> None:
    call_output = {"type": "function_call_output", "call_id": "c", "output": "1", "id": None}
    given = inner_text(json.dumps([{"role": "user", "content": "x"}, call_output]).encode())
    entry = StoredResponse(id="resp_1", owner="a", previous="", input=given, response=b'{"output":[]}')
    message, output = input_items([entry])
    content = [{"type": "input_text", "text": "x"}]
    whole = {"type": "message", "status": "completed", "id": "msg_1_in0", "role": "user", "content": content}
    assert message == whole
    assert output["id"] == "fco_1_in1" and output["output"] == "1"


def test_pages() -> None:
    items = [{"id": str(n)} for n in range(5)]
    first = page_of(items, {"limit": "2", "order": "asc"})
    assert [item["id"] for item in first["data"]] == ["0", "1"] and first["has_more"] and first["last_id"] == "1"
    rest = page_of(items, {"order": "asc", "after": "3"})
    assert [item["id"] for item in rest["data"]] == ["4"] and not rest["has_more"]
    assert [item["id"] for item in page_of(items, {})["data"]] == list("43210")
    assert page_of([], {}) == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_an_answer_without_an_id_is_not_stored() -> None:
    opened = asyncio.run(open_conversation(StoreFields(input=msgspec.Raw(b'"x"')), _nothing))
    assert to_store(opened, owner="a", answer=b'{"error":{}}') is None
    kept = to_store(opened, owner="a", answer=b'{"id":"resp_1","output":[]}')
    assert kept is not None and (kept.id, kept.previous) == ("resp_1", "")


def test_one_id_twice_confuses_nothing() -> None:
    """Only a worker that is broken gives it."""
    book = LocalBook(ResponseStore(max_count=9, max_bytes=1 << 20))

    async def abort(id: str) -> None: ...

    first, second = book.running("resp_1", "a", abort=abort), book.running("resp_1", "b", abort=abort)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert asyncio.run(book.cancel("resp_1", "b")) is False


async def _nothing(id: str) -> list[StoredResponse]:
    return []
