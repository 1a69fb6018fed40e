"""/v1/responses over HTTP, by OpenAI's client: items, events, tools, what is stored and for which key.

The stand-in's model repeats its prompt, so a prompt that holds a call makes an answer that holds it.
"""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall

from engine.frontend.apis.responses.body import Item
from engine.frontend.apis.responses.chat import messages_of
from tests.frontend.conftest import CALL, Worker, start_worker

PATH = "/v1/responses"
TOOL: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
STOP = {"stop": "<|assistant|>"}
LOGPROBS: Any = ["message.output_text.logprobs"]


@pytest.fixture
def client(worker: Worker) -> Iterator[openai.OpenAI]:
    with client_of(worker) as found:
        yield found


def client_of(worker: Worker, key: str = "EMPTY") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{worker.url}/v1", api_key=key, max_retries=0, timeout=30)


def events_of(worker: Worker, body: dict[str, Any]) -> list[dict[str, Any]]:
    events = worker.named_events(PATH, body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_text_is_answered_with_a_message(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="hello", extra_body=STOP)
    assert answer.output_text == "<|user|>hello" and answer.status == "completed" and answer.error is None
    (item,) = answer.output
    assert item.type == "message" and item.status == "completed" and item.role == "assistant"
    assert answer.id.startswith("resp_") and item.id == f"msg_{answer.id[5:]}_0"
    assert answer.usage is not None and answer.usage.input_tokens == len("<|user|>hello<|assistant|>")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert (answer.tools, answer.parallel_tool_calls, answer.metadata, answer.truncation) == ([], True, {}, "disabled")


def test_all_of_a_conversation_reaches_the_model(worker: Worker, client: openai.OpenAI) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "C"}]},
        {"type": "message", "role": "developer", "content": "D"},
    ]
    answer = client.responses.create(model="tiny", input=items, instructions="Be brief", extra_body=STOP)
    assert answer.output_text == "<|system|>Be brief<|user|>A\nB"
    assert worker.prompt == "<|system|>Be brief<|user|>A\nB<|assistant|>C<|system|>D<|assistant|>"


