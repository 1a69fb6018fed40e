"""The parts of a rank's steps, by feature, and the memory that each has on the device."""

from collections.abc import Sequence

import torch

from engine.attention.backend import CapturableBackend, make_attention_backend
from engine.config import EngineConfig, ModelFlags
from engine.core.plan import Plan, SlotOpen
from engine.device.step_memory import StepMemory
from engine.executor.image_pass import ImagePass, ImagePositions
from engine.executor.states import States
from engine.executor.step_part import Batch, PagedPool, StepInputs, StepPart, StepRows
from engine.flags.resolve import drafts_overlap, state_slots
from engine.flags.speculation import passes_of, topk_of
from engine.kv.kv_pool import DTYPES
from engine.kv.state_pool import StatePool
from engine.kv.step_batch import PageTable, WindowedPageTable
from engine.lora.bank import AdapterBank, make_bank
from engine.models.decoder import DenseDecoder
from engine.sampler.sampler import TokenSampler
from engine.speculative.draft_graphs import DraftRecording
from engine.speculative.draft_pass import DraftPass, draft_pass
from engine.speculative.draft_rows import DraftTrees
from engine.speculative.draft_steps import DraftParts
from engine.speculative.futures import DraftedInputs, DraftFutures
from service.flags import ConfigError


class _BalancedExperts(StepPart):
    """Experts that may move between two steps: a recorded step runs without the host."""

    def expect(self, batch: Batch) -> None:
        assert batch.model.balance is not None, "a part of models whose experts move"
        if not batch.plan.warms_up:
            batch.model.balance.on_step()


class _RoutedTokens(StepPart):
    """Loads of experts, which leave out steps before the worker is ready."""

    def prepare(self, model: DenseDecoder, plan: Plan) -> None:
        if plan.warms_up:
            for mixture in model.mixtures().values():
                mixture.loads.zero_()


class _AdapterPart(StepPart):
    """LoRA adapters, which change the model's layers."""

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank

    def attach(self, model: DenseDecoder) -> None:
        self._bank.attach(model.linear_sites())

    def open(self, opened: SlotOpen) -> None:
        self._bank.open(opened)

    def expect(self, batch: Batch) -> None:
        batch.adapted = self._bank.begin(batch.items)

    def begin(self, batch: Batch) -> None:
        self._bank.compute()


class _WindowPart(StepPart):
    """Layers with a window, which have a pool of their own."""

    def __init__(self, page_table: WindowedPageTable) -> None:
        self._table = page_table

    def fill(self, rows: StepRows) -> None:
        rows.step.windows = self._table.window_rows(rows.token_slots, rows.places)


def make_parts(
    config: EngineConfig,
    model: DenseDecoder,
    memory: StepMemory,
    page_table: PageTable,
    *,
    adapters: AdapterBank | None,
    states: States | None,
) -> list[StepPart]:
    """The parts of steps in their order; the drafter's follows.

    Windows use the places that trees of drafts fill in.
    """
    parts = list[StepPart]()
    if topk_of(config) > 1:
        parts.append(DraftTrees(page_table))
    if isinstance(page_table, WindowedPageTable):
        parts.append(_WindowPart(page_table))
    if model.balance is not None:
        parts.append(_BalancedExperts())
    if model.mixtures():
        parts.append(_RoutedTokens())
    if adapters is not None:
        parts.append(_AdapterPart(adapters))
    if states is not None:
        parts.append(states)
    if model.sees:
        parts.append(ImagePositions())
    if model.vision is not None:
        device, dtype = page_table.device, DTYPES[config.dtype]
        parts.append(
            ImagePass(
                device,
                dtype=dtype,
                ranks=model.collectives,
                shares=config.mm_enable_dp_encoder,
                arrivals=memory.arrivals,
            )
        )
    return parts


def make_adapters(config: EngineConfig, model: DenseDecoder, *, grouped: bool) -> AdapterBank | None:
    """`grouped`: by kernels for all of a step."""
    if not config.enable_lora:
        return None
    return make_bank(
        [site.shape for site in model.linear_sites()],
        grouped=grouped,
        places=config.max_loras_per_batch,
        max_rank=config.max_lora_rank,
        dtype=DTYPES[config.dtype],
        device=torch.device(config.device),
    )


def make_states(config: EngineConfig, model: DenseDecoder, memory: StepMemory, device: torch.device) -> States | None:
    """Raises ConfigError."""
    specs, num_slots, shadows = model.state_specs(), state_slots(config), memory.shadows
    if not specs:
        return None
    try:
        pool = StatePool(specs, num_slots=num_slots, num_shadows=shadows, device=device)
    except (MemoryError, OSError, torch.OutOfMemoryError) as error:
        size = (num_slots + shadows) * StatePool.slot_bytes_of(specs) / 2**30
        beside = f" and {shadows} copies for drafts" if shadows else ""
        raise ConfigError(
            f"--max-running-requests {config.max_running_requests}: no memory for {num_slots} recurrent states{beside} of {size:.1f} GiB "
            f"({error}); lower it"
        ) from error
    return States(pool, memory.host_states)


def with_draft_futures(config: EngineConfig, inputs: StepInputs, device: torch.device) -> StepInputs:
    """`inputs`, and with overlapped drafts what they leave on the device."""
    if not drafts_overlap(config):
        return inputs
    assert config.max_running_requests is not None, "resolved"
    futures = DraftFutures(num_slots=config.max_running_requests, most=passes_of(config), device=device)
    return DraftedInputs(inputs, futures)


def make_draft_pass(
    config: ModelFlags,
    model: DenseDecoder,
    pools: Sequence[PagedPool],
    *,
    sampler: TokenSampler | None,
    inputs: StepInputs,
    recording: DraftRecording | None,
) -> DraftPass | None:
    """Raises ConfigError. `pools`: of all layers. `sampler`: of the rank that samples."""
    drafter, pool = model.drafter, pools[0].pool
    if drafter is None:
        return None
    assert pool.drafter is not None, "pages have room for what the drafter keeps"
    backend = make_attention_backend(
        config.attention_backend, pool.drafter, num_heads=drafter.num_heads, needs=drafter.attention_needs
    )
    recording = recording if isinstance(backend, CapturableBackend) else None
    return draft_pass(DraftParts(pools, backend, sampler, model.collectives, inputs), recording)
