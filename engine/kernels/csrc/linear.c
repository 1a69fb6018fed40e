/* y = x W^T + b for bf16, any number of rows: weights are packed once, and each of their bytes is read once for up to
 * CHUNK rows. Sums are fp32, the result is rounded once.
 *
 * Layout of packed weights: panels of 32 outputs; in a panel, steps of 32 inputs; in a step, two tiles of 16 outputs; in
 * a tile, 16 lines of 64 bytes: line i holds inputs 2i and 2i + 1 of each of the 16 outputs, pair by pair (tiles.h). Outputs and inputs beyond the matrix are zeros. A decode step so reads memory from one
 * end to the other, in the order in which it lies there. Of a gate and what it gates, one above the other in the matrix,
 * a panel has 16 outputs of each, so that one sum can be gated by the other before it is written.
 *
 * An output is one sum over the inputs in ascending order, 32 at a time, whatever the number of rows, its place among
 * them and the number of threads: the bits of a row depend on the row alone. Of an input cut into segments (a power of two
 * of them) each is such a sum, and these are added in a binary tree, neighbours first. So ranks that have a part of the
 * segments each, and add what they get in the same tree, give the bits of one rank that has all.
 *
 * Many rows by AMX. 64 cycles multiply 2 x 2 tiles, and in those the L2 cache gives hardly more than 2 KiB. So the weights
 * at hand (DEPTH steps of a panel) stay in L1, x passes by without a place in it, and sums leave their registers after
 * DEPTH steps only. Weights come from memory but once in CHUNK rows: the few lines that a core may wait for at a time are
 * those that x needs as well. Results are written around the caches: the line they replace is never read.
 *
 * Sources: Intel, "Architecture Instruction Set Extensions Programming Reference" (AMX tiles), and its optimization
 * manual, chapter 20 (2x2 blocks of tiles, operands kept in L1 and L2).
 *
 * Integer weights (`bits`) stay integers in memory, in integer_steps.h's layout, and become bf16 or fp32 just before they are
 * multiplied: exactly. A group of inputs has a scale, and may have an offset, for each output: its sum times the scale, plus
 * the sum of its inputs times the offset, is added to the sums of the groups before.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tiles/blocks.h"
#include "tiles/integer_steps.h"
#include "rows.h"
#include "team.h"
#include "tiles/tiles.h"

#define FEW (4 * PANEL)         /* rows up to which a panel is passed over once for every 32 of them */
#define CHUNK 256               /* rows that share one reading of the weights */
#define PACKED (2 * CHUNK)      /* rows that lie packed at a time */
#define DEPTH 16                /* steps of a panel that stay in the L1 cache while the rows of a chunk pass */
#define GROUP 8                 /* panels that share one reading of x: their sums stay in the L2 cache */
#define ITEMS_A_THREAD 2        /* at least, with groups of 2 panels or more */
#define AHEAD_BYTES 1024        /* few rows, AMX: weights are fetched this long before their use; longer is slower */
#define LINES_AHEAD 6144        /* the same by vectors, line by line; measured from 1024 to 16384 */
#define MOST_FEW 16             /* without AMX: rows up to which weights become what is multiplied in registers, again for every block */
#define SPAN 4                  /* steps that become ready at a time, in the L1 cache */

enum form { BF16 = 0, ROUNDED_F32 = 1, F32 = 2 }; /* of y; the second: the values of the first */

/* Mirrored by LinearArgs in linear.py. x [rows, inputs] with rows x_stride elements apart, y [rows, outputs] dense. What is
 * multiplied is x; or, with `norm` [inputs], x's RMS norm times it, after x += delta where there is one [rows, inputs]
 * (inputs: a multiple of 16). With `interleaved` weights (outputs: a multiple of 32) y may be `gated`: [rows, outputs / 2],
 * silu of the first half's outputs times those of the second. The bias belongs to the first of the `segments`.
 * With `bits` (4 or 8; 0: bf16) a group has `group` steps, of a segment, and has offsets or not. `e2m1`: 4 bits are a float. */
struct args {
    bf16 *x;
    const char *weight;
    const bf16 *bias; /* [outputs] or NULL */
    void *y;          /* of `form`; gated: bf16 */
    const bf16 *norm, *delta;
    int64_t rows, inputs, outputs, segments, x_stride, form, interleaved, gated, kind, bits, group, offsets, e2m1;
    float eps;
};

/* Mirrored by _Each in linear.py. `like`: of the first matrix, without its rows. Matrix i lies i * `apart` bytes behind it; its
 * rows[i] rows of x and of y lie behind those of matrix i - 1. */
struct each {
    struct args like;
    const int64_t *rows; /* [matrices] */
    int64_t matrices, apart;
};

/* Mirrored by _Packing in linear.py. weight [outputs, inputs] dense -> `to`, 64-byte aligned: segments * ceil(outputs / 32) *
 * ceil(inputs / segments / 32) steps. */
struct packing {
    const bf16 *weight;
    char *to;
    int64_t outputs, inputs, segments, interleaved;
};

/* Which rows are computed together, and how. x: packed rows, zeros beyond the last input: [block of 16 rows][step][row]
 * [32 inputs]; of many rows a block is one of 32, and a step two tiles of 16 rows each. */