def test_a_stream_has_every_event_in_order(worker: Worker) -> None:
    events = events_of(worker, {"input": "hi", "stop": "<|assistant|>"})
    types = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert types[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert types[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert len(deltas) == len(types) - 8 and "".join(event["delta"] for event in deltas) == "<|user|>hi"
    created, completed = events[0]["response"], events[-1]["response"]
    assert created["status"] == "in_progress" and created["output"] == [] and created["usage"] is None
    assert completed["status"] == "completed" and completed["output"] == [events[-2]["item"]]
    assert created["id"] == completed["id"] and {e["item_id"] for e in deltas} == {completed["output"][0]["id"]}
    assert events[2]["item"]["content"] == [] and events[2]["item"]["status"] == "in_progress"


def test_a_streamed_response_equals_one_that_is_not(worker: Worker, qwen: Worker) -> None:
    for at, body in (
        (worker, {"input": "hi", **STOP}),
        (worker, {"input": "hi", "max_output_tokens": 4}),
        (qwen, {"input": f"x{CALL}y{CALL}", "tools": [TOOL], **STOP}),
        (worker, {"input": "hi", "include": LOGPROBS, "top_logprobs": 1, "max_output_tokens": 3}),
    ):
        whole, streamed = at.post(PATH, body).json(), events_of(at, body)[-1]["response"]
        assert without_ids(whole) == without_ids(streamed)
        assert len(whole["output"]) == len(streamed["output"])


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    usage = {**response["usage"], "input_tokens_details": None}
    return {**response, "output": output, "usage": usage, "id": "", "created_at": 0}


def test_texts_around_calls_have_the_logprobs_of_their_own_tokens(qwen: Worker) -> None:
    body = {"input": f"é鬱{CALL}🫠x", "tools": [TOOL], "include": LOGPROBS, **STOP}
    for answer in (qwen.post(PATH, body).json(), events_of(qwen, body)[-1]["response"]):
        texts = [item["content"][0] for item in answer["output"] if item["type"] == "message"]
        assert [text["text"] for text in texts] == ["<|user|>é鬱", "🫠x"]
        shown = [b"".join(bytes(lp["bytes"]) for lp in text["logprobs"]) for text in texts]
        assert shown[0] == texts[0]["text"].encode() and shown[1].startswith(texts[1]["text"].encode())


def test_an_answer_cut_by_length_says_so(worker: Worker, client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="hello", max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens" and answer.output_text == "<|u"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert events_of(worker, {"input": "hello", "max_output_tokens": 3})[-1]["type"] == "response.incomplete"


def test_calls_are_items(qwen: Worker) -> None:
    with client_of(qwen) as client:
        answer = client.responses.create(model="tiny", input=f"x{CALL}y{CALL}", tools=[TOOL], extra_body=STOP)  # type: ignore[list-item]
    assert [item.type for item in answer.output] == ["message", "function_call", "message", "function_call"]
    calls = [item for item in answer.output if isinstance(item, ResponseFunctionToolCall)]
    assert [(call.name, call.arguments) for call in calls] == [("add", '{"a": 1}')] * 2
    assert len({call.call_id for call in calls}) == 2 and all(call.call_id.startswith("call_") for call in calls)
    assert answer.tools[0].name == "add"  # type: ignore[union-attr]


def test_a_call_streams_with_events_of_its_own(qwen: Worker) -> None:
    events = events_of(qwen, {"input": CALL, "tools": [TOOL], "stop": "<|assistant|>"})
    (begun,) = (e for e in events if e["type"].endswith("item.added") and e["item"]["type"] == "function_call")
    deltas = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
    done = next(e for e in events if e["type"] == "response.function_call_arguments.done")
    assert begun["item"]["name"] == "add" and begun["item"]["arguments"] == "" and begun["output_index"] == 1
    assert "".join(e["delta"] for e in deltas) == done["arguments"] == '{"a": 1}'
    assert {e["output_index"] for e in (*deltas, done)} == {1}


def test_logprobs_are_those_of_chat(worker: Worker, client: openai.OpenAI) -> None:
    asked: Any = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "max_tokens": 4, "top_logprobs": 2}
    content: Any = client.chat.completions.create(model="tiny", **asked).choices[0].logprobs
    wanted = [logprob.to_dict() for logprob in content.content]
    body: Any = {"input": "hi", "max_output_tokens": 4, "include": LOGPROBS, "top_logprobs": 2}
    answer: Any = client.responses.create(model="tiny", **body)
    assert [logprob.to_dict() for logprob in answer.output[0].content[0].logprobs] == wanted
    deltas = [e["logprobs"] for e in events_of(worker, body) if e["type"] == "response.output_text.delta"]
    assert [logprob for shown in deltas for logprob in shown] == wanted


@pytest.mark.parametrize("more", [{}, {"stream": True}])
def test_reasoning_is_an_item_of_its_own(thinker: Worker, more: dict[str, Any]) -> None:
    """Its tokens are counted, and logprobs are those of the text alone."""
    body = {"input": f"Hm.</think>\n\nFive.{CALL}", "tools": [TOOL], "include": LOGPROBS, **STOP}
    events = events_of(thinker, body) if more else []
    answer = events[-1]["response"] if more else thinker.post(PATH, body).json()
    reasoning, message, call = answer["output"]
    assert reasoning["type"] == "reasoning" and reasoning["summary"] == [] and reasoning["id"].startswith("rs_")
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "<|user|>Hm."}]
    (text,) = message["content"]
    assert text["text"] == "Five." and call["name"] == "add"
    shown = "".join(logprob["token"] for logprob in text["logprobs"])
    assert "Five." in shown and len(shown) <= len("Five.") + 12, shown  # the call's marker, held back, may come with it
    usage = answer["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == len("<|user|>Hm.</think>")
    kinds = [e["type"].removeprefix("response.") for e in events if "text" in e["type"] and e["type"].endswith("done")]
    assert kinds == (["reasoning_text.done", "output_text.done"] if more else [])


def test_reasoning_goes_back_to_the_model_with_its_turn() -> None:
    """One message for one turn, as chat templates want it."""
    texts = [{"type": "reasoning_text", "text": "hm"}]
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": texts},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "1"}]},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "xyz"},
        {"type": "message", "role": "assistant", "content": "c"},
        {"type": "reasoning", "id": "rs_3", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "content": "d"},
    ]
    messages = messages_of([Item.model_validate(item) for item in items], field="input")
    assert [m.role for m in messages] == ["user", "assistant", "tool", "tool", "assistant", "assistant"]
    first, third, last = messages[1], messages[4], messages[5]
    assert first.reasoning_content == "hm" and [call["id"] for call in first.tool_calls or []] == ["c1", "c2"]
    assert (third.content, third.reasoning_content) == ("c", None)
    assert (last.content, last.reasoning_content) == ("d", "so")


