# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Mixtures of experts for GPUs: five launches from logits to the weighted sum."""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.packed import BLOCK_N, Stack, packed_places, packed_sums
from engine.model_files.experts_config import ExpertsConfig

# route  (token)        scores, choice, weights; counts real rows
# sort   (expert)       pairs by expert, in blocks of rows (as in SGLang's fused MoE); few pairs need none
# up     (block, tile)  activated gate times up
# down   (block, tile)  answers of pairs
# sum    (token, tile)  answers by rank, and the shared expert's
#
# A pair is (token, rank), number token * PER_TOKEN + rank.
#
# Bits: one thread adds up an answer in order of its inputs, 16 by 16 (mma.sync), whatever rows and columns share the tile.
# So a row has the same bits in every step of up to SHORT_ROWS pairs an expert. Longer ones take wgmma, whose sums may round
# differently. By packed weights all steps take wgmma.
FEW_PAIRS = 64  # each is a block: equal experts meet in the L2 cache
SPARSE_ROWS, SHORT_ROWS, MID_ROWS = 2, 32, 64  # pairs an expert, on average
PACKED_INPUTS = 128  # of a word tile: more need more registers than there are, beside 128 rows
SORT_TILE, SORT_WARPS = 2048, 8
SUM_TILE = 1024
LOWEST = tl.constexpr(-1e30)  # in place of NaN, twice as low still finite


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    rows: int
    columns: int  # of weights
    depth: int  # inputs of an iteration
    warps: int
    stages: int


@cache
def expert_tiles(pairs: int, experts: int, dtype: torch.dtype, *, packed: bool = False) -> ExpertTiles:
    # for sm_90 without spills (tests compile them); near sizes that others tuned for fused_moe on an H200. Rows, by which pairs
    # are sorted, are the same for packed weights: one of two matrices may be dense.
    if dtype == torch.float32:  # no tensor cores for exact fp32
        return ExpertTiles(rows=16, columns=32, depth=32, warps=4, stages=2)
    if packed:
        return _packed_tiles(pairs, experts)
    if pairs <= SPARSE_ROWS * experts:
        return ExpertTiles(rows=16, columns=64, depth=128, warps=4, stages=4)
    if not is_long(pairs, experts):
        return ExpertTiles(rows=16, columns=128, depth=128, warps=4, stages=3)
    if pairs <= MID_ROWS * experts:
        return ExpertTiles(rows=64, columns=128, depth=64, warps=4, stages=4)
    return ExpertTiles(rows=128, columns=256, depth=64, warps=8, stages=3)


def _packed_tiles(pairs: int, experts: int) -> ExpertTiles:
    # Prompts take this way, too: a number widens once for 128 rows, beside products that take longer. Dense parts, which one matrix
    # has for more than MOST_ROWS rows, would be written and read for every expert, whatever few rows it has.
    if not is_long(pairs, experts):
        return ExpertTiles(rows=16, columns=64, depth=0, warps=4, stages=5)
    return ExpertTiles(rows=64 if pairs <= MID_ROWS * experts else 128, columns=128, depth=0, warps=8, stages=4)


def is_long(pairs: int, experts: int) -> bool:
    """True for a step whose answers are most of its bytes."""
    return pairs > SHORT_ROWS * experts


# ---- Choice of experts.


@triton.jit
def _in_best_groups(choice, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, BEST: tl.constexpr):
    # scores of the CHOSEN groups whose BEST (1 or 2) scores sum to most, -inf elsewhere
    SIZE: tl.constexpr = choice.shape[0] // GROUPS
    grouped = tl.reshape(choice, [GROUPS, SIZE])
    best, first = tl.max(grouped, 1, return_indices=True)
    if BEST == 2:
        best += tl.max(tl.where(tl.arange(0, SIZE)[None, :] == first[:, None], float("-inf"), grouped), 1)
    group = tl.arange(0, GROUPS)
    kept = group < 0
    for _ in range(CHOSEN):
        at = group == tl.argmax(best, 0)
        kept = kept | at
        best = tl.where(at, float("-inf"), best)
    return tl.reshape(tl.where(kept[:, None], grouped, float("-inf")), [GROUPS * SIZE])


