"""Sliding windows against float64: a query sees its last tokens alone, in every backend, however a prompt is cut."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.attention.backend import make_attention_backend
from engine.attention.torch_backend import CpuBackend, TorchBackend
from engine.attention.triton_backend import TritonBackend
from engine.kernels.build import Kind
from engine.kernels.paged_attention import EXTEND, PagedExtend, make_paged_extend
from engine.kv.kv_pool import KVPool
from service.flags import ConfigError
from tests.attention.attention_cases import (
    TOLERANCE,
    Heads,
    Sequence,
    fill,
    make_pool,
    make_sequences,
    pages_needed,
    reference,
    run_step,
)
from tests.kernels.test_linear import kinds

HEADS, PAGE = Heads(q=6, kv=2, dim=32), 8
WINDOWS = [1, 17, 64, 256, 300]
STARTS, ENDS = [0, 0, 70, 300, 513, 5], [1, 90, 200, 570, 514, 6]


def pool_of(sequences: list[Sequence], ends: list[int], starts: list[int], *, window: int) -> KVPool:
    """NaN in every token that nothing should read."""
    dtype = str(sequences[0].k.dtype).removeprefix("torch.")
    pool = make_pool(HEADS, num_pages=pages_needed(ends, PAGE), page_size=PAGE, dtype=dtype, window=window)
    for layer in range(2):
        pool.k(layer).fill_(torch.nan)
        pool.v(layer).fill_(torch.nan)
    fill(pool, sequences, starts)
    return pool


def extend_of(kind: Kind) -> Callable[[KVPool], PagedExtend]:
    library = EXTEND.load(kind=kind)
    assert library is not None
    return lambda pool: PagedExtend(library, pool)


def error(
    outs: list[torch.Tensor], sequences: list[Sequence], starts: list[int], ends: list[int], window: int
) -> float:
    return max(
        float(np.abs(out.double().numpy() - reference(s, a, b, window=window)).max())
        for out, s, a, b in zip(outs, sequences, starts, ends, strict=True)
    )


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [CpuBackend, TorchBackend])
def test_prompts_and_single_tokens_equal_the_reference(make: type, dtype: str, window: int) -> None:
    sequences = make_sequences(HEADS, ENDS, page_size=PAGE, dtype=dtype)
    outs = run_step(make(pool_of(sequences, ENDS, STARTS, window=window)), sequences, STARTS, ENDS, page_size=PAGE)
    assert error(outs, sequences, STARTS, ENDS, window) < TOLERANCE[dtype]
    starts = [end - 1 for end in ENDS]
    decode = make(pool_of(sequences, ENDS, starts, window=window))
    outs = run_step(decode, sequences, starts, ENDS, page_size=PAGE, extend=False)
    assert error(outs, sequences, starts, ENDS, window) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
def test_a_prompt_in_parts_has_the_bits_of_the_whole(kind: Kind, window: int) -> None:
    make, sequences = extend_of(kind), make_sequences(HEADS, [570], page_size=PAGE, dtype="bfloat16")

    def computed(start: int, end: int) -> torch.Tensor:
        pool = pool_of(sequences, [570], [start], window=window)
        return run_step(make(pool), sequences, [start], [end], page_size=PAGE)[0]

    whole = computed(0, 570)
    for start, end in ((0, 64), (64, 72), (72, 400), (400, 570), (255, 257), (569, 570)):
        assert torch.equal(computed(start, end), whole[start:end])
    assert error([whole], sequences, [0], [570], window) < TOLERANCE["bfloat16"]


def test_what_a_window_leaves_out_is_not_read() -> None:
    """NaN behind the window reaches no output: of whole blocks in a prompt, of every token in a decode step."""
    sequences = make_sequences(HEADS, [600], page_size=PAGE, dtype="bfloat16")
    for start, first, extend in ((599, 590, False), (560, 256, True)):
        pool = pool_of(sequences, [600], [start], window=10)
        at = torch.arange(first)
        pages = torch.tensor(sequences[0].pages)[at // PAGE]
        for cache in (pool.k(1), pool.v(1)):
            cache[pages, at % PAGE] = torch.nan
        if extend and make_paged_extend(pool) is None:
            continue  # torch reads what any query of a tile sees
        out = run_step(CpuBackend(pool), sequences, [start], [600], page_size=PAGE, extend=extend)[0]
        assert not out.isnan().any()


def test_the_backend_without_windows_refuses_them() -> None:
    pool = make_pool(HEADS, num_pages=2, page_size=PAGE, window=4)
    with pytest.raises(ConfigError, match=r"--attention-backend flashinfer: has no sliding windows.*; choose triton"):
        make_attention_backend("flashinfer", pool, num_heads=6)


@pytest.mark.parametrize("needs", [(), ("softcaps of scores",), ("attention sinks",)])
def test_triton_is_chosen_on_devices_other_than_a_cpu(needs: tuple[str, ...]) -> None:
    spec = make_pool(HEADS, num_pages=2, page_size=PAGE, window=4).specs[0]
    pool = KVPool([spec], num_pages=2, page_size=PAGE, device="meta")
    assert isinstance(make_attention_backend("auto", pool, num_heads=6, needs=needs), TritonBackend)
