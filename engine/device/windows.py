"""Division of memory between the pools of full and window layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.core.mem_cache.window_pages import WindowPages
from engine.flags.resolve import depth, largest_prompt_step
from engine.flags.speculation import rows_of_request
from engine.kv.cache_spec import CacheSpec, page_bytes_of

PREFIXES = 2  # windows per running request: its own, and one of a cached prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowGroup:
    """Pages of both pools, and of a request's window."""

    window: int
    pages_of_window: int
    num_pages: int
    window_pages: int
    steps: int
    step_tokens: int | None
    rows: int = 1

    def make_pages(self, page_size: int) -> WindowPages:
        return WindowPages(
            num_pages=self.window_pages,
            page_size=page_size,
            window=self.window,
            steps=self.steps,
            step_tokens=self.step_tokens,
            rows=self.rows,
        )


def window_group(config: EngineConfig, specs: Sequence[CacheSpec], *, pages: int, units: int) -> WindowGroup:
    """Divide the memory of `pages`; some layer has a window.

    Windows get the maximum for running requests and as many cached prefixes.
    """
    assert config.max_running_requests is not None and config.context_length is not None, "resolved"
    inside = [spec for spec in specs if spec.window]
    size, steps, window = config.page_size, depth(config), max(spec.window for spec in inside)
    step_tokens = None if config.chunked_prefill_size == -1 else largest_prompt_step(config)
    rows = rows_of_request(config)
    each = -(-(window - 1 + max(steps, rows)) // size) + 2
    wanted = PREFIXES * config.max_running_requests * each + -(-(step_tokens or 0) * steps // size)
    window_pages = pages if step_tokens is None else min(pages, wanted)
    num_pages = pages
    if config.max_total_tokens is None:
        usable = config.max_running_requests * -(-config.context_length // size)
        left = pages * page_bytes_of(specs, size, units=units)
        left -= window_pages * page_bytes_of(inside, size, units=units)
        beside = [spec for spec in specs if not spec.window]
        num_pages = max(pages, min(usable, left // page_bytes_of(beside, size, units=units)))
    return WindowGroup(
        window=window,
        pages_of_window=each,
        num_pages=num_pages,
        window_pages=window_pages,
        steps=steps,
        step_tokens=step_tokens,
        rows=rows,
    )
