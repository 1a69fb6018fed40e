"""Run by test_decode_graphs.py with TRITON_INTERPRET=1: layers with a window in a pool of their own, by Triton's kernels.

Beside torch, which keeps all KV; pages that no request holds are NaN all the time.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from engine.core.mem_cache.window_pages import WindowPages
from engine.device.step_memory import LocalMachine
from engine.executor.graphs import DecodeGraphs
from engine.kernels.triton import sample
from tests.e2e.two_engines import disaggregated, run
from tests.engine.device.graphs_by_the_interpreter import CountingCapture
from tests.engine.drafts.drafters import always, fared
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.test_window_pages import WithWindows
from tests.models.tiny_checkpoints import make_tiny_checkpoint

WINDOW, PAGE = 7, 4
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "some layers": (
        "qwen2",
        {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 2},
    ),
    "all layers": ("mistral", {"sliding_window": WINDOW, "num_hidden_layers": 1}),
}
PROMPTS = {"a": (prompt_of(27, 1), 14), "b": (prompt_of(5, 2), 20), "c": (prompt_of(14, 3), 9)}
FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": PAGE,
    "max_total_tokens": 256,
    "max_running_requests": 4,
    "chunked_prefill_size": 16,
}


def main() -> None:
    torch.set_num_threads(1)
    sample.PARTS, sample.TILE, sample.ROW_TILE = 1, 512, 512
    with tempfile.TemporaryDirectory(prefix="tandem-windows-") as folder:
        for family, (name, fields) in FAMILIES.items():
            path = make_tiny_checkpoint(Path(folder) / name, name, **fields)
            right = answers_of(EngineInProcess(path, attention_backend="torch", **kept()))
            check_freed_pages(path, right, full=family == "some layers")
            check_prefixes(path, right)
            check_pair(path, right)
            check_drafts(path)


def kept() -> dict[str, Any]:
    return {**FLAGS, "disable_hybrid_swa_memory": True}


def answers_of(engine: EngineInProcess, each_turn: Callable[[], None] = lambda: None) -> dict[str, list[int]]:
    with engine:
        for rid, (prompt, new) in PROMPTS.items():
            engine.add(rid, prompt, max_new_tokens=new)
        while engine.turn():
            each_turn()
        engine.check()
    return engine.tokens


def by_triton(path: str, *, capture: CountingCapture | None = None, **flags: Any) -> WithWindows:
    machine = LocalMachine(capture=lambda: capture) if capture else LocalMachine()
    return WithWindows(path, attention_backend="triton", machine=machine, **{**FLAGS, **flags})


def check_freed_pages(path: str, right: dict[str, list[int]], *, full: bool) -> None:
    """Launched one by one, with decodes beside prompts; and as graphs of decodes and prompts, with a step in flight."""
    for flags in ({"disable_cuda_graph": True, "enable_mixed_chunk": True}, {"stream": "threaded"}):
        capture = CountingCapture()
        engine = by_triton(path, capture=capture, **flags)
        pages = engine.parts.pool.num_layers, engine.pool.num_layers, engine.windows
        assert pages[:2] == (int(full), 1) and engine.parts.behind_windows == "freed", pages
        assert (engine.recorded(DecodeGraphs) is not None) == ("stream" in flags)
        found = answers_of(engine, lambda engine=engine: engine.parts.executor.call(engine.poison))  # type: ignore[misc]
        assert found == right, (flags, found, right)
        assert pages[2].num_retired > 10 and (capture.replays > 20) == ("stream" in flags), capture.replays


def check_prefixes(path: str, right: dict[str, list[int]]) -> None:
    """Behind a cached prefix, whose window is there."""
    prompt, new = PROMPTS["a"]
    with by_triton(path, capture=CountingCapture()) as engine:
        first = engine.answer("first", prompt, max_new_tokens=new)
        engine.poison()
        again = engine.answer("again", [*prompt, *first[:6]], max_new_tokens=new - 6)
        assert [*first[:6], *again] == first == right["a"] and engine.cached["again"] > len(prompt) - PAGE


def check_pair(path: str, right: dict[str, list[int]]) -> None:
    """Windows cross to a worker that decodes with other pages."""
    asked = [(rid, prompt, new) for rid, (prompt, new) in PROMPTS.items()]
    with disaggregated(path, decode={}, attention_backend="triton", **FLAGS) as pair:
        assert run(pair, asked, turns_between=3) == right
        for worker in pair.workers:
            windows = worker.parts.scheduler.memory.part(WindowPages)
            assert windows is not None and windows.num_retired > 0
            assert windows.num_available == windows.allocator.num_pages


def check_drafts(path: str) -> None:
    """Verify steps as graphs: rows of one request at several places, and rejected ones taken back."""
    asked: dict[str, Any] = {"logit_bias": {30: 60.0, 31: 60.0}, "temperature": 1.0, "seed": 5, "max_new_tokens": 12}
    drafts = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}
    prompt, capture = [*PROMPTS["a"][0], 30, 31, 30], CountingCapture()
    with EngineInProcess(path, attention_backend="torch", **kept()) as plain:
        right = plain.answer("a", prompt, **asked)
    with by_triton(path, capture=capture, **drafts) as engine:
        always(engine.parts.scheduler)
        assert engine.answer("a", prompt, **asked) == right
        how, windows = fared(engine), engine.windows
        assert 0 < how.accepted < how.drafts and windows.num_retired > 4 and capture.replays > 4, (how, capture.replays)


if __name__ == "__main__":
    main()
    sys.exit(0)
