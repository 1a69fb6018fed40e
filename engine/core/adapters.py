"""LoRA adapters by name, and the requests that use them.

  (absent) --begin_load--> LOADING --finish_load--> READY
      --begin_unload--> LEAVING --take_left, no user--> (absent)
  LOADING --fail_load--> (absent)

Each load has a new *number*, as a name may be reused; 0 is the base model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from engine.core.policy import Limits
from engine.core.prefill_planning import PrefillAdder, PrefillPlanner
from engine.core.request import Request
from engine.core.state import Stages


class AdapterState(Enum):
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"


class AdapterRefused(ValueError):
    """The name cannot be loaded, unloaded or used now."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Adapter:
    name: str
    path: str
    number: int
    state: AdapterState
    users: set[str]


class Adapters:
    def __init__(self, *, max_loaded: int | None = None) -> None:
        self._max_loaded = max_loaded
        self._last_number = 0
        self._by_name: dict[str, Adapter] = {}
        self._used_by: dict[str, Adapter] = {}  # rid -> its adapter

    # ---- loads

    def begin_load(self, name: str, path: str) -> None:
        """Raises AdapterRefused."""
        known = self._by_name.get(name)
        if known is not None and known.state is AdapterState.READY:
            raise AdapterRefused(f"lora_name: {name!r} is loaded already (from {known.path}); unload it first")
        if known is not None:
            raise AdapterRefused(f"lora_name: {name!r} is {known.state.value} just now", status=409)
        if self._max_loaded is not None and len(self._by_name) >= self._max_loaded:
            raise AdapterRefused(
                f"lora_name: {len(self._by_name)} adapters are loaded, as many as --max-loaded-loras allows; unload one first"
            )
        self._last_number += 1
        self._by_name[name] = Adapter(name, path, self._last_number, AdapterState.LOADING, set())

    def finish_load(self, name: str) -> int:
        """Enable requests for it; return its number."""
        adapter = self._by_name[name]
        assert adapter.state is AdapterState.LOADING
        adapter.state = AdapterState.READY
        return adapter.number

    def fail_load(self, name: str) -> None:
        assert self._by_name[name].state is AdapterState.LOADING
        del self._by_name[name]

    def begin_unload(self, name: str) -> None:
        """Raises AdapterRefused."""
        adapter = self._by_name.get(name)
        if adapter is None:
            raise AdapterRefused(f"lora_name: {name!r} is not loaded; {self._loaded_names()}")
        if adapter.state is not AdapterState.READY:
            raise AdapterRefused(f"lora_name: {name!r} is {adapter.state.value} just now", status=409)
        adapter.state = AdapterState.LEAVING

    def take_left(self) -> list[Adapter]:
        left = [a for a in self._by_name.values() if a.state is AdapterState.LEAVING and not a.users]
        for adapter in left:
            del self._by_name[adapter.name]
        return left

    # ---- uses

    def acquire(self, rid: str, name: str) -> int:
        """Hold `name` for `rid` until `release`; return its number. Raises AdapterRefused."""
        if rid in self._used_by:
            return self._used_by[rid].number
        adapter = self._by_name.get(name)
        if adapter is None or adapter.state is AdapterState.LOADING:
            raise AdapterRefused(f"lora_path: no adapter {name!r} is loaded; {self._loaded_names()}")
        if adapter.state is AdapterState.LEAVING:
            raise AdapterRefused(f"lora_path: the adapter {name!r} is being unloaded")
        adapter.users.add(rid)
        self._used_by[rid] = adapter
        return adapter.number

    def release(self, rid: str) -> None:
        adapter = self._used_by.pop(rid, None)
        if adapter is not None:
            adapter.users.remove(rid)

    def loaded(self) -> dict[str, str]:
        """Name -> path, by load order."""
        return {a.name: a.path for a in self._by_name.values() if a.state is AdapterState.READY}

    def counts(self) -> dict[AdapterState, int]:
        return {state: sum(a.state is state for a in self._by_name.values()) for state in AdapterState}

    @property
    def num_used(self) -> int:
        return sum(bool(a.users) for a in self._by_name.values())

    def _loaded_names(self) -> str:
        names = list(self.loaded())
        return f"loaded: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else "none is"

    def check(self) -> None:
        used = {rid: a.name for a in self._by_name.values() for rid in a.users}
        assert used == {rid: a.name for rid, a in self._used_by.items()}, "users and adapters differ"
        assert not any(a.users for a in self._by_name.values() if a.state is AdapterState.LOADING)
        assert self._max_loaded is None or len(self._by_name) <= self._max_loaded


class AdapterBudget:
    """Adapters of the next step; `growing` requests compute or are about to.

    At most `max_loras_per_batch`, with running ones; others are skipped, as in SGLang. After
    `lora_drain_wait_s` the adapter that ends soonest takes no new requests.
    """

    def __init__(
        self, limits: Limits, *, growing: Iterable[Request], waiting: Iterable[Request], now_s: float = 0.0
    ) -> None:
        self._places = limits.max_loras_per_batch
        self._ending: int | None = None  # drains: takes no new requests
        self._promised: set[int] = set()  # at most one: gets the next free place
        running = [r for r in growing if r.variant.number]
        self._used = {r.variant.number for r in running}
        overdue = self._overdue(waiting, limits.lora_drain_wait_s, now_s)
        if overdue is not None:
            self._promised = {overdue.variant.number}
            self._ending = _ends_soonest(running) if len(self._used) >= self._places else None

    def has_place(self, request: Request) -> bool:
        adapter = request.variant.number
        if not adapter:
            return True
        if adapter in self._used:
            return adapter != self._ending
        return len(self._used | self._promised | {adapter}) <= self._places

    def take(self, request: Request) -> None:
        assert self.has_place(request)
        if request.variant.number:
            self._used.add(request.variant.number)

    def _overdue(self, waiting: Iterable[Request], wait_s: float | None, now_s: float) -> Request | None:
        if wait_s is None:
            return None
        for request in waiting:
            if now_s - request.arrived_s < wait_s:
                return None
            if request.variant.number and request.variant.number not in self._used:
                return request
        return None


def _ends_soonest(running: list[Request]) -> int:
    left: dict[int, int] = {}
    for request in running:
        own = request.num_tokens - request.launched_len + request.samples_left
        left[request.variant.number] = max(own, left.get(request.variant.number, 0))
    return min(left, key=lambda adapter: (left[adapter], adapter))


def budget_of(stages: Stages, limits: Limits, now_s: float) -> AdapterBudget:
    waiting = chain(stages.waiting.values(), (r for r in stages.held if not r.pages and not r.ended))
    return AdapterBudget(limits, growing=stages.growing(), waiting=waiting, now_s=now_s)


class AdapterPrefill(PrefillPlanner):
    """Choice of prompts whose adapters have a place in the step."""

    _adapters: AdapterBudget  # of the step that is planned

    def in_order(self, now_s: float) -> list[Request]:
        self._adapters = budget_of(self._stages, self._limits, now_s)
        return super().in_order(now_s)

    def _adder(self, now_s: float) -> PrefillAdder:
        self._adapters = budget_of(self._stages, self._limits, now_s)
        return super()._adder(now_s)

    def _waiting(self) -> Iterable[Request]:
        return (r for r in super()._waiting() if self._adapters.has_place(r))

    def _waits(self, request: Request, now_s: float) -> bool:
        return super()._waits(request, now_s) or not self._adapters.has_place(request)

    def _note_admitted(self, request: Request) -> None:
        super()._note_admitted(request)
        self._adapters.take(request)
