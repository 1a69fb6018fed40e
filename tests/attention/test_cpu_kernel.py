"""The C decode kernel against float64, and how it gets built."""

import logging
from itertools import product

import pytest
import torch

from engine.attention.torch_backend import CpuBackend, TorchBackend
from engine.kernels import build
from engine.kernels.paged_attention import make_paged_decode, plain_softmax
from tests.attention.attention_cases import (
    TOLERANCE,
    Heads,
    Sequence,
    fill,
    filled_pool,
    make_pool,
    make_sequences,
    make_step,
    poisoned_pool,
    reference,
    run_step,
    worst_error,
)

BORDERS = [1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 192, 257, 300]


def decode(
    heads: Heads, sequences: list[Sequence], lengths: list[int], *, page_size: int, dtype: str
) -> list[torch.Tensor]:
    pool = poisoned_pool(heads, lengths, page_size=page_size, dtype=dtype)
    starts = [n - 1 for n in lengths]
    fill(pool, sequences, starts)
    backend = CpuBackend(pool)
    assert backend.has_kernel
    return run_step(backend, sequences, starts, lengths, page_size=page_size, extend=False)


HEADS = [(2, 1), (2, 2), (2, 4), (1, 8)]
COMMON = [(*heads, dim, page) for heads, dim, page in product(HEADS, [16, 32, 64, 128], [1, 16, 64])]
UNCOMMON = [(1, 16, 48), (3, 5, 80), (1, 11, 256), (1, 6, 112), (2, 7, 16), (1, 3, 96), (8, 8, 32), (3, 13, 16)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kv", "group", "dim", "page_size"), [*COMMON, *((kv, group, dim, 8) for kv, group, dim in UNCOMMON)]
)
def test_decode_equals_reference(dtype, kv, group, dim, page_size):
    heads = Heads(q=kv * group, kv=kv, dim=dim)
    sequences = make_sequences(heads, BORDERS, page_size=page_size, dtype=dtype)
    outs = decode(heads, sequences, BORDERS, page_size=page_size, dtype=dtype)
    assert worst_error(outs, sequences, [n - 1 for n in BORDERS], BORDERS) < TOLERANCE[dtype]


