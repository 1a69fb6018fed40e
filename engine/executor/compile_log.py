"""Detection of Triton compilations while serving, which stop steps for seconds.

Uses Triton's hooks around compilation and disk cache (3.6 and 3.7).
"""

import logging
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class CompileLog:
    """One per process, as hooks are global; `num_late` counts kernels since `serve`."""

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
