"""Where a part of the GPU check runs: a GPU at full size, or this CPU at a size that shows that the code runs."""

import json
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from benchmarks.random_model import qwen3_config
from engine.model_files.model_config import ModelConfig, load_model_config

TABLE = tomllib.loads(Path(__file__).with_name("parts.toml").read_text())
WARM_UP = 3
FLUSH_BYTES = 256 << 20  # more than any L2: what a step left there does not help the next
Work = Any  # Callable[[], object]


@dataclass(frozen=True, slots=True)
class Target:
    """`limits`: what the part `limits` measured: `copy_gb_s` (bytes read and written), `bf16_tflop_s`. `output`: see `keep`."""

    small: bool
    limits: dict[str, float]
    output: str = ""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.small else "cuda:0")

    @property
    def dtype(self) -> str:
        return "float32" if self.small else "bfloat16"  # Triton's interpreter multiplies no bf16

    def pick(self, full: Any, small: Any) -> Any:
        return small if self.small else full

    def sync(self) -> None:
        if not self.small:
            torch.cuda.synchronize()

    def ms(self, work: Work, *, repeats: int = 20, flush: bool = True) -> float:
        """Median milliseconds of `work` on the device, by events; caches are flushed between two runs."""
        if self.small:
            return _wall_ms(work)
        scratch = torch.ones(FLUSH_BYTES // 8, dtype=torch.int64, device=self.device) if flush else None
        for _ in range(WARM_UP):
            work()
        times = []
        for _ in range(repeats):
            if scratch is not None:
                scratch.sum()  # reads: what was written would go back to memory in the timed part
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
        return median(begin.elapsed_time(end) for begin, end in times)

    def keep(self, found: Mapping[str, Any]) -> None:
        """Save what a part has found so far: it stays if the part is ended."""
        if self.output:
            Path(self.output).write_text(json.dumps(found))

    def share(self, value: float, limit: str) -> float | None:
        """`value` over a limit, where that was measured."""
        return value / self.limits[limit] if limit in self.limits else None


def side_by_side(target: Target, jobs: Mapping[str, Callable[[], object]], *, processes: int = 16) -> dict[str, Any]:
    """Run each in a process; {name: what it returned, or what it raised in words}."""
    if target.small:
        return {name: _attempted(job) for name, job in jobs.items()}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        begun = {name: pool.submit(_attempted, job) for name, job in jobs.items()}
        return {name: one.result() for name, one in begun.items()}


def _attempted(job: Callable[[], object]) -> object:
    torch.set_grad_enabled(False)
    try:
        return job()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def _wall_ms(work: Work) -> float:
    begin = perf_counter()
    work()
    return 1000 * (perf_counter() - begin)


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Qwen3 family. `experts`: of `intermediate` each in every layer, of which a token takes `per_token`; 0: one MLP."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    per_token: int = 0

    def fields(self, *, context: int) -> dict[str, object]:
        """Return config.json."""
        sizes = {"layers": self.layers, "hidden": self.hidden, "intermediate": self.intermediate, "vocab": self.vocab}
        text = qwen3_config(**sizes, heads=(self.heads, self.kv_heads, self.head_dim), context=context)
        text |= {"tie_word_embeddings": False, "eos_token_id": 0}
        if self.experts:
            text |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
            text |= {"moe_intermediate_size": self.intermediate, "num_experts": self.experts}
            text |= {"num_experts_per_tok": self.per_token}
        return text

    def config(self, *, context: int) -> ModelConfig:
        with TemporaryDirectory(prefix="tandem-gpu-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.fields(context=context)))
            return load_model_config(folder)

    @property
    def products(self) -> int:
        """Weights of the layers' matrices, one expert's in the place of an MLP."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    def step_bytes(self, *, batch: int, context: int) -> int:
        """What a decode step has to read in bf16: every matrix once, of experts those that any token takes if all are equally likely, and each request's K and V."""
        kv = 2 * self.kv_heads * self.head_dim * self.layers * batch * context
        others = 0.0
        if self.experts:
            taken = self.experts * (1 - (1 - self.per_token / self.experts) ** batch)
            others = (taken - 1) * self.layers * 3 * self.hidden * self.intermediate
        return 2 * (self.products + round(others) + self.hidden * self.vocab + kv)

    def prefill_flop(self, tokens: int) -> int:
        """Of a prompt alone: two operations a weight and token, and causal attention (half of QK and PV); one row of logits."""
        return 2 * self.products * tokens + 2 * self.layers * self.heads * self.head_dim * tokens * tokens


QWEN3_8B = Shape(36, 4096, 12288, 32, 8, 128, 151936)
QWEN3_06B = Shape(28, 1024, 3072, 16, 8, 128, 151936)
QWEN3_30B_A3B = Shape(12, 2048, 768, 32, 4, 128, 151936, experts=128, per_token=8)  # 12 of its 48 layers
TINY = Shape(1, 64, 64, 4, 2, 16, 528)
TINY_MIXTURE = Shape(1, 64, 32, 4, 2, 16, 528, experts=8, per_token=2)
