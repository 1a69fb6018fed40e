"""FlashInfer's prefill behind the Triton backend: arguments, the paged layout, and clear errors. The package runs on GPUs alone."""

import ast
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from engine.attention.flashinfer_prompts import (
    FlashInferPrompts,
    check_reach,
    check_specs,
    import_wrapper,
    paged_layout,
)
from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import KVPool
from service.flags import ConfigError
from tests.attention.attention_cases import (
    TOLERANCE,
    Heads,
    fill,
    filled_pool,
    make_sequences,
    make_step,
    poisoned_pool,
    worst_error,
)
from tests.attention.flashinfer_stand_in import SIGNATURES, VERSION, BatchPrefillWithPagedKVCacheWrapper

HEADS = Heads(q=6, kv=2, dim=16)


def test_every_token_is_found_by_the_paged_layout() -> None:
    rng = random.Random(0)
    for page_size in (1, 16, 64):
        ends = [rng.randint(1, 200) for _ in range(9)] + [page_size, 2 * page_size]
        starts = [rng.randint(0, end - 1) for end in ends]
        sequences = make_sequences(HEADS, ends, page_size=page_size, dtype="float32")
        step = make_step(sequences, starts, ends, page_size=page_size, extend=True)
        chosen = sorted(rng.sample(range(len(ends)), 7))
        layout = paged_layout(step, chosen, page_size=page_size)
        indices = step.page_table[step.slots[layout.at[0]], layout.at[1]].tolist()
        assert layout.qo_indptr.diff().tolist() == [ends[i] - starts[i] for i in chosen]
        kv_indptr, tails = layout.kv_indptr.tolist(), layout.last_page_lens.tolist()
        for n, i in enumerate(chosen):
            assert indices[kv_indptr[n] : kv_indptr[n + 1]] == sequences[i].pages
            assert (len(sequences[i].pages) - 1) * page_size + tails[n] == ends[i] == layout.kv_lens[n]


@pytest.mark.parametrize("chosen", [[0, 1, 2], [0, 2], [1]])
def test_attention_by_its_arguments_is_the_reference(chosen: list[int]) -> None:
    starts, ends = [0, 40, 7], [20, 100, 49]
    sequences = make_sequences(HEADS, ends, page_size=16, dtype="float32")
    pool = filled_pool(HEADS, sequences, ends)
    prompts = FlashInferPrompts(pool, num_heads=HEADS.q, wrapper=BatchPrefillWithPagedKVCacheWrapper)
    q_lens = [b - a for a, b in zip(starts, ends, strict=True)]
    merged = torch.full((sum(q_lens), 9 * HEADS.dim), torch.nan)  # q is a view of q, k and v, as in the model
    q = merged.view(-1, 9, HEADS.dim)[:, : HEADS.q]
    q.copy_(torch.cat([s.q[a:b] for s, a, b in zip(sequences, starts, ends, strict=True)]))
    for _ in range(6):  # more than plans in flight
        out = torch.full(q.shape, 7.0)
        prompts.begin(make_step(sequences, starts, ends, page_size=16, extend=True), chosen)
        prompts.attend(1, q, out)
    parts = out.flatten(1).split(q_lens)
    mine = [[of[i] for i in chosen] for of in (parts, sequences, starts, ends)]
    assert worst_error(*mine) < TOLERANCE["float32"]
    assert all((parts[i] == 7.0).all() for i in range(3) if i not in chosen)


def test_nothing_but_the_tokens_of_a_request_is_read() -> None:
    sequences = make_sequences(HEADS, [40], page_size=16, dtype="float32")
    pool = poisoned_pool(HEADS, [40], page_size=16, dtype="float32")
    fill(pool, sequences, [40])
    prompts = FlashInferPrompts(pool, num_heads=HEADS.q, wrapper=BatchPrefillWithPagedKVCacheWrapper)
    prompts.begin(make_step(sequences, [0], [40], page_size=16, extend=True), [0])
    prompts.attend(1, sequences[0].q, out := torch.empty(40, HEADS.q, HEADS.dim))
    assert worst_error([out.flatten(1)], sequences, [0], [40]) < TOLERANCE["float32"]


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="it is installed")
def test_without_the_package_the_error_names_the_extra() -> None:
    with pytest.raises(
        ConfigError, match=r"^--attention-backend flashinfer: .*pip install 'tandem-serve\[flashinfer\]'"
    ):
        import_wrapper()


@pytest.mark.parametrize(
    "specs",
    [[(8, 128, "float32")], [(8, 96, "bfloat16")], [(8, 128, "bfloat16"), (4, 128, "bfloat16")]],
    ids=str,
)
def test_a_cache_that_it_does_not_take_is_named(specs: list[tuple[int, int, str]]) -> None:
    with pytest.raises(ConfigError, match=r"^--attention-backend flashinfer: needs heads of 64, 128 or 256"):
        check_specs(tuple(CacheSpec(*spec) for spec in specs))
    check_specs((CacheSpec(8, 128, "bfloat16"),) * 2)


def test_a_pool_beyond_its_addresses_is_refused_with_what_fits() -> None:
    """Of Qwen3-8B: 2.25 MiB a page of 16 tokens. 64 GiB are 29,127 pages, one of them for padding."""
    specs = [CacheSpec(8, 128, "bfloat16")] * 36

    def pool_of(num_pages: int) -> KVPool:
        return KVPool(specs, num_pages=num_pages, page_size=16, device="meta")

    with pytest.raises(ConfigError, match=r"reaches 64 GiB of KV cache, not 64\.0; give --max-total-tokens 466016 at "):
        check_reach(pool_of(466_016 // 16 + 1))
    check_reach(pool_of(466_016 // 16))


def test_the_stand_in_has_the_signatures_of_the_package() -> None:
    """By its source: to import it wants CUDA."""
    spec = find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer is not installed")
    source = (Path(spec.origin).parent / "prefill.py").read_text()
    classes = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
    methods = {
        node.name: node
        for node in classes[BatchPrefillWithPagedKVCacheWrapper.__name__].body
        if isinstance(node, ast.FunctionDef)
    }
    for name in ("__init__", "plan"):
        assert arguments(methods[name]) == list(SIGNATURES[name].parameters), (name, VERSION)
    runs = [
        node
        for node in classes[BatchPrefillWithPagedKVCacheWrapper.__name__].body
        if getattr(node, "name", "") == "run"
    ]
    own = list(SIGNATURES["run"].parameters)
    assert own in [arguments(node) for node in runs if isinstance(node, ast.FunctionDef)], VERSION


def arguments(node: ast.FunctionDef) -> list[str]:
    args = node.args
    middle = [args.vararg.arg] if args.vararg else []
    return [x.arg for x in args.args] + middle + [x.arg for x in args.kwonlyargs]
