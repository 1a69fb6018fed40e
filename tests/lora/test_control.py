"""Loads and unloads by the production loop at depth 2, and a store whose reading the test finishes."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from engine.core.mem_cache.radix_cache import Branch
from engine.core.request import Request
from engine.loop.adapter_control import AdapterControl
from engine.messages import AbortRequest, ControlReply, GenerateRequest, LoadAdapter, UnloadAdapter
from engine.sampling_params import SamplingParams
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens
from tests.loop.loop_in_a_test import LoopInATest


class FakeStore:
    """`events`: what was done to the stream, in order. `used`: by requests that go on."""

    def __init__(self, used: Callable[[], set[int]]) -> None:
        self._used = used
        self.futures: dict[str, Future[Any]] = {}
        self.events: list[tuple[str, int]] = []

    def start_reading(self, path: str, *, when_done: Callable[[], None]) -> "Future[Any]":
        self.futures[path] = Future()
        return self.futures[path]

    def read(self, path: str) -> str:
        return path

    def install(self, number: int, weights: Any) -> str:
        self.events.append(("install", number))
        return f"digest of {weights}"

    def remove(self, number: int) -> None:
        assert number not in self._used(), "an adapter was removed under a request"
        self.events.append(("remove", number))


class Rig(LoopInATest):
    def __init__(self) -> None:
        super().__init__(2, max_running=8, max_loras_per_batch=2)

    def more_services(self) -> dict[str, Any]:
        self.store = FakeStore(self._used)
        self.adapters = AdapterControl(
            store=self.store,
            max_loaded=3,
            forget_prefixes_of=self.scheduler.memory.cache.forget,
            reply=self.ports.to_frontend,
            wakeup=self.ports.call_attention,
        )
        return {"adapters": self.adapters, "listeners": [self.adapters]}

    def _used(self) -> set[int]:
        return {request.variant.number for request in self.scheduler.stages.live.values() if request.finish is None}

    def load(self, name: str, weights: str = "") -> None:
        self.tell(LoadAdapter(f"load-{name}", name, f"/{name}"))
        self.store.futures[f"/{name}"].set_result(weights or f"weights of {name}")
        self.turns(1)
        self.adapters.check()


def test_an_adapter_is_unloaded_when_its_last_request_has_ended() -> None:
    rig = Rig()
    rig.load("a")
    rig.load("b")
    assert rig.replies["load-b"].ok and rig.replies["load-b"].adapters == {"a": "/a", "b": "/b"}
    rig.ask("old", [1, 2, 3], 12, lora="a")
    rig.ask("other", [1, 2, 3], 20, lora="b")
    rig.turns(1)
    live = rig.scheduler.stages.live
    assert [live[rid].variant.digest for rid in ("old", "other")] == [
        "digest of weights of a",
        "digest of weights of b",
    ]
    rig.tell(UnloadAdapter("u", "a"))
    rig.ask("new", [1, 2, 3], lora="a")
    refused = rig.engine.finish["new"]
    assert (refused.status, refused.field) == (400, "lora_path") and "being unloaded" in refused.message
    while "old" not in rig.engine.finish:
        assert "u" not in rig.replies
        rig.turns(1)
    rig.settle()
    rig.adapters.check()
    assert rig.replies["u"].ok and rig.replies["u"].adapters == {"b": "/b"}
    assert rig.store.events == [("install", 1), ("install", 2), ("remove", 1)]
    assert rig.engine.tokens["old"] == expected_tokens([1, 2, 3], 12, adapter=1)
    assert rig.adapters.gauges() == {"num_loaded_loras": 1.0, "num_used_loras": 0.0}


def test_prefixes_are_kept_while_an_adapter_of_these_weights_is_loaded() -> None:
    rig = Rig()
    rig.load("a", "same")
    rig.load("b", "same")
    assert rig.adapters.digests == {"a": "digest of same", "b": "digest of same"}
    rig.ask("r", list(range(9)), 1, lora="a")
    rig.settle()
    cache = rig.scheduler.memory.cache
    for name, kept in (("a", True), ("b", False)):
        rig.tell(UnloadAdapter(f"unload-{name}", name))
        rig.turns(1)
        assert (cache.num_cached(list(range(9)), branch=Branch("digest of same")) > 0) is kept
    assert rig.adapters.digests == {}


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
    rig.ask("r", [1, 2, 3], 100, lora="a")
    rig.turns(2)
    rig.tell(UnloadAdapter("u", "a"))
    rig.tell(AbortRequest("r"))
    rig.turns(1)
    assert rig.replies["u"].ok
    rig.settle()
    rig.adapters.check()
    assert rig.scheduler.idle