struct work {
    const struct args *a;
    char *x;
    float *of_x;                        /* [packed row][group]: the sum of a group of its inputs, where weights have offsets */
    bf16 *own;                          /* [TILE, inputs] of this thread: rows that are computed before they are packed */
    int64_t first, rows;                /* of a->x, those that lie packed */
    int64_t each, steps;                /* of a segment, of all */
    int64_t panels, chunk, group;       /* an item: `group` panels of at most `chunk` rows */
    int many;
};

/* ---- rows of x -> tiles */

/* Row r of what is multiplied: of x, or computed into `own`. */
static const bf16 *ready(const struct args *a, int64_t r, bf16 *own) {
    bf16 *x = a->x + r * a->x_stride;
    if (!a->norm) return x;
    if (a->delta) add_row(x, a->delta + r * a->inputs, a->inputs);
    norm_row(x, a->norm, own, a->inputs, a->eps);
    return own;
}

/* Of integers. */
INLINE int form_of(const struct args *a) { return a->e2m1 ? IS_E2M1 : (int)a->bits; }

INLINE int64_t groups_of(const struct args *a, int64_t steps) { return a->bits ? ceil_div(steps, a->group) : 0; }

INLINE char *tile_of(const struct work *w, int64_t r) {
    if (w->many) return w->x + r / PANEL * w->steps * STEP_BYTES + r % PANEL / TILE * TILE_BYTES;
    return w->x + r / TILE * w->steps * LEFT_TILE_BYTES;
}

/* Of packed row r, whose line in the first tile of segment s is given. */
static void sum_groups(const struct work *w, const char *line, int64_t r, int64_t s) {
    const int64_t groups = groups_of(w->a, w->each), group = w->a->group;
    float *to = w->of_x + (r * w->a->segments + s) * groups;
    for (int64_t g = 0; g < groups; g++) to[g] = sum_of_row(line + g * group * LEFT_TILE_BYTES, smaller(group, w->each - g * group), LEFT_TILE_BYTES);
}

/* Rows from..to - 1, those of a tile together: so each step of them is written as one run of memory. */
PART void pack_rows(const struct work *w, int64_t from, int64_t to) {
    const struct args *a = w->a;
    const int64_t segment = a->inputs / a->segments, apart = w->many ? STEP_BYTES : LEFT_TILE_BYTES;
    for (int64_t r = from, count; r < to; r += count) {
        const bf16 *rows[TILE];
        count = smaller(to - r, TILE - r % TILE);
        for (int64_t i = 0; i < count; i++) rows[i] = ready(a, w->first + r + i, w->own + i * a->inputs);
        char *line = tile_of(w, r) + r % TILE * LEFT_LINE_BYTES;
        for (int64_t s = 0; s < a->segments; s++, line += w->each * apart) {
            for (int64_t k = 0; k < w->each; k++)
                for (int64_t i = 0; i < count; i++) put_left(line + k * apart + i * LEFT_LINE_BYTES, rows[i] + s * segment + k * STEP, smaller(STEP, segment - k * STEP));
            for (int64_t i = 0; a->offsets && i < count; i++) sum_groups(w, line + i * LEFT_LINE_BYTES, r + i, s);
        }
    }
}

/* ---- sums [rows, 32] fp32 -> y */

/* Where the 16 outputs of a half panel belong. */
INLINE int64_t column_of(const struct args *a, int64_t half) { return a->interleaved ? half % 2 * (a->outputs / 2) + half / 2 * TILE : half * TILE; }

INLINE f16v bias_of(const struct args *a, int64_t column) { return a->bias ? load_some_bf16(a->bias + column, a->outputs - column) : (f16v){0}; }

INLINE void write_half(const struct args *a, f16v sum, int64_t row, int64_t column) {
    const int64_t at = row * a->outputs + column, left = a->outputs - column;
    if (a->form != BF16) store_some_f32((float *)a->y + at, a->form == F32 ? sum : round_bf16(sum), left);
    else store_some_bf16((bf16 *)a->y + at, sum, left);
}

/* A panel's 32 outputs of a row. `around`: of the caches, for which the line must be aligned. */
INLINE void write_line(const struct args *a, f16v low, f16v high, int64_t row, int64_t panel, const int around) {
    if (a->gated) {
        const f16v gate = round_bf16(silu(round_bf16(low))), up = round_bf16(high);
        store_bf16((bf16 *)a->y + row * (a->outputs / 2) + panel * TILE, gate * up);
    } else if (a->form != BF16 || a->interleaved || a->outputs - panel * PANEL < PANEL) {
        write_half(a, low, row, column_of(a, 2 * panel));
        write_half(a, high, row, column_of(a, 2 * panel + 1));
    } else {
        store_line((bf16 *)a->y + row * a->outputs + panel * PANEL, low, high, around);
    }
}

/* to += from: `panels` blocks of [chunk, 32] each, of which `count` rows. */
PART void add_sums(const struct work *w, float *to, const float *from, int64_t panels, int64_t count) {
    for (int64_t p = 0; p < panels; p++)
        for (int64_t i = p * w->chunk * PANEL; i < (p * w->chunk + count) * PANEL; i += TILE) store_f32(to + i, load_f32(to + i) + load_f32(from + i));
}

