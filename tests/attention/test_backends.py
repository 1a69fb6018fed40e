"""Attention of a CPU against float64: windows, capped scores, sinks and scales, however a prompt is cut; and what a backend refuses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from engine.attention.backend import make_attention_backend
from engine.attention.torch_backend import CpuBackend, TorchBackend
from engine.attention.triton_backend import TritonBackend
from engine.kernels.build import Kind
from engine.kernels.paged_attention import EXTEND, PagedExtend, Softmax, make_paged_extend
from engine.kv.kv_pool import KVPool
from service.flags import ConfigError
from tests.attention import attention_cases
from tests.attention.attention_cases import (
    TOLERANCE,
    Heads,
    filled_pool,
    make_pool,
    make_sequences,
    poisoned_pool,
    run_step,
    worst_error,
)
from tests.kernels.test_linear import kinds

HEADS, PAGE = Heads(q=6, kv=2, dim=32), 8
STARTS, ENDS = [0, 0, 70, 300, 513, 5], [1, 90, 200, 570, 514, 6]
SINKS = torch.tensor([2.0, -1.0, 0.5, 8.0, -30.0, 3.0])
SOFTMAXES = {
    "scale": Softmax(0.7),
    "cap": Softmax(0.9, cap=1.5),
    "sinks": Softmax(0.2, sinks=SINKS),
    "both": Softmax(0.3, cap=2.0, sinks=SINKS),
}


@dataclass(frozen=True)
class Case:
    window: int = 0
    softmax: Softmax | None = None
    page: int = PAGE

    def pool(self, sequences: list[attention_cases.Sequence], starts: list[int]) -> KVPool:
        """NaN in every token that nothing should read."""
        lengths, dtype = [len(s.k) for s in sequences], str(sequences[0].k.dtype).removeprefix("torch.")
        pool = poisoned_pool(HEADS, lengths, page_size=self.page, dtype=dtype, window=self.window)
        attention_cases.fill(pool, sequences, starts)
        return pool


WINDOWS = {f"window of {window}": Case(window) for window in (1, 17, 64, 256, 300)}
CASES = WINDOWS | {
    **{f"pages of {page}": Case(page=page) for page in (1, 16)},
    **{f"{name}, window of {w}": Case(w, softmax) for (name, softmax), w in product(SOFTMAXES.items(), (0, 17))},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("make", "dtype"),  # fp32 prompts of a CPU are torch's
    [(CpuBackend, "float32"), (CpuBackend, "bfloat16"), (TorchBackend, "bfloat16")],
)
def test_prompts_and_single_tokens_equal_the_reference(
    make: Callable[[KVPool], CpuBackend | TorchBackend], dtype: str, name: str
) -> None:
    case, sequences = CASES[name], make_sequences(HEADS, ENDS, page_size=CASES[name].page, dtype=dtype)
    for starts, extend in ((STARTS, True), ([end - 1 for end in ENDS], False)):
        backend = make(case.pool(sequences, starts))
        outs = run_step(backend, sequences, starts, ENDS, page_size=case.page, extend=extend, softmax=case.softmax)
        assert worst_error(outs, sequences, starts, ENDS, window=case.window, softmax=case.softmax) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["window of 17", "window of 256", "cap, window of 0", "sinks, window of 17"])
@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
def test_a_prompt_in_parts_has_the_bits_of_the_whole(kind: Kind, name: str) -> None:
    case, library = CASES[name], EXTEND.load(kind=kind)
    assert library is not None
    sequences = make_sequences(HEADS, [570], page_size=PAGE, dtype="bfloat16")

    def computed(start: int, end: int) -> torch.Tensor:
        kernel = PagedExtend(library, case.pool(sequences, [start]))
        return run_step(kernel, sequences, [start], [end], page_size=PAGE, softmax=case.softmax)[0]

    whole = computed(0, 570)
    for start, end in ((0, 64), (64, 72), (72, 400), (400, 570), (255, 257), (569, 570)):
        assert torch.equal(computed(start, end), whole[start:end])
    error = worst_error([whole], sequences, [0], [570], window=case.window, softmax=case.softmax)
    assert error < TOLERANCE["bfloat16"]


def test_long_extend_crosses_query_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.attention.torch_backend.QUERY_TILE", 32)
    sequences = make_sequences(HEADS, [150], page_size=16, dtype="float32")
    outs = run_step(TorchBackend(filled_pool(HEADS, sequences, [37])), sequences, [37], [150], page_size=16)
    assert worst_error(outs, sequences, [37], [150]) < 2e-5


def test_a_bf16_cache_under_an_fp32_model_is_seen_alike_by_every_chunk() -> None:
    sequences = make_sequences(HEADS, [64], page_size=16, dtype="float32")
    whole, cut = (make_pool(HEADS, num_pages=4, page_size=16, dtype="bfloat16") for _ in range(2))
    out = run_step(TorchBackend(whole), sequences, [0], [64], page_size=16)[0]
    backend = TorchBackend(cut)
    parts = [run_step(backend, sequences, [a], [a + 32], page_size=16)[0] for a in (0, 32)]
    torch.testing.assert_close(torch.cat(parts), out, rtol=1e-5, atol=2e-6)


def test_what_a_window_leaves_out_is_not_read() -> None:
    """NaN behind the window reaches no output: of whole blocks in a prompt, of every token in a decode step."""
    sequences = make_sequences(HEADS, [600], page_size=PAGE, dtype="bfloat16")
    for start, first, extend in ((599, 590, False), (560, 256, True)):
        pool = Case(window=10).pool(sequences, [start])
        at = torch.arange(first)
        pages = torch.tensor(sequences[0].pages)[at // PAGE]
        for cache in (pool.k(1), pool.v(1)):
            cache[pages, at % PAGE] = torch.nan
        if extend and make_paged_extend(pool) is None:
            continue  # torch reads what any query of a tile sees
        out = run_step(CpuBackend(pool), sequences, [start], [600], page_size=PAGE, extend=extend)[0]
        assert not out.isnan().any()


@pytest.mark.parametrize(
    ("name", "num_heads", "pool", "needs", "said"),
    [
        ("triton", 6, {}, (), "needs a GPU"),
        ("torch", 3, {}, (), "not a multiple"),
        ("flashinfer", 6, {"window": 4}, (), "flashinfer: has no sliding windows.*; choose triton"),
        ("flashinfer", 6, {}, ("attention sinks",), "flashinfer: has no attention sinks.*; choose triton"),
    ],
)
def test_a_backend_that_cannot_work_says_why(
    name: str, num_heads: int, pool: dict[str, Any], needs: Sequence[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"--attention-backend {said}" if name == "flashinfer" else said):
        make_attention_backend(
            name, make_pool(HEADS, num_pages=2, page_size=PAGE, **pool), num_heads=num_heads, needs=needs
        )


@pytest.mark.parametrize("needs", [(), ("softcaps of scores",), ("attention sinks",)])
def test_triton_is_chosen_on_devices_other_than_a_cpu(needs: tuple[str, ...]) -> None:
    spec = make_pool(HEADS, num_pages=2, page_size=PAGE, window=4).specs[0]
    pool = KVPool([spec], num_pages=2, page_size=PAGE, device="meta")
    assert isinstance(make_attention_backend("auto", pool, num_heads=6, needs=needs), TritonBackend)
