"""Run by test_grouped.py with TRITON_INTERPRET=1 (it must be set before kernels are defined).

The grouped kernels beside torch's products, and the whole engine with recorded steps (eager ones: the same work over the same
buffers, each time anew) beside one that computes adapters slice by slice.
"""

import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from engine.device.step_memory import LocalMachine
from engine.executor.graphs import Work
from engine.kernels.triton import lora, sample
from engine.layers.linear import SiteShape
from engine.lora import grouped
from engine.lora.bank import Run, add_delta
from engine.lora.grouped import GroupedAdapters
from engine.lora.weights import AdapterWeights, SiteWeights
from tests.attention.triton.triton_numerics import GuardedTorch
from tests.engine.engine_in_process import EngineInProcess
from tests.lora.tiny_adapters import make_tiny_adapter
from tests.models.tiny_checkpoints import make_tiny_checkpoint

WIDTH = 2080  # two splits, the second with a rest
SHAPES = [SiteShape(WIDTH, (("q", 40), ("k", 24), ("v", 136))), SiteShape(72, (("o", 72),))]
RANKS = {1: (4, 0, 20), 2: (8, 8, 8), 3: (0, 17, 3)}  # of q, k and v, by adapter; the rank of q is o's, too
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2}  # the interpreter has no products of bfloat16
CPU = torch.device("cpu")