def test_a_conversation_goes_on_from_its_last_response(worker: Worker, client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input="one", instructions="I", extra_body=STOP)
    assert first.output_text == "<|system|>I<|user|>one"
    prompt = "<|user|>one<|assistant|><|system|>I<|user|>one<|user|>two<|assistant|>"  # without the instructions
    limit: dict[str, Any] = {"max_output_tokens": len(prompt)}
    second = client.responses.create(model="tiny", input="two", previous_response_id=first.id, **limit)
    assert second.output_text == prompt
    assert second.previous_response_id == first.id and second.instructions is None
    third = client.responses.create(model="tiny", input="x", previous_response_id=second.id, max_output_tokens=1)
    listed = client.responses.input_items.list(third.id, order="asc")
    roles = [item.role for item in listed]  # type: ignore[union-attr]
    assert roles == ["user", "assistant", "user", "assistant", "user"]


def test_items_are_listed_in_pages(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": str(n)} for n in range(5)]
    answer = client.responses.create(model="tiny", input=items, max_output_tokens=1)
    listed = list(client.responses.input_items.list(answer.id, order="asc", limit=2))
    assert [item.content[0].text for item in listed] == list("01234")  # type: ignore[union-attr]
    newest = client.responses.input_items.list(answer.id, limit=1)
    assert newest.data[0].content[0].text == "4" and newest.has_more  # type: ignore[union-attr]


def test_items_may_be_referred_to(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input="one", extra_body=STOP)
    output: Any = {"type": "item_reference", "id": first.output[0].id}
    given: Any = {"type": "item_reference", "id": client.responses.input_items.list(first.id).data[0].id}
    second = client.responses.create(model="tiny", input=[given, output], max_output_tokens=30)
    assert second.output_text.startswith("<|user|>one<|assistant|><|user")
    with pytest.raises(openai.BadRequestError, match=r"input\[0\].id: no item 'msg_nope_0' is stored"):
        client.responses.create(model="tiny", input=[{"type": "item_reference", "id": "msg_nope_0"}])


def test_a_tool_goes_round(worker: Worker, qwen: Worker) -> None:
    """The stand-in's template refuses tool messages, so the refusal shows that the output arrived as one."""
    with client_of(qwen) as client:
        first = client.responses.create(model="tiny", input=CALL, tools=[TOOL], extra_body=STOP)  # type: ignore[list-item]
        call = next(item for item in first.output if isinstance(item, ResponseFunctionToolCall))
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        with pytest.raises(openai.BadRequestError, match="no tools here") as refused:
            client.responses.create(model="tiny", input=[output], previous_response_id=first.id)
        assert refused.value.param == "input"
        with pytest.raises(openai.BadRequestError, match="no function_call before it"):
            client.responses.create(model="tiny", input=[output])


def test_a_stored_response_is_read_and_deleted(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="hello", extra_body=STOP)
    assert client.responses.retrieve(answer.id) == answer
    client.responses.delete(answer.id)
    for act in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="no response 'resp_"):
            act(answer.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id: no response 'resp_") as refused:
        client.responses.create(model="tiny", input="x", previous_response_id=answer.id)
    assert refused.value.code == "previous_response_not_found"


def test_a_streamed_response_is_stored_as_it_ended(worker: Worker, client: openai.OpenAI) -> None:
    final = events_of(worker, {"input": "hi", "stop": "<|assistant|>"})[-1]["response"]
    read = worker.http.get(f"{PATH}/{final['id']}")
    assert read.status_code == 200 and read.json() == final


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="hello", store=False, extra_body=STOP)
    assert answer.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_key_does_not_read_what_another_stored(worker: Worker) -> None:
    with client_of(worker, "alice") as alice, client_of(worker, "bob") as bob:
        answer = alice.responses.create(model="tiny", input="secret", extra_body=STOP)
        assert alice.responses.retrieve(answer.id).output_text == "<|user|>secret"
        for act in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel, bob.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                act(answer.id)
        item: Any = {"type": "item_reference", "id": answer.output[0].id}
        for more in ({"previous_response_id": answer.id, "input": "x"}, {"input": [item]}):
            with pytest.raises(openai.BadRequestError, match="stored"):
                bob.responses.create(model="tiny", **more)
        assert alice.responses.retrieve(answer.id) == answer