/* sums += bias: the same blocks, those of panels `panel`... */
static void add_bias(const struct work *w, float *sums, int64_t panels, int64_t panel, int64_t count) {
    for (int64_t p = 0; p < panels; p++)
        for (int64_t half = 0; half < 2; half++) {
            const f16v bias = bias_of(w->a, column_of(w->a, 2 * (panel + p) + half));
            float *to = sums + p * w->chunk * PANEL + half * TILE;
            for (int64_t r = 0; r < count; r++, to += PANEL) store_f32(to, load_f32(to) + bias);
        }
}

/* sums: `panels` blocks of [chunk, 32], those of panels `panel`.. and rows first.. of x. */
PART void write_rows(const struct work *w, const float *sums, int64_t panels, int64_t panel, int64_t first, int64_t count) {
    const struct args *a = w->a;
    const int around = w->many && a->outputs % PANEL == 0 && (uintptr_t)a->y % LINE_BYTES == 0;
    f16v bias[2 * GROUP];
    for (int64_t h = 0; h < 2 * panels; h++) bias[h] = a->segments == 1 ? bias_of(a, column_of(a, 2 * panel + h)) : (f16v){0};
    for (int64_t r = 0; r < count; r++)
        for (int64_t p = 0; p < panels; p++) {
            const float *from = sums + (p * w->chunk + r) * PANEL;
            write_line(a, load_f32(from) + bias[2 * p], load_f32(from + TILE) + bias[2 * p + 1], first + r, panel + p, around);
        }
    if (around) end_stores_around();
}

/* ---- AMX: sums of a block of at most 32 rows over `steps` steps of a panel */

