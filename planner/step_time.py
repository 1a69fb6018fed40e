"""How long one step takes: the cost model of the executor. Pure: from what a plan asks for to seconds.

Two models with one face: `Roofline` follows from a GPU's data sheet and the model's shape, `Fitted` from measurements
(planner/fit.py). Both see only sums over the step's items (`StepLoad`).
"""

from dataclasses import dataclass
from typing import Protocol

from engine.core.plan import Plan
from planner.gpus import Gpu
from planner.shape import Shape


@dataclass(slots=True)
class StepLoad:
    """Of one step. `prefill_pairs`: (query, key) pairs that attention looks at; `prefill_context`: KV tokens it reads.

    `decodes`: items of one token; `decode_context`: KV tokens they read. `draws`: tokens drawn, by anybody.
    """

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    prefill_context: int = 0
    decodes: int = 0
    decode_context: int = 0
    draws: int = 0


class StepTime(Protocol):
    def seconds(self, load: StepLoad) -> float:
        """From the moment the device is free to the moment the tokens are known."""


def load_of(plan: Plan) -> StepLoad:
    load = StepLoad()
    for item in plan.items:
        if item.extend:
            tokens = len(item.tokens)
            load.prefill_tokens += tokens
            load.prefill_pairs += tokens * (item.start + (tokens + 1) / 2)
            load.prefill_context += item.start + tokens
            load.draws += item.sample
        else:
            load.decodes += 1
            load.decode_context += item.start + 1
    load.draws += load.decodes
    return load


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What part of a data sheet is reached, and what each step costs besides (launches, sampling, scheduler).

    `memory`: of all bandwidths. `reduce_s`: an all-reduce between GPUs, however small.
    """

    compute: float
    memory: float
    step_s: float
    reduce_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The slower of arithmetic and memory, for the linear layers and for attention apart (Williams et al. 2009).

    Over `tp` GPUs each has its part of the weights, of the heads and their KV, and of the arithmetic (a KV head is not
    divided: more GPUs than that hold copies). After attention and after the MLP of each layer they add up what they have of
    each token's hidden state (Shoeybi et al. 2019), by a ring: 2 (tp - 1) / tp of its bytes leave each GPU.
    """

    gpu: Gpu
    shape: Shape
    efficiency: Efficiency
    tp: int = 1

    def seconds(self, load: StepLoad) -> float:
        if not load.draws and not load.prefill_tokens:
            return 0.0
        flops_s = self.tp * self.gpu.tflops * 1e12 * self.efficiency.compute
        bytes_s = self.tp * self.gpu.memory_gb_s * 1e9 * self.efficiency.memory
        shape, tokens = self.shape, load.prefill_tokens + load.decodes
        read = (shape.layer_params + shape.head_params) * shape.element_bytes
        linear = 2 * (shape.layer_params * tokens + shape.head_params * load.draws)
        kv_bytes = shape.kv_bytes * kv_copies(shape, self.tp)
        prefill = max(load.prefill_pairs * shape.pair_flops / flops_s, load.prefill_context * kv_bytes / bytes_s)
        decode = load.decode_context * kv_bytes / bytes_s
        return self.efficiency.step_s + max(linear / flops_s, read / bytes_s) + prefill + decode + self._sums_s(tokens)

    def _sums_s(self, tokens: int) -> float:
        """The all-reduces of a step."""
        if self.tp == 1:
            return 0.0
        moved = 2 * (self.tp - 1) / self.tp * tokens * self.shape.hidden_bytes
        once_s = moved / (self.gpu.peer_gb_s * 1e9 * self.efficiency.memory) + self.efficiency.reduce_s
        return 2 * self.shape.layers * once_s


def kv_copies(shape: Shape, tp: int) -> float:
    """How often KV is held by `tp` GPUs together."""
    return max(1.0, tp / shape.kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Linear in the load, as measured: seconds a step, a prompt token, a (query, key) pair; a decode step, a request
    in it, a KV token that it reads. A mixed step costs a prefill step plus what its decodes add to one.
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