def test_a_running_response_is_cancelled_and_says_so(worker: Worker, client: openai.OpenAI) -> None:
    stream = client.responses.create(model="tiny", input="SLOW", stream=True, max_output_tokens=100)
    created = next(iter(stream))
    assert created.type == "response.created"
    cancelled = client.responses.cancel(created.response.id)
    assert cancelled.status == "cancelled" and cancelled.output[0].status == "incomplete"  # type: ignore[union-attr]
    last = list(stream)[-1]
    assert last.type == "response.incomplete" and last.response == cancelled
    assert client.responses.cancel(cancelled.id) == cancelled
    worker.wait_idle()


def test_a_client_that_leaves_frees_everything(worker: Worker, client: openai.OpenAI) -> None:
    stream = client.responses.create(model="tiny", input="SLOW", stream=True, max_output_tokens=100)
    created = next(iter(stream))
    stream.close()
    worker.wait_idle()
    assert created.type == "response.created"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created.response.id)


def test_an_error_within_a_stream_is_an_event(worker: Worker, client: openai.OpenAI) -> None:
    worker.scheduler.may_break.clear()
    with worker.http.stream("POST", PATH, json={"input": "BREAK", "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: response.created"
        worker.scheduler.may_break.set()
        last = [line for line in lines if line][-2:]
    event = json.loads(last[1].removeprefix("data: "))
    assert last[0] == "event: error" and event["type"] == "error" and event["message"] == event["error"]["message"]
    with pytest.raises(openai.APIError):
        list(client.responses.create(model="tiny", input="BREAK", stream=True))
    assert worker.post(PATH, {"input": "REFUSE", "stream": True}).status_code == 503
    worker.wait_idle()


def test_a_chain_of_responses_is_a_conversation(client: openai.OpenAI, worker: Worker) -> None:
    limit: Any = {"model": "tiny", "max_output_tokens": 1}
    first = client.responses.create(input="one", **limit)
    second = client.responses.create(input="two", previous_response_id=first.id, **limit)
    client.responses.create(input="three", previous_response_id=second.id, **limit)
    assert [seen.conversation for seen in worker.scheduler.seen[-3:]] == ["", first.id, first.id]


def test_a_worker_that_stores_nothing_says_so(tmp_path: Any) -> None:
    with start_worker(tmp_path, server={"max_stored_responses": 0}) as w:
        answer = w.post(PATH, {"input": "hi", "max_output_tokens": 1}).json()
        assert answer["store"] is False and w.http.get(f"{PATH}/{answer['id']}").status_code == 404
        error = w.error(PATH, {"input": "hi", "previous_response_id": answer["id"]})
        assert "--max-stored-responses" in error["message"]


def test_a_routers_history_comes_before_the_input(worker: Worker) -> None:
    """The router keeps the conversation: this server neither looks it up nor stores it."""
    body = {"input": "two", "history": [{"role": "user", "content": "one"}], "previous_response_id": "resp_1"}
    answer = worker.post(PATH, {**body, "max_output_tokens": 50}).json()
    assert answer["output"][0]["content"][0]["text"].startswith("<|user|>one<|user|>two<|assistant|>")
    assert answer["previous_response_id"] == "resp_1" and answer["store"] is True
    assert worker.http.get(f"{PATH}/{answer['id']}").status_code == 404


TEXT_FORMAT = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "'web_search' is not supported: this server runs no tools of its own"),
        ({"background": True}, "background: is not supported by this server; leave it out; the answer comes while"),
        ({"max_tokens": 5}, "use max_output_tokens"),
        ({"max_output_tokens": 100_000}, "in the input"),
        ({"tools": [{"type": "function", "name": "no space"}]}, r"tools[0].name: must be 1 to 64"),
    ],
)
def test_a_refusal_speaks_of_the_bodys_own_fields(worker: Worker, more: dict[str, Any], message: str) -> None:
    assert message in worker.error(PATH, {"input": "x", **more})["message"]


