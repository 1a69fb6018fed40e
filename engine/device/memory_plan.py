"""Division of a rank's memory, from measurements. Pure.

  memory (of the GPU; of a machine: free when the rank starts)
  |-- static (--mem-fraction-static): weights | image features | KV and window pages, states --|
  |-- steps, graphs, the rest --|

The fraction is SGLang's; unset, it leaves room for the largest steps, after vLLM's profiled
forward. `given` are the flags before `resolve`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.config import MEM_FRACTION_OF, EngineConfig, SchedulingFlags
from engine.core.mem_cache.state_slots import grid_of
from engine.core.policy import TAIL_SHARE
from engine.flags.resolve import largest_prompt_step, longest_prompt, num_pages, state_slots
from service.flags import ConfigError

MAX_CPU_BYTES = 4 << 30  # default limit: other processes use the machine, too
STATES_PER_KV = 0.9  # recurrent state bytes per KV byte of the model; SGLang's default
MIN_PAGES = 2  # per running request: one of its prompt, one to grow into
MIN_SLOTS = 2  # per running request: its state, and a snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Bytes of one rank; `free` for it includes its weights.

    - weights: with CUDA's context
    - prompts: peak of the largest prompt step, `token_bytes` per token; samples: of other steps
    - features: for images, not measured
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
        return max(self.prompts, self.samples)

    @property
    def kept(self) -> int:
        """Static bytes besides pages and states."""
        return self.weights + self.features

    @property
    def beside_weights(self) -> int:
        """Bytes left by weights, features and graphs."""
        return self.free - self.kept - self.graphs

    @property
    def most(self) -> int:
        """Maximum for pages and states; negative if weights and steps do not fit."""
        return self.beside_weights - self.steps

    def fitting(self, tokens: int, room: int) -> int:
        """Number of the measured step's `tokens` that fit into `room`."""
        over = self.prompts - room
        return tokens if over <= 0 or self.token_bytes == 0 else tokens - math.ceil(over / self.token_bytes)

    def with_fewer(self, tokens: int) -> "MeasuredMemory":
        return replace(self, prompts=max(0, int(self.prompts - tokens * self.token_bytes)))

    def at_once(self, streams: int) -> "MeasuredMemory":
        """Bytes of two concurrent phases with `streams` each, which torch caches memory for."""
        prompts, token_bytes = streams * self.prompts + self.samples, streams * self.token_bytes
        return replace(self, prompts=prompts, token_bytes=token_bytes, graphs=streams * self.graphs)

    def __str__(self) -> str:
        parts = f"weights {sized(self.weights)}, steps {sized(self.steps)}, graphs {sized(self.graphs)}"
        parts += f", features of images {sized(self.features)}" if self.features else ""
        return f"{sized(self.free)} free, {parts}"


def unmeasured(free: int, weights: int) -> MeasuredMemory:
    return MeasuredMemory(
        memory=free, free=free, weights=weights, prompts=0, token_bytes=0, samples=0, graphs=0, on_gpu=False
    )


def sized(size_bytes: float) -> str:
    """ "1.5 GiB" or "20.0 MiB"."""
    return f"{size_bytes / 2**30:.1f} GiB" if abs(size_bytes) >= 2**28 else f"{size_bytes / 2**20:.1f} MiB"


def static_left(given: EngineConfig, found: MeasuredMemory) -> int:
    """Bytes for pages and states. Raises ConfigError if steps lack room."""
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
    """Number of KV pages, by --max-total-tokens or memory. Raises ConfigError."""
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
    """Limit recurrent states to their share; return slots for drafts, too. Raises ConfigError."""
    wanted = state_slots(config)
    if found is None or config.max_mamba_cache_size is not None:
        return config, _shadows_beside(wanted, drafted)
    left, ratio = static_left(given, found), STATES_PER_KV
    fitting, asked = int(left * ratio / (1 + ratio)) // slot_bytes, config.speculative_algorithm
    if fitting == MIN_SLOTS and asked is None:
        drafted = 0  # grammar-forced drafts are skipped
    if fitting < MIN_SLOTS + (drafted > 0):
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
    return min(drafted, slots // MIN_SLOTS)


def with_running_requests(
    given: EngineConfig, config: EngineConfig, *, pages: int, slots: int, windows: int
) -> EngineConfig:
    """Limit running requests to memory. Raises ConfigError if --max-running-requests is higher.

    `slots` of states and `windows` are 0 if the model has none.
    """
    assert config.max_running_requests is not None, "resolved"
    limits = [pages // MIN_PAGES, *([slots // MIN_SLOTS] if slots else []), *([windows] if windows else [])]
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
    given: SchedulingFlags, config: EngineConfig, found: MeasuredMemory, *, recurrent: bool
) -> tuple[EngineConfig, MeasuredMemory]:
    """Limit unset prompt steps to half of the rest after weights and graphs. Raises ConfigError."""
    most = largest_prompt_step(config)
    fits = found.fitting(most, found.beside_weights // 2)
    if config.chunked_prefill_size == -1:
        shorter = _with_fitting_batch(given, config, found, fits=fits)
    elif given.chunked_prefill_size is not None or fits >= most:
        return config, found
    else:
        multiple = grid_of(config.page_size) if recurrent else config.page_size  # chunks end at multiples
        parts = fits * TAIL_SHARE // (TAIL_SHARE + 1) // multiple
        shorter = replace(config, chunked_prefill_size=max(1, parts) * multiple)
    return shorter, found.with_fewer(max(0, most - largest_prompt_step(shorter)))


def _with_fitting_batch(
    given: SchedulingFlags, config: EngineConfig, found: MeasuredMemory, *, fits: int
) -> EngineConfig:
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


def _smaller_steps(given: SchedulingFlags) -> str:
    if given.chunked_prefill_size == -1:
        return "leave --chunked-prefill-size -1 out, or lower --context-length and --max-prefill-tokens"
    return "lower --chunked-prefill-size and --max-running-requests"


def memory_text(parts: Mapping[str, int]) -> str:
    """ "weights 1.1 GiB, kv pages 4.0 GiB"."""
    return ", ".join(f"{name.replace('_', ' ')} {sized(size)}" for name, size in parts.items() if size)
