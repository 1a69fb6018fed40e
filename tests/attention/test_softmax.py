"""Capped scores, sinks and scales against float64, in every backend that has them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.attention.backend import make_attention_backend
from engine.attention.torch_backend import CpuBackend, TorchBackend
from engine.kernels.build import Kind
from engine.kernels.paged_attention import PagedExtend, Softmax
from engine.kv.kv_pool import KVPool
from service.flags import ConfigError
from tests.attention.attention_cases import TOLERANCE, make_pool, make_sequences, reference, run_step
from tests.attention.test_windows import ENDS, HEADS, PAGE, STARTS, extend_of, pool_of
from tests.kernels.test_linear import kinds

SINKS = torch.tensor([2.0, -1.0, 0.5, 8.0, -30.0, 3.0])
CASES = {
    "scale": Softmax(0.7),
    "cap": Softmax(0.9, cap=1.5),
    "sinks": Softmax(0.2, sinks=SINKS),
    "both": Softmax(0.3, cap=2.0, sinks=SINKS),
}


@pytest.mark.parametrize("window", [0, 17])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [CpuBackend, TorchBackend])
def test_prompts_and_single_tokens_equal_the_reference(
    make: Callable[[KVPool], CpuBackend | TorchBackend], dtype: str, case: str, window: int
) -> None:
    softmax, sequences = CASES[case], make_sequences(HEADS, ENDS, page_size=PAGE, dtype=dtype)
    for starts, extend in ((STARTS, True), ([end - 1 for end in ENDS], False)):
        pool = pool_of(sequences, ENDS, starts, window=window)
        outs = run_step(make(pool), sequences, starts, ENDS, page_size=PAGE, extend=extend, softmax=softmax)
        for out, s, a, b in zip(outs, sequences, starts, ENDS, strict=True):
            wanted = reference(s, a, b, window=window, softmax=softmax)
            assert np.abs(out.double().numpy() - wanted).max() < TOLERANCE[dtype]


@pytest.mark.parametrize("case", ["cap", "sinks"])
@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.label)
def test_a_prompt_in_parts_has_the_bits_of_the_whole(kind: Kind, case: str) -> None:
    make: Callable[[KVPool], PagedExtend] = extend_of(kind)
    sequences = make_sequences(HEADS, [570], page_size=PAGE, dtype="bfloat16")

    def computed(start: int, end: int) -> torch.Tensor:
        pool = pool_of(sequences, [570], [start], window=0)
        return run_step(make(pool), sequences, [start], [end], page_size=PAGE, softmax=CASES[case])[0]

    whole = computed(0, 570)
    for start, end in ((0, 64), (64, 72), (72, 400), (569, 570)):
        assert torch.equal(computed(start, end), whole[start:end])


def test_a_backend_without_it_refuses_it():
    pool = make_pool(HEADS, num_pages=2, page_size=PAGE)
    with pytest.raises(ConfigError, match=r"--attention-backend flashinfer: has no attention sinks.*; choose triton"):
        make_attention_backend("flashinfer", pool, num_heads=6, needs=("attention sinks",))
