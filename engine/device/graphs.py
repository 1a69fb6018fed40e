"""Choice of the steps that run as graphs."""

import logging
from dataclasses import replace
from functools import partial

import torch

from engine.attention.backend import AttentionBackend, CapturableBackend
from engine.config import EngineConfig
from engine.device.feature_parts import make_draft_pass
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
from engine.executor.step_part import StepInputs
from engine.flags.resolve import flops_of_token
from engine.flags.speculation import drafts_by_model, max_drafted, passes_of, rows_of_request, topk_of
from engine.kernels.triton.extend_plan import MAX_WHOLE
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.sampler.sampler import TokenSampler
from engine.speculative.draft_graphs import DraftRecording, DraftSizes
from engine.speculative.draft_pass import DraftPass
from engine.speculative.draft_rows import tree_rows

LAUNCH_FLOPS = 2e11  # what an H200 computes while its host launches a layer's kernels (docs/reports/gpu.md)

# Estimates. What a graph returns stays, the rest of its memory is shared.
GRAPH_BYTES = 32 << 20  # of a step
DRAFT_GRAPH_BYTES = 4 << 20  # of a drafter's passes, or of what is accepted: few kernels
LOGIT_BYTES = 12  # of a row and token, of the largest step: the product, logits, and what the sampler edits

log = logging.getLogger(__name__)


def make_recorder(
    config: EngineConfig, parts: ForwardParts, records: Recording, *, inputs: StepInputs
) -> GraphRecorder | None:
    """None: nothing is recorded."""
    capture, page_table, backend = records.capture, parts.page_table, parts.backend
    if capture is None and page_table.device.type == "cuda":
        capture = partial(CudaCapture, torch.cuda.Stream(page_table.device))  # type: ignore[no-untyped-call]
    if capture is None or config.disable_cuda_graph or not (records.decodes or records.prefills):
        return None
    if not isinstance(backend, CapturableBackend):
        log.warning("no graphs: the attention backend asks the host for lengths; triton does not")
        return None
    return GraphRecorder(
        capture, backend, page_table, inputs, parts.states, exchange=parts.exchange, progress=records.progress
    )


def make_graphs(
    config: EngineConfig,
    model: DenseDecoder,
    parts: ForwardParts,
    records: Recording,
    *,
    recorder: GraphRecorder | None,
    end: RecordedEnd | None,
    drafter: DraftPass | None,
) -> list[DecodeGraphs | PrefillGraphs]:
    """`end`: of decode steps; None: they cannot be recorded."""
    if recorder is None or end is None:
        return []
    if drafter is not None and drafter.follows_in_graphs:
        recorder = replace(recorder, follower=drafter)
    found = list[DecodeGraphs | PrefillGraphs]()
    if records.decodes:
        adapters = parts.adapters
        features = RecordedFeatures(
            adapters=adapters if adapters is not None and adapters.records else None,
            trees=RecordedTrees(passes_of(config), tree_rows) if topk_of(config) > 1 else None,
            sees=model.sees,
        )
        found.append(DecodeGraphs(_decode_sizes(config), recorder, end=end, features=features))
    # Chunks of recurrences are cut on the host, and other DP ranks may have no prompt.
    if records.prefills and parts.states is None and parts.exchange is None:
        found.append(PrefillGraphs(prefill_sizes(model.config), recorder))
    return found


def make_drafter(
    config: EngineConfig,
    model: DenseDecoder,
    parts: ForwardParts,
    records: Recording,
    *,
    recorder: GraphRecorder | None,
    sampler: TokenSampler | None,
    inputs: StepInputs,
) -> DraftPass | None:
    """Raises ConfigError. `sampler`: of the rank that samples."""
    recording = None
    if recorder is not None and records.decodes and drafts_by_model(config):
        recording = DraftRecording(recorder, _draft_sizes(config))
    return make_draft_pass(config, model, parts.pools, sampler=sampler, inputs=inputs, recording=recording)


def _draft_sizes(config: EngineConfig) -> DraftSizes:
    return DraftSizes(
        requests=_request_sizes(config, rows=1),
        rows=_decode_sizes(config),
        passes=passes_of(config),
        topk=topk_of(config),
        request_rows=rows_of_request(config),
    )


def prefill_sizes(model: ModelConfig) -> list[int]:
    """Tokens of prompt steps that a GPU computes faster than a host launches."""
    faster = int(LAUNCH_FLOPS * model.num_layers / flops_of_token(model))
    most = min(max(faster // 64 * 64, 64), MAX_WHOLE)
    return [16, 32, *range(64, min(most, 512) + 1, 64), *range(768, most + 1, 256)]


def graph_bytes(config: EngineConfig, model: ModelConfig, *, prefills: bool, row_bytes: int) -> int:
    """Estimate the memory of all graphs. `row_bytes`: kept of each row if drafts may roll back."""
    if config.disable_cuda_graph:
        return 0
    kinds, sizes = 2 if config.enable_lora else 1, _decode_sizes(config)  # without and with adapters
    size_bytes = (len(sizes) * kinds + len(prefill_sizes(model)) * prefills) * GRAPH_BYTES
    size_bytes += LOGIT_BYTES * sizes[-1] * model.vocab_size
    if max_drafted(config):
        size_bytes += row_bytes * sum(sizes) * kinds
    if drafts_by_model(config):
        drafts = _draft_sizes(config)
        size_bytes += drafts.num_graphs * DRAFT_GRAPH_BYTES
        size_bytes += LOGIT_BYTES * drafts.requests[-1] * drafts.topk * model.vocab_size
    return size_bytes


def max_recorded_rows(config: EngineConfig, model: ModelConfig) -> int:
    return max(_decode_sizes(config)[-1], prefill_sizes(model)[-1])


def split_bytes(config: EngineConfig, backend: AttentionBackend) -> int:
    """Bytes of parts of split contexts, which the memory of graphs has once."""
    if config.disable_cuda_graph or not isinstance(backend, CapturableBackend):
        return 0
    return backend.parts_bytes(_decode_sizes(config)[-1])


def _decode_sizes(config: EngineConfig) -> list[int]:
    return _request_sizes(config, rows=1 if config.speculative_algorithm is None else rows_of_request(config))


def _request_sizes(config: EngineConfig, *, rows: int) -> list[int]:
    assert config.max_running_requests is not None, "resolved"
    return graph_sizes(
        sizes=config.cuda_graph_bs,
        max_bs=config.cuda_graph_max_bs,
        max_running=config.max_running_requests,
        rows=rows,
    )
