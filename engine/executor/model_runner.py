"""One step on the device: forward, then sampling. Runs inside the stream, in plan order.

Never waits for the device: CUDA work is enqueued, with copies of results to pinned memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import TypeVar

import torch

from engine.core.plan import Plan
from engine.executor.passes import ForwardPass, SamplePass, StepOutput, nothing_sampled
from engine.executor.states import States
from engine.executor.step_part import Forward, TokenDrafter
from engine.kv.host_pool import HostPool
from engine.kv.page_backup import PageBackup
from engine.kv.page_copies import Arrival
from engine.models.decoder import DenseDecoder
from engine.models.expert_balance import ExpertBalance, expert_gauges, expert_loads

# ---- Model in use by a rank's steps.


class RunningModel:
    """Holder of the model, used in stream order."""

    def __init__(self, model: "DenseDecoder", forward_pass: "ForwardPass") -> None:
        self._model: DenseDecoder | None = model
        self._forward_pass = forward_pass
        forward_pass.attach(model)

    @property
    def released(self) -> bool:
        return self._model is None

    @property
    def model(self) -> "DenseDecoder":
        assert self._model is not None, "its weights are released"
        return self._model

    def use(self, model: "DenseDecoder", *, needs_graphs: bool = True) -> None:
        """Use another model of the same shape.

        `needs_graphs`: raise torch.OutOfMemoryError instead of continuing without.
        """
        self._model = model
        self._forward_pass.attach(model)
        if needs_graphs:
            self._forward_pass.record(model)
        else:
            self._forward_pass.record_if_possible(model)

    def drop(self) -> None:
        """Drop model and recordings until `use`; no step may come."""
        self._model = None
        self._forward_pass.detach()

    def record(self) -> None:
        """Record graphs on all ranks before the first step. Raises torch.OutOfMemoryError."""
        self._forward_pass.record(self.model)


# ---- Copies of a step's KV pages between device and host, in `Plan` order.


class Copies:
    """Copies for retracted requests (`backup`), and for the host tier."""

    def __init__(self, *, backup: PageBackup | None, host_pool: HostPool | None, states: States | None) -> None:
        self._backup = backup
        self._host_pool = host_pool
        self._states = states

    def begin(self, plan: Plan) -> Sequence[Arrival]:
        """Loads that the forward awaits by layer."""
        arrivals: Sequence[Arrival] = ()
        if plan.states_to_host:
            assert self._states is not None, "a plan copies a state, and there is none"
            self._states.save(plan)
        if self._host_pool is None:
            assert not plan.to_host and not plan.from_host, "a plan copies to a host tier, and there is none"
        elif not (arrival := self._host_pool.begin(plan)).is_held:
            arrivals = (arrival,)
        if self._backup is None:
            assert not plan.saves, "a plan keeps copies of pages, and there is no room for them"
        else:
            self._backup.run(plan)
        return arrivals

    def wait(self, seq: int) -> None:
        """Block until host pages of steps up to `seq` are complete."""
        for pool in self._host_pools():
            pool.wait(seq)

    def close(self) -> None:
        for pool in self._host_pools():
            pool.close()
        if self._states is not None:
            self._states.close()

    def _host_pools(self) -> list[HostPool]:
        tier = [] if self._host_pool is None else [self._host_pool]
        return tier + ([] if self._backup is None else self._backup.hosts)


T = TypeVar("T")


class DeviceOutOfMemory(Exception):
    """The device has no memory for a step: no results, but slots and copies as planned."""


@dataclass(eq=False, kw_only=True)
class ModelRunner:
    """`drafts`: of a model with a drafter; `states`: of one with recurrent layers."""

    model: InitVar[DenseDecoder]
    copies: Copies
    forward_pass: ForwardPass
    sample_pass: SamplePass
    drafts: TokenDrafter | None = None
    states: States | None = None

    def __post_init__(self, model: DenseDecoder) -> None:
        self.running = RunningModel(model, self.forward_pass)

    @property
    def balance(self) -> ExpertBalance | None:
        return self.running.model.balance

    def expert_gauges(self) -> dict[str, float]:
        """{} while the weights are released. Any thread."""
        return {} if self.running.released else expert_gauges(self._loads(), self.balance)

    def expert_loads(self) -> list[list[int]]:
        return [] if self.running.released else expert_loads(self._loads(), self.running.model.num_layers)

    def _loads(self) -> dict[int, torch.Tensor]:
        return {layer: mixture.loads for layer, mixture in self.running.model.mixtures().items()}

    def run(self, plan: Plan) -> StepOutput:
        return self.sample(plan, self.forward(plan))

    def forward(self, plan: Plan) -> Forward | None:
        """Run everything before sampling; reads no masks. Return sampling's input, if any tokens.

        Raises DeviceOutOfMemory. A torch.OutOfMemoryError of copies or slots passes: later steps
        rely on them.
        """
        if plan.rewinds:
            assert self.states is not None, "the model has no states"
            self.states.rewind(self.running.model, plan.rewinds)
        arrivals = self.copies.begin(plan)
        for slot in plan.closes:
            self.sample_pass.sampler.close(slot)
        for opened in plan.opens:
            self.sample_pass.sampler.open(opened)
            self.forward_pass.open(opened)
        compute(lambda: self.forward_pass.prepare(self.running.model, plan))
        if not plan.items:
            compute(lambda: self.forward_pass.join(self.running.model, plan, arrivals))
            return None
        if plan.skips_model:
            for arrival in arrivals:
                arrival.hold_all()
            self.forward_pass.place(plan)
            return None
        return compute(lambda: self.forward_pass.run(self.running.model, plan, arrivals))

    def wait_for_copies(self, seq: int) -> None:
        self.copies.wait(seq)

    def close(self) -> None:
        """Give pinned memory back. Nothing is launched any more."""
        self.copies.close()

    def sample(self, plan: Plan, forward: Forward | None) -> StepOutput:
        """Sample tokens; `forward`: of the same plan. Raises DeviceOutOfMemory."""
        if not plan.items:
            return nothing_sampled({})
        if plan.skips_model:
            return compute(lambda: self._drafted(plan))
        assert forward is not None, f"step {plan.seq}: the forward has failed"
        return compute(lambda: self._sampled(plan, forward))

    def _sampled(self, plan: Plan, forward: Forward) -> StepOutput:
        output = self.sample_pass.run(self.running.model, plan, forward)
        if self.drafts is not None and any(item.draft for item in plan.items):
            self.drafts.accept(plan.items, output.on_device)
        return output

    def _drafted(self, plan: Plan) -> StepOutput:
        assert self.drafts is not None, "a plan asks a drafter, and there is none"
        output = nothing_sampled({})
        output.drafted = self.drafts.draft(self.running.model, plan.items)
        return output


def compute(work: Callable[[], T]) -> T:
    """Raise DeviceOutOfMemory in place of torch's error, whose frames hold the step's tensors."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        why = str(error).partition(". If reserved")[0]  # torch's advice is about its own settings
    torch.cuda.empty_cache()  # without CUDA it does nothing
    raise DeviceOutOfMemory(why)
