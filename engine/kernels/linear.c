/* y = x W^T + b for bf16, any number of rows: weights are packed once, and each of their bytes is read once for up to
 * CHUNK rows. Sums are fp32, the result is rounded once.
 *
 * Layout of packed weights: panels of 32 outputs; in a panel, steps of 32 inputs; in a step, two tiles of 16 outputs; in
 * a tile, 16 lines of 64 bytes: line i holds inputs 2i and 2i + 1 of each of the 16 outputs, pair by pair (what AMX and
 * AVX512-BF16 both multiply by). Outputs and inputs beyond the matrix are zeros. A decode step so reads memory from one
 * end to the other, in the order in which it lies there.
 *
 * An output is one sum over the inputs in ascending order, 32 at a time, whatever the number of rows, its place among
 * them and the number of threads: the bits of a row depend on the row alone.
 *
 * Sources: Intel, "Architecture Instruction Set Extensions Programming Reference" (AMX tiles), and its optimization
 * manual, chapter 20 (2x2 blocks of tiles, operands kept in L1 and L2).
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "rows.h"
#include "tiles.h"

#define ABI_VERSION 1
#define CHUNK 256               /* rows that share one reading of the weights */
#define DEPTH 8                 /* steps of a panel that stay in the L1 cache while the rows of a chunk pass */
#define GROUP 8                 /* panels of many rows that are written together: 512 bytes of each row, not 64 */
#define FEW (4 * PANEL)         /* rows up to which a panel is passed over once for every 32 of them */
#define AHEAD_BYTES 1024        /* few rows: weights are fetched this long before their use; longer is slower */

/* Mirrored by _Args in linear.py. x [rows, inputs] with rows x_stride elements apart, y [rows, outputs] dense. What is
 * multiplied is x; or, with `norm` [inputs], x's RMS norm times it, after x += delta where there is one [rows, inputs]; or,
 * if gated, silu(x[:, :inputs]) * x[:, inputs:] of a row twice as long. The last two need inputs to be a multiple of 16. */
struct args {
    bf16 *x;
    const char *weight;
    const bf16 *bias; /* [outputs] or NULL */
    void *y;          /* bf16, or the same rounded values as fp32 */
    const bf16 *norm, *delta;
    int64_t rows, inputs, outputs, x_stride, y_is_f32, gated, threads, kind;
    float eps;
};

#if defined(HAVE_AVX512)
/* ---- rows of x -> tiles: [block of 16 rows][step][row][32 inputs], zeros beyond the last input */

/* Row r of what is multiplied: of x, or computed into `own`. */
static const bf16 *ready(const struct args *a, int64_t r, bf16 *own) {
    bf16 *x = a->x + r * a->x_stride;
    if (a->gated) {
        gate_row(x, x + a->inputs, own, a->inputs);
        return own;
    }
    if (!a->norm) return x;
    if (a->delta) add_row(x, a->delta + r * a->inputs, a->inputs);
    norm_row(x, a->norm, own, a->inputs, a->eps);
    return own;
}

PART void pack_rows(const struct args *a, int64_t first, int64_t count, char *to) {
    const int64_t steps = ceil_div(a->inputs, STEP), whole = a->inputs / STEP;
    const __mmask32 rest = (__mmask32)((1ull << (a->inputs % STEP)) - 1);
    bf16 own[a->inputs];
    for (int64_t r = 0; r < count; r++) {
        const bf16 *x = ready(a, first + r, own);
        char *line = to + (r / TILE) * steps * TILE_BYTES + (r % TILE) * LINE_BYTES;
        for (int64_t k = 0; k < whole; k++) _mm512_store_si512(line + k * TILE_BYTES, _mm512_loadu_si512(x + k * STEP));
        if (rest) _mm512_store_si512(line + whole * TILE_BYTES, _mm512_maskz_loadu_epi16(rest, x + whole * STEP));
    }
}

/* ---- sums [rows, 32] fp32 -> y */

INLINE __m512 rounded(__m512 sum) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(sum)), 16)); }

