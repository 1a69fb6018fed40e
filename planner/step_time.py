"""The cost model of the executor: from the load of a step to its duration. Pure.

Two models with one interface: `Roofline` from a GPU's data sheet and the model's shape, `Fitted` from measurements
(planner/fit.py). Both depend only on sums over the step's items (`StepLoad`).
"""

from dataclasses import dataclass
from typing import Protocol

from engine.core.plan import Plan
from planner.gpus import Gpu
from planner.shape import Shape

SMALL_SUM = 1 << 18  # numbers: engine/parallel/nccl.py adds these in one pass
PARTIAL_BYTES = 4  # what ranks add is float32


@dataclass(slots=True)
class StepLoad:
    """The load of one step. `prefill_pairs`: (query, key) pairs of attention; `prefill_context`: KV tokens that it reads.

    `decodes`: items of one token; `decode_context`: KV tokens that they read. `samples`: sampled tokens of all items.
    """

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    prefill_context: int = 0
    decodes: int = 0
    decode_context: int = 0
    samples: int = 0


class StepTime(Protocol):
    def seconds(self, load: StepLoad) -> float:
        """Return the time from the start of the step to its tokens, in seconds."""


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
    """The slowdown of steps while all other cores of their machine compute: 0.1: a tenth. Memory and caches are shared.

    `prefill`: of steps with prompts, `decode`: of others.
    """

    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The shares of a data sheet that are reached, and the overhead of a step (launches, sampling, scheduler).

    `memory`: share of all bandwidths. `reduce_s`: overhead of an all-reduce between GPUs.
    """

    compute: float
    memory: float
    step_s: float
    reduce_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The slower of arithmetic and memory, separately for the linear layers and for attention (Williams et al. 2009).

    `shape`: of each of `tp` GPUs. The embedding and each layer, after attention and after the MLP (Shoeybi et al. 2019), sum
    hidden states as engine/parallel/nccl.py does; logits of samples go to one GPU.
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
        """Small sums read all partials of the others; large ones a slice of each, and then the others' rounded slices."""
        numbers, others = tokens * self.shape.hidden, self.tp - 1
        if numbers <= SMALL_SUM:
            moved = others * PARTIAL_BYTES * numbers
        else:
            moved = others * (PARTIAL_BYTES + self.shape.element_bytes) * numbers // self.tp
        return (2 * self.shape.layers + 1) * self._meeting_s(moved)

    def _gather_s(self, samples: int) -> float:
        return self._meeting_s(samples * PARTIAL_BYTES * (self.shape.vocab - self.shape.vocab // self.tp))

    def _meeting_s(self, moved: float) -> float:
        """Time of a collective: `moved` bytes reach a GPU."""
        return moved / (self.gpu.peer_gb_s * 1e9 * self.efficiency.memory) + self.efficiency.reduce_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Linear in the load, as measured: seconds per prefill step, prompt token, (query, key) pair; per decode step,
    request in it, KV token that it reads. A mixed step costs a prefill step plus the decodes' share.
    """

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
