"""Rows of trees of drafts: each has the bits of plain decoding of its path's tokens, wherever these lie."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from engine.attention.backend import AttentionBackend, windowed
from engine.attention.latent import CpuLatents, TorchLatents
from engine.attention.torch_backend import CpuBackend, TorchBackend
from engine.kernels.latent_attention import make_latent_kernel
from engine.kernels.paged_attention import Softmax, make_paged_decode
from engine.kernels.tape import Tape, Workspace
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch, WindowRows
from engine.layers.rope import Unturned
from tests.attention.attention_cases import Heads, by_no_angle, latents_by_no_angle, make_pool
from tests.attention.test_latents import PAGE, SCALE, Shape, latent_pool
from tests.attention.tree_cases import (
    behind_a_prompt,
    fill_alone,
    fill_known,
    new_rows,
    pages_of,
    rows_alone,
    some_trees,
    step_alone,
    tree_requests,
    tree_step,
)

HEADS = Heads(q=6, kv=2, dim=32)
PLAIN = Softmax(0.2)
SINKS = torch.tensor([3.0, -2.0, 0.0, 5.0, -90.0, 1.0])


@dataclass(frozen=True)
class Case:
    dtype: str = "float32"
    page_size: int = 16
    units: int = 1
    window: int = 0
    fp8: bool = False
    softmax: Softmax = PLAIN

    def pool(self, num_pages: int) -> KVPool:
        """NaN wherever nothing is written."""
        pool = make_pool(
            HEADS,
            num_pages=num_pages,
            page_size=self.page_size,
            dtype=self.dtype,
            layers=1,
            units=self.units,
            window=self.window,
            fp8=self.fp8,
        )
        pool.buffer.fill_(0xFF)
        return pool


CASES = {
    "fp32": Case(),
    "bf16, pages of a token": Case("bfloat16", page_size=1),
    "fp8": Case("bfloat16", page_size=8, fp8=True),
    "units": Case(units=2),
    "fp8 in units": Case("bfloat16", fp8=True, units=2),
    "a short window": Case("bfloat16", window=5),
    "a long window": Case(window=120),
    "cap and sinks": Case("bfloat16", softmax=Softmax(0.6, cap=2.0, sinks=SINKS)),
}


@pytest.mark.parametrize("make", [CpuBackend, TorchBackend])
@pytest.mark.parametrize("name", CASES)
def test_every_row_has_the_bits_of_its_path_alone(name: str, make: Callable[[KVPool], AttentionBackend]) -> None:
    check(make, CASES[name], seed=list(CASES).index(name))


def test_two_threads_give_the_same_bits() -> None:
    torch.set_num_threads(2)
    try:
        check(CpuBackend, Case("bfloat16", page_size=8), seed=20)
    finally:
        torch.set_num_threads(1)


def check(make: Callable[[KVPool], AttentionBackend], case: Case, *, seed: int) -> None:
    trees = some_trees(seed)
    requests = tree_requests(HEADS, trees, page_size=case.page_size, dtype=case.dtype)
    alone = rows_alone(trees, requests, page_size=case.page_size)
    pool, plain = case.pool(pages_of(requests)), case.pool(pages_of(alone))
    fill_known(pool, trees, requests)
    fill_alone(plain, alone)
    rows = by_no_angle(*new_rows(trees, requests), case.softmax)
    found = attended(make(pool), tree_step(trees, requests, page_size=case.page_size), rows)
    expected = attended(make(plain), step_alone(alone, page_size=case.page_size), rows)
    assert not expected.isnan().any()
    assert torch.equal(found, expected)


def attended(backend: AttentionBackend, step: StepBatch, rows: Unturned, *, layer: int = 0) -> torch.Tensor:
    backend.begin(step)
    return backend.attend(layer, rows)


@pytest.mark.parametrize("make", [CpuBackend, TorchBackend])
def test_layers_of_a_pool_of_windows_find_paths_in_their_own_pages(make: type[CpuBackend] | type[TorchBackend]) -> None:
    trees, cases = some_trees(3), (Case(), Case(window=40))
    requests = tree_requests(HEADS, trees, page_size=16, dtype="float32")
    step, count = tree_step(trees, requests, page_size=16), pages_of(requests)
    rows, pools = by_no_angle(*new_rows(trees, requests), PLAIN), [case.pool(count) for case in cases]
    for pool in pools:
        fill_known(pool, trees, requests)
    alone = [attended(make(pool), step, rows) for pool in pools]
    other = [replace(s, pages=[1 + count - page for page in s.pages]) for s in requests]
    moved, windows = tree_step(trees, other, page_size=16), cases[1].pool(count)
    fill_known(windows, trees, other)
    both = windowed(make(pools[0]), make(windows), in_window=[False, True])
    both.begin(replace(step, windows=WindowRows(moved.page_table, moved.token_pages)))
    assert [torch.equal(both.attend(layer, rows), alone[layer]) for layer in range(2)] == [True, True]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [CpuBackend, TorchBackend])
def test_trees_beside_a_prompt_have_the_bits_of_a_step_of_their_own(
    dtype: str, make: Callable[[KVPool], AttentionBackend]
) -> None:
    case, tokens = Case(dtype), 20
    trees = some_trees(1)
    requests = tree_requests(HEADS, trees, page_size=16, dtype=dtype)
    count = pages_of(requests)
    step, rows, outs = tree_step(trees, requests, page_size=16), new_rows(trees, requests), []
    for prompts in (0, 1):
        pool = case.pool(count + 2)
        fill_known(pool, trees, requests)
        if prompts:
            step = behind_a_prompt(step, tokens=tokens, first_page=count + 1, page_size=16)
            rows = [torch.cat((torch.ones_like(each[:1]).expand(tokens, -1, -1), each)) for each in rows]
        outs.append(attended(make(pool), step, by_no_angle(*rows, case.softmax))[prompts * tokens :])
    assert torch.equal(*outs)


def test_a_tape_that_was_recorded_without_trees_plays_them() -> None:
    trees, softmax = some_trees(2), PLAIN
    requests = tree_requests(HEADS, trees, page_size=16, dtype="float32")
    pool = Case().pool(pages_of(requests))
    fill_known(pool, trees, requests)
    kernel, rows, step = make_paged_decode(pool), new_rows(trees, requests), tree_step(trees, requests, page_size=16)
    assert kernel is not None
    kernel.begin(step)
    expected = kernel.attend_rotated(0, *rows, softmax)
    plain = [tree for tree in trees for _ in tree.parents]
    kernel.begin(replace(step, kv_lens=[tree.known + 1 for tree in plain], drafted=frozenset(), paths=None))
    tape = Tape(Workspace(len(plain)))
    with tape.recording():
        out = kernel.attend_rotated(0, *rows, softmax)
    assert not torch.equal(out, expected)
    kernel.begin(step)
    tape.play()
    assert torch.equal(out, expected)


def latent_kernel(pool: KVPool) -> CpuLatents:
    kernel = make_latent_kernel(pool)
    assert kernel is not None
    return CpuLatents(kernel)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [latent_kernel, TorchLatents])
def test_rows_of_latents_have_the_bits_of_their_paths_alone(
    dtype: str, make: Callable[[KVPool], AttentionBackend]
) -> None:
    shape, trees = Shape(5, 80, 48), some_trees(4)
    requests = tree_requests(Heads(shape.heads, 1, shape.width), trees, page_size=PAGE, dtype=dtype)
    alone = rows_alone(trees, requests, page_size=PAGE)
    q, latents, _ = new_rows(trees, requests)
    outs = []
    for kept, fill, step in (
        (requests, partial(fill_known, trees=trees, requests=requests), tree_step(trees, requests, page_size=PAGE)),
        (alone, partial(fill_alone, alone=alone), step_alone(alone, page_size=PAGE)),
    ):
        pool = latent_pool(shape, dtype, num_pages=pages_of(kept))
        pool.buffer.fill_(0xFF)
        fill(pool)
        backend = make(pool)
        backend.begin(step)
        outs.append(backend.attend(0, latents_by_no_angle(q, latents[:, 0], rank=shape.rank, scale=SCALE)))
    assert not outs[1].isnan().any() and torch.equal(*outs)