#if defined(HAVE_AMX)
/* At most 16 rows and two panels that lie `panel_bytes` apart: x is read half as often. sums, other: [rows, 32]. */
static void amx_pair(const char *x, const char *w, int64_t panel_bytes, float *sums, float *other, int64_t steps) {
    const char *v = w + panel_bytes;
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

/* Many rows: 32 of them over `steps` steps of a panel, on top of what is there if `begun`. x: [step][2 tiles]. Step k
 * fetches `share` bytes of what comes next. */
INLINE void amx_part(const char *x, const char *w, float *sums, int64_t steps, const int begun, const char *ahead, const int64_t share) {
    settle();
    begin_sums(sums, 1, begun);
    for (int64_t k = 0; k < steps; k++, x += STEP_BYTES, w += STEP_BYTES, ahead += share) {
        fetch(ahead, share);
        _tile_stream_loadd(4, x, LINE_BYTES);
        _tile_loadd(6, w, LINE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + TILE_BYTES, LINE_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_stream_loadd(5, x + TILE_BYTES, LINE_BYTES);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    end_sums(sums, 1);
    settle();
}

/* Many rows by some panels: DEPTH steps of all of them at a time, while which the rows' part of x stays in the L2 cache.
 * Each block of rows fetches its share of the weights that come next. Rows beyond the last are computed like the others,
 * from what lies there, and not written. */
PART void amx_group(const struct work *w, const char *x, const char *weight, int64_t panels, float *sums, int64_t rows) {
    const int64_t steps = w->steps, share = ceil_div(STEP_BYTES / LINE_BYTES, ceil_div(rows, PANEL)) * LINE_BYTES;
    for (int64_t k = 0; k < w->each; k += DEPTH) {
        const int64_t depth = smaller(DEPTH, w->each - k);
        for (int64_t p = 0; p < panels; p++) {
            const char *own = weight + (p * steps + k) * STEP_BYTES;
            const char *ahead = p + 1 < panels ? own + steps * STEP_BYTES : k + depth < w->each ? weight + (k + depth) * STEP_BYTES : weight + panels * steps * STEP_BYTES;
            for (int64_t r = 0; r < rows; r += PANEL, ahead += depth * share) {
                const char *from = x + (r / PANEL * steps + k) * STEP_BYTES;
                float *to = sums + (p * w->chunk + r) * PANEL;
                if (k) amx_part(from, own, to, depth, 1, ahead, share);
                else amx_part(from, own, to, depth, 0, ahead, share);
            }
        }
    }
}

/* Few rows. x: tiles of all of them, those of 16 rows x_block bytes apart; sums: [rows, 32]. */
static void amx_panel(const char *x, int64_t x_block, const char *w, float *sums, int64_t steps, int64_t rows) {
    if (rows <= TILE) {
        amx_block(x, x_block, w, sums, steps, 0, 0, w + AHEAD_BYTES, STEP_BYTES);
    } else {
        amx_block(x, x_block, w, sums, steps, 1, 0, w + AHEAD_BYTES, STEP_BYTES);
        for (int64_t r = PANEL; r < rows; r += PANEL) /* the panel lies in the L2 cache now */
            amx_block(x + r / TILE * x_block, x_block, w, sums + r * PANEL, steps, 1, 0, w, 0);
    }
}
#endif

/* ---- the same sums by vectors, some rows of a tile at a time */

#define BLOCK(size, rows) \
    PART void block_##size(const char *x, const char *w, float *sums, int64_t steps) { product_block(x, w, sums, steps, rows, 0, 0, LINES_AHEAD); }
BLOCK(0, 1) BLOCK(1, 2) BLOCK(2, FOUR_ROWS) BLOCK(3, MAX_ROWS)

static void (*const BLOCK_OF[BLOCK_SIZES])(const char *, const char *, float *, int64_t) = {block_0, block_1, block_2, block_3};

/* Many rows of a kind that takes lines apart: some steps at a time, for all rows. */
PART void ready_panel(const char *x, int64_t x_block, const char *w, float *sums, int64_t steps, int64_t rows) {
    _Alignas(LINE_BYTES) char ready[SPAN * READY_STEP_BYTES];
    for (int64_t k = 0, span; k < steps; k += span) {
        span = smaller(SPAN, steps - k);
        fetch(w + (k + SPAN) * STEP_BYTES, span * STEP_BYTES);
        for (int64_t i = 0; i < span * 2 * TILE; i++) store_ready(ready + i * READY_LINE_BYTES, bf16_line(w + k * STEP_BYTES + i * LINE_BYTES), NULL);
        vector_steps(x + k * LEFT_TILE_BYTES, x_block, ready, sums, span, rows, k > 0);
    }
}

static void vector_panel(const char *x, int64_t x_block, const char *w, float *sums, int64_t steps, int64_t rows) {
    if (READY_LINE_BYTES != LINE_BYTES && rows > MOST_FEW) {
        ready_panel(x, x_block, w, sums, steps, rows);
        return;
    }
    for (int64_t r = 0, size; r < rows; r += ROWS_OF[size]) {
        size = size_for(smaller(rows - r, TILE - r % TILE));
        BLOCK_OF[size](line_at(x, x_block, r), w, sums + r * PANEL, steps);
    }
}

/* ---- integer weights */

static void add_steps(const struct args *a, const char *x, int64_t x_block, const char *w, float *sums, int64_t steps, int64_t rows, int begun) {
#if defined(HAVE_AMX)
    if (a->kind == AMX) {
        if (rows <= TILE) amx_block(x, x_block, w, sums, steps, 0, begun, w, 0);
        else
            for (int64_t r = 0; r < rows; r += PANEL) amx_block(x + r / TILE * x_block, x_block, w, sums + r * PANEL, steps, 1, begun, w, 0);
        return;
    }
#endif
    (void)a;
    vector_steps(x, x_block, w, sums, steps, rows, begun);
}

/* Rows and integer weights: `steps` steps of a segment of a panel, or of two that lie in a pair of `paired` panels. of_x: the rows'
 * sums of these groups, `apart` floats from row to row. The panels' sums, [rows, 32] each, lie sums_apart. */
struct block {
    const struct args *a;
    const char *x, *w;
    const float *of_x;
    float *sums;
    int64_t sums_apart, apart, steps, paired;
};

/* Forms of integers: 4 bits, 8, and floats of 4. */
enum { FORMS = 3 };
INLINE int number_of(int form) { return form == 4 ? 0 : form == 8 ? 1 : 2; }

/* Of a group that has `panels` panels; of one panel. */
INLINE int64_t factor_bytes(const struct args *a, int64_t panels) { return panels * (a->offsets ? 2 : 1) * PANEL * sizeof(float); }

INLINE int64_t segment_bytes(const struct args *a, int64_t steps) { return steps * integer_step_bytes(a->bits) + groups_of(a, steps) * factor_bytes(a, 1); }

/* The scales of a group of a pair, behind whose steps they lie, and its offsets or NULL; of the first panel. */
INLINE const float *offsets_of(const struct block *b, const float *scales) { return b->a->offsets ? scales + b->paired * PANEL : NULL; }

/* Sums of panel `panel` += group g of it, of which `part` [rows, 32] are the sums and `factors` lie behind its pair's steps. */
INLINE void add_group(const struct block *b, int64_t panel, int64_t g, const float *part, const char *factors, int64_t rows) {
    const float *scales = (const float *)factors + panel * PANEL, *offsets = offsets_of(b, scales);
    float *to = b->sums + panel * b->sums_apart;
    for (int64_t r = 0; r < rows; r++, to += PANEL, part += PANEL)
        for (int64_t h = 0; h < PANEL; h += TILE) {
            const struct half before = g ? load_sums(to + h) : no_sums();
            store_sums(to + h, with_group(before, load_sums(part + h), scales + h, offsets ? offsets + h : NULL, b->of_x + r * b->apart + g));
        }
}

/* Any number of rows by panel `panel` of the pair. x: tiles of all of them, those of 16 rows x_block bytes apart. */
PART void integer_tiles(const struct block *b, int64_t x_block, int64_t rows, int64_t panel) {
    _Alignas(LINE_BYTES) char ready[SPAN * READY_STEP_BYTES];
    _Alignas(LINE_BYTES) float part[FEW * PANEL];
    const int64_t bytes = integer_step_bytes(b->a->bits), apart = b->paired * bytes, group = b->a->group;
    const char *w = b->w;
    for (int64_t at = 0, g = 0; at < b->steps; at += group, g++, w += factor_bytes(b->a, b->paired)) {
        const int64_t end = smaller(at + group, b->steps);
        for (int64_t k = at, span; k < end; k += span, w += span * apart) {
            span = smaller(SPAN, end - k);
            expand(w + panel * bytes, apart, ready, span, form_of(b->a));
            add_steps(b->a, b->x + k * LEFT_TILE_BYTES, x_block, ready, part, span, rows, k > at);
        }
        add_group(b, panel, g, part, w, rows);
    }
}

#if defined(HAVE_AMX)
/* The sums that tiles 0 to 3 hold -> part, [16 rows, 32] of each panel; then they are zeros. */
INLINE void take_sums(float *part, const int panels) {
    const int stride = PANEL * sizeof(float);
    _tile_stored(0, part, stride);
    _tile_stored(1, part + TILE, stride);
    if (panels == 2) {
        _tile_stored(2, part + TILE * PANEL, stride);
        _tile_stored(3, part + TILE * PANEL + TILE, stride);
    }
    settle();
    begin_sums(NULL, 0, 0);
}

INLINE void add_groups(const struct block *b, int64_t g, const float *part, const char *factors, int64_t rows, const int panels) {
    for (int64_t panel = 0; panel < panels; panel++) add_group(b, panel, g, part + panel * TILE * PANEL, factors, rows);
}

/* The bits of integer_tiles, for at most 16 rows and all panels of the pair, whose memory passes by once from end to end. Each tile
 * becomes bf16 while the one LAG tiles before is multiplied, and a group is added while the next one is summed: a tile's load
 * waits until stores to where it lies have left the core. It would wait for stores to the same place of any 4 KiB, too, so the
 * ready tiles have no more than that. (A product by fp32 FMA in registers has the same bits, but takes longer.) */
INLINE void integer_pair(const struct block *b, int64_t rows, const int panels, const int form) {
    enum { LAG = 2, READY = 4 };
    _Alignas(LINE_BYTES) char ready[READY * TILE_BYTES];
    _Alignas(LINE_BYTES) float part[2][2 * TILE * PANEL];
    const struct values values = values_for(form);
    const int64_t steps = b->steps, tiles = 2 * panels, bytes = integer_step_bytes(form) / 2, more = factor_bytes(b->a, panels);
    const char *w = b->w, *factors[2] = {NULL, NULL};
    int64_t g = 0;
    begin_sums(NULL, 0, 0);
    for (int64_t k = 0; k <= steps; k++) {
        const int ended = k == steps || (k && k % b->a->group == 0); /* a group, with step k - 1 */
        if (ended) factors[g % 2] = w, fetch(w + INTEGERS_AHEAD, more), w += more;
#pragma GCC unroll 4
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t of = i < LAG ? k - 1 : k, number = (i - LAG + tiles) % tiles;
            if (k < steps) expand_tile(w, ready + (k * tiles + i) % READY * TILE_BYTES, &values, form, 1), w += bytes;
            settle();
            if (of < 0 || of == steps) continue;
            if (number == 0) _tile_loadd(4, b->x + of * TILE_BYTES, LINE_BYTES);
            add_product(ready + (of * tiles + number) % READY * TILE_BYTES, number);
            if (!ended || i != LAG - 1) continue;
            take_sums(part[g % 2], panels);
            if (g) add_groups(b, g - 1, part[(g - 1) % 2], factors[(g - 1) % 2], rows, panels);
            g++;
        }
    }
    add_groups(b, g - 1, part[(g - 1) % 2], factors[(g - 1) % 2], rows, panels);
}

#define PAIR(form) \
    PART void integer_pair_1_##form(const struct block *b, int64_t rows) { integer_pair(b, rows, 1, form); } \
    PART void integer_pair_2_##form(const struct block *b, int64_t rows) { integer_pair(b, rows, 2, form); }
PAIR(4) PAIR(8) PAIR(IS_E2M1)

/* [form][panels - 1] */
static void (*const PAIR_OF[FORMS][2])(const struct block *, int64_t) = {{integer_pair_1_4, integer_pair_2_4}, {integer_pair_1_8, integer_pair_2_8}, {integer_pair_1_IS_E2M1, integer_pair_2_IS_E2M1}};
#endif

/* The same bits, for some rows of one tile: `halves` half panels at a time, whose sums stay in registers. The first pass fetches
 * for all where `fetched`. */
INLINE void integer_few(const struct block *b, const int rows, const int panels, const int form, int64_t fetched) {
    const struct values values = values_for(form);
    const int halves = rows <= PAIRED_ROWS ? 2 * panels : rows <= WHOLE_ROWS ? 2 : 1;
    const int64_t bytes = panels * integer_step_bytes(form), more = factor_bytes(b->a, panels);
    for (int first = 0; first < 2 * panels; first += halves) {
        const char *x = b->x, *w = b->w;
        for (int64_t at = 0, g = 0; at < b->steps; at += b->a->group, g++, w += more) {
            const int64_t steps = smaller(b->a->group, b->steps - at);
            struct half acc[MAX_ROWS * 4];
            for (int i = 0; i < rows * halves; i++) acc[i] = no_sums();
            for (int64_t k = 0; k < steps; k++, x += LEFT_TILE_BYTES, w += bytes) {
                add_step(x, w, acc, &values, rows, first, halves, form, fetched && !first ? 2 * panels : 0);
            }
            if (fetched && !first) fetch(w + INTEGERS_AHEAD, more);
            const float *scales = (const float *)w + first * TILE, *offsets = offsets_of(b, scales);
            for (int r = 0; r < rows; r++)
                for (int h = 0; h < halves; h++) {
                    float *to = b->sums + (first + h) / 2 * b->sums_apart + r * PANEL + (first + h) % 2 * TILE;
                    store_sums(to, with_group(at ? load_sums(to) : no_sums(), acc[r * halves + h], scales + h * TILE, offsets ? offsets + h * TILE : NULL, b->of_x + r * b->apart + g));
                }
        }
    }
}

#define FEW_INTEGERS(size, rows, form) \
    PART void integer_few_##size##_1_##form(const struct block *b, int64_t fetched) { integer_few(b, rows, 1, form, fetched); } \
    PART void integer_few_##size##_2_##form(const struct block *b, int64_t fetched) { integer_few(b, rows, 2, form, fetched); }
#define FEW_ROWS(form) FEW_INTEGERS(0, 1, form) FEW_INTEGERS(1, 2, form) FEW_INTEGERS(2, FOUR_ROWS, form) FEW_INTEGERS(3, MAX_ROWS, form)
FEW_ROWS(4) FEW_ROWS(8) FEW_ROWS(IS_E2M1)

/* [form][panels - 1][size of the block] */
#define FEW_TABLE(form) \
    { {integer_few_0_1_##form, integer_few_1_1_##form, integer_few_2_1_##form, integer_few_3_1_##form}, {integer_few_0_2_##form, integer_few_1_2_##form, integer_few_2_2_##form, integer_few_3_2_##form} }
static void (*const FEW_OF[FORMS][2][BLOCK_SIZES])(const struct block *, int64_t) = {FEW_TABLE(4), FEW_TABLE(8), FEW_TABLE(IS_E2M1)};

INLINE struct block rows_of(const struct block *b, int64_t x_block, int64_t r) {
    struct block rows = *b;
    rows.x = line_at(b->x, x_block, r), rows.of_x = b->of_x + r * b->apart, rows.sums = b->sums + r * PANEL;
    return rows;
}

/* Up to MOST_FEW rows; the first block's fetch for all. */
static void integer_rows(const struct block *b, int64_t x_block, int64_t rows) {
    for (int64_t r = 0, size; r < rows; r += ROWS_OF[size]) {
        size = size_for(smaller(rows - r, TILE - r % TILE));
        const struct block some = rows_of(b, x_block, r);
        FEW_OF[number_of(form_of(b->a))][b->paired - 1][size](&some, r == 0);
    }
}

/* Rows by all panels of the pair. x: as integer_tiles has it. */
static void sum_pair(const struct block *b, int64_t x_block, int64_t rows) {
#if defined(HAVE_AMX)
    if (b->a->kind == AMX && rows <= TILE) {
        PAIR_OF[number_of(form_of(b->a))][b->paired - 1](b, rows);
        return;
    }
#endif
    if (b->a->kind == AMX || rows > MOST_FEW)
        for (int64_t panel = 0; panel < b->paired; panel++) integer_tiles(b, x_block, rows, panel);
    else integer_rows(b, x_block, rows);
}

/* As sum_panels, of the rows from `row` on of those that lie packed; `from` begins a pair. */
static void sum_integer_panels(const struct work *w, int64_t segment, int64_t row, int64_t from, int64_t to, float *sums, int64_t rows) {
    const struct args *a = w->a;
    const int64_t at = segment * w->each, groups = groups_of(a, w->each), all = a->segments * groups, apart = w->chunk * PANEL;
    const int64_t bytes = segment_bytes(a, w->each), panel_bytes = a->segments * bytes;
    const char *x = tile_of(w, row) + at * LEFT_TILE_BYTES;
    const float *of_x = w->of_x + row * all + segment * groups;
    for (int64_t p = from; p < to; p += 2, sums += 2 * apart) {
        const int64_t paired = smaller(2, w->panels - p);
        const struct block b = {a, x, a->weight + p * panel_bytes + segment * paired * bytes, of_x, sums, apart, all, w->each, paired};
        sum_pair(&b, w->steps * LEFT_TILE_BYTES, rows);
    }
}

/* ---- an item, and all of them */

/* Sums over a segment, of panels from..to-1 and `rows` packed rows, each panel into its own [chunk, 32] of `sums`. */
static void sum_panels(const struct work *w, int64_t segment, const char *x, int64_t from, int64_t to, float *sums, int64_t rows) {
    const int64_t first = segment * w->each, x_block = w->steps * LEFT_TILE_BYTES, panel_bytes = w->steps * STEP_BYTES;
    const char *weight = w->a->weight + from * panel_bytes + first * STEP_BYTES;
#if defined(HAVE_AMX)
    if (w->many) {
        amx_group(w, x + first * STEP_BYTES, weight, to - from, sums, rows);
        return;
    }
    if (w->a->kind == AMX && rows <= TILE && to - from == 2) {
        amx_pair(x + first * LEFT_TILE_BYTES, weight, panel_bytes, sums, sums + w->chunk * PANEL, w->each);
        return;
    }
#endif
    x += first * LEFT_TILE_BYTES;
    for (int64_t p = from; p < to; p++, weight += panel_bytes, sums += w->chunk * PANEL) {
#if defined(HAVE_AMX)
        if (w->a->kind == AMX) amx_panel(x, x_block, weight, sums, w->each, rows);
        else
#endif
            vector_panel(x, x_block, weight, sums, w->each, rows);
    }
}

INLINE int64_t count_items(const struct work *w) { return ceil_div(w->rows, w->chunk) * ceil_div(w->panels, w->group); }

/* Rows first.. of x, and the cut into items. */
static void plan(struct work *w, int64_t first) {
    const struct args *a = w->a;
    w->first = first;
    w->rows = smaller(PACKED, a->rows - first);
    w->many = a->kind == AMX && w->rows > FEW && !a->bits;
    w->chunk = smaller(w->many ? CHUNK : FEW, ceil_div(w->rows, PANEL) * PANEL);
    w->group = w->rows > PANEL ? GROUP : w->rows <= TILE || a->bits ? 2 : 1;
    while (w->group > 2 && count_items(w) < ITEMS_A_THREAD * team_threads()) w->group /= 2;
}

/* All rows of a group's weights come one behind the other: only the first of them read these from memory. */
static void compute(const struct work *w, struct loop *l, int64_t item, float *sums) {
    const int64_t chunks = ceil_div(w->rows, w->chunk), first = item % chunks * w->chunk, count = smaller(w->chunk, w->rows - first);
    const int64_t from = item / chunks * w->group, to = smaller(from + w->group, w->panels);
    const int64_t size = w->chunk * PANEL * GROUP; /* of the sums over a segment, or over several that were added */
    float *next = sums;
    for (int64_t s = 0; s < w->a->segments; s++, next += size) {
        if (w->a->bits) sum_integer_panels(w, s, first, from, to, next, count);
        else sum_panels(w, s, tile_of(w, first), from, to, next, count);
        if (s == 0 && w->a->segments > 1) add_bias(w, next, to - from, from, count);
        for (int64_t done = s + 1; done % 2 == 0; done /= 2, next -= size) add_sums(w, next - size, next, to - from, count);
    }
    if (team_claims(l)) write_rows(w, sums, to - from, from, w->first + first, count);
}

/* Bytes of `rows` packed rows, and of their groups' sums behind them. */
static int64_t packed_bytes(int64_t rows, int64_t steps) { return rows * steps * LEFT_LINE_BYTES; }

static int64_t sums_bytes(const struct args *a, int64_t rows, int64_t steps) {
    const int64_t groups = a->offsets ? a->segments * groups_of(a, steps / a->segments) : 0;
    return ceil_div(rows * groups * sizeof(float), LINE_BYTES) * LINE_BYTES;
}

/* One thread's memory, for the sums of its items; `rows`: of a chunk. Behind them is room for w->own. */
static float *place_for_sums(const struct args *a, int64_t rows, bf16 **own) {
    int64_t kept = 1; /* sums that wait for their neighbour, and the last one */
    while (1 << (kept - 1) < a->segments) kept++;
    const int64_t floats = rows * PANEL * GROUP * kept, inputs = a->norm ? TILE * a->inputs : 0;
    float *sums = team_scratch(floats * (int64_t)sizeof(float) + inputs * (int64_t)sizeof(bf16));
    *own = (bf16 *)(sums + (sums ? floats : 0));
    return sums;
}

static int multiply(const struct args *a) {
    const int64_t each = ceil_div(a->inputs / a->segments, STEP), steps = a->segments * each;
    const int64_t all = smaller(PACKED, ceil_div(a->rows, PANEL) * PANEL);
    char *x = team_memory(packed_bytes(all, steps) + sums_bytes(a, all, steps));
    if (!x) return -1;
    struct work w = {.a = a, .x = x, .of_x = (float *)(x + packed_bytes(all, steps)), .each = each, .steps = steps, .panels = ceil_div(a->outputs, PANEL)};
    plan(&w, 0);
    float *sums = place_for_sums(a, w.chunk, &w.own);
    if (!sums) return -1;
    for (int64_t first = 0; first < a->rows; first += PACKED) {
        plan(&w, first);
        const int64_t at_once = w.rows > FEW ? TILE : 1;
        for (struct loop l = team_loop(ceil_div(w.rows, at_once), 0); team_next(&l);) pack_rows(&w, l.item * at_once, smaller((l.item + 1) * at_once, w.rows));
#if defined(HAVE_AMX)
        if (a->kind == AMX) configure(smaller(w.rows, PANEL));
#endif
        for (struct loop l = team_repeats(count_items(&w)); team_next(&l);) compute(&w, &l, l.item, sums);
    }
#if defined(HAVE_AMX)
    if (a->kind == AMX) _tile_release();
#endif
    return 0;
}

/* ---- many matrices, each by rows of its own */

static struct args of_matrix(const struct each *e, int64_t i, int64_t rows_before) {
    struct args a = e->like;
    const int64_t width = a.gated ? a.outputs / 2 : a.outputs, item = a.form == BF16 ? sizeof(bf16) : sizeof(float);
    a.x += rows_before * a.x_stride;
    a.y = (char *)a.y + rows_before * width * item;
    a.weight += i * e->apart;
    a.rows = e->rows[i];
    return a;
}

/* Of all rows of a product, packed. */
static int64_t bytes_of(const struct args *a, int64_t steps) {
    const int64_t rows = ceil_div(a->rows, PANEL) * PANEL;
    return packed_bytes(rows, steps) + sums_bytes(a, rows, steps);
}

static void compute_few(const struct work *work, const int64_t *ends, int64_t count, float *sums) {
#if defined(HAVE_AMX)
    int64_t configured = 0;
#endif
    for (struct loop l = team_repeats(ends[count - 1]); team_next(&l);) {
        int64_t low = 0, high = count - 1; /* the first product that ends behind the item */
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (ends[middle] > l.item) high = middle;
            else low = middle + 1;
        }
        const struct work *w = &work[low];
#if defined(HAVE_AMX)
        if (w->a->kind == AMX && configured != smaller(w->rows, PANEL)) configure(configured = smaller(w->rows, PANEL));
#endif
        compute(w, &l, l.item - (low ? ends[low - 1] : 0), sums);
    }
#if defined(HAVE_AMX)
    if (configured) _tile_release();
#endif
}

/* Products of at most FEW rows each, side by side: one alone has too few panels for all threads. */
static int multiply_few(const struct args *list, int64_t count) {
    const int64_t each = ceil_div(list->inputs / list->segments, STEP), steps = list->segments * each;
    int64_t size = 0, items = 0;
    for (int64_t i = 0; i < count; i++) size += bytes_of(&list[i], steps);
    char *x = team_memory(size);
    struct work *work = malloc((size_t)count * sizeof *work);
    int64_t *ends = malloc((size_t)count * sizeof *ends); /* of each product's items */
    bf16 *own;
    float *sums = place_for_sums(list, FEW, &own);
    const int ready = x && work && ends && sums;
    if (ready) {
        for (int64_t i = 0, at = 0; i < count; i++) {
            float *of_x = (float *)(x + at + packed_bytes(ceil_div(list[i].rows, PANEL) * PANEL, steps));
            work[i] = (struct work){.a = &list[i], .x = x + at, .of_x = of_x, .own = own, .each = each, .steps = steps, .panels = ceil_div(list->outputs, PANEL)};
            plan(&work[i], 0);
            ends[i] = items += count_items(&work[i]);
            at += bytes_of(&list[i], steps);
        }
        for (struct loop l = team_loop(count, 1); team_next(&l);) pack_rows(&work[l.item], 0, work[l.item].rows);
        compute_few(work, ends, count, sums);
    }
    free(ends);
    free(work);
    return ready ? 0 : -1;
}

static int multiply_each(const struct each *e) {
    struct args *few = malloc((size_t)e->matrices * sizeof *few);
    int64_t count = 0, before = 0;
    int failed = few ? 0 : -1;
    for (int64_t i = 0; i < e->matrices && !failed; before += e->rows[i++]) {
        const struct args a = of_matrix(e, i, before);
        if (a.rows > FEW) failed = multiply(&a);
        else if (a.rows) few[count++] = a;
    }
    if (count && !failed) failed = multiply_few(few, count);
    free(few);
    return failed;
}

/* ---- weights -> panels */

/* A tile of the matrix [outputs, inputs] (dense) whose first output and input are given; its inputs end at `end`. */
static void pack_tile(const bf16 *weight, int64_t outputs, int64_t inputs, int64_t output, int64_t input, int64_t end, char *to) {
    const int64_t down = smaller(TILE, outputs - output), across = smaller(STEP, end - input);
    memset(to, 0, TILE_BYTES);
    for (int64_t j = 0; j < down; j++) {
        const bf16 *row = weight + (output + j) * inputs + input;
        for (int64_t i = 0; i < across; i++) ((bf16 *)to)[(i / 2) * STEP + 2 * j + i % 2] = row[i];
    }
}

/* The same for a tile that is whole: line i gathers pair i of 16 rows. */
static void pack_whole_tile(const bf16 *weight, int64_t inputs, int64_t output, int64_t input, char *to) {
    for (int j = 0; j < TILE; j++) {
        uint32_t pairs[TILE];
        memcpy(pairs, weight + (output + j) * inputs + input, sizeof pairs);
        for (int i = 0; i < TILE; i++) memcpy(to + i * LINE_BYTES + j * sizeof *pairs, &pairs[i], sizeof *pairs);
    }
}

static void pack_panel(const struct packing *p, int64_t panel) {
    const struct args like = {.outputs = p->outputs, .interleaved = p->interleaved};
    const int64_t segment = p->inputs / p->segments, each = ceil_div(segment, STEP), steps = p->segments * each;
    for (int64_t t = 0; t < 2 * steps; t++) {
        const int64_t output = column_of(&like, 2 * panel + t % 2), end = (t / 2 / each + 1) * segment;
        const int64_t input = end - segment + t / 2 % each * STEP;
        char *tile = p->to + (panel * 2 * steps + t) * TILE_BYTES;
        if (output + TILE <= p->outputs && input + STEP <= end) pack_whole_tile(p->weight, p->inputs, output, input, tile);
        else pack_tile(p->weight, p->outputs, p->inputs, output, input, end, tile);
    }
}

/* ---- the library's face */

int tandem_linear_kind(void) { return best_kind(); }

/* Returns 0. */
int tandem_linear_pack(const struct packing *p) {
    for (struct loop l = team_loop(ceil_div(p->outputs, PANEL), 0); team_next(&l);) pack_panel(p, l.item);
    return 0;
}

/* Returns 0, or -1 when out of memory. */
int tandem_linear(const struct args *a) {
    if (a->rows == 0) return 0;
    return multiply(a);
}

/* As tandem_linear, of all matrices of `e`. */
int tandem_linear_each(const struct each *e) {
    return multiply_each(e);
}
