"""Whole workers without HTTP: production engine, role, transfer engine and bootstrap server, in one process.

A pair is a prefill and a decode worker whose KV crosses by the real transfer engine; `turn`s take the loop's place.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from time import monotonic, sleep
from types import MappingProxyType
from typing import Any, Protocol

from bootstrap_server.app import BootstrapServer
from bootstrap_server.registry import BootstrapConfig
from disagg.compose import make_role
from disagg.config import DisaggConfig, SchedulerSpec
from disagg.transfer_engine import engine_use
from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.loop.role import EngineRole
from engine.messages import Bootstrap, TokenOutput
from engine.sampling_params import SamplingParams
from tests.core.engine_in_a_test import new_request
from tests.engine.engine_in_process import EngineInProcess

HOST = "127.0.0.1"
REST_S = 60.0


@dataclass
class Seen:
    """What the steps of a worker were."""

    overlapped: int = 0
    mixed: int = 0
    chunks: int = 0

    def plan(self, plan: Plan, *, in_flight: int) -> None:
        self.overlapped += in_flight > 0
        self.mixed += len({item.extend for item in plan.items}) == 2
        self.chunks += sum(not item.sample for item in plan.items)


@dataclass
class Outputs:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    aborted: dict[str, str] = field(default_factory=dict)  # why

    def hear(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            assert output.rid not in self.ended
            self.tokens.setdefault(output.rid, []).extend(output.new_ids)
            if output.finish is not None:
                self.ended.add(output.rid)
                if output.finish.kind == "abort":
                    self.aborted[output.rid] = output.finish.message


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
        own = DisaggConfig(disaggregation_mode=mode, num_reserved_decode_tokens=0, **disagg)
        super().__init__(model_path, use=engine_use(own), **flags)
        spec = SchedulerSpec(
            engine=self.parts.config,
            disagg=own,
            ipc_dir="",
            control_host=HOST,
            bootstrap=f"{HOST}:{bootstrap}" if mode == "prefill" else None,
        )
        self.role: EngineRole = make_role(spec, self.parts, wakeup=lambda: None)
        self.prefill_only = mode == "prefill"
        self.seen, self.outputs = Seen(), Outputs()

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
        self.outputs.hear(self.role.add(request, monotonic()))

    def poll(self) -> None:
        self.outputs.hear(self.role.poll(monotonic()))

    def turn(self) -> bool:
        self.poll()
        plan = self.parts.scheduler.schedule(monotonic())
        worked = plan is not None or self.pipeline.num_launched > 0
        if plan is not None:
            self.role.on_launch(plan, monotonic())
            self.seen.plan(plan, in_flight=self.pipeline.num_launched)
        self.outputs.hear(self.pipeline.advance(plan))
        return worked

    def collect(self, effects: StepEffects) -> list[TokenOutput]:
        self.role.on_step(effects, monotonic())
        return effects.outputs

    @property
    def at_rest(self) -> bool:
        return not self.pipeline.num_launched and self.parts.scheduler.idle and not self.role.waits_for_outside()

    def check(self) -> None:
        self.parts.scheduler.check()
        self.role.check()
        counts = self.parts.scheduler.memory.allocator.counts()
        assert counts["held"] == counts["quarantined"] == 0

    def queues(self) -> dict[str, int]:
        return self.role.queues()

    def close(self) -> None:
        self.role.close()
        super().close()


class System(Protocol):
    """One worker, or a pair."""

    @property
    def workers(self) -> list[WorkerInProcess]: ...

    def submit(self, rid: str, prompt: list[int], *, new: int) -> None: ...

    def gather(self, count: int) -> None:
        """Until `count` requests are where they decode; none does yet. So what happens then is the same every time."""


class Alone:
    def __init__(self, worker: WorkerInProcess) -> None:
        self.workers = [worker]

    def submit(self, rid: str, prompt: list[int], *, new: int) -> None:
        self.workers[0].submit(rid, prompt, new=new, meeting=None)

    def gather(self, count: int) -> None:
        """They are."""


class Pair:
    def __init__(self, prefill: WorkerInProcess, decode: WorkerInProcess, *, port: int) -> None:
        self.workers = [prefill, decode]
        self._port = port
        self._rooms = 0

    def submit(self, rid: str, prompt: list[int], *, new: int, **more: Mapping[str, Any]) -> None:
        self._rooms += 1
        for worker in self.workers:
            meeting = Bootstrap(HOST, self._port, self._rooms)
            worker.submit(rid, prompt, new=new, meeting=meeting, **more)

    def gather(self, count: int) -> None:
        prefill, decode = self.workers
        deadline_s = monotonic() + REST_S
        while decode.parts.scheduler.num_running < count:
            assert monotonic() < deadline_s, decode.queues()
            prefill.turn()
            decode.poll()


@contextmanager
def unified(model_path: str, **flags: object) -> Iterator[Alone]:
    with ExitStack() as stack:
        worker = WorkerInProcess(model_path, **flags)
        stack.callback(worker.close)
        yield Alone(worker)


@contextmanager
def disaggregated(model_path: str, *, decode: dict[str, object], **flags: object) -> Iterator[Pair]:
    """`decode`: flags of that worker alone."""
    with ExitStack() as stack:
        server = BootstrapServer(BootstrapConfig(port=0), shared=False, secret=None)
        server.start()
        stack.callback(server.close)
        workers = []
        for mode, own in (("prefill", {}), ("decode", decode)):
            worker = WorkerInProcess(model_path, mode=mode, bootstrap=server.port, **{**flags, **own})
            stack.callback(worker.close)
            workers.append(worker)
        yield Pair(*workers, port=server.port)


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
    deadline_s, turns = monotonic() + rest_s, 0
    while waiting or not all(worker.at_rest for worker in system.workers):
        assert monotonic() < deadline_s, [worker.queues() for worker in system.workers]
        if not any([worker.turn() for worker in system.workers]):
            sleep(0.0005)
        turns += 1
        if waiting and turns % turns_between == 0:
            rid, prompt, new = waiting.pop(0)
            system.submit(rid, prompt, new=new)
    for worker in system.workers:
        worker.check()
        assert not worker.outputs.aborted
    return system.workers[-1].outputs.tokens
