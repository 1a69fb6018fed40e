"""The cost model, from a step's load to its duration: `Roofline` by data sheet and shape, `Fitted`
by measurements (planner/fit.py). Pure.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.core.plan import Plan
from engine.kv.cache_spec import ELEMENT_BYTES
from engine.model_files.model_config import ModelConfig
from engine.parallel.layout import Place, share_of

# ---- Weights, KV and arithmetic of a model per GPU (engine/parallel/layout.py). Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One GPU's part. `layer_params`: per token, `head_params`: per sample. `read_bytes`: per step.
    `kv_bytes`: per token. `pair_flops`: attention per query and key token.
    """

    layer_params: int
    head_params: int
    weight_bytes: int
    read_bytes: int
    kv_bytes: int
    pair_flops: int
    element_bytes: int
    layers: int
    hidden: int
    vocab: int


def fullest(tp: int) -> Place:
    """The last rank, if the vocabulary does not divide."""
    return Place(tp_rank=tp - 1, tp_size=tp)


def shape_of(model: ModelConfig, tp: int = 1, *, on_cpu: bool = False) -> Shape:
    """The fullest GPU's part, or CPU rank's, with packed integers except in fp32.

    2 FLOPs per weight and token; 4 x head_dim FLOPs per head and (query, key) pair.
    """
    share = share_of(model, fullest(tp))
    size = ELEMENT_BYTES[model.dtype]
    query, key = len(share.heads) * model.head_dim, len(share.kv_heads) * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size // tp
    matrices = [(query + 2 * key, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner)]  # [outputs, inputs]
    layers = len(share.layers) * sum(outputs * inputs for outputs, inputs in matrices)
    packing = model.stored.packing if on_cpu and model.stored and model.dtype != "float32" else None
    layer_bytes = layers * size
    if packing is not None:
        layer_bytes = len(share.layers) * sum(packing.size_bytes(*matrix) for matrix in matrices)
    head = len(share.vocab) * hidden
    tables = 1 if model.tie_word_embeddings else 2
    return Shape(
        layer_params=layers,
        head_params=head,
        weight_bytes=layer_bytes + tables * head * size,
        read_bytes=layer_bytes + head * size,
        kv_bytes=2 * len(share.layers) * key * size,
        pair_flops=4 * len(share.layers) * query,
        element_bytes=size,
        layers=len(share.layers),
        hidden=model.hidden_size,
        vocab=model.vocab_size,
    )


# ---- data sheets of GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU's data sheet. `tflops`: dense bf16. `link_gb_s`: to other machines. `peer_gb_s`: within
    one. 1 GB = 10^9 bytes.

    NVIDIA A100 (80 GB SXM), L4, L40S, H100 (SXM5), H200 (SXM), HGX B200 (an eighth of the board;
    half of "sparse"); AMD Instinct MI300X. `link_gb_s` assumes a 400 Gb/s port per GPU (A100: 200,
    L4 and L40S: 100). `peer_gb_s`: one direction of NVLink (half of the data sheet), Infinity
    Fabric to seven others, or PCIe 4 x16 (L4, L40S).
    """

    name: str
    tflops: float
    memory_gb: float
    memory_gb_s: float
    link_gb_s: float
    peer_gb_s: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="A100", tflops=312, memory_gb=80, memory_gb_s=2039, link_gb_s=25, peer_gb_s=300),
        Gpu(name="L4", tflops=121, memory_gb=24, memory_gb_s=300, link_gb_s=12.5, peer_gb_s=32),
        Gpu(name="L40S", tflops=362, memory_gb=48, memory_gb_s=864, link_gb_s=12.5, peer_gb_s=32),
        Gpu(name="H100", tflops=989, memory_gb=80, memory_gb_s=3350, link_gb_s=50, peer_gb_s=450),
        Gpu(name="H200", tflops=989, memory_gb=141, memory_gb_s=4800, link_gb_s=50, peer_gb_s=450),
        Gpu(name="B200", tflops=2250, memory_gb=180, memory_gb_s=8000, link_gb_s=50, peer_gb_s=900),
        Gpu(name="MI300X", tflops=1307, memory_gb=192, memory_gb_s=5300, link_gb_s=50, peer_gb_s=448),
    )
}


# ---- step time

SMALL_SUM = 1 << 18  # numbers; summed in one pass by engine/parallel/process_groups.py
PARTIAL_BYTES = 4  # ranks add in float32


@dataclass(slots=True)
class StepLoad:
    """`*_pairs`: (query, key) pairs of attention. `*_context`: KV tokens read."""

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    prefill_context: int = 0
    decodes: int = 0
    decode_context: int = 0
    samples: int = 0


class StepTime(Protocol):
    def seconds(self, load: StepLoad) -> float: ...


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


@dataclass(frozen=True, slots=True)
class BoundPart:
    compute_s: float
    memory_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The slower of arithmetic and memory, for linear layers and attention (Williams et al. 2009).

    With TP, embedding and layers, after attention and MLP (Shoeybi et al. 2019), sum hidden states
    as engine/parallel/process_groups.py; logits go to one GPU.
    """

    gpu: Gpu
    shape: Shape
    efficiency: Efficiency
    tp: int = 1

    def seconds(self, load: StepLoad) -> float:
        if not load.samples and not load.prefill_tokens:
            return 0.0
        tokens = load.prefill_tokens + load.decodes
        ranks_s = 0.0 if self.tp == 1 else self._sums_s(tokens) + self._gather_s(load.samples)
        parts_s = sum(max(part.compute_s, part.memory_s) for part in self.parts(load))
        return self.efficiency.step_s + parts_s + ranks_s

    def parts(self, load: StepLoad) -> tuple[BoundPart, BoundPart, BoundPart]:
        """Linear layers, attention of prompts, attention of decodes."""
        flops_s = self.gpu.tflops * 1e12 * self.efficiency.compute
        bytes_s = self.gpu.memory_gb_s * 1e9 * self.efficiency.memory
        shape, tokens = self.shape, load.prefill_tokens + load.decodes
        linear = 2 * (shape.layer_params * tokens + shape.head_params * load.samples)
        prefill_read = load.prefill_context * shape.kv_bytes
        return (
            BoundPart(linear / flops_s, shape.read_bytes / bytes_s),
            BoundPart(load.prefill_pairs * shape.pair_flops / flops_s, prefill_read / bytes_s),
            BoundPart(0.0, load.decode_context * shape.kv_bytes / bytes_s),
        )

    def _sums_s(self, tokens: int) -> float:
        """Small sums read all partials, large ones slices, then rounded slices."""
        numbers, others = tokens * self.shape.hidden, self.tp - 1
        if numbers <= SMALL_SUM:
            moved = others * PARTIAL_BYTES * numbers
        else:
            moved = others * (PARTIAL_BYTES + self.shape.element_bytes) * numbers // self.tp
        return (2 * self.shape.layers + 1) * self._rendezvous_s(moved)

    def _gather_s(self, samples: int) -> float:
        return self._rendezvous_s(samples * PARTIAL_BYTES * (self.shape.vocab - self.shape.vocab // self.tp))

    def _rendezvous_s(self, moved: float) -> float:
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