@triton.jit
def _best(choice, scores, ranks, COUNT: tl.constexpr, APART: tl.constexpr):
    # spots of the COUNT best and their scores, by rank; APART: the choice is not by scores alone
    spot = tl.arange(0, choice.shape[0])
    spots, found = tl.zeros([ranks.shape[0]], tl.int32), tl.zeros([ranks.shape[0]], tl.float32)
    for rank in range(COUNT):
        best, first = tl.max(choice, 0, return_indices=True)
        at = spot == first
        if APART:
            best = tl.sum(tl.where(at, scores, 0.0), 0)
        spots = tl.where(ranks == rank, first, spots)
        found = tl.where(ranks == rank, best, found)
        choice = tl.where(at, float("-inf"), choice)
    return spots, found


@triton.jit
def route_kernel(
    logits_ptr,  # [T, COUNT] fp32
    logit_bias_ptr,  # [COUNT] fp32
    choice_bias_ptr,  # [COUNT] fp32
    chosen_ptr,  # [T, PER_TOKEN] int32
    weights_ptr,  # [T, PER_TOKEN] fp32
    loads_ptr,  # [COUNT] int64; None: not counted
    real_ptr,  # [1] int64: only the first so many tokens count; None: all
    scale,
    COUNT: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    MEMBER_TILE: tl.constexpr,
    RANK_TILE: tl.constexpr,
):
    # Program (token). Groups of MEMBER_TILE in order of experts; the lower wins ties.
    SIZE: tl.constexpr = COUNT // GROUPS
    token = tl.program_id(0).to(tl.int64)
    spot = tl.arange(0, GROUP_TILE * MEMBER_TILE)
    member = spot % MEMBER_TILE
    expert = spot // MEMBER_TILE * SIZE + member
    inside = (member < SIZE) & (expert < COUNT)
    x = tl.load(logits_ptr + token * COUNT + expert, mask=inside, other=float("-inf"))
    if logit_bias_ptr is not None:
        x += tl.load(logit_bias_ptr + expert, mask=inside, other=0.0)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        powers = tl.exp(x - tl.max(x, 0))
        total = tl.sum(powers, 0)
        scores = powers / total
    choice = scores
    if choice_bias_ptr is not None:
        choice += tl.load(choice_bias_ptr + expert, mask=inside, other=0.0)
    choice = tl.where(choice != choice, LOWEST, choice)  # padding may be NaN, and has experts all the same
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        choice = _in_best_groups(choice, GROUP_TILE, CHOSEN_GROUPS, GROUP_BEST)
    ranks = tl.arange(0, RANK_TILE)
    spots, weights = _best(choice, scores, ranks, PER_TOKEN, choice_bias_ptr is not None)
    chosen = spots // MEMBER_TILE * SIZE + spots % MEMBER_TILE
    if not SIGMOID:
        weights += total - total  # NaN stays NaN
    if NORMALIZED:
        total = tl.sum(weights, 0)
        if SIGMOID:
            total += 1e-20
        weights = weights / total
    own = ranks < PER_TOKEN
    tl.store(chosen_ptr + token * PER_TOKEN + ranks, chosen, mask=own)
    tl.store(weights_ptr + token * PER_TOKEN + ranks, weights * scale, mask=own)
    if loads_ptr is not None:
        if real_ptr is not None:
            own = own & (token < tl.load(real_ptr))
        tl.atomic_add(loads_ptr + chosen, tl.full([RANK_TILE], 1, tl.int64), mask=own, sem="relaxed")