@pytest.mark.parametrize("page_size", [1, 16])
def test_every_length(page_size):
    heads = Heads(q=2, kv=1, dim=16)
    lengths = list(range(1, 301))
    sequences = make_sequences(heads, lengths, page_size=page_size, dtype="float32")
    outs = decode(heads, sequences, lengths, page_size=page_size, dtype="float32")
    assert worst_error(outs, sequences, [n - 1 for n in lengths], lengths) < TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_single_tokens_beside_prompts_are_bitwise_those_of_a_decode_step(dtype):
    heads = Heads(q=4, kv=2, dim=64)
    starts, ends = [0, 76, 40, 299, 0, 199], [50, 77, 90, 300, 1, 200]
    sequences = make_sequences(heads, ends, page_size=16, dtype=dtype)
    pool = filled_pool(heads, sequences, starts)
    mixed = run_step(CpuBackend(pool), sequences, starts, ends, page_size=16)
    assert worst_error(mixed, sequences, starts, ends) < TOLERANCE[dtype]
    single = [i for i, (a, b) in enumerate(zip(starts, ends, strict=True)) if b - a == 1]
    chosen = [[of[i] for i in single] for of in (sequences, starts, ends)]
    alone = run_step(CpuBackend(pool), *chosen, page_size=16, extend=False)
    assert all(torch.equal(mixed[i], out) for i, out in zip(single, alone, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_alone_and_in_a_batch_are_bitwise_equal(dtype):
    heads = Heads(q=4, kv=2, dim=64)
    lengths = [300, 1, 64, 77, 200]
    sequences = make_sequences(heads, lengths, page_size=16, dtype=dtype)
    together = decode(heads, sequences, lengths, page_size=16, dtype=dtype)
    # page numbers of a pool of its own, so that the place in memory differs too
    for s, n, out in zip(sequences, lengths, together, strict=True):
        alone = Sequence(q=s.q, k=s.k, v=s.v, pages=list(range(1, len(s.pages) + 1)))
        assert torch.equal(decode(heads, [alone], [n], page_size=16, dtype=dtype)[0], out)


@pytest.mark.parametrize(("kv", "lengths"), [(2, BORDERS), (5, [90] * 4), (3, [200])], ids=str)
def test_two_threads_give_the_same_bits(kv, lengths):
    """Whatever runs the kv heads are cut into: all together, 2 and 3, or one by one."""
    heads = Heads(q=2 * kv, kv=kv, dim=64)
    sequences = make_sequences(heads, lengths, page_size=16, dtype="bfloat16")
    one = decode(heads, sequences, lengths, page_size=16, dtype="bfloat16")
    torch.set_num_threads(2)
    try:
        two = decode(heads, sequences, lengths, page_size=16, dtype="bfloat16")
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writes_the_new_token_and_nothing_else(dtype):
    heads = Heads(q=4, kv=2, dim=32)
    lengths = [1, 16, 17, 40]
    sequences = make_sequences(heads, lengths, page_size=16, dtype=dtype)
    starts = [n - 1 for n in lengths]
    pools = [filled_pool(heads, sequences, starts) for _ in range(2)]
    for backend in (CpuBackend(pools[0]), TorchBackend(pools[1])):
        run_step(backend, sequences, starts, lengths, page_size=16, extend=False)
    assert torch.equal(pools[0].buffer, pools[1].buffer)


def test_large_scores_neither_overflow_nor_lose_the_winner():
    heads = Heads(q=2, kv=1, dim=32)
    sequences = make_sequences(heads, [200], page_size=16, dtype="float32")
    sequences[0].q.mul_(300.0)  # gaps far below where exp is 0
    outs = decode(heads, sequences, [200], page_size=16, dtype="float32")
    assert worst_error(outs, sequences, [199], [200]) < 1e-3


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_nan_in_the_cache_stays_visible(side):
    heads = Heads(q=2, kv=1, dim=32)
    sequences = make_sequences(heads, [100, 100], page_size=16, dtype="float32")
    getattr(sequences[0], side)[10, 0, 0] = torch.nan
    poisoned, clean = decode(heads, sequences, [100, 100], page_size=16, dtype="float32")
    assert poisoned.isnan().any() and not clean.isnan().any()


def test_heads_of_a_merged_qkv_are_read_in_place():
    heads = Heads(q=4, kv=2, dim=32)
    lengths = [30, 70]
    sequences = make_sequences(heads, lengths, page_size=16, dtype="float32")
    pool = filled_pool(heads, sequences, [29, 69])
    kernel = make_paged_decode(pool)
    assert kernel is not None
    kernel.begin(make_step(sequences, [29, 69], lengths, page_size=16, extend=False))
    merged = torch.cat([torch.stack([getattr(s, n)[-1] for s in sequences]).flatten(1) for n in "qkv"], dim=1)
    q, k, v = (x.unflatten(1, (-1, 32)) for x in merged.split([128, 64, 64], dim=1))
    outs = kernel.attend_rotated(1, q, k, v, plain_softmax(q.shape[2])).split(1)
    assert worst_error(list(outs), sequences, [29, 69], lengths) < TOLERANCE["float32"]


def test_other_head_dims_fall_back_to_torch():
    check_decode_by_torch(dim=24)


def check_decode_by_torch(*, dim: int) -> None:
    heads = Heads(q=2, kv=1, dim=dim)
    sequences = make_sequences(heads, [50], page_size=16, dtype="float32")
    backend = CpuBackend(filled_pool(heads, sequences, [49]))
    assert not backend.has_kernel
    outs = run_step(backend, sequences, [49], [50], page_size=16, extend=False)
    assert worst_error(outs, sequences, [49], [50]) < TOLERANCE["float32"]


def test_a_page_id_out_of_range_never_reaches_c():
    heads = Heads(q=2, kv=1, dim=16)
    sequences = make_sequences(heads, [20], page_size=16, dtype="float32")
    pool = make_pool(heads, num_pages=2, page_size=16)
    sequences[0].pages[1] = 3
    with pytest.raises(AssertionError):
        run_step(CpuBackend(pool), sequences, [19], [20], page_size=16, extend=False)


@pytest.mark.parametrize(
    "flags", [("-O0",), ("-O0", "-mavx2", "-mfma"), ("-O0", "-march=native", "-mno-avx512bf16")], ids=str
)
def test_builds_for_lesser_cpus(flags, monkeypatch, tmp_path):
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(build, "flag_sets", lambda kind: [flags])
    heads = Heads(q=4, kv=2, dim=48)
    for dtype in ("float32", "bfloat16"):
        sequences = make_sequences(heads, BORDERS, page_size=16, dtype=dtype)
        outs = decode(heads, sequences, BORDERS, page_size=16, dtype=dtype)
        assert worst_error(outs, sequences, [n - 1 for n in BORDERS], BORDERS) < TOLERANCE[dtype]


@pytest.mark.parametrize("how", ["off", "no compiler", "broken compiler"])
def test_without_a_kernel_torch_decodes_and_one_line_says_so(how, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))
    if how == "off":
        monkeypatch.setenv(build.DISABLE_VARIABLE, "1")
    elif how == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
    else:
        monkeypatch.setenv("CC", "false")
    with caplog.at_level(logging.INFO, logger="engine.kernels.build"):
        check_decode_by_torch(dim=16)
    assert len(caplog.records) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_reference_itself_on_a_case_done_by_hand():
    one = torch.ones(2, 1, 1)
    s = Sequence(q=one, k=torch.zeros(2, 1, 1), v=torch.tensor([1.0, 3.0]).view(2, 1, 1), pages=[1])
    assert reference(s, 0, 2).tolist() == [[1.0], [2.0]]
