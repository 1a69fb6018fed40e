"""Which steps of an engine run as graphs."""

import logging
from collections.abc import Callable
from functools import partial

from engine.attention.backend import AttentionBackend, CapturableBackend
from engine.config import EngineConfig
from engine.executor.decode_graphs import Capture, CudaCapture, DecodeGraphs, graph_sizes
from engine.executor.future_map import StepInputs
from engine.executor.prefill_graphs import PrefillGraphs, prefill_graph_sizes
from engine.executor.recorded_ends import RecordedEnd
from engine.flags.speculation import passes_of, topk_of
from engine.kv.page_table import PageTable
from engine.lora.bank import AdapterBank

MOST_PREFILL_TOKENS = 512  # by default: a GPU computes more for longer than the host needs to launch them

log = logging.getLogger(__name__)

MakeCapture = Callable[[], Capture]


def make_graphs(
    config: EngineConfig,
    *,
    decodes: bool,
    prefills: bool,
    capture: MakeCapture | None,
    backend: AttentionBackend,
    page_table: PageTable,
    inputs: StepInputs,
    end: RecordedEnd | None,
    adapters: AdapterBank | None,
    has_states: bool,
    is_watched: bool = False,
    sees: bool = False,
    progress: bool,
) -> tuple[DecodeGraphs | None, PrefillGraphs | None]:
    """Return the graphs of decode steps and of short prompts, still to be recorded. `capture` takes the place of CUDA's.

    `config` is resolved. `decodes`, `prefills`: whether the worker has such steps. `end`: of decode steps; None: they cannot be
    recorded. `is_watched`: as of DenseDecoder. `sees`: as of ForwardPass.
    """
    if capture is None and page_table.device.type == "cuda":
        capture = partial(CudaCapture, page_table.device)
    if capture is None or config.disable_cuda_graph or not (decodes or prefills):
        return None, None
    if has_states:
        log.warning("no graphs: the model has recurrent states, which no recorded step knows")
        return None, None
    if is_watched:
        log.warning("no graphs: the drafter reads hidden states inside the model, which no recorded step gives")
        return None, None
    if not isinstance(backend, CapturableBackend) or end is None:
        log.warning("no graphs: the attention backend asks the host for lengths; triton does not")
        return None, None
    decode_graphs = prefill_graphs = None
    if decodes:
        decode_graphs = DecodeGraphs(
            sizes=_decode_sizes(config),
            capture=capture,
            backend=backend,
            page_table=page_table,
            inputs=inputs,
            end=end,
            device=page_table.device,
            adapters=adapters if adapters is not None and adapters.records else None,
            depth=passes_of(config) if topk_of(config) > 1 else 0,
            sees=sees,
            progress=progress,
        )
    if prefills and (prefill_sizes := _prefill_sizes(config)):
        prefill_graphs = PrefillGraphs(
            sizes=prefill_sizes,
            capture=capture,
            backend=backend,
            page_table=page_table,
            inputs=inputs,
            progress=progress,
        )
    return decode_graphs, prefill_graphs


def num_graphs(config: EngineConfig, *, decodes: bool, prefills: bool) -> int:
    """Return how many graphs `make_graphs` returns on a GPU."""
    if config.disable_cuda_graph:
        return 0
    kinds = 2 if config.enable_lora else 1  # decode steps without and with adapters
    return len(_decode_sizes(config)) * kinds * decodes + len(_prefill_sizes(config)) * prefills


def most_recorded_rows(config: EngineConfig) -> int:
    """Return the most rows of a recorded step."""
    return max(_decode_sizes(config)[-1], *_prefill_sizes(config), 0)


def logits_bytes(config: EngineConfig, *, vocab_size: int, decodes: bool) -> int:
    """Return the bytes of the logits that all decode graphs share."""
    return 0 if config.disable_cuda_graph or not decodes else 4 * _decode_sizes(config)[-1] * vocab_size


def _decode_sizes(config: EngineConfig) -> list[int]:
    assert config.max_running_requests is not None, "resolved"
    return graph_sizes(
        sizes=config.cuda_graph_bs, max_bs=config.cuda_graph_max_bs, max_running=config.max_running_requests
    )


def _prefill_sizes(config: EngineConfig) -> list[int]:
    given = config.cuda_graph_max_prefill_tokens
    most = MOST_PREFILL_TOKENS if given is None else given
    return prefill_graph_sizes(most) if most > 0 else []
