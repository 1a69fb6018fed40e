# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
"""Token sampling on GPU: four launches per batch, without a sort.

Tokens equal engine/sampler/sampling.py's to the bit, without fused multiply-adds. Rows read
parameters by slot from a table, so launches can be captured:

  peaks   (row, part)  penalties, biases, bans, masks into `edited`; best logit, raw and edited
  top_k   (row)        the bound that keeps the k best tokens
  scores  (row, part)  temperature, min_p, noise: the best score; the mass that top_p refers to
  finish  (row)        the token; counts it

Tokens rank by (bits of the gap to the best logit, token id); filters bound that rank. top_k counts
tokens in 16 bins, then in 16 bins of one. top_p takes the best score if the mass ranked before it
is below the limit, else it is the next bound (FlashInfer's rejection sampling with fixed noise).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.noise import key_of, mass_of, noise_at

PARTS = 16  # programs per row in `peaks` and `scores`
TILE = 2048
ROW_TILE = 4096  # if one program walks a row; at most 255 tiles, as top_k counts in bytes
MOST_TOKENS = 255 * ROW_TILE
WARPS, ROW_WARPS = 8, 16
EXACT = {"enable_fp_fusion": False}  # no fused multiply-add: a CPU's bits
ROWS_OF_INPUTS = ["slots_ptr", "output_lens_ptr"]  # slices of one tensor [k, n]: aligned for some n
COLUMNS = 12  # of the request table, int64: seven numbers, a gap, then eight float32

# two are addresses, or 0: of an int32 per token id, and of int32 pairs
SEED, TOP_K, SEEN, EDITS, NUM_BIASES, NUM_ENDS, MIN_NEW_TOKENS = (tl.constexpr(i) for i in range(7))
TEMPERATURE, TOP_P, LOG_MIN_P, REPETITION, FREQUENCY, PRESENCE = (tl.constexpr(i) for i in range(6))

_INTEGERS_OF_ROW, _FLOATS_OF_ROW, _FLOATS_FROM = tl.constexpr(12), tl.constexpr(24), tl.constexpr(16)
_LARGEST_NOISE = tl.constexpr(22.9)
_INF = tl.constexpr(float("inf"))
_INF_BITS = tl.constexpr(0x7F800000)
_NO_BOUND = tl.constexpr(0x7FFFFFFF)
_FIRST_BIN = tl.constexpr((127 - 8) << 23)  # gaps from 2**-8 in bins of an octave


class _Row(NamedTuple):
    source: Any
    best: Any
    temperature: Any
    log_min_p: Any
    key: Any


@triton.jit
def _request_at(slot, integers_ptr, floats_ptr):
    return integers_ptr + slot * _INTEGERS_OF_ROW, floats_ptr + slot * _FLOATS_OF_ROW + _FLOATS_FROM


@triton.jit
def _better(values, value_ids, x, ids):
    """Larger value and token per lane, the first for ties."""
    better = x > values
    return tl.where(better, x, values), tl.where(better, ids, value_ids)


@triton.jit
def _take_scores(scores, score_ids, most, kept, scaled, key, ids):
    """Add a tile to best scores; compute noise only if it may win."""
    if tl.max(tl.where(kept, scaled, -_INF), 0) + _LARGEST_NOISE > most:
        scores, score_ids = _better(scores, score_ids, tl.where(kept, scaled + noise_at(key, ids), -_INF), ids)
        most = tl.max(scores, 0)
    return scores, score_ids, most


@triton.jit
def _is_edited(integers, output_len, masked_as):
    ends = tl.where(output_len < tl.load(integers + MIN_NEW_TOKENS), tl.load(integers + NUM_ENDS), 0)
    return (tl.load(integers + SEEN) != 0) | (tl.load(integers + NUM_BIASES) + ends > 0) | (masked_as >= 0)


@triton.jit
def _masked_as(mask_rows_ptr, row, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(mask_rows_ptr + row)
    return -1


@triton.jit
def _edit(x, ids, inside, integers, floats, output_len):
    seen_ptr = tl.load(integers + SEEN)
    if seen_ptr != 0:
        word = tl.load(seen_ptr.to(tl.pointer_type(tl.int32)) + ids, mask=inside, other=0)
        repetition = tl.load(floats + REPETITION)
        count = (word >> 1).to(tl.float32)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where((word & 1) != 0, repeated, x)
        x = x - tl.load(floats + FREQUENCY) * count
        x = x - tl.load(floats + PRESENCE) * (count > 0).to(tl.float32)
    edits = tl.load(integers + EDITS).to(tl.pointer_type(tl.int32))
    ends = tl.where(output_len < tl.load(integers + MIN_NEW_TOKENS), tl.load(integers + NUM_ENDS), 0)
    for i in range(tl.load(integers + NUM_BIASES) + ends):
        value = tl.load(edits + 2 * i + 1).to(tl.float32, bitcast=True)
        x = tl.where(ids == tl.load(edits + 2 * i), x + value, x)
    return x


@triton.jit(do_not_specialize_on_alignment=ROWS_OF_INPUTS)
def peaks_kernel(
    logits_ptr,  # [n, VOCAB]
    edited_ptr,  # same shape; edited rows
    slots_ptr,  # [n] int64
    output_lens_ptr,  # [n] int64; -1: the row is not sampled
    integers_ptr,  # [slots, COLUMNS] int64
    floats_ptr,  # the same memory as float32
    mask_rows_ptr,  # [n] int32; -1: no mask
    masks_ptr,  # [m, ceil(VOCAB / 32)] int32
    before_ptr,  # IS_FALLBACK: peaks without it
    peaks_ptr,  # [n, 3, PARTS] float32: raw, edited, of the scores
    ids_ptr,  # [n, 2, PARTS] int32: of the edited peak, of the best score
    VOCAB: tl.constexpr,
    PART: tl.constexpr,  # tokens per program, a multiple of TILE
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    IS_FALLBACK: tl.constexpr,
):
    """Program (row, part). IS_FALLBACK: the row forbids all tokens, so apply only its mask."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    output_len = tl.load(output_lens_ptr + row)
    if output_len < 0:
        return
    slot = tl.load(slots_ptr + row)
    integers, floats = _request_at(slot, integers_ptr, floats_ptr)
    masked_as = _masked_as(mask_rows_ptr, row, MASKED)
    is_edited = _is_edited(integers, output_len, masked_as)
    at = row * 3 * PARTS + part
    if IS_FALLBACK:
        own = before_ptr + row * 3 * PARTS
        if (masked_as < 0) | (tl.max(tl.load(own + PARTS + tl.arange(0, PARTS)), 0) > -_INF):
            tl.store(peaks_ptr + at, tl.load(own + part))
            tl.store(peaks_ptr + at + PARTS, tl.load(own + PARTS + part))
            return
    raw = tl.full([TILE], -_INF, tl.float32)
    best = tl.full([TILE], -_INF, tl.float32)
    best_ids = tl.zeros([TILE], tl.int32)
    for i in range(PART // TILE):
        ids = part * PART + i * TILE + tl.arange(0, TILE)
        inside = ids < VOCAB
        x = tl.load(logits_ptr + row * VOCAB + ids, mask=inside, other=-_INF)
        raw = tl.maximum(raw, tl.where(x != x, _INF, x))
        if is_edited:
            if not IS_FALLBACK:
                x = _edit(x, ids, inside, integers, floats, output_len)
            if MASKED:  # noqa: SIM102 (decided by the compiler)
                if masked_as >= 0:
                    words = masks_ptr + masked_as.to(tl.int64) * ((VOCAB + 31) // 32)
                    word = tl.load(words + (ids >> 5), mask=inside, other=0)
                    x = tl.where(((word >> (ids & 31)) & 1) != 0, x, -_INF)
            tl.store(edited_ptr + row * VOCAB + ids, x, mask=inside)
        best, best_ids = _better(best, best_ids, x, ids)
    peak = tl.max(best, 0)
    tl.store(peaks_ptr + at, tl.max(raw, 0))
    tl.store(peaks_ptr + at + PARTS, peak)
    tl.store(ids_ptr + row * 2 * PARTS + part, tl.min(tl.where(best == peak, best_ids, VOCAB), 0))


@triton.jit
def _peak_of(peaks_ptr, row, which, PARTS: tl.constexpr):
    return tl.max(tl.load(peaks_ptr + (row * 3 + which) * PARTS + tl.arange(0, PARTS)), 0)


@triton.jit
def _id_of_peak(peaks_ptr, ids_ptr, row, which, peak, PARTS: tl.constexpr, VOCAB: tl.constexpr):
    """Lowest token of a peak (1: edited, 2: scores)."""
    at = tl.arange(0, PARTS)
    values = tl.load(peaks_ptr + (row * 3 + which) * PARTS + at)
    return tl.min(tl.where(values == peak, tl.load(ids_ptr + (row * 2 + which - 1) * PARTS + at), VOCAB), 0)


@triton.jit
def _is_finite(x):
    return (x > -_INF) & (x < _INF)


@triton.jit
def _is_below(gap_bits, ids, bound_gap, bound_id):
    return (gap_bits < bound_gap) | ((gap_bits == bound_gap) & (ids < bound_id))


@triton.jit
def _bins_of(source, best, within, start, shift, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Count tokens with bits `within` by element: a byte for each of bins 0 to 7, and 8 to 15."""
    low, high = within
    few, many = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64)
    for at in range(0, VOCAB, TILE):
        ids = at + tl.arange(0, TILE)
        x = tl.load(source + ids, mask=ids < VOCAB, other=-_INF)
        bits = (best - x).to(tl.int32, bitcast=True)
        counts = (ids < VOCAB) & (bits >= low) & (bits < high)
        index = tl.minimum(tl.maximum(bits - start, 0) >> shift, 15)
        one = tl.where(counts, 1, 0).to(tl.int64) << ((index & 7) * 8).to(tl.int64)
        few += tl.where(index < 8, one, 0)
        many += tl.where(index < 8, 0, one)
    return few, many


@triton.jit
def _count_in(bins, index: tl.constexpr):
    return tl.sum(((bins >> (8 * index)) & 255).to(tl.int32), 0)


@triton.jit(do_not_specialize_on_alignment=ROWS_OF_INPUTS)
def top_k_kernel(
    logits_ptr,
    edited_ptr,
    slots_ptr,
    output_lens_ptr,
    integers_ptr,
    floats_ptr,
    mask_rows_ptr,
    peaks_ptr,
    bounds_ptr,  # [n, 2] int32: gap bits, token id
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Program (row): the bound with top_k tokens below it."""
    row = tl.program_id(0).to(tl.int64)
    output_len = tl.load(output_lens_ptr + row)
    if output_len < 0:
        return
    slot = tl.load(slots_ptr + row)
    integers, floats = _request_at(slot, integers_ptr, floats_ptr)
    top_k = tl.load(integers + TOP_K).to(tl.int32)
    best = _peak_of(peaks_ptr, row, 1, PARTS)
    is_sampled = tl.load(floats + TEMPERATURE) > 0
    is_good = _is_finite(best) & _is_finite(_peak_of(peaks_ptr, row, 0, PARTS))
    if (top_k >= VOCAB) | (is_sampled == 0) | (is_good == 0):
        return
    is_edited = _is_edited(integers, output_len, _masked_as(mask_rows_ptr, row, MASKED))
    source = tl.where(is_edited, edited_ptr, logits_ptr) + row * VOCAB
    # tokens with bits < low: `before`, at most top_k; with bits < high: more
    low, high, before = tl.full([], 0, tl.int32), tl.full([], _INF_BITS + 1, tl.int32), tl.full([], 0, tl.int32)
    start, shift = tl.full([], _FIRST_BIN, tl.int32), tl.full([], 23, tl.int32)
    while (before != top_k) & (high - low > 1):
        few, many = _bins_of(source, best, (low, high), start, shift, VOCAB, TILE)
        found = tl.full([], 0, tl.int32)  # the bin of token number top_k
        running = before
        for i in tl.static_range(15):
            running += _count_in(few, i) if i < 8 else _count_in(many, i - 8)
            found += tl.where(running <= top_k, 1, 0)
            before = tl.where(running <= top_k, running, before)
        high = tl.where(found < 15, start + tl.minimum(high - start, (found + 1) << shift), high)
        low = tl.where(found > 0, start + (found << shift), low)
        is_edge = ((found == 0) | (found == 15)) & (shift == 23) & (start == _FIRST_BIN)
        shift = tl.where(is_edge, 27, tl.maximum(shift - 4, 0))
        start = low
    bound_id = tl.full([], 0, tl.int32)
    if before != top_k:  # ties: keep the lower token ids
        for at in range(0, VOCAB, TILE):
            ids = at + tl.arange(0, TILE)
            x = tl.load(source + ids, mask=ids < VOCAB, other=-_INF)
            tie = ((ids < VOCAB) & ((best - x).to(tl.int32, bitcast=True) == low)).to(tl.int32)
            rank = before + tl.cumsum(tie, 0) - tie
            bound_id += tl.sum(tl.where((tie != 0) & (rank == top_k), ids, 0), 0)
            before += tl.sum(tie, 0)
    tl.store(bounds_ptr + row * 2, low)
    tl.store(bounds_ptr + row * 2 + 1, bound_id)


@triton.jit
def _scaled(x, best, temperature):
    return tl.div_rn(x - best, temperature)


@triton.jit(do_not_specialize_on_alignment=ROWS_OF_INPUTS)
def scores_kernel(
    logits_ptr,
    edited_ptr,
    slots_ptr,
    output_lens_ptr,
    integers_ptr,
    floats_ptr,
    mask_rows_ptr,
    bounds_ptr,
    peaks_ptr,
    ids_ptr,
    masses_ptr,  # [n, PARTS] int64: of tokens within top_k
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Program (row, part)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    output_len = tl.load(output_lens_ptr + row)
    if output_len < 0:
        return
    slot = tl.load(slots_ptr + row)
    integers, floats = _request_at(slot, integers_ptr, floats_ptr)
    temperature = tl.load(floats + TEMPERATURE)
    best = _peak_of(peaks_ptr, row, 1, PARTS)
    is_good = _is_finite(best) & _is_finite(_peak_of(peaks_ptr, row, 0, PARTS))
    if (temperature <= 0) | (is_good == 0):
        return
    bound_gap, bound_id = tl.full([], _NO_BOUND, tl.int32), tl.full([], 0, tl.int32)
    if tl.load(integers + TOP_K) < VOCAB:
        bound_gap, bound_id = tl.load(bounds_ptr + row * 2), tl.load(bounds_ptr + row * 2 + 1)
    has_top_p, log_min_p = tl.load(floats + TOP_P) < 1, tl.load(floats + LOG_MIN_P)
    key = key_of(tl.load(integers + SEED), output_len)
    is_edited = _is_edited(integers, output_len, _masked_as(mask_rows_ptr, row, MASKED))
    source = tl.where(is_edited, edited_ptr, logits_ptr) + row * VOCAB
    scores = tl.full([TILE], -_INF, tl.float32)
    score_ids = tl.zeros([TILE], tl.int32)
    masses = tl.zeros([TILE], tl.int64)
    most = tl.full([], -_INF, tl.float32)
    for i in range(PART // TILE):
        ids = part * PART + i * TILE + tl.arange(0, TILE)
        x = tl.load(source + ids, mask=ids < VOCAB, other=-_INF)
        scaled = _scaled(x, best, temperature)
        kept = _is_below((best - x).to(tl.int32, bitcast=True), ids, bound_gap, bound_id) & (ids < VOCAB)
        if has_top_p:
            masses += tl.where(kept, mass_of(scaled), 0)
        kept = kept & (scaled >= log_min_p)
        scores, score_ids, most = _take_scores(scores, score_ids, most, kept, scaled, key, ids)
    tl.store(peaks_ptr + (row * 3 + 2) * PARTS + part, most)
    tl.store(ids_ptr + (row * 2 + 1) * PARTS + part, tl.min(tl.where(scores == most, score_ids, VOCAB), 0))
    tl.store(masses_ptr + row * PARTS + part, tl.sum(masses, 0))


@triton.jit(do_not_specialize_on_alignment=ROWS_OF_INPUTS)
def finish_kernel(
    logits_ptr,
    edited_ptr,
    slots_ptr,
    output_lens_ptr,
    integers_ptr,
    floats_ptr,
    mask_rows_ptr,
    peaks_ptr,
    ids_ptr,
    masses_ptr,
    tokens_ptr,  # [n] int64
    bad_ptr,  # [n] uint8
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Program (row); bad or unsampled rows get 0."""
    row = tl.program_id(0).to(tl.int64)
    output_len = tl.load(output_lens_ptr + row)
    if output_len < 0:
        tl.store(tokens_ptr + row, 0)
        tl.store(bad_ptr + row, 0)
        return
    slot = tl.load(slots_ptr + row)
    integers, floats = _request_at(slot, integers_ptr, floats_ptr)
    is_good = _is_finite(_peak_of(peaks_ptr, row, 0, PARTS))
    best = _peak_of(peaks_ptr, row, 1, PARTS)
    temperature, top_p = tl.load(floats + TEMPERATURE), tl.load(floats + TOP_P)
    token = tl.full([], 0, tl.int32)
    if is_good & (best > -_INF):
        token = _id_of_peak(peaks_ptr, ids_ptr, row, 1, best, PARTS, VOCAB)
    if is_good & _is_finite(best) & (temperature > 0):
        most = _peak_of(peaks_ptr, row, 2, PARTS)
        if most > -_INF:
            token = _id_of_peak(peaks_ptr, ids_ptr, row, 2, most, PARTS, VOCAB)
        if top_p < 1:
            total = tl.sum(tl.load(masses_ptr + row * PARTS + tl.arange(0, PARTS)), 0)
            limit = top_p.to(tl.float64) * total.to(tl.float64)
            is_edited = _is_edited(integers, output_len, _masked_as(mask_rows_ptr, row, MASKED))
            source = tl.where(is_edited, edited_ptr, logits_ptr) + row * VOCAB
            key = key_of(tl.load(integers + SEED), output_len)
            drawn = _Row(source, best, temperature, tl.load(floats + LOG_MIN_P), key)
            gap = (best - tl.load(source + token)).to(tl.int32, bitcast=True)
            before = _mass_below(drawn, gap, token, VOCAB, TILE)
            while before.to(tl.float64) >= limit:
                token = _best_below(drawn, gap, token, VOCAB, TILE)
                gap = (best - tl.load(source + token)).to(tl.int32, bitcast=True)
                before = _mass_below(drawn, gap, token, VOCAB, TILE)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(bad_ptr + row, tl.where(is_good, 0, 1).to(tl.uint8))
    seen_ptr = tl.load(integers + SEEN)
    if seen_ptr != 0:
        word_ptr = seen_ptr.to(tl.pointer_type(tl.int32)) + token
        tl.store(word_ptr, (tl.load(word_ptr) + 2) | 1)


@triton.jit
def _mass_below(row, bound_gap, bound_id, VOCAB: tl.constexpr, TILE: tl.constexpr):
    total = tl.zeros([TILE], tl.int64)
    for at in range(0, VOCAB, TILE):
        ids = at + tl.arange(0, TILE)
        x = tl.load(row.source + ids, mask=ids < VOCAB, other=-_INF)
        kept = _is_below((row.best - x).to(tl.int32, bitcast=True), ids, bound_gap, bound_id) & (ids < VOCAB)
        if tl.max(kept.to(tl.int32), 0) > 0:
            total += tl.where(kept, mass_of(_scaled(x, row.best, row.temperature)), 0)
    return tl.sum(total, 0)


@triton.jit
def _best_below(row, bound_gap, bound_id, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Token of the best score below a bound; the best token is always within it."""
    scores = tl.full([TILE], -_INF, tl.float32)
    score_ids = tl.zeros([TILE], tl.int32)
    most = tl.full([], -_INF, tl.float32)
    for at in range(0, VOCAB, TILE):
        ids = at + tl.arange(0, TILE)
        x = tl.load(row.source + ids, mask=ids < VOCAB, other=-_INF)
        scaled, gap_bits = _scaled(x, row.best, row.temperature), (row.best - x).to(tl.int32, bitcast=True)
        kept = _is_below(gap_bits, ids, bound_gap, bound_id) & (scaled >= row.log_min_p)
        kept = kept & (ids < VOCAB)
        scores, score_ids, most = _take_scores(scores, score_ids, most, kept, scaled, row.key, ids)
    return tl.min(tl.where(scores == most, score_ids, VOCAB), 0)


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Mask index per row, int32[n] or -1, into `bits` int32[m, ceil(V / 32)]."""

    rows: Tensor
    bits: Tensor
    bans: bool


def part_of(vocab_size: int) -> int:
    return triton.cdiv(vocab_size, PARTS * TILE) * TILE


def sample(
    logits: Tensor, slots: Tensor, output_lens: Tensor, requests: Tensor, masks: RowMasks | None
) -> tuple[Tensor, Tensor]:
    """Sample int64[n] tokens, and bool[n] bad rows.

    logits float32[n, V]; requests int64[num_slots, COLUMNS]. Rows with output_len -1 give 0. Only
    kernels read the tensors, so the call can be captured.
    """
    n, vocab_size = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32, (logits.shape, logits.dtype)
    assert masks is None or masks.bits.shape[1] == -(-vocab_size // 32), (masks, vocab_size)
    assert vocab_size <= MOST_TOKENS, f"{vocab_size} token ids: the kernels take {MOST_TOKENS}"
    device = logits.device
    edited = torch.empty_like(logits)
    peaks = torch.empty((n, 3, PARTS), dtype=torch.float32, device=device)
    ids = torch.empty((n, 2, PARTS), dtype=torch.int32, device=device)
    masses = torch.empty((n, PARTS), dtype=torch.int64, device=device)
    bounds = torch.empty((n, 2), dtype=torch.int32, device=device)
    tokens = torch.empty(n, dtype=torch.int64, device=device)
    bad = torch.empty(n, dtype=torch.uint8, device=device)
    rows = (logits, edited, slots, output_lens, requests, requests.view(torch.float32))
    mask_rows, mask_bits = (slots, slots) if masks is None else (masks.rows, masks.bits)
    by_part = {"PART": part_of(vocab_size), "PARTS": PARTS, "TILE": TILE, "num_warps": WARPS}
    by_row = {"PARTS": PARTS, "TILE": ROW_TILE, "num_warps": ROW_WARPS}
    shared = {"VOCAB": vocab_size, "MASKED": masks is not None, **EXACT}
    peaks_kernel[(n, PARTS)](*rows, mask_rows, mask_bits, peaks, peaks, ids, IS_FALLBACK=False, **by_part, **shared)
    if masks is not None and masks.bans:
        before, peaks = peaks, torch.empty_like(peaks)
        peaks_kernel[(n, PARTS)](*rows, mask_rows, mask_bits, before, peaks, ids, IS_FALLBACK=True, **by_part, **shared)
    top_k_kernel[(n,)](*rows, mask_rows, peaks, bounds, **by_row, **shared)
    scores_kernel[(n, PARTS)](*rows, mask_rows, bounds, peaks, ids, masses, **by_part, **shared)
    finish_kernel[(n,)](*rows, mask_rows, peaks, ids, masses, tokens, bad, **by_row, **shared)
    return tokens, bad.view(torch.bool)


@triton.jit
def log_norm_kernel(logits_ptr, norms_ptr, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Program (row): logsumexp, in tile order in any batch."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([TILE], -_INF, tl.float32)
    for at in range(0, VOCAB, TILE):
        ids = at + tl.arange(0, TILE)
        best = tl.maximum(best, tl.load(logits_ptr + row * VOCAB + ids, mask=ids < VOCAB, other=-_INF))
    peak = tl.max(best, 0)
    total = tl.zeros([TILE], tl.float32)
    for at in range(0, VOCAB, TILE):
        ids = at + tl.arange(0, TILE)
        total += tl.exp(tl.load(logits_ptr + row * VOCAB + ids, mask=ids < VOCAB, other=-_INF) - peak)
    tl.store(norms_ptr + row, peak + tl.log(tl.sum(total, 0)))


def log_norms(logits: Tensor) -> Tensor:
    """Logsumexp float32[n] per row."""
    n, vocab_size = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32, (logits.shape, logits.dtype)
    norms = torch.empty(n, dtype=torch.float32, device=logits.device)
    log_norm_kernel[(n,)](logits, norms, VOCAB=vocab_size, TILE=ROW_TILE, num_warps=ROW_WARPS)
    return norms
