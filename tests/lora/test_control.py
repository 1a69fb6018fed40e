"""Loads and unloads beside the production scheduler at depth 2, by a store whose reading the test finishes."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from engine.core.request import Request
from engine.loop.adapter_control import AdapterControl
from engine.messages import ControlReply, GenerateRequest, LoadAdapter, TokenOutput, UnloadAdapter
from engine.sampling_params import SamplingParams
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens


class FakeStore:
    """`events`: what was done to the stream, in order."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[Any]] = {}
        self.events: list[tuple[str, int]] = []

    def start_reading(self, path: str, *, when_done: Callable[[], None]) -> "Future[Any]":
        self.futures[path] = Future()
        return self.futures[path]

    def read(self, path: str) -> str:
        return path

    def install(self, number: int, weights: Any) -> None:
        self.events.append(("install", number))

    def remove(self, number: int) -> None:
        self.events.append(("remove", number))


class Rig(EngineInATest):
    """What the loop does with adapters: acquire, told, a turn of control before planning."""

    def __init__(self) -> None:
        super().__init__(depth=2, max_loras_per_batch=2)
        self.store = FakeStore()
        self.replies: dict[str, ControlReply] = {}
        self.control = AdapterControl(
            store=self.store,
            max_loaded=3,
            forget_prefixes_of=self.scheduler.memory.cache.forget,
            reply=lambda reply: self.replies.__setitem__(reply.call_id, reply),
            wakeup=lambda: None,
        )

    def load(self, name: str) -> None:
        self.control.on_message(LoadAdapter(f"load-{name}", name, f"/{name}"))
        self.store.futures[f"/{name}"].set_result("weights")
        self.turn()

    def ask(self, rid: str, lora: str, prompt: list[int], new: int = 6) -> None:
        message = GenerateRequest(rid, prompt, SamplingParams(max_new_tokens=new), lora=lora)
        if (refused := self.control.refuse(message)) is not None:
            self.say([refused])
        else:
            request = Request(message=message, arrived_s=0.0)
            self.control.on_added(request, 0.0)
            self.add(rid, prompt, adapter=request.adapter, max_new_tokens=new)

    def say(self, outputs: list[TokenOutput]) -> None:
        super().say(outputs)
        self.control.on_outputs(outputs, 0.0)

    def turn(self) -> bool:
        self.control.on_turn(0.0)
        self.control.check()
        for plan, _ in self.launched:
            gone = {number for event, number in self.store.events if event == "remove"}
            requests = [self.scheduler.stages.live[item.rid] for item in plan.items]
            live = {request.adapter for request in requests if request.finish is None}
            assert not gone & live, "an adapter was removed under a request"
        return super().turn()


def test_an_adapter_is_unloaded_when_its_last_request_has_ended() -> None:
    rig = Rig()
    rig.load("a")
    rig.load("b")
    assert rig.replies["load-b"].ok and rig.replies["load-b"].adapters == {"a": "/a", "b": "/b"}
    rig.ask("old", "a", [1, 2, 3], new=12)
    rig.ask("other", "b", [1, 2, 3], new=20)
    rig.turn()
    rig.control.on_message(UnloadAdapter("u", "a"))
    rig.ask("new", "a", [1, 2, 3])
    refused = rig.finish["new"]
    assert (refused.status, refused.field) == (400, "lora_path") and "being unloaded" in refused.message
    while "old" not in rig.finish:
        assert "u" not in rig.replies
        rig.turn()
    rig.run()
    assert rig.replies["u"].ok and rig.replies["u"].adapters == {"b": "/b"}
    assert rig.store.events == [("install", 1), ("install", 2), ("remove", 1)]
    assert rig.tokens["old"] == expected_tokens([1, 2, 3], 12, adapter=1)
    assert rig.control.gauges() == {"num_loaded_loras": 1.0, "num_used_loras": 0.0}


@pytest.mark.parametrize("message", [LoadAdapter("c", "a", "/a"), UnloadAdapter("c", "a")])
def test_without_enable_lora_all_is_refused(message: LoadAdapter | UnloadAdapter) -> None:
    replies: list[ControlReply] = []
    control = AdapterControl(reply=replies.append)
    control.on_message(message)
    assert replies[0].message == "lora_name: this server was started without --enable-lora" and not replies[0].ok
    assert control.gauges() == {}
    request = Request(message=GenerateRequest("r", [1], SamplingParams(max_new_tokens=1), lora="a"), arrived_s=0.0)
    (refused,) = EngineInATest().scheduler.add(request)
    assert refused.finish is not None and refused.finish.field == "lora_path"


def test_aborted_requests_no_longer_use_their_adapter() -> None:
    rig = Rig()
    rig.load("a")
    rig.ask("r", "a", [1, 2, 3], new=100)
    rig.turns(2)
    rig.control.on_message(UnloadAdapter("u", "a"))
    rig.abort("r")
    rig.turn()
    assert rig.replies["u"].ok
    rig.run()
    assert rig.scheduler.idle
