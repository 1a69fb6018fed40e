"""Choice of the steps that run as graphs."""

import logging
from functools import partial

import torch

from engine.attention.backend import CapturableBackend
from engine.config import EngineConfig
from engine.device.forward_parts import ForwardParts
from engine.device.step_memory import Recording
from engine.executor.graphs import (
    CudaCapture,
    DecodeGraphs,
    GraphRecorder,
    PrefillGraphs,
    RecordedEnd,
    RecordedFeatures,
    RecordedTrees,
    graph_sizes,
)
from engine.executor.step_part import RecordedSteps, StepInputs
from engine.flags.resolve import flops_of_token
from engine.flags.speculation import passes_of, rows_of_request, topk_of
from engine.kernels.triton.extend_plan import MAX_WHOLE
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.speculative.draft_rows import tree_rows

LAUNCH_FLOPS = 2e11  # what an H200 computes while its host launches a layer's kernels (docs/reports/gpu.md)

log = logging.getLogger(__name__)


def make_graphs(
    config: EngineConfig,
    model: DenseDecoder,
    parts: ForwardParts,
    records: Recording,
    *,
    inputs: StepInputs,
    end: RecordedEnd | None,
) -> list[RecordedSteps]:
    """`end`: of decode steps; None: they cannot be recorded."""
    capture, page_table, backend = records.capture, parts.page_table, parts.backend
    if capture is None and page_table.device.type == "cuda":
        capture = partial(CudaCapture, torch.cuda.Stream(page_table.device))  # type: ignore[no-untyped-call]
    if capture is None or config.disable_cuda_graph or not (records.decodes or records.prefills):
        return []
    if not isinstance(backend, CapturableBackend) or end is None:
        log.warning("no graphs: the attention backend asks the host for lengths; triton does not")
        return []
    found = list[RecordedSteps]()
    recorder = GraphRecorder(capture, backend, page_table, inputs, parts.states, records.progress)
    if records.decodes:
        adapters = parts.adapters
        features = RecordedFeatures(
            adapters=adapters if adapters is not None and adapters.records else None,
            trees=RecordedTrees(passes_of(config), tree_rows) if topk_of(config) > 1 else None,
            sees=model.sees,
        )
        found.append(DecodeGraphs(_decode_sizes(config), recorder, end=end, features=features))
    if records.prefills and parts.states is None:  # chunks of recurrences are cut on the host
        found.append(PrefillGraphs(prefill_sizes(model.config), recorder))
    return found


def prefill_sizes(model: ModelConfig) -> list[int]:
    """Tokens of prompt steps that a GPU computes faster than a host launches."""
    faster = int(LAUNCH_FLOPS * model.num_layers / flops_of_token(model))
    most = min(max(faster // 64 * 64, 64), MAX_WHOLE)
    return [16, 32, *range(64, min(most, 512) + 1, 64), *range(768, most + 1, 256)]


def num_graphs(config: EngineConfig, model: ModelConfig, *, decodes: bool, prefills: bool) -> int:
    if config.disable_cuda_graph:
        return 0
    kinds = 2 if config.enable_lora else 1  # decode steps without and with adapters
    return len(_decode_sizes(config)) * kinds * decodes + len(prefill_sizes(model)) * prefills


def max_recorded_rows(config: EngineConfig, model: ModelConfig) -> int:
    return max(_decode_sizes(config)[-1], prefill_sizes(model)[-1])


def logits_bytes(config: EngineConfig, *, vocab_size: int, decodes: bool) -> int:
    return 0 if config.disable_cuda_graph or not decodes else 4 * _decode_sizes(config)[-1] * vocab_size


def _decode_sizes(config: EngineConfig) -> list[int]:
    assert config.max_running_requests is not None, "resolved"
    return graph_sizes(
        sizes=config.cuda_graph_bs,
        max_bs=config.cuda_graph_max_bs,
        max_running=config.max_running_requests,
        rows=1 if config.speculative_algorithm is None else rows_of_request(config),
    )
