"""The cost model, from a step's load to its duration: `Roofline` by data sheet and shape, `Fitted`
by measurements (planner/fit.py). Pure.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.core.plan import Plan
from planner.gpus import Gpu
from planner.shape import Shape

SMALL_SUM = 1 << 18  # numbers; summed in one pass by engine/parallel/nccl.py
PARTIAL_BYTES = 4  # ranks add in float32


@dataclass(slots=True)
class StepLoad:
    """The load of a step. `*_pairs`: (query, key) pairs of attention. `*_context`: KV tokens
    read.
    """

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    prefill_context: int = 0
    decodes: int = 0
    decode_context: int = 0
    samples: int = 0


class StepTime(Protocol):
    def seconds(self, load: StepLoad) -> float:
        """Return the seconds until its tokens."""


def load_of(plan: Plan) -> StepLoad:
    load = StepLoad()
    for item in plan.items:
        if item.extend:
            tokens = len(item.tokens)
            load.prefill_tokens += tokens
            load.prefill_pairs += tokens * (item.start + (tokens + 1) / 2)
            load.prefill_context += item.start + tokens
            load.samples += item.sample
        else:
            load.decodes += 1
            load.decode_context += item.start + 1
    load.samples += load.decodes
    return load


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Relative slowdown while all other cores compute."""

    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Reached shares of a data sheet, and overheads."""

    compute: float
    memory: float
    step_s: float
    reduce_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The slower of arithmetic and memory, for linear layers and attention (Williams et al. 2009).

    With TP, embedding and layers, after attention and MLP (Shoeybi et al. 2019), sum hidden states
    as engine/parallel/nccl.py; logits go to one GPU.
    """

    gpu: Gpu
    shape: Shape
    efficiency: Efficiency
    tp: int = 1

    def seconds(self, load: StepLoad) -> float:
        if not load.samples and not load.prefill_tokens:
            return 0.0
        flops_s = self.gpu.tflops * 1e12 * self.efficiency.compute
        bytes_s = self.gpu.memory_gb_s * 1e9 * self.efficiency.memory
        shape, tokens = self.shape, load.prefill_tokens + load.decodes
        linear = 2 * (shape.layer_params * tokens + shape.head_params * load.samples)
        prefill_read = load.prefill_context * shape.kv_bytes
        prefill = max(load.prefill_pairs * shape.pair_flops / flops_s, prefill_read / bytes_s)
        decode = load.decode_context * shape.kv_bytes / bytes_s
        ranks_s = 0.0 if self.tp == 1 else self._sums_s(tokens) + self._gather_s(load.samples)
        return self.efficiency.step_s + max(linear / flops_s, shape.read_bytes / bytes_s) + prefill + decode + ranks_s

    def _sums_s(self, tokens: int) -> float:
        """Small sums read all partials, large ones slices, then rounded slices."""
        numbers, others = tokens * self.shape.hidden, self.tp - 1
        if numbers <= SMALL_SUM:
            moved = others * PARTIAL_BYTES * numbers
        else:
            moved = others * (PARTIAL_BYTES + self.shape.element_bytes) * numbers // self.tp
        return (2 * self.shape.layers + 1) * self._meeting_s(moved)

    def _gather_s(self, samples: int) -> float:
        return self._meeting_s(samples * PARTIAL_BYTES * (self.shape.vocab - self.shape.vocab // self.tp))

    def _meeting_s(self, moved: float) -> float:
        return moved / (self.gpu.peer_gb_s * 1e9 * self.efficiency.memory) + self.efficiency.reduce_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Measured linear costs; a mixed step is a prefill step plus the decodes' share."""

    prefill_step_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_step_s: float
    decode_request_s: float
    decode_context_s: float

    def seconds(self, load: StepLoad) -> float:
        base = self.prefill_step_s if load.prefill_tokens else self.decode_step_s if load.decodes else 0.0
        prefill = self.prefill_token_s * load.prefill_tokens + self.prefill_pair_s * load.prefill_pairs
        return base + prefill + self.decode_request_s * load.decodes + self.decode_context_s * load.decode_context
