"""How the memory of a rank is shared out, on a GPU and on a CPU. Pure: what it shares out is measured elsewhere.

    memory (of the GPU; of a machine: what is free when the rank starts)
    |-- static (--mem-fraction-static): weights | features of images | KV pages, window pages, recurrent states --|-- steps, graphs, the rest --|

The fraction means what SGLang's means. Where it is unset it follows from the figures, so that the largest steps fit beside it.
After vLLM's profiled forward. `given`: the flags before `resolve`, which fills in what is unset.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.config import MEM_FRACTION_OF, EngineConfig
from engine.core.limits import TAIL_SHARE
from engine.core.state_slots import grid_of
from engine.flags.resolve import largest_prompt_step, longest_prompt, num_pages, state_slots
from service.flags import ConfigError

MAX_CPU_BYTES = 4 << 30  # where no flag says more: other processes use the machine, too
STATES_PER_KV = 0.9  # bytes of recurrent states for each byte of KV pages of the same model; SGLang's default
LEAST_PAGES = 2  # of a running request: one of its prompt, one to grow into
LEAST_SLOTS = 2  # the state of a running request, and a snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """In bytes, of one rank. `memory`: as drawn above. `free`: of it, for this rank, its weights included.

    `weights`: on a GPU with CUDA's context. `prompts`: the peak of the largest prompt step, `token_bytes` of it for each token;
    `samples`: of the largest other step. `graphs`: recorded steps. `features`: room for those of images, which is not measured.
    """

    memory: int
    free: int
    weights: int
    prompts: int
    token_bytes: float
    samples: int
    graphs: int
    on_gpu: bool
    features: int = 0

    @property
    def steps(self) -> int:
        """The peak of the largest steps."""
        return max(self.prompts, self.samples)

    @property
    def kept(self) -> int:
        """Return the static bytes beside pages and states."""
        return self.weights + self.features

    @property
    def beside_weights(self) -> int:
        """Return the bytes that weights, features of images and graphs leave."""
        return self.free - self.kept - self.graphs

    @property
    def most(self) -> int:
        """Return what pages and states can take beside all the rest; negative: the weights or the steps do not fit."""
        return self.beside_weights - self.steps

    def fitting(self, tokens: int, room: int) -> int:
        """Return how many of `tokens`, whose step was measured, fit in the given bytes; 0 or less: none."""
        over = self.prompts - room
        return tokens if over <= 0 or self.token_bytes == 0 else tokens - math.ceil(over / self.token_bytes)

    def with_fewer(self, tokens: int) -> "MeasuredMemory":
        """Return the memory for prompt steps shorter by the given tokens."""
        return replace(self, prompts=max(0, int(self.prompts - tokens * self.token_bytes)))

    def at_once(self) -> "MeasuredMemory":
        """Return it for a prompt step and another one at the same time."""
        return replace(self, prompts=self.prompts + self.samples)

    def __str__(self) -> str:
        parts = f"weights {sized(self.weights)}, steps {sized(self.steps)}, graphs {sized(self.graphs)}"
        parts += f", features of images {sized(self.features)}" if self.features else ""
        return f"{sized(self.free)} free, {parts}"


def unmeasured(free: int, weights: int) -> MeasuredMemory:
    """Return the memory of a CPU's rank with --max-total-tokens: nothing was measured."""
    return MeasuredMemory(
        memory=free, free=free, weights=weights, prompts=0, token_bytes=0, samples=0, graphs=0, on_gpu=False
    )


def sized(size_bytes: float) -> str:
    """Such as "1.5 GiB" or "20.0 MiB"."""
    return f"{size_bytes / 2**30:.1f} GiB" if abs(size_bytes) >= 2**28 else f"{size_bytes / 2**20:.1f} MiB"


