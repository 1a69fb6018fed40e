"""Whole workers without HTTP: production engine, role, transfer engine and bootstrap server, in one process.

A pair is a prefill and a decode worker whose KV crosses by the real transfer engine; `turn`s take the loop's place.
"""

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from time import monotonic, sleep
from types import MappingProxyType
from typing import Any

from bootstrap_server.app import BootstrapServer
from bootstrap_server.registry import BootstrapConfig
from disagg.compose import make_role
from disagg.config import DisaggConfig, SchedulerSpec
from disagg.features.prefix_fetching import PrefixFetches
from disagg.transfer_engine import engine_of, engine_use, memory_of
from engine.config import EngineConfig
from engine.loop.role import EngineRole
from engine.messages import Bootstrap, PrefixSource, TokenOutput
from engine.ranks.rank_parts import RankPools
from engine.sampling_params import SamplingParams
from service.kv_layout import layout_conflict, read_layout
from tests.core.engine_in_a_test import new_request
from tests.engine.engine_in_process import EngineInProcess, PartsInProcess
from tests.engine.ranks.ranks_in_process import ranks
from transfer_backends.engines.remote import serve_engine

HOST = "127.0.0.1"
REST_S = 60.0


class WorkerInProcess(EngineInProcess):
    """`mode`: as --disaggregation-mode; `bootstrap`: port of the server (prefill registers there); `disagg`: its other flags."""

    def __init__(
        self,
        model_path: str,
        *,
        mode: str = "null",
        bootstrap: int = 0,
        disagg: Mapping[str, Any] = MappingProxyType({}),
        **flags: object,
    ) -> None:
        self._disagg = DisaggConfig(disaggregation_mode=mode, num_reserved_decode_tokens=0, **disagg)
        self.prefill_only = mode == "prefill"
        self._bootstrap = f"{HOST}:{bootstrap}" if self.prefill_only else None
        super().__init__(model_path, use=engine_use(self._disagg), **flags)

    def make_role(self) -> EngineRole:
        spec = SchedulerSpec(
            engine=self.parts.config,
            disagg=self._disagg,
            ipc_dir="",
            control_host=HOST,
            bootstrap=self._bootstrap,
        )
        return make_role(spec, self.parts, wakeup=lambda: None)

    def submit(
        self,
        rid: str,
        prompt: list[int],
        *,
        new: int,
        meeting: Bootstrap | None,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        wanted: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`wanted`: other fields of the request."""
        values = {"temperature": 0.0, "seed": 0, "ignore_eos": True, **sampling}
        request = new_request(
            rid=rid,
            input_ids=prompt,
            sampling=SamplingParams(max_new_tokens=new, **values),
            eos_ids=frozenset(self.model.eos_token_ids),
            arrived_s=monotonic(),
            bootstrap=meeting,
            prefill_only=self.prefill_only,
            **deepcopy(dict(wanted)),
        )
        self.hear(self.role.add(request, monotonic()))

    def hear(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            assert output.rid not in self.finish, f"{output.rid} spoke after its end"
            super().hear([output])

    @property
    def aborted(self) -> dict[str, str]:
        """Why."""
        return {rid: reason.message for rid, reason in self.finish.items() if reason.kind == "abort"}


class System:
    """One worker, or a prefill and a decode worker, which meet at the bootstrap server of `port`."""

    def __init__(self, *workers: WorkerInProcess, port: int = 0) -> None:
        self.workers = workers
        self._port = port
        self._rooms = 0

    @property
    def conflict(self) -> str | None:
        """Why a router would send a pair no request, by what both workers name in /server_info."""
        prefill, decode = (read_layout(worker.role.info()) for worker in self.workers)
        assert prefill is not None and decode is not None
        return layout_conflict(prefill, decode, me="prefill", them="decode")

    def submit(self, rid: str, prompt: list[int], *, new: int, **more: Mapping[str, Any]) -> None:
        self._rooms += 1
        meeting = Bootstrap(HOST, self._port, self._rooms) if len(self.workers) > 1 else None
        for worker in self.workers:
            worker.submit(rid, prompt, new=new, meeting=meeting, **more)

    def gather(self, count: int) -> None:
        """Until `count` requests are where they decode; none does yet. So what happens then is the same every time."""
        *prefills, decode = self.workers
        deadline_s = monotonic() + REST_S
        while prefills and decode.parts.scheduler.num_running < count:
            assert monotonic() < deadline_s, decode.role.queues()
            prefills[0].turn()
            decode.poll()


@contextmanager
def unified(model_path: str, **flags: Any) -> Iterator[System]:
    with WorkerInProcess(model_path, **flags) as worker:
        yield System(worker)


@contextmanager
def disaggregated(
    model_path: str, *, decode: Mapping[str, Any], prefill: Mapping[str, Any] = MappingProxyType({}), **flags: Any
) -> Iterator[System]:
    """`decode`, `prefill`: flags of that worker alone, which may have several ranks."""
    with ExitStack() as stack:
        server = BootstrapServer(BootstrapConfig(port=0), shared=False, secret=None)
        server.start()
        stack.callback(server.close)
        workers = [
            stack.enter_context(_worker(model_path, mode, server.port, **{**flags, **own}))
            for mode, own in (("prefill", prefill), ("decode", decode))
        ]
        yield System(*workers, port=server.port)


@contextmanager
def _worker(
    path: str, mode: str, port: int, *, disagg: Mapping[str, Any] = MappingProxyType({}), **flags: Any
) -> Iterator[WorkerInProcess]:
    make = partial(WorkerInProcess, mode=mode, bootstrap=port, disagg=disagg)
    serve = partial(_serve, DisaggConfig(disaggregation_mode=mode, **disagg), path)
    with ranks(path, make=make, serve=serve, **flags) as group:
        assert isinstance(group.engine, WorkerInProcess)
        yield group.engine


def _serve(disagg: DisaggConfig, path: str, pools: RankPools, sock: socket.socket) -> None:
    """A follower's transfer engine."""
    spec = SchedulerSpec(
        engine=EngineConfig(model_path=path), disagg=disagg, ipc_dir="", control_host=HOST, bootstrap=None
    )
    receives = disagg.disaggregation_mode == "decode" or disagg.prefix_fetch
    serve_engine(engine_of(spec, pools.kv), memory_of(pools), sock, receives=receives, host=HOST)


def run(
    system: System,
    asked: list[tuple[str, list[int], int]],
    *,
    turns_between: int,
    together: int | None = None,
    rest_s: float = REST_S,
) -> dict[str, list[int]]:
    """The first `together` of `asked` (name, prompt, new tokens) at once, half unless told; then one by one while those run.

    The tokens of each; all memory is back then. Fails after `rest_s`.
    """
    together = len(asked) // 2 if together is None else together
    waiting = asked[together:]
    for rid, prompt, new in asked[:together]:
        system.submit(rid, prompt, new=new)
    system.gather(together)
    for turns, _ in enumerate(turning(system.workers, lambda: bool(waiting), rest_s=rest_s), 1):
        if waiting and turns % turns_between == 0:
            rid, prompt, new = waiting.pop(0)
            system.submit(rid, prompt, new=new)
    assert not any(worker.aborted for worker in system.workers)
    return system.workers[-1].tokens


def next_turn(pair: System, chat: list[int], *, known: int, new: int = 16) -> list[int]:
    """The tokens of "next", of which decode has `known` tokens, as prefill knows; it waits for them."""
    prefill, decode = pair.workers
    (fetches,) = (part for part in prefill.role.parts if isinstance(part, PrefixFetches))  # type: ignore[attr-defined]
    fetches._policy.wait_s = lambda num_tokens, now_s: REST_S  # type: ignore[method-assign]
    at = json.loads(decode.role.info()["prefix_source"])
    meeting = Bootstrap(HOST, pair._port, 77)
    source = PrefixSource(at["control"], at["incarnation"], known)
    prefill.submit("next", chat, new=new, meeting=meeting, wanted={"prefix_source": source})
    decode.submit("next", chat, new=new, meeting=meeting)
    for _ in turning(pair.workers):
        pass
    return decode.tokens["next"]


def turning(
    workers: Sequence[PartsInProcess], more: Callable[[], bool] = lambda: False, *, rest_s: float = REST_S
) -> Iterator[None]:
    """Turns of all, until there is no `more` to come and all rest; then each is checked. Fails after `rest_s`."""
    deadline_s = monotonic() + rest_s
    while more() or not all(worker.at_rest for worker in workers):
        assert monotonic() < deadline_s, [worker.role.queues() for worker in workers]
        if not any([worker.turn() for worker in workers]):
            sleep(0.0005)
        yield
    for worker in workers:
        worker.check()