def random_adapter(ranks: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> AdapterWeights:
    sites = []
    for shape, of_site in zip(SHAPES, (ranks, ranks[:1]), strict=True):
        a, parts, column, at = [], [], 0, 0
        for (_, rows), rank in zip(shape.parts, of_site, strict=True):
            if rank:
                a.append(torch.randn(rank, shape.in_size, generator=generator) * 0.05)
                b = (torch.randn(rank, rows, generator=generator) * 0.05).to(dtype)
                parts.append((slice(column, column + rows), slice(at, at + rank), b))
            column, at = column + rows, at + rank
        sites.append(SiteWeights(torch.cat(a).to(dtype), tuple(parts)) if parts else None)
    return AdapterWeights(tuple(sites), max(ranks), digest="")


def check_kernels(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    adapters = {number: random_adapter(ranks, dtype, generator) for number, ranks in RANKS.items()}
    steps = GroupedAdapters(SHAPES, places=2, max_rank=20, dtype=dtype, device=CPU)
    for number, weights in adapters.items():
        steps.add(number, weights)
    guards = GuardedTorch()
    lora.torch = guards  # type: ignore[attr-defined]
    one = [Run(1, slice(2, 3)), Run(2, slice(3, 5)), Run(1, slice(6, 7))]
    many = [Run(1, slice(0, 70)), Run(3, slice(71, 73))]
    steps.begin_recording(9)
    recorded = [steps.delta(index) for index in range(len(SHAPES))]
    cases = [(one, 9), (many, None), (one, None), ([Run(3, slice(0, 1))], 1), ([], 9), (one, 9)]
    for runs, rows in cases if dtype == torch.float32 else cases[:2]:
        steps.begin(runs, recorded=rows)
        for index, shape in enumerate(SHAPES):
            x = torch.randn(rows or 80, shape.in_size, generator=generator).to(dtype)
            whole = torch.randn(len(x) + 2, sum(r for _, r in shape.parts), generator=generator).to(dtype)
            y, before = whole[1:-1], whole.clone()
            expected = y.double()
            for run in runs:
                weights = adapters[run.adapter].sites[index]
                if weights is not None:
                    exact = SiteWeights(weights.a.double(), tuple((c, r, b.double()) for c, r, b in weights.parts))
                    add_delta(exact, x[run.rows].double(), expected[run.rows])
            recorded[index](x, y)
            torch.testing.assert_close(y.double(), expected, rtol=0.0, atol=TOLERANCE[dtype])
            plain = torch.ones(len(x), dtype=torch.bool)
            for run in runs:
                plain[run.rows] = False
            assert torch.equal(y[plain], before[1:-1][plain]), "a row without an adapter has changed"
            assert torch.equal(whole[[0, -1]], before[[0, -1]]), "rows around the step have changed"
        if runs:
            guards.check()
    lora.torch = torch  # type: ignore[attr-defined]


class NotingCapture:
    """Runs the work when it is recorded, as a warm-up does, and anew at each replay; notes which have kernels of adapters."""

    def __init__(self, calls: list[int]) -> None:
        self.replayed: list[bool] = []
        self._calls = calls

    def capture(self, work: Work) -> Work:
        before = len(self._calls)
        work()
        adapted = len(self._calls) > before

        def replay() -> Tensor:
            self.replayed.append(adapted)
            return work()

        return replay


PROMPTS = {"a": list(range(20, 37)), "plain": [20, 30, 40], "b": [60, 61, 62, 63], "late": [90, 91]}
LENGTHS = {"a": 3, "plain": 6, "b": 4, "late": 4}


def run(engine: EngineInProcess, adapters: dict[str, int]) -> dict[str, list[int]]:
    """Three requests, then another adapter than either, when its place must change hands."""
    for rids in (("a", "plain", "b"), ("late", "a")):
        for rid in rids:
            name = f"{rid}-{len(engine.tokens)}" if rid in engine.tokens else rid
            engine.add(name, PROMPTS[rid], max_new_tokens=LENGTHS[rid], adapter=adapters.get(rid, 0))
        engine.run()
    return dict(engine.tokens)


def started(path: str, folder: Path, **flags: object) -> EngineInProcess:
    flags = {"dtype": "float32", "max_running_requests": 4, "max_total_tokens": 160, **flags}
    engine = EngineInProcess(path, enable_lora=True, max_loras_per_batch=2, max_lora_rank=8, **flags)  # type: ignore[arg-type]
    store = engine.parts.device.adapters
    assert store is not None
    for number, (targets, rank) in enumerate(((("q_proj", "v_proj", "o_proj"), 4), (("gate_proj", "down_proj"), 8)), 1):
        store.install(number, store.read(adapter(path, folder / str(number), number, targets, rank)))
    store.install(3, store.read(adapter(path, folder / "3", 3, ("k_proj", "up_proj"), 2)))
    return engine


def adapter(path: str, folder: Path, seed: int, targets: tuple[str, ...], rank: int) -> str:
    return make_tiny_adapter(folder, path, seed=seed, targets=targets, rank=rank)


def check_engine(folder: Path) -> None:
    path = make_tiny_checkpoint(folder / "model", "qwen3", num_hidden_layers=1)
    adapters = {"a": 1, "b": 2, "late": 3}
    with started(path, folder, attention_backend="torch") as engine:
        expected = run(engine, adapters)
        alone = run_plain(engine)
    calls = count_launches()
    capture = NotingCapture(calls)
    with started(
        path,
        folder,
        depth=2,
        stream="threaded",
        attention_backend="triton",
        machine=LocalMachine(capture=lambda: capture, prefills=False),
    ) as engine:
        assert run(engine, adapters) == expected
        assert alone != [expected["a"], expected["b"]], "the adapters change nothing"
        assert set(capture.replayed) == {True, False}  # plain goes on alone at the end
        calls.clear()
        capture.replayed.clear()
        assert run_plain(engine) == alone
        assert set(capture.replayed) == {False} and not calls, "a batch without adapters launched their kernels"


def run_plain(engine: EngineInProcess) -> list[list[int]]:
    for rid in "ab":
        engine.add(f"plain-{rid}", PROMPTS[rid], max_new_tokens=LENGTHS[rid])
    engine.run()
    return [engine.tokens[f"plain-{rid}"] for rid in "ab"]


def count_launches() -> list[int]:
    calls: list[int] = []
    add_lora = grouped.add_lora

    def counted(x: Tensor, y: Tensor, **others: object) -> None:
        calls.append(len(x))
        add_lora(x, y, **others)  # type: ignore[arg-type]

    grouped.add_lora = counted  # type: ignore[assignment]
    return calls


def main() -> None:
    torch.set_num_threads(1)
    sample.PARTS, sample.TILE, sample.ROW_TILE = 1, 256, 256
    for dtype in (torch.float32, torch.float16):
        check_kernels(dtype)
    with tempfile.TemporaryDirectory(prefix="tandem-lora-") as folder:
        check_engine(Path(folder))
    with pytest.raises(AssertionError, match="more adapters in a step than places"):
        GroupedAdapters(SHAPES, places=1, max_rank=4, dtype=torch.float32, device=CPU).begin(
            [Run(1, slice(0, 1)), Run(2, slice(1, 2))], recorded=None
        )


if __name__ == "__main__":
    main()
    sys.exit(0)
