"""LoRA loading in a thread, installation between steps, unloading when unused."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import InitVar, dataclass
from typing import Any, Protocol

from engine.core.adapters import AdapterRefused, Adapters, AdapterState
from engine.core.outputs import refused
from engine.core.request import Request, Variant
from engine.loop.listeners import LoopListener
from engine.messages import ControlReply, FinishReason, GenerateRequest, LoadAdapter, TokenOutput, UnloadAdapter
from service.flags import ConfigError

log = logging.getLogger(__name__)

OFF = "this server was started without --enable-lora"


class AdapterStore(Protocol):
    def start_reading(self, path: str, *, when_done: Callable[[], None]) -> "Future[Any]": ...

    def read(self, path: str) -> Any: ...

    def install(self, number: int, weights: Any) -> str: ...  # its digest

    def remove(self, number: int) -> None: ...


@dataclass(eq=False, kw_only=True)
class AdapterControl(LoopListener):
    """LoRA control; without `store` adapters are off, and the loop does not listen to it."""

    store: AdapterStore | None = None
    max_loaded: InitVar[int | None] = None
    forget_prefixes_of: Callable[[str], None] = lambda _: None
    reply: Callable[[ControlReply], None] = lambda _: None
    wakeup: Callable[[], None] = lambda: None

    def __post_init__(self, max_loaded: int | None) -> None:
        self._adapters = Adapters(max_loaded=max_loaded)
        self.digests: dict[str, str] = {}  # by name
        self._reading: list[tuple[LoadAdapter, Future[Any]]] = []
        self._unloading: dict[str, str] = {}  # name -> waiting call

    def load_now(self, name: str, path: str) -> None:
        """Raises ConfigError."""
        assert self.store is not None
        self._adapters.begin_load(name, path)
        self._install(name, self.store.read(path))

    # ---- requests

    def refuse(self, message: GenerateRequest) -> TokenOutput | None:
        """Hold the adapter of a request until its end, or return a refusal."""
        if not message.lora:
            return None
        try:
            self._adapters.acquire(message.rid, message.lora)
        except AdapterRefused as error:
            return refused(message, FinishReason(kind="abort", message=str(error), status=400, field="lora_path"))
        return None

    def on_added(self, request: Request, now_s: float) -> None:
        if request.message.lora:
            number = self._adapters.acquire(request.rid, request.message.lora)
            request.variant = Variant(number, self.digests[request.message.lora])

    def on_outputs(self, outputs: Sequence[TokenOutput], now_s: float) -> None:
        for output in outputs:
            if output.finish is not None:
                self._adapters.release(output.rid)
        if self._unloading:
            self.wakeup()  # one of them may have been the last user

    # ---- loads and unloads

    def on_message(self, message: LoadAdapter | UnloadAdapter) -> None:
        if self.store is None:
            return self._refuse(message.call_id, f"lora_name: {OFF}")
        try:
            if isinstance(message, UnloadAdapter):
                self._adapters.begin_unload(message.name)
                self._unloading[message.name] = message.call_id
                return
            self._adapters.begin_load(message.name, message.path)
        except AdapterRefused as error:
            return self._refuse(message.call_id, str(error), status=error.status)
        self._reading.append((message, self.store.start_reading(message.path, when_done=self.wakeup)))

    def on_turn(self, now_s: float) -> None:
        if not self._reading and not self._unloading:
            return
        done = [(message, future) for message, future in self._reading if future.done()]
        self._reading = [entry for entry in self._reading if entry not in done]
        for message, future in done:
            self._on_read(message, future)
        for adapter in self._adapters.take_left():
            self._remove(adapter.name, adapter.number)

    def _on_read(self, message: LoadAdapter, future: "Future[Any]") -> None:
        error = future.exception()
        if error is None:
            self._install(message.name, future.result())
            return self._accept(message.call_id, f"loaded the adapter {message.name!r}")
        self._adapters.fail_load(message.name)
        if not isinstance(error, ConfigError):
            log.error("reading the adapter %s failed", message.path, exc_info=error)
            error = ConfigError(f"{message.path} cannot be read: {error}")
        self._refuse(message.call_id, f"lora_path: {error}")

    def _install(self, name: str, weights: Any) -> None:
        assert self.store is not None
        number = self._adapters.finish_load(name)
        self.digests[name] = self.store.install(number, weights)
        log.info("adapter %r loaded", name)

    def _remove(self, name: str, number: int) -> None:
        assert self.store is not None
        self.store.remove(number)
        digest = self.digests.pop(name)
        if digest not in self.digests.values():
            self.forget_prefixes_of(digest)
        log.info("adapter %r unloaded", name)
        self._accept(self._unloading.pop(name), f"unloaded the adapter {name!r}")

    # ---- answers

    def gauges(self) -> dict[str, float]:
        if self.store is None:
            return {}
        counts = self._adapters.counts()
        loaded = counts[AdapterState.READY] + counts[AdapterState.LEAVING]
        return {"num_loaded_loras": float(loaded), "num_used_loras": float(self._adapters.num_used)}

    def check(self) -> None:
        self._adapters.check()

    def _accept(self, call_id: str, message: str) -> None:
        self.reply(ControlReply(call_id, True, message, adapters=self._adapters.loaded()))

    def _refuse(self, call_id: str, message: str, *, status: int = 400) -> None:
        self.reply(ControlReply(call_id, False, message, status=status, adapters=self._adapters.loaded()))
