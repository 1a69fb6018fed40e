"""Gated DeltaNet's and Mamba2's layers: transformers' numbers, and bits that depend neither on the batch nor on how a prompt is cut."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from engine.kernels.recurrent import conv_kernel
from engine.layers.recurrence import GRID, decays_of
from tests.models.recurrent_layers import DeltaLayers, Layers, MambaLayers, again, one_by_one, run, run_in_parts

Make = Callable[..., Layers]

# Heads of q or groups, heads, keys, values: unequal, as large as in real models, narrower and wider than blocks of columns.
MAKES: dict[str, Make] = {
    **{f"delta {shape}": partial(DeltaLayers, shape) for shape in ((2, 4, 8, 12), (1, 1, 128, 128), (2, 2, 6, 70))},
    **{f"mamba {shape}": partial(MambaLayers, shape) for shape in ((2, 8, 8, 8), (1, 2, 128, 64), (2, 4, 6, 70))},
    "mamba, norm first": partial(MambaLayers, (2, 8, 8, 8), norm="norm first"),
    "mamba without a norm": partial(MambaLayers, (1, 3, 8, 10), norm=""),
    "mamba with limits": partial(MambaLayers, (1, 3, 8, 10), limits=(0.3, 0.9)),
}
SMALL = ("delta (2, 4, 8, 12)", "mamba (2, 8, 8, 8)")
# On a CPU (not on a GPU) torch computes the last elements of a tensor, up to 63, by scalar functions, which round otherwise than
# those of vectors: softplus, sigmoid and silu of one element then depend on what stands beside it. These rows leave no such rest.
WHOLE_VECTORS: dict[str, Make] = {
    SMALL[0]: partial(DeltaLayers, (4, 64, 8, 8)),
    SMALL[1]: partial(MambaLayers, (4, 64, 8, 8)),
}


@pytest.fixture(params=["c", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        for name in ("delta", "conv", "mamba"):
            monkeypatch.setattr(f"engine.layers.recurrence.{name}_kernel", lambda: None)
    elif conv_kernel() is None:
        pytest.skip("no C compiler")
    return str(request.param)


@pytest.mark.parametrize("name", MAKES)
def test_prompts_and_answers_are_those_of_transformers(form: str, name: str) -> None:
    """Prompts shorter than the convolution, of a chunk and about it; then tokens one by one."""
    for slot, count in ((1, 1), (2, 2), (3, 3), (4, GRID), (1, GRID + 1), (2, 2 * GRID + 6)):
        layers = MAKES[name]()
        x = layers.inputs.rows(count + 3)
        ours, theirs = run_in_parts(layers, x, [count, count + 1, count + 2, count + 3], slot), layers.theirs(x)
        assert (ours - theirs).abs().max() < 2e-5 * max(1, theirs.abs().max()), count


def test_weak_decays_keep_their_digits_behind_a_strong_one() -> None:
    decay = torch.full((1, GRID), -0.001)
    decay[0, 3] = -1000.0
    between = decays_of(decay).between[0]
    counts = torch.arange(GRID - 4)
    torch.testing.assert_close(between[4:, 4], (-0.001 * counts.double()).exp().float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_bits_depend_neither_on_cuts_nor_on_the_batch(form: str, name: str, dtype: torch.dtype) -> None:
    """C may cut anywhere and has one kernel for prompts and answers; torch may cut at multiples of its chunk."""
    layers = (WHOLE_VECTORS if form == "torch" else MAKES)[name](dtype=dtype)
    pool = layers.inputs.pool
    x, other = layers.inputs.rows(3 * GRID + 5), layers.inputs.rows(GRID)
    whole = run_in_parts(layers, x, [len(x)], 1)
    kept = pool.conv(0)[1].clone(), pool.recurrent(0)[1].clone()
    cuts = [GRID, 3 * GRID, len(x)] if form == "torch" else [1, 2, 3, 70, 71, len(x) - 1, len(x)]
    assert torch.equal(run_in_parts(layers, x, cuts, 2), whole)
    _, beside = run(layers, [other, x[: 2 * GRID]], [4, 3])
    last, _ = run(layers, [x[2 * GRID :], other[:1]], [3, 4], decodes=[1])
    assert torch.equal(torch.cat((beside, last)), whole)
    for slot in (2, 3):
        assert torch.equal(pool.conv(0)[slot], kept[0]) and torch.equal(pool.recurrent(0)[slot], kept[1])


@pytest.mark.parametrize("most", [2, 32])
@pytest.mark.parametrize("name", SMALL)
def test_prompts_in_torch_have_their_bits_alone(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all lengths, in one step: chunks of all are prepared together, `most` at once."""
    monkeypatch.setattr("engine.layers.recurrence.CHUNKS_AT_ONCE", most)
    layers = WHOLE_VECTORS[name]()
    layers.inputs.step.rows = None  # as without a compiler
    slots, prompts = [2, 4, 1, 3], [layers.inputs.rows(n) for n in (3, 2 * GRID + 2, GRID, 3 * GRID + 1)]
    alone = [run(layers, [x], [slot])[0] for x, slot in zip(prompts, slots, strict=True)]
    kept = [copy_of(layers, slot) for slot in slots]
    layers.inputs.pool.buffer.zero_()
    assert all(torch.equal(a, b) for a, b in zip(run(layers, prompts, slots), alone, strict=True))
    for slot, state in zip(slots, kept, strict=True):
        assert_equal(copy_of(layers, slot), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_rows_that_read_drafts_have_the_bits_of_steps_of_one(form: str, name: str, dtype: torch.dtype) -> None:
    """Beside a prompt and another answer, too; and where some are rejected, the state goes back and passes those that count again."""
    layers = (WHOLE_VECTORS if form == "torch" else MAKES)[name](dtype=dtype)
    prompt, x, other = layers.inputs.rows(5), layers.inputs.rows(6), layers.inputs.rows(3)
    for slot in (1, 2, 3):
        run(layers, [prompt], [slot])
    behind, right = [copy_of(layers, 1)], []
    for row in torch.split(x, 1):
        right.append(one_by_one(layers, row, 1))
        behind.append(copy_of(layers, 1))
    others = one_by_one(layers, other, 3)
    kept = copy_of(layers, 3)
    for count in range(1, len(x)):
        for slot in (2, 3):
            put(layers, slot, behind[0])
        entries = [prompt, *torch.split(x, 1), *torch.split(other, 1)]
        found = run(
            layers, entries, [4, *[2] * len(x), *[3] * len(other)], decodes=range(1, 10), drafted={*range(2, 7), 8, 9}
        )
        spans = [(span.first, span.end, span.decodes) for span in layers.inputs.step.spans]
        assert spans == [(0, 5, False), (5, 11, True), (11, 14, True)], "entries of their own would race for a state"
        assert torch.equal(torch.cat(found[1:7]), torch.cat(right)) and torch.equal(torch.cat(found[7:]), others)
        assert_equal(copy_of(layers, 2), behind[-1])
        assert_equal(copy_of(layers, 3), kept)
        for slot in (2, 3):
            put(layers, slot, behind[0])
        again(layers, torch.cat((other, x[:count])), [len(other), count], [3, 2])
        assert_equal(copy_of(layers, 2), behind[count])
        assert_equal(copy_of(layers, 3), kept)
    assert all(not torch.equal(a, b) for a, b in zip(behind[1], behind[2], strict=True)), (
        "both states move with every row"
    )


State = tuple[torch.Tensor, torch.Tensor]


def copy_of(layers: Layers, slot: int) -> State:
    """Of both states of a request: the convolution's inputs, and the recurrent one."""
    pool = layers.inputs.pool
    return pool.conv(0)[slot].clone(), pool.recurrent(0)[slot].clone()


def put(layers: Layers, slot: int, state: State) -> None:
    layers.inputs.pool.conv(0)[slot], layers.inputs.pool.recurrent(0)[slot] = state


def assert_equal(one: State, other: State) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("make", [DeltaLayers, MambaLayers])
def test_bf16_rounds_its_ends_alone(make: Make) -> None:
    """The state is fp32: the error of 300 tokens is that of one rounding."""
    layers = make((2, 4, 32, 32), dtype=torch.bfloat16)
    x = layers.inputs.rows(300)
    exact = layers.theirs(x)
    assert (run(layers, [x], [1])[0].float() - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize("name", SMALL)
def test_a_slot_is_touched_by_its_own_request_alone(form: str, name: str) -> None:
    layers = MAKES[name]()
    buffer = layers.inputs.pool.buffer
    buffer.fill_(7)
    before = buffer.clone().view(5, -1)
    run(layers, [layers.inputs.rows(5)], [2])
    after = buffer.view(5, -1)
    assert [slot for slot in range(5) if not torch.equal(before[slot], after[slot])] == [2]