INLINE void write_half(const struct args *a, __m512 sum, int64_t row, int64_t output) {
    const int64_t left = a->outputs - output;
    if (left <= 0) return;
    const __mmask16 there = left >= TILE ? 0xffff : (__mmask16)((1u << left) - 1);
    const int64_t at = row * a->outputs + output;
    if (a->y_is_f32) _mm512_mask_storeu_ps((float *)a->y + at, there, rounded(sum));
    else _mm256_mask_storeu_epi16((bf16 *)a->y + at, there, (__m256i)_mm512_cvtneps_pbh(sum));
}

INLINE __m512 bias_of(const struct args *a, int64_t output) {
    const int64_t left = a->outputs - output;
    if (!a->bias || left <= 0) return _mm512_setzero_ps();
    const __mmask16 there = left >= TILE ? 0xffff : (__mmask16)((1u << left) - 1);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, a->bias + output)), 16));
}

/* A panel's 32 outputs of a row. */
INLINE void write_line(const struct args *a, const float *from, const __m512 *bias, int64_t row, int64_t output) {
    const __m512 low = _mm512_add_ps(_mm512_load_ps(from), bias[0]), high = _mm512_add_ps(_mm512_load_ps(from + TILE), bias[1]);
    if (a->y_is_f32 || a->outputs - output < PANEL) {
        write_half(a, low, row, output);
        write_half(a, high, row, output + TILE);
    } else {
        _mm512_storeu_si512((bf16 *)a->y + row * a->outputs + output, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

/* sums: `panels` blocks of [chunk, 32], those of outputs output.. on. */
static void write_rows(const struct args *a, const float *sums, int64_t chunk, int64_t panels, int64_t first, int64_t count, int64_t output) {
    __m512 bias[2 * GROUP];
    for (int64_t h = 0; h < 2 * panels; h++) bias[h] = bias_of(a, output + h * TILE);
    for (int64_t r = 0; r < count; r++)
        for (int64_t p = 0; p < panels; p++) write_line(a, sums + (p * chunk + r) * PANEL, bias + 2 * p, first + r, output + p * PANEL);
}
#endif

/* ---- AMX: sums of a block of at most 32 rows over `steps` steps of a panel */

#if defined(HAVE_AMX)
/* At most 16 rows and two panels that lie one behind the other: x is read half as often. sums, other: [rows, 32]. */
static void amx_pair(const char *x, const char *w, float *sums, float *other, int64_t steps) {
    const char *v = w + steps * STEP_BYTES;
    const int stride = PANEL * sizeof(float);
    settle();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < steps; k++, x += TILE_BYTES, w += STEP_BYTES, v += STEP_BYTES) {
        fetch(w + AHEAD_BYTES, STEP_BYTES);
        _tile_loadd(4, x, LINE_BYTES);
        _tile_loadd(6, w, LINE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + TILE_BYTES, LINE_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        fetch(v + AHEAD_BYTES, STEP_BYTES);
        _tile_loadd(6, v, LINE_BYTES);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, v + TILE_BYTES, LINE_BYTES);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + TILE, stride);
    _tile_stored(2, other, stride);
    _tile_stored(3, other + TILE, stride);
    settle();
}

/* Many rows. DEPTH steps of all panels at a time: their part of x stays in the L2 cache, and the weights of the panel at
 * hand in L1, while each block of rows fetches its share of the weights that come next. Rows beyond the last are computed
 * like the others, from what lies there, and not written. */
PART void amx_group(const char *x, const char *w, int64_t panels, float *sums, int64_t chunk, int64_t steps, int64_t rows) {
    const int64_t x_block = steps * TILE_BYTES, share = ceil_div(STEP_BYTES / LINE_BYTES, ceil_div(rows, PANEL)) * LINE_BYTES;
    for (int64_t k = 0; k < steps; k += DEPTH) {
        const int64_t depth = smaller(DEPTH, steps - k);
        for (int64_t p = 0; p < panels; p++) {
            const char *own = w + (p * steps + k) * STEP_BYTES;
            const char *ahead = p + 1 < panels ? own + steps * STEP_BYTES : w + (k + depth) * STEP_BYTES;
            for (int64_t r = 0; r < rows; r += PANEL, ahead += depth * share)
                amx_block(x + r / TILE * x_block + k * TILE_BYTES, x_block, own, sums + (p * chunk + r) * PANEL, depth, 1, k > 0, ahead, share);
        }
    }
}

/* Few rows. x: tiles of all of them; sums: [rows, 32]. */
static void amx_panel(const char *x, const char *w, float *sums, int64_t steps, int64_t rows) {
    const int64_t x_block = steps * TILE_BYTES;
    if (rows <= TILE) {
        amx_block(x, x_block, w, sums, steps, 0, 0, w + AHEAD_BYTES, STEP_BYTES);
    } else {
        amx_block(x, x_block, w, sums, steps, 1, 0, w + AHEAD_BYTES, STEP_BYTES);
        for (int64_t r = PANEL; r < rows; r += PANEL) /* the panel lies in the L2 cache now */
            amx_block(x + r / TILE * x_block, x_block, w, sums + r * PANEL, steps, 1, 0, w, 0);
    }
}
#endif

/* ---- AVX512-BF16: the same sums, 8 rows at a time */

#if defined(HAVE_AVX512)
/* The number of rows is a constant in each copy, so that the sums stay in registers. */
#define COPY(rows) \
    static __attribute__((noinline)) void avx512_block_##rows(const char *x, const char *w, float *sums, int64_t steps) { avx512_block(x, w, sums, steps, rows, 0, w + AHEAD_BYTES, STEP_BYTES); }
COPY(1) COPY(2) COPY(4) COPY(8)

static void avx512_panel(const struct args *a, const char *x, const char *w, float *sums, int64_t rows) {
    const int64_t steps = ceil_div(a->inputs, STEP);
    for (int64_t r = 0; r < rows;) {
        const char *block = x + (r / TILE) * steps * TILE_BYTES + (r % TILE) * LINE_BYTES;
        float *to = sums + r * PANEL;
        if (rows - r >= 8) avx512_block_8(block, w, to, steps), r += 8;
        else if (rows - r >= 4) avx512_block_4(block, w, to, steps), r += 4;
        else if (rows - r >= 2) avx512_block_2(block, w, to, steps), r += 2;
        else avx512_block_1(block, w, to, steps), r += 1;
    }
}

/* ---- a chunk of rows, and all of them */

/* Sums of panels from..to-1, each into its own [chunk, 32] of `sums`. */
static void sum_panels(const struct args *a, const char *x, int64_t from, int64_t to, float *sums, int64_t chunk, int64_t rows) {
    const int64_t steps = ceil_div(a->inputs, STEP);
    const char *w = a->weight + from * steps * STEP_BYTES;
#if defined(HAVE_AMX)
    if (a->kind == AMX && rows > FEW) {
        amx_group(x, w, to - from, sums, chunk, steps, rows);
        return;
    }
    if (a->kind == AMX && rows <= TILE && to - from == 2) {
        amx_pair(x, w, sums, sums + chunk * PANEL, steps);
        return;
    }
#endif
    for (int64_t p = from; p < to; p++, w += steps * STEP_BYTES, sums += chunk * PANEL) {
#if defined(HAVE_AMX)
        if (a->kind == AMX) amx_panel(x, w, sums, steps, rows);
        else
#endif
            avx512_panel(a, x, w, sums, rows);
    }
}

static int multiply(const struct args *a) {
    const int64_t steps = ceil_div(a->inputs, STEP), panels = ceil_div(a->outputs, PANEL);
    const int64_t chunk = smaller(CHUNK, ceil_div(a->rows, PANEL) * PANEL);
    const int64_t at_once = chunk > PANEL ? GROUP : a->rows <= TILE ? 2 : 1;
    char *x = aligned_alloc(LINE_BYTES, (size_t)(chunk * steps * LINE_BYTES));
    int failed = 0;
    if (!x) return -1;
    /* Threads meet when the rows are packed, and when a chunk is done: each meeting costs as much as a small matrix. */
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
    {
        float *sums = aligned_alloc(LINE_BYTES, (size_t)(chunk * PANEL * at_once) * sizeof(float));
        if (!sums) {
#pragma omp atomic write
            failed = 1;
        }
        for (int64_t first = 0; first < a->rows; first += chunk) {
            const int64_t rows = smaller(chunk, a->rows - first);
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r += TILE)
                pack_rows(a, first + r, smaller(TILE, rows - r), x + r * steps * LINE_BYTES);
#if defined(HAVE_AMX)
            if (a->kind == AMX) configure(rows <= PANEL ? rows : PANEL);
#endif
#pragma omp for schedule(static) nowait
            for (int64_t p = 0; p < panels; p += at_once) {
                const int64_t end = smaller(p + at_once, panels);
                if (!sums) continue;
                sum_panels(a, x, p, end, sums, chunk, rows);
                write_rows(a, sums, chunk, end - p, first, rows, p * PANEL);
            }
            if (first + chunk < a->rows) {
#pragma omp barrier
            }
        }
#if defined(HAVE_AMX)
        if (a->kind == AMX) _tile_release();
#endif
        free(sums);
    }
    free(x);
    return failed ? -1 : 0;
}

/* ---- weights -> panels */

/* A tile of the matrix [outputs, inputs] (dense) whose first output and input are given. */
static void pack_tile(const bf16 *weight, int64_t outputs, int64_t inputs, int64_t output, int64_t input, char *to) {
    const int64_t down = smaller(TILE, outputs - output), across = smaller(STEP, inputs - input);
    memset(to, 0, TILE_BYTES);
    for (int64_t j = 0; j < down; j++) {
        const bf16 *row = weight + (output + j) * inputs + input;
        for (int64_t i = 0; i < across; i++) ((bf16 *)to)[(i / 2) * STEP + 2 * j + i % 2] = row[i];
    }
}

/* The same for a tile that is whole: line i gathers pair i of 16 rows. */
static void pack_whole_tile(const bf16 *weight, int64_t inputs, int64_t output, int64_t input, char *to) {
    const char *from = (const char *)(weight + output * inputs + input);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i rows = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)inputs * 2));
    for (int i = 0; i < TILE; i++) _mm512_store_si512(to + i * LINE_BYTES, _mm512_i32gather_epi32(rows, from + i * 4, 1));
}

