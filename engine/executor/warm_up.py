"""Steps without requests before a worker is ready: they compile kernels and measure memory.

Plans, made here without torch, pass the whole runner with token 0, in slots that they close again,
and KV page 0. A CPU, whose C kernels are built at load, only runs the largest steps.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from msgspec.structs import replace
from tqdm import tqdm

from engine.core.plan import FeatureRows, ItemImages, Plan, PlanItem, SlotOpen, StepResult
from engine.executor.model_runner import DeviceOutOfMemory
from engine.images import KEY_BYTES, ImageInput
from engine.messages import LogprobOptions
from engine.sampling_params import SamplingParams

# Tokens of prompts, beside the largest step: one row, a page and a bit, a whole tile, each kind of tile of experts.
PROMPTS = (1, 17, *(1 << n for n in range(7, 14)))
SHORT = 17
LOGPROBS = LogprobOptions(start_len=0, top_num=5, token_ids=(0,))
_PLAIN = SamplingParams(max_new_tokens=1, seed=1)
KINDS = {
    "greedy": replace(_PLAIN, temperature=0.0),
    "temperature": replace(_PLAIN, temperature=0.8),
    "top_k": replace(_PLAIN, top_k=50),
    "top_p": replace(_PLAIN, top_p=0.9, min_p=0.01),
    "penalties": replace(
        _PLAIN, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1, logit_bias={0: 1.0}
    ),
    "min_new_tokens": replace(_PLAIN, temperature=0.0, min_new_tokens=1, stop_token_ids=(0,)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Limits of an engine's steps: `prompt_tokens` and `rows` per step, `positions` per request.

    `mixed`: decodes join prompts. `drafts`: the executor drafts.
    `image`: the largest, if multimodal. `encoders`: ranks that divide a step's images.
    """

    prompt_tokens: int
    rows: int
    positions: int
    page_size: int
    vocab_size: int
    mixed: bool
    drafts: bool = False
    image: ImageInput | None = None
    encoders: int = 1

    def plans(self) -> list[Plan]:
        """Each closes the slots of the one before."""
        return _closing([*self._prompts(), *self._samples(), *self._decodes(), *self._images()])

    def largest(self) -> list[Plan]:
        """Steps to measure.

        One token (weights), half and all of a prompt, most samples, an image.
        """
        half = max(1, self.prompt_tokens // 2)
        prompts = [self._step([(n, 0) for n in self._parts(tokens)]) for tokens in (half, self.prompt_tokens)]
        samples = self._step([(1, 0)] * self.rows, list(KINDS.values()), extend=False)
        return _closing([self._step([(1, 0)]), *prompts, samples, *self._images()])

    def _images(self) -> Iterator[Plan]:
        """An image per encoding rank, and a token of the first."""
        if self.image is not None:
            plan = self._step([(1, 0)])
            rows = FeatureRows(0, self.image.key, 0, 1)
            plan.items = [replace(item, images=ItemImages((rows,), ([0], [0], [0]))) for item in plan.items]
            others = [replace(self.image, key=number.to_bytes(KEY_BYTES)) for number in range(1, self.encoders)]
            plan.encodes = [self.image, *others]
            yield plan

    def _prompts(self) -> Iterator[Plan]:
        """Prompts by length class, after a long prefix, with logprobs, pooled, and mixed."""
        for length in sorted({n for n in (*PROMPTS, self.prompt_tokens) if n <= self.prompt_tokens}):
            yield self._step([(n, 0) for n in self._parts(length)])
        short = min(SHORT, self.positions)
        yield self._step([(short, self.positions - short)])
        yield self._step([(min(self.prompt_tokens, self.positions), 0)], logprobs=LOGPROBS)
        yield self._step([(short, 0)], pool="mean")
        if self.mixed and self.rows > 1:
            yield self._step([(short, 0), (1, 0)], riders=1)
        most = max(1, min(self.prompt_tokens // self.rows, self.positions))
        yield self._step([(most, 0)] * self.rows, list(KINDS.values()))

    def _samples(self) -> Iterator[Plan]:
        """All kinds of sampling for one row and all rows, alone and mixed; masks; logprobs."""
        for parts in ([(1, 0)] * rows for rows in sorted({1, self.rows})):
            for extend in (True, False):
                for sampling in ([kind] for kind in KINDS.values()):
                    yield self._step(parts, sampling, extend=extend)
                for masked in sorted({0, 1, len(parts)}):
                    yield self._step(parts, list(KINDS.values())[::-1], masked=masked, extend=extend)
                yield self._step(parts, logprobs=LOGPROBS, extend=extend)

    def _decodes(self) -> Iterator[Plan]:
        """Decode steps of each power of two, for batches that no graph covers."""
        for rows in sorted({min(1 << n, self.rows) for n in range(self.rows.bit_length() + 1)}):
            yield self._step([(1, 0)] * rows, extend=False)
            if self.drafts:
                yield self._step([(1, 0)] * rows, extend=False, drafts=True)
        yield self._step([(1, self.positions - 1)], extend=False)

    def _parts(self, length: int) -> list[int]:
        """Split a prompt step among the fewest requests."""
        whole, rest = divmod(length, self.positions)
        return ([self.positions] * whole + [rest] * (rest > 0))[: self.rows]

    def _step(
        self,
        parts: Sequence[tuple[int, int]],
        sampling: Sequence[SamplingParams] = (KINDS["greedy"],),
        *,
        extend: bool = True,
        riders: int = 0,
        masked: int = 0,
        logprobs: LogprobOptions | None = None,
        pool: str = "",
        drafts: bool = False,
    ) -> Plan:
        """Build a step of (tokens, earlier tokens) `parts`.

        The last `riders` decode, the first `masked` have a mask.
        """
        items = [
            PlanItem(
                rid="",
                slot=slot,
                tokens=[0] * length,
                start=start,
                page_start=0,
                new_pages=[0] * -(-(start + length) // self.page_size),
                sample=not drafts,
                to_draft=int(drafts),
                output_len=0,
                extend=extend and slot < len(parts) - riders,
                logprobs=logprobs,
                logprob_from=1 if logprobs and length > 1 else None,
                hidden_from=start if pool else None,
                pool=pool,
            )
            for slot, (length, start) in enumerate(parts)
        ]
        opens = [
            SlotOpen(slot=i, sampling=sampling[i % len(sampling)], prompt_ids=[0], output_ids=[], eos_ids=(0,))
            for i in range(len(parts))
        ]
        all_tokens = b"\xff" * (4 * -(-self.vocab_size // 32))
        masks = dict.fromkeys(range(masked), all_tokens)
        return Plan(seq=0, extend=extend, items=items, opens=opens, masks=masks)


def _closing(plans: list[Plan]) -> list[Plan]:
    """Let each step close the previous slots and drop its images; append a last one."""
    opened = [[opened.slot for opened in plan.opens] for plan in plans]
    encoded = [[image.key for image in plan.encodes] for plan in plans]
    plans.append(Plan(seq=0, extend=False, items=[]))
    for plan, closes, forgets in zip(plans[1:], opened, encoded, strict=True):
        plan.closes, plan.forgets = closes, forgets
    return plans


class StepExecutor(Protocol):
    def launch(self, plan: Plan) -> Any: ...

    def collect(self, launch: Any) -> StepResult: ...


def by_executor(executor: StepExecutor) -> Callable[[Plan], None]:
    """Raises DeviceOutOfMemory."""

    def run(plan: Plan) -> None:
        if failure := executor.collect(executor.launch(plan)).failure:
            raise DeviceOutOfMemory(failure)

    return run


def warm_up(run: Callable[[Plan], None], steps: WarmUp, *, progress: bool) -> None:
    """Run the steps in stream order, before any other."""
    for plan in tqdm(steps.plans(), desc="warm-up", disable=None if progress else True, leave=False):
        run(plan)


log = logging.getLogger(__name__)


class CompileLog:
    """Detects Triton compilations while serving, which stop steps for seconds.

    One per process: it sets Triton's global hooks (3.6 and 3.7). `num_late`: kernels since `serve`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_late = 0
        self._serves = False
        self._clock = clock
        self._begun_s: dict[str, float] = {}
        from triton import knobs  # its extra is not installed everywhere

        self._hooks = knobs.runtime
        knobs.runtime.jit_cache_hook = self._on_begin
        knobs.runtime.jit_post_compile_hook = self._on_end

    def serve(self) -> None:
        self._serves = True

    def close(self) -> None:
        self._hooks.jit_cache_hook = self._hooks.jit_post_compile_hook = None

    def _on_begin(self, *, key: str, **_: Any) -> None:
        self._begun_s[key] = self._clock()

    def _on_end(self, *, key: str, fn: Any, **about: Any) -> None:
        now_s = self._clock()
        taken_s = now_s - self._begun_s.pop(key, now_s)
        if self._serves:
            self.num_late += 1
            types = ", ".join(f"{name}: {kind}" for name, kind in about["compile"]["signature"].items())
            log.warning("kernel %s was compiled while serving, in %.1f s: %s", fn.name, taken_s, types)


# ---- GPU memory of this process, counted by torch.

CONTEXT_BYTES = 768 << 20  # CUDA's context and loaded kernels, uncounted by torch: an estimate


class CudaGauge:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def own(self) -> int:
        return int(torch.cuda.memory_reserved(self._device)) + CONTEXT_BYTES

    def begin_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return int(torch.cuda.max_memory_reserved(self._device)) + CONTEXT_BYTES

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