def static_left(given: EngineConfig, found: MeasuredMemory) -> int:
    """Return the bytes for pages and states. Raises ConfigError where --mem-fraction-static leaves the steps too little."""
    fraction = given.mem_fraction_static
    if fraction is None:
        if found.on_gpu:
            return min(int(MEM_FRACTION_OF["cuda"] * found.memory) - found.kept, found.most)
        return min(int(MEM_FRACTION_OF["cpu"] * found.most), MAX_CPU_BYTES)
    static, beside = int(fraction * found.memory), found.steps + found.graphs
    if static > found.free - beside:
        fits = max(0, int((found.free - beside) / found.memory * 100)) / 100
        raise ConfigError(
            f"--mem-fraction-static {fraction:g}: weights and KV cache may take {sized(static)}, and the largest steps need "
            f"{sized(beside)} beside them ({found}); give at most {fits:g}, or {_smaller_steps(given)}"
        )
    return static - found.kept


def kv_pages(
    given: EngineConfig, config: EngineConfig, found: MeasuredMemory | None, *, page_bytes: int, states: int
) -> int:
    """Count the KV pages: --max-total-tokens, or what memory holds. `config`: resolved. `states`: bytes of recurrent states.

    `found`: None: nothing was measured, since --max-total-tokens says all. Raises ConfigError.
    """
    if given.max_total_tokens is not None:
        pages = given.max_total_tokens // config.page_size
        if found is not None and (most := found.most - states) < pages * page_bytes:
            fits = max(0, most // page_bytes) * config.page_size
            raise ConfigError(
                f"--max-total-tokens {given.max_total_tokens}: a KV cache of {sized(pages * page_bytes)}, and "
                f"{sized(max(0, most))} are left beside the rest ({found}); give at most {fits}"
            )
        return pages
    assert found is not None and config.context_length is not None, "measured"
    left = static_left(given, found) - states
    tokens = max(0, left // page_bytes) * config.page_size
    assert config.max_prefill_tokens is not None, "resolved"
    step = config.max_prefill_tokens if config.chunked_prefill_size == -1 else largest_prompt_step(config)
    least = min(step, config.context_length) if found.on_gpu else config.page_size
    if tokens < least:
        raise ConfigError(
            f"--mem-fraction-static {config.mem_fraction_static:g}: left for KV {sized(left)} ({found}), {tokens} tokens, fewer "
            f"than {'a step' if found.on_gpu else 'a page'}'s {least}; raise it, take a smaller model, {_smaller_steps(given)}, or serve "
            "with so few by --max-total-tokens"
        )
    return num_pages(config, page_bytes=page_bytes, kv_bytes=left)


def with_state_slots(
    given: EngineConfig, config: EngineConfig, found: MeasuredMemory | None, *, slot_bytes: int, drafted: int
) -> tuple[EngineConfig, int]:
    """Let recurrent states take no more than their share of memory. `found`: as of `kv_pages`. Raises ConfigError.

    `drafted`: of how many requests a step should be able to verify drafts: each takes one slot more, a shadow. Return of how many it is.
    """
    wanted = state_slots(config)
    if found is None or config.max_mamba_cache_size is not None:
        return config, _shadows_beside(wanted, drafted)
    left, ratio = static_left(given, found), STATES_PER_KV
    fitting, asked = int(left * ratio / (1 + ratio)) // slot_bytes, config.speculative_algorithm
    if fitting == LEAST_SLOTS and asked is None:
        drafted = 0  # what a grammar forces does without
    if fitting < LEAST_SLOTS + (drafted > 0):
        needs = f"three with --speculative-algorithm {asked}" if drafted and asked else "two"
        raise ConfigError(
            f"--mem-fraction-static {config.mem_fraction_static:g}: {left / 2**20:.0f} MiB, of which "
            f"{ratio / (1 + ratio):.0%} are for recurrent states of {slot_bytes / 2**20:.1f} MiB, and one request needs {needs}; raise it, or "
            "set --max-mamba-cache-size"
        )
    most = next(slots for slots in range(fitting, 0, -1) if slots + _shadows_beside(slots, drafted) <= fitting)
    slots = min(most, wanted)
    return replace(config, max_mamba_cache_size=slots), _shadows_beside(slots, drafted)


def _shadows_beside(slots: int, drafted: int) -> int:
    """As many as requests run at once."""
    return min(drafted, slots // LEAST_SLOTS)


def with_running_requests(
    given: EngineConfig, config: EngineConfig, *, pages: int, slots: int, windows: int
) -> EngineConfig:
    """Let no more requests run than memory holds at once. `slots`: of recurrent states; 0: the model has none.

    `windows`: windows that their pool holds; 0: there is none. Raises ConfigError where --max-running-requests asks for more.
    """
    assert config.max_running_requests is not None, "resolved"
    limits = [pages // LEAST_PAGES, *([slots // LEAST_SLOTS] if slots else []), *([windows] if windows else [])]
    fitting = max(1, min(limits))
    wanted = given.max_running_requests
    if wanted is None:
        return replace(config, max_running_requests=min(fitting, config.max_running_requests))
    if wanted > min(pages, slots or pages) and given.max_total_tokens is None and given.max_mamba_cache_size is None:
        what = f"{pages} KV pages" + (f" and {slots} recurrent states" if slots else "")
        raise ConfigError(
            f"--max-running-requests {wanted}: each request takes one or more, and memory holds {what}; give at most {fitting}, or "
            "raise --mem-fraction-static"
        )
    return config


def with_fitting_prompts(
    given: EngineConfig, config: EngineConfig, found: MeasuredMemory, *, recurrent: bool
) -> tuple[EngineConfig, MeasuredMemory]:
    """Shorten prompt steps, unless a flag says their length, that take more than half of what weights and graphs leave.

    Return `found` for the shorter ones, too. Raises ConfigError.
    """
    most = largest_prompt_step(config)
    fits = found.fitting(most, found.beside_weights // 2)
    if config.chunked_prefill_size == -1:
        shorter = _with_fitting_batch(given, config, found, fits=fits)
    elif given.chunked_prefill_size is not None or fits >= most:
        return config, found
    else:
        multiple = grid_of(config.page_size) if recurrent else config.page_size  # at which chunks end
        parts = fits * TAIL_SHARE // (TAIL_SHARE + 1) // multiple
        shorter = replace(config, chunked_prefill_size=max(1, parts) * multiple)
    return shorter, found.with_fewer(max(0, most - largest_prompt_step(shorter)))


def _with_fitting_batch(given: EngineConfig, config: EngineConfig, found: MeasuredMemory, *, fits: int) -> EngineConfig:
    """Whole prompts: a step has to hold the longest, and with --max-prefill-tokens more than one."""
    assert config.max_prefill_tokens is not None and config.max_running_requests is not None, "resolved"
    most, longest = largest_prompt_step(config), longest_prompt(config)
    can = found.fitting(most, found.beside_weights)
    if can < longest:
        raise ConfigError(
            f"--chunked-prefill-size -1: the longest prompt, {longest} tokens, is one step, and memory holds a step of {max(0, can)} "
            f"({found.with_fewer(most - longest)}); leave the flag out, or give --context-length {max(1, can)} at most"
        )
    if given.max_prefill_tokens is None:
        least = longest + config.max_running_requests  # decodes that ride along count, too
        return replace(config, max_prefill_tokens=min(config.max_prefill_tokens, max(fits, least)))
    if can < given.max_prefill_tokens:
        raise ConfigError(
            f"--max-prefill-tokens {given.max_prefill_tokens}: memory holds a step of {can} prompt tokens ({found}); give at most "
            f"{can}, or leave --chunked-prefill-size -1 out"
        )
    return config


def _smaller_steps(given: EngineConfig) -> str:
    """Return the flags that make the largest steps smaller."""
    if given.chunked_prefill_size == -1:
        return "leave --chunked-prefill-size -1 out, or lower --context-length and --max-prefill-tokens"
    return "lower --chunked-prefill-size and --max-running-requests"


def memory_text(parts: Mapping[str, int]) -> str:
    """Name what takes how much, such as "weights 1.1 GiB, kv pages 4.0 GiB"."""
    return ", ".join(f"{name.replace('_', ' ')} {sized(size)}" for name, size in parts.items() if size)