static void pack(const bf16 *weight, int64_t outputs, int64_t inputs, char *to, int64_t threads) {
    const int64_t steps = ceil_div(inputs, STEP), panels = ceil_div(outputs, PANEL);
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t t = 0; t < 2 * steps; t++) {
            const int64_t output = p * PANEL + (t % 2) * TILE, input = t / 2 * STEP;
            char *tile = to + (p * 2 * steps + t) * TILE_BYTES;
            if (output + TILE <= outputs && input + STEP <= inputs) pack_whole_tile(weight, inputs, output, input, tile);
            else pack_tile(weight, outputs, inputs, output, input, tile);
        }
}
#endif

/* ---- the library's face */

int tandem_linear_abi(void) { return ABI_VERSION; }

int tandem_linear_kind(void) { return best_kind(); }

/* weight [outputs, inputs] dense -> `to`, 64-byte aligned, of ceil(outputs / 32) * ceil(inputs / 32) * 2048 bytes. */
void tandem_linear_pack(const bf16 *weight, int64_t outputs, int64_t inputs, char *to, int64_t threads) {
#if defined(HAVE_AVX512)
    pack(weight, outputs, inputs, to, threads);
#endif
}

/* Returns 0, or -1 when out of memory or of a kind that this library was not built for. */
int tandem_linear(const struct args *a) {
    if (a->rows == 0) return 0;
#if defined(HAVE_AVX512)
    return multiply(a);
#else
    return -1;
#endif
}
