"""Trees of drafts by the Triton backend: each row has the bits of plain decoding of its path's tokens. Run by triton_numerics.py."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.nn.functional import pad

from engine.attention import triton_backend
from engine.attention.triton_backend import TritonBackend, TritonLatents
from engine.kernels.paged_attention import Softmax
from engine.kernels.triton.decode import DecodeTiles
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import DeviceExtend, DeviceStep, StepBatch
from tests.attention.attention_cases import Heads, by_no_angle, latents_by_no_angle, make_pool, on_device
from tests.attention.test_latents import PAGE, SCALE, Shape, latent_pool
from tests.attention.tree_cases import (
    Tree,
    behind_a_prompt,
    chain,
    fill_alone,
    fill_known,
    new_rows,
    pages_of,
    random_tree,
    rows_alone,
    step_alone,
    tree_requests,
    tree_step,
)

HEADS = Heads(q=4, kv=2, dim=16)
PROMPT = 4
SHORT_CHUNKS = DecodeTiles(chunk=32, chunks=4, block=16)


def few_trees() -> list[Tree]:
    """Over the border of two blocks, and of two of SHORT_CHUNKS, and a small one; beside a chain."""
    rng = np.random.default_rng(3)
    over_a_border = Tree(30, [0, 0, 1, 2, 3], [30, 34, 32, 33, 31], 31)
    return [random_tree(rng, 3, 3), chain(15, 2), over_a_border]


def pool_of(pages: int, *, window: int = 0, units: int = 1) -> KVPool:
    """NaN wherever nothing is written, but of padded rows."""
    pool = make_pool(HEADS, num_pages=pages, page_size=PAGE, layers=1, window=window, units=units)
    pool.buffer[pool.page_bytes :].fill_(0xFF)
    return pool


def check_rows(*, softmax: Softmax, window: int = 0, units: int = 1, everywhere: bool = False) -> None:
    """Of a step of their own; `everywhere`: of one whose lengths the device knows and of one beside a prompt, too."""
    trees = few_trees()
    requests = tree_requests(HEADS, trees, page_size=PAGE, dtype="float32")
    alone, rows = rows_alone(trees, requests, page_size=PAGE), new_rows(trees, requests)
    plain = pool_of(pages_of(alone), window=window, units=units)
    fill_alone(plain, alone)
    expected = attended(plain, step_alone(alone, page_size=PAGE), rows, softmax)
    assert not expected.isnan().any()
    pool = pool_of(pages_of(requests) + 2, window=window, units=units)
    fill_known(pool, trees, requests)
    step = tree_step(trees, requests, page_size=PAGE)
    assert torch.equal(attended(pool, step, rows, softmax), expected)
    if not everywhere:
        return
    padded = [pad(each, (0, 0, 0, 0, 0, 1)) for each in rows]
    assert torch.equal(attended(pool, on_device(step), padded, softmax)[:-1], expected)
    step = behind_a_prompt(step, tokens=PROMPT, first_page=pages_of(requests) + 1, page_size=PAGE)
    behind = [torch.cat((torch.ones_like(each[:1]).expand(PROMPT, -1, -1), each)) for each in rows]
    assert torch.equal(attended(pool, step, behind, softmax)[PROMPT:], expected)


def attended(
    pool: KVPool, step: StepBatch | DeviceStep | DeviceExtend, rows: list[torch.Tensor], softmax: Softmax
) -> torch.Tensor:
    backend = TritonBackend(pool, num_heads=HEADS.q)
    begin(backend, step)
    return backend.attend(0, by_no_angle(*rows, softmax))


def begin(backend: TritonBackend, step: StepBatch | DeviceStep | DeviceExtend) -> None:
    if isinstance(step, StepBatch):
        backend.begin(step)
    else:
        backend.begin_on_device(step)


def check_latents() -> None:
    shape, trees = Shape(5, 80, 48), few_trees()
    requests = tree_requests(Heads(shape.heads, 1, shape.width), trees, page_size=PAGE, dtype="float32")
    for request in requests:
        kept = request.k[:, :, : shape.rank]
        kept.copy_(kept.sign())  # their norm has the bits of themselves
    alone, (q, latents, _) = rows_alone(trees, requests, page_size=PAGE), new_rows(trees, requests)
    outs = []
    for kept, fill, step in (
        (requests, partial(fill_known, trees=trees, requests=requests), tree_step(trees, requests, page_size=PAGE)),
        (alone, partial(fill_alone, alone=alone), step_alone(alone, page_size=PAGE)),
    ):
        pool = latent_pool(shape, "float32", num_pages=pages_of(kept))
        pool.buffer[pool.page_bytes :].fill_(0xFF)
        fill(pool)
        backend = TritonLatents(pool, num_heads=shape.heads)
        backend.begin(step)
        outs.append(backend.attend(0, latents_by_no_angle(q, latents[:, 0], rank=shape.rank, scale=SCALE)))
    assert not outs[1].isnan().any() and torch.equal(*outs)


def check_trees(check_guards: Callable[[], None]) -> None:
    setattr(triton_backend, "decode_tiles", lambda **_: SHORT_CHUNKS)  # noqa: B010
    check_rows(softmax=Softmax(0.2), units=2, everywhere=True)
    check_rows(softmax=Softmax(0.6, cap=2.0, sinks=torch.tensor([3.0, -2.0, 0.0, 5.0])), window=7)
    check_latents()
    check_guards()
