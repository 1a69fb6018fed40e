"""How the memory of a rank is shared out, on a GPU and on a CPU. Pure: what it shares out is measured elsewhere.

    memory (of the GPU; of a machine: what is free when the rank starts)
    |-- static (--mem-fraction-static): weights | KV pages, window pages, recurrent states --|-- steps, graphs, the rest --|

The fraction means what SGLang's means. Where it is unset it follows from the figures, so that the largest steps fit beside it.
After vLLM's profiled forward. `given`: the flags before `resolve`, which fills in what is unset.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.config import MEM_FRACTION_OF, EngineConfig
from engine.flags.resolve import largest_prompt_step, num_pages, state_slots
from service.flags import ConfigError

MAX_CPU_BYTES = 4 << 30  # where no flag says more: other processes use the machine, too
LEAST_PAGES = 2  # of a running request: one of its prompt, one to grow into
LEAST_SLOTS = 2  # the state of a running request, and a snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """In bytes, of one rank. `memory`: as drawn above. `free`: of it, for this rank, its weights included.

    `weights`: on a GPU with CUDA's context. `steps`: the peak of the largest ones. `graphs`: recorded steps.
    """

    memory: int
    free: int
    weights: int
    steps: int
    graphs: int
    on_gpu: bool

    @property
    def most(self) -> int:
        """Return what pages and states can take beside all the rest; negative: the weights or the steps do not fit."""
        return self.free - self.weights - self.steps - self.graphs

    def __str__(self) -> str:
        parts = f"weights {sized(self.weights)}, steps {sized(self.steps)}, graphs {sized(self.graphs)}"
        return f"{sized(self.free)} free, {parts}"


def sized(size_bytes: float) -> str:
    """Such as "1.5 GiB" or "20.0 MiB"."""
    return f"{size_bytes / 2**30:.1f} GiB" if abs(size_bytes) >= 2**28 else f"{size_bytes / 2**20:.1f} MiB"


def static_left(given: EngineConfig, found: MeasuredMemory) -> int:
    """Return the bytes for pages and states. Raises ConfigError where --mem-fraction-static leaves the steps too little."""
    fraction = given.mem_fraction_static
    if fraction is None:
        if found.on_gpu:
            return min(int(MEM_FRACTION_OF["cuda"] * found.memory) - found.weights, found.most)
        return min(int(MEM_FRACTION_OF["cpu"] * found.most), MAX_CPU_BYTES)
    static, beside = int(fraction * found.memory), found.steps + found.graphs
    if static > found.free - beside:
        fits = max(0, int((found.free - beside) / found.memory * 100)) / 100
        raise ConfigError(
            f"--mem-fraction-static {fraction:g}: weights and KV cache may take {sized(static)}, and the largest steps need "
            f"{sized(beside)} beside them ({found}); give at most {fits:g}, or lower --chunked-prefill-size and "
            "--max-running-requests"
        )
    return static - found.weights


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
    least = min(largest_prompt_step(config), config.context_length) if found.on_gpu else config.page_size
    if tokens < least:
        raise ConfigError(
            f"--mem-fraction-static {config.mem_fraction_static:g}: left for KV {sized(left)} ({found}), {tokens} tokens, fewer "
            f"than {'a step' if found.on_gpu else 'a page'}'s {least}; raise it, take a smaller model, lower --chunked-prefill-size and "
            "--max-running-requests, or serve with so few by --max-total-tokens"
        )
    return num_pages(config, page_bytes=page_bytes, kv_bytes=left)


def with_state_slots(
    given: EngineConfig, config: EngineConfig, found: MeasuredMemory | None, *, slot_bytes: int
) -> EngineConfig:
    """Let recurrent states take no more than their share of memory. `found`: as of `kv_pages`. Raises ConfigError."""
    if found is None or config.max_mamba_cache_size is not None:
        return config
    left, ratio = static_left(given, found), config.mamba_full_memory_ratio
    fitting = int(left * ratio / (1 + ratio)) // slot_bytes
    if fitting < LEAST_SLOTS:
        raise ConfigError(
            f"--mem-fraction-static {config.mem_fraction_static:g}: {left / 2**20:.0f} MiB, of which --mamba-full-memory-ratio "
            f"{ratio:g} is for recurrent states of {slot_bytes / 2**20:.1f} MiB, and one request needs two; raise one of them, or set "
            "--max-mamba-cache-size"
        )
    return replace(config, max_mamba_cache_size=min(fitting, state_slots(config)))


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


def with_fitting_chunk(
    given: EngineConfig, config: EngineConfig, found: MeasuredMemory, *, multiple: int
) -> EngineConfig:
    """Lower an unset --chunked-prefill-size where steps would take more than half of what weights and graphs leave.

    What steps take grows with their tokens. `multiple`: of tokens, at which chunks end.
    """
    room = (found.free - found.weights - found.graphs) // 2
    if given.chunked_prefill_size is not None or found.steps <= room:
        return config
    assert config.chunked_prefill_size is not None, "resolved"
    parts = int(config.chunked_prefill_size * max(0, room) / found.steps) // multiple
    return replace(config, chunked_prefill_size=max(1, parts) * multiple)


def memory_text(parts: Mapping[str, int]) -> str:
    """Name what takes how much, such as "weights 1.1 GiB, kv pages 4.0 GiB"."""
    return ", ".join(f"{name.replace('_', ' ')} {sized(size)}" for name, size in parts.items() if size)