@pytest.mark.parametrize(
    ("query", "field"), [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=no", "after")]
)
def test_a_wrong_query_names_its_field(worker: Worker, query: str, field: str) -> None:
    id = worker.post(PATH, {"input": "x", "max_output_tokens": 1}).json()["id"]
    refused = worker.http.get(f"{PATH}/{id}/input_items?{query}")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == field


def test_paths_below_a_response_are_known_or_not(worker: Worker) -> None:
    id = worker.post(PATH, {"input": "x", "max_output_tokens": 1}).json()["id"]
    assert worker.http.get(f"{PATH}/{id}/other").status_code == 404
    assert worker.http.get(f"{PATH}/{id}/cancel").status_code == 405
    assert worker.http.get(f"{PATH}/{id}?stream=true").status_code == 400
    assert worker.http.post(f"{PATH}/{id}").status_code == 405


def test_fields_of_chat_reach_the_engine(worker: Worker) -> None:
    body = {"input": "x", "max_output_tokens": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 5}
    answer = worker.post(PATH, {**body, "min_tokens": 2, "text": {"format": TEXT_FORMAT}, "priority": 3}).json()
    request = worker.scheduler.seen[-1]
    sampling = request.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.25, 3)
    assert (sampling.seed, sampling.min_new_tokens, request.priority) == (5, 2, 3)
    assert sampling.json_schema == '{"type": "object"}'
    assert answer["temperature"] == 0.5 and answer["text"]["format"]["name"] == "x"


@pytest.mark.parametrize("num_turns", [4, 5, 9])
def test_a_conversation_may_lose_its_oldest_turns(worker: Worker, num_turns: int) -> None:
    """As few as fit: three are left."""
    turns = [{"role": role, "content": f"{n}" * 50} for n in range(num_turns) for role in ("user", "assistant")]
    body = {"instructions": "S", "input": [*turns, {"role": "user", "content": "now"}], "max_output_tokens": 100}
    assert worker.post(PATH, body).json()["error"]["code"] == "context_length_exceeded"
    answer = worker.post(PATH, {**body, "truncation": "auto"}).json()
    assert answer["truncation"] == "auto" and answer["usage"]["input_tokens"] <= 412
    kept = "".join(f"<|user|>{n * 50}<|assistant|>{n * 50}" for n in "012")
    assert answer["usage"]["input_tokens"] == len(f"<|system|>S{kept}<|user|>now<|assistant|>")
    alone = {"instructions": "S", "input": "x" * 600, "truncation": "auto"}
    assert worker.post(PATH, alone).json()["error"]["code"] == "context_length_exceeded"


def test_allowed_tools_are_the_only_ones(qwen: Worker) -> None:
    other = {**TOOL, "name": "sub"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "sub"}]}
    body = {"input": CALL, "tools": [TOOL, other], "tool_choice": choice, "stop": "<|assistant|>"}
    answer = Response.model_validate(qwen.post(PATH, body).json())
    assert [item.type for item in answer.output] == ["message"]