def route_constants(config: ExpertsConfig) -> dict[str, Any]:
    assert config.group_best in (1, 2), config.group_best
    return {
        "COUNT": config.count,
        "PER_TOKEN": config.per_token,
        "SIGMOID": config.sigmoid,
        "NORMALIZED": config.normalized,
        "GROUPS": config.groups,
        "CHOSEN_GROUPS": config.chosen_groups,
        "GROUP_BEST": config.group_best,
        "GROUP_TILE": triton.next_power_of_2(config.groups),
        "MEMBER_TILE": triton.next_power_of_2(config.count // config.groups),
        "RANK_TILE": triton.next_power_of_2(config.per_token),
    }


def route(
    logits: Tensor,
    *,
    logit_bias: Tensor | None,
    choice_bias: Tensor | None,
    loads: Tensor | None,
    real: Tensor | None,
    scale: float,
    constants: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return experts [T, k] int32, best first, and weights fp32."""
    tokens, count = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous() and count == constants["COUNT"], logits.shape
    chosen = torch.empty((tokens, constants["PER_TOKEN"]), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, constants["PER_TOKEN"]), dtype=torch.float32, device=logits.device)
    arguments = logits, logit_bias, choice_bias, chosen, weights, loads, real, scale
    route_kernel[(tokens,)](*arguments, **constants, num_warps=1)
    return chosen, weights


# ---- Pairs by expert.


@triton.jit(do_not_specialize=["pairs", "blocks"])
def sort_kernel(
    chosen_ptr,  # [pairs] int32; COUNT or more: of no expert here
    order_ptr,  # [pairs] int32: pairs by expert, stable
    blocks_ptr,  # [blocks, 4] int32: (expert, first, end, unused), of `order`; empty if first >= end
    pairs,
    blocks,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    # Program (expert). Its blocks begin at first pair // ROWS + expert: enough, and none twice.
    expert = tl.program_id(0)
    ids = tl.arange(0, TILE)
    lower, own = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for at in range(0, pairs, TILE):
        found = tl.load(chosen_ptr + at + ids, mask=at + ids < pairs, other=COUNT)
        lower += (found < expert).to(tl.int32)
        own += (found == expert).to(tl.int32)
    begin = tl.sum(lower, 0)
    end = begin + tl.sum(own, 0)
    place = begin
    for at in range(0, pairs, TILE):
        found = tl.load(chosen_ptr + at + ids, mask=at + ids < pairs, other=COUNT)
        mine = (found == expert).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(mine, 0) - 1, at + ids, mask=mine != 0)
        place += tl.sum(mine, 0)
    first = begin // ROWS + expert
    last = tl.where(expert == COUNT - 1, blocks, end // ROWS + expert + 1)
    for at in range(first, last, TILE):
        block = at + ids
        start = begin + (block - first) * ROWS
        mask = block < last
        tl.store(blocks_ptr + block * 4, tl.zeros([TILE], tl.int32) + expert, mask=mask)
        tl.store(blocks_ptr + block * 4 + 1, start, mask=mask)
        tl.store(blocks_ptr + block * 4 + 2, tl.zeros([TILE], tl.int32) + end, mask=mask)


class Blocks(NamedTuple):
    chosen: Tensor  # [T, k]
    order: Tensor | None  # None: pairs are blocks
    blocks: Tensor | None

    @property
    def count(self) -> int:
        return self.chosen.numel() if self.blocks is None else len(self.blocks)


def sort(chosen: Tensor, *, experts: int, rows: int) -> Blocks:
    """chosen [T, k] int32; `experts` or more: of none here."""
    pairs, device = chosen.numel(), chosen.device
    assert chosen.dtype == torch.int32 and chosen.is_contiguous(), (chosen.dtype, chosen.stride())
    if pairs <= FEW_PAIRS:
        return Blocks(chosen, None, None)
    count = pairs // rows + experts
    order = torch.empty((pairs,), dtype=torch.int32, device=device)
    blocks = torch.empty((count, 4), dtype=torch.int32, device=device)
    constants = {"COUNT": experts, "ROWS": rows, "TILE": SORT_TILE}
    sort_kernel[(experts,)](chosen, order, blocks, pairs, count, **constants, num_warps=SORT_WARPS)
    return Blocks(chosen, order, blocks)


# ---- Products of blocks.


@triton.jit
def _rows_of(block, chosen_ptr, order_ptr, blocks_ptr, COUNT: tl.constexpr, ROWS: tl.constexpr):
    # expert, COUNT or more without rows; pairs int64 [ROWS], and which of these exist
    row = tl.arange(0, ROWS)
    if blocks_ptr is None:
        expert = tl.load(chosen_ptr + block)
        inside = row == 0
        pair = tl.zeros([ROWS], tl.int64) + block
    else:
        first, end = tl.load(blocks_ptr + block * 4 + 1), tl.load(blocks_ptr + block * 4 + 2)
        expert = tl.where(first < end, tl.load(blocks_ptr + block * 4), COUNT)
        inside = first + row < end
        pair = tl.load(order_ptr + first + row, mask=inside, other=0).to(tl.int64)
    return expert, pair, inside


@triton.jit
def _product(
    x,  # pointers [ROWS], to the first of SIZE inputs
    mask_rows,
    weight_ptr,  # [COUNT, OUTPUTS, INPUTS], or packed
    factors_ptr,
    expert,
    column,
    first,  # input, 0 of packed weights
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    FORM: tl.constexpr,  # None: dense
    FACTORS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # sums [ROWS, COLUMNS] fp32, in order of inputs
    if FORM is None:
        depth = tl.arange(0, DEPTH)
        weight = weight_ptr + expert.to(tl.int64) * (OUTPUTS * INPUTS) + first + column * INPUTS
        acc = tl.zeros([x.shape[0], column.shape[0]], tl.float32)
        for at in range(0, SIZE, DEPTH):
            inputs = at + depth
            mask = inputs < SIZE
            rows = tl.load(x[:, None] + inputs[None, :], mask=mask_rows[:, None] & mask[None, :], other=0.0)
            mask = (column < OUTPUTS)[None, :] & mask[:, None]
            columns = tl.load(weight[None, :] + inputs[:, None], mask=mask, other=0.0)
            acc = tl.dot(rows, columns, acc, input_precision=PRECISION)
    else:
        BLOCKS: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
        TILES: tl.constexpr = (INPUTS + FORM.inputs - 1) // FORM.inputs
        weight_ptr += expert.to(tl.int64) * (BLOCKS * TILES * BLOCK_N * FORM.tile // 2)
        factors_ptr += expert.to(tl.int64) * (BLOCKS * FACTORS * FORM.each)
        words, factors = packed_places(weight_ptr, factors_ptr, column, OUTPUTS, TILES, FACTORS, FORM)
        WHOLE: tl.constexpr = INPUTS % FORM.inputs == 0
        sums = packed_sums(x, mask_rows, words, factors, 0, TILES, INPUTS, FORM, WHOLE, STAGES, PRECISION)
        acc = tl.trans(sums)
    return acc


@triton.jit
def up_kernel(
    x_ptr,  # [T, INPUTS]
    weight_ptr,  # [COUNT, 2 * WIDTH, INPUTS], or packed; rows of gate and up alternate
    factors_ptr,
    bias_ptr,  # [COUNT, 2 * WIDTH] fp32
    inner_ptr,  # [pairs, WIDTH]
    chosen_ptr,
    order_ptr,
    blocks_ptr,  # None: pairs are blocks
    alpha,
    limit,
    COUNT: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CLAMPED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    FORM: tl.constexpr,
    FACTORS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Program (block, tile): silu(gate) * up; CLAMPED: as in BiasedExperts.
    TILES: tl.constexpr = (2 * WIDTH + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) % TILES
    expert, pair, inside = _rows_of(tl.program_id(0) // TILES, chosen_ptr, order_ptr, blocks_ptr, COUNT, ROWS)
    if expert >= COUNT:
        return
    row = tile * COLUMNS + tl.arange(0, COLUMNS)
    acc = _product(
        x_ptr + pair // PER_TOKEN * INPUTS,
        inside,
        weight_ptr,
        factors_ptr,
        expert,
        row,
        0,
        INPUTS,
        2 * WIDTH,
        INPUTS,
        DEPTH,
        PRECISION,
        FORM,
        FACTORS,
        STAGES,
    )
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * (2 * WIDTH) + row, mask=row < 2 * WIDTH, other=0.0)[None, :]
    gate, up = tl.split(tl.reshape(acc, [ROWS, COLUMNS // 2, 2]))
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        inner = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    else:
        inner = gate / (1.0 + tl.exp(-gate)) * up
    column = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    to = inner_ptr + pair[:, None] * WIDTH + column[None, :]
    tl.store(to, inner.to(inner_ptr.dtype.element_ty), mask=inside[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def down_kernel(
    inner_ptr,  # [pairs, SEGMENTS * WIDTH]
    weight_ptr,  # [COUNT, OUTPUTS, SEGMENTS * WIDTH], or packed
    factors_ptr,
    bias_ptr,  # [COUNT, OUTPUTS] fp32, of the first segment
    answers_ptr,  # [SEGMENTS, pairs, OUTPUTS]
    chosen_ptr,
    order_ptr,
    blocks_ptr,
    pairs,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    SEGMENTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    FORM: tl.constexpr,
    FACTORS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Program (block, tile; segment).
    TILES: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    tile, segment = tl.program_id(0) % TILES, tl.program_id(1)
    expert, pair, inside = _rows_of(tl.program_id(0) // TILES, chosen_ptr, order_ptr, blocks_ptr, COUNT, ROWS)
    if expert >= COUNT:
        return
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    acc = _product(
        inner_ptr + pair * (SEGMENTS * WIDTH) + segment * WIDTH,
        inside,
        weight_ptr,
        factors_ptr,
        expert,
        column,
        segment * WIDTH,
        WIDTH,
        OUTPUTS,
        SEGMENTS * WIDTH,
        DEPTH,
        PRECISION,
        FORM,
        FACTORS,
        STAGES,
    )
    if bias_ptr is not None:  # noqa: SIM102 (decided by the compiler)
        if segment == 0:
            acc += tl.load(bias_ptr + expert * OUTPUTS + column, mask=column < OUTPUTS, other=0.0)[None, :]
    to = answers_ptr + (segment.to(tl.int64) * pairs + pair)[:, None] * OUTPUTS + column[None, :]
    tl.store(to, acc.to(answers_ptr.dtype.element_ty), mask=inside[:, None] & (column < OUTPUTS)[None, :])


def product_constants(stack: Stack, tiles: ExpertTiles, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "DEPTH": tiles.depth,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "FORM": stack.form,
        "FACTORS": 0 if stack.factors is None else stack.factors.shape[2],
        "STAGES": tiles.stages,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def up(
    x: Tensor,
    stack: Stack,
    bias: Tensor | None,
    blocks: Blocks,
    *,
    clamp: tuple[float, float] | None,
    tiles: ExpertTiles,
) -> Tensor:
    """Return [pairs, width]; `clamp`: (alpha, limit)."""
    (experts, both, inputs), (tokens, per_token) = stack.shape, blocks.chosen.shape
    assert x.shape == (tokens, inputs) and x.is_contiguous(), (x.shape, x.stride())
    assert stack.form is not None or x.dtype == stack.weight.dtype, x.dtype
    inner = torch.empty((tokens * per_token, both // 2), dtype=x.dtype, device=x.device)
    up_kernel[(blocks.count * triton.cdiv(both, tiles.columns),)](
        x,
        stack.weight,
        stack.factors,
        bias,
        inner,
        *blocks,
        *(clamp or (0.0, 0.0)),
        COUNT=experts,
        PER_TOKEN=per_token,
        INPUTS=inputs,
        WIDTH=both // 2,
        CLAMPED=clamp is not None,
        **product_constants(stack, tiles, x.dtype),
    )
    return inner


def down(
    inner: Tensor,
    stack: Stack,
    bias: Tensor | None,
    blocks: Blocks,
    *,
    segments: int,
    dtype: torch.dtype,
    tiles: ExpertTiles,
) -> Tensor:
    """Return [segments, pairs, outputs], undefined without an expert.

    Packed weights have one segment.
    """
    (experts, outputs, width), pairs = stack.shape, len(inner)
    answers = torch.empty((segments, pairs, outputs), dtype=dtype, device=inner.device)
    down_kernel[(blocks.count * triton.cdiv(outputs, tiles.columns), segments)](
        inner,
        stack.weight,
        stack.factors,
        bias,
        answers,
        *blocks,
        pairs,
        COUNT=experts,
        WIDTH=width // segments,
        SEGMENTS=segments,
        OUTPUTS=outputs,
        **product_constants(stack, tiles, inner.dtype),
    )
    return answers


# ---- Sums of answers.


@triton.jit
def sum_kernel(
    answers_ptr,  # [T, PER_TOKEN, WIDTH]
    weights_ptr,  # [T, PER_TOKEN] fp32
    shared_ptr,  # [T, WIDTH] fp32
    gate_ptr,  # [T] fp32: the sigmoid weighs `shared`
    out_ptr,  # [T, WIDTH]
    PER_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    # Program (token, tile): from the best expert down, then the shared one.
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = at < WIDTH
    total = tl.zeros([TILE], tl.float32)
    for rank in range(PER_TOKEN):
        pair = token * PER_TOKEN + rank
        answer = tl.load(answers_ptr + pair * WIDTH + at, mask=mask, other=0.0)
        total += answer.to(tl.float32) * tl.load(weights_ptr + pair)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * WIDTH + at, mask=mask, other=0.0)
        if gate_ptr is not None:
            shared = shared / (1.0 + tl.exp(-tl.load(gate_ptr + token)))
        total += shared
    tl.store(out_ptr + token * WIDTH + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def weighed_sum(
    answers: Tensor, weights: Tensor, *, shared: Tensor | None, gate: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return [T, width]; answers [T * k, width]; `gate` [T, 1]: before its sigmoid."""
    (tokens, per_token), width = weights.shape, answers.shape[1]
    assert shared is None or (shared.dtype == torch.float32 and shared.is_contiguous()), shared
    out = torch.empty((tokens, width), dtype=dtype, device=answers.device)
    constants = {"PER_TOKEN": per_token, "WIDTH": width, "TILE": SUM_TILE}
    grid = tokens, triton.cdiv(width, SUM_TILE)
    sum_kernel[grid](answers, weights, shared, gate, out, **constants, num_warps=4)
    return out
