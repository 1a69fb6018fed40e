/* Products of bf16 tiles, summed in fp32, by the kind of arithmetic that this library is compiled for. Knows tiles, not what is in
 * them.
 *
 * From the right come steps of 32 inputs x 32 outputs, two tiles of 16 outputs each: line i of a tile, 64 bytes, holds inputs 2i
 * and 2i + 1 of each of its outputs, pair by pair (what AMX, AVX512-BF16 and NEON all multiply by; fp32 takes the pairs apart). A
 * line that is `ready` is in the form that the kind multiplies by.
 *
 * What is multiplied from the left lies in tiles of 16 rows x 32 inputs of type `left`: bf16, or fp32 where the kind multiplies
 * fp32. Sums are [rows, 32] fp32, inputs in ascending order: a sum does not depend on which rows and outputs are computed beside
 * it.
 *
 * A kind's header (lines_*.h) has `left`, `struct half` (16 sums), `struct line`, `struct values` and `struct lines` (integers),
 * functions of these, and
 *
 *   MAX_ROWS    rows that a block has at most
 *   WHOLE_ROWS   those up to which the sums of a whole panel stay in registers; else those of one half, and then the other
 *   PAIRED_ROWS  those up to which two panels do
 */
#ifndef TANDEM_TILES_H
#define TANDEM_TILES_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <string.h>

#include "../kind.h"
#include "../vectors.h"

#define TILE 16                     /* rows, or outputs, of a tile */
#define STEP 32                     /* inputs of a tile */
#define PANEL 32                    /* outputs of two tiles */
#define LINE_BYTES 64
#define TILE_BYTES 1024
#define STEP_BYTES (2 * TILE_BYTES) /* two tiles from the right */

#define PART static __attribute__((noinline)) /* of some milliseconds: a profiler tells them apart */

enum { MOST_LINES = 4, IS_E2M1 = 5 }; /* in 64 bytes of integers; a form beside those of 4 and 8 bits */

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Memory of later steps. Past its end nothing is read: a prefetch does not fault. */
INLINE void fetch(const char *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += LINE_BYTES) __builtin_prefetch(from + at, 0, 2);
}

#if defined(HAVE_AVX512_BF16)
#include "lines_avx512_bf16.h"
#elif defined(HAVE_NEON_BF16)
#include "lines_neon_bf16.h"
#else
#include "lines_fp32.h"
#endif

enum { LEFT_LINE_BYTES = STEP * (int)sizeof(left), LEFT_TILE_BYTES = TILE * LEFT_LINE_BYTES, READY_STEP_BYTES = 2 * TILE * READY_LINE_BYTES };

/* `count` inputs of a row -> its line of a tile, zeros behind them. */
INLINE void put_left(char *line, const bf16 *x, int64_t count) {
    left own[STEP];
    bf16 some[STEP] = {0};
    if (count < STEP) memcpy(some, x, (size_t)count * sizeof *x), x = some;
    for (int i = 0; i < STEP; i++) own[i] = to_left(x[i]);
    memcpy(line, own, sizeof own);
}

/* sums [rows, 32] = x times w over `steps` steps, on top of what is there if `begun`. Each line is fetched `ahead` bytes before its
 * use (0: it is not): one by one, since many fetches at once hold up the loads between them. */
INLINE void product_block(const char *x, const char *w, float *sums, int64_t steps, const int rows, const int begun, const int ready, const int64_t ahead) {
    const int halves = rows <= WHOLE_ROWS ? 2 : 1, line_bytes = ready ? READY_LINE_BYTES : LINE_BYTES;
    for (int first = 0; first < 2; first += halves) {
        struct half acc[MAX_ROWS * 2];
        for (int r = 0; r < rows; r++)
            for (int h = 0; h < halves; h++) acc[r * halves + h] = begun ? load_sums(sums + r * PANEL + (first + h) * TILE) : no_sums();
        for (int64_t k = 0; k < steps; k++) {
            const char *own = x + k * LEFT_TILE_BYTES, *from = w + k * 2 * TILE * line_bytes + first * TILE * line_bytes;
            for (int i = 0; i < TILE; i++) {
                for (int h = 0; h < 2 && ahead && !first; h++) fetch(from + (h * TILE + i) * line_bytes + ahead, LINE_BYTES);
                for (int h = 0; h < halves; h++) {
                    const char *at = from + (h * TILE + i) * line_bytes;
                    add_line(acc + h, halves, own + i * 2 * (int)sizeof(left), rows, ready ? ready_line(at) : bf16_line(at), NULL);
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int h = 0; h < halves; h++) store_sums(sums + r * PANEL + (first + h) * TILE, acc[r * halves + h]);
    }
}

/* Sizes of blocks, in rows, and the one for the next rows, of those that are left of a tile. */
enum { BLOCK_SIZES = 4, FOUR_ROWS = MAX_ROWS < 4 ? MAX_ROWS : 4 };
static const int ROWS_OF[BLOCK_SIZES] = {1, 2, FOUR_ROWS, MAX_ROWS};
INLINE int size_for(int64_t rows) { return rows >= MAX_ROWS ? 3 : rows >= FOUR_ROWS ? 2 : rows >= 2 ? 1 : 0; }

#if defined(HAVE_AMX)
#include "amx.h"
#endif

/* The best kind this process may use. */
INLINE enum kind best_kind(void) {
#if defined(HAVE_AMX)
    if (amx_allowed()) return AMX;
#endif
    return VECTOR_KIND;
}

#endif
