/* Products of any number of rows and ready lines, by vectors: blocks of rows one after the other. */
#ifndef TANDEM_BLOCKS_H
#define TANDEM_BLOCKS_H
#include "tiles.h"

INLINE const char *line_at(const char *x, int64_t x_block, int64_t r) { return x + r / TILE * x_block + r % TILE * LEFT_LINE_BYTES; }

/* The number of rows is a constant in each copy, so that the sums stay in registers. */
#define MORE(size, rows) \
    PART void more_##size(const char *x, const char *w, float *sums, int64_t steps, int begun) { product_block(x, w, sums, steps, rows, begun, 1, 0); }
MORE(0, 1) MORE(1, 2) MORE(2, FOUR_ROWS) MORE(3, MAX_ROWS)

static void (*const MORE_OF[BLOCK_SIZES])(const char *, const char *, float *, int64_t, int) = {more_0, more_1, more_2, more_3};

/* sums [rows, 32] over `steps` ready steps, on top of what is there if `begun`. x: tiles of 16 rows, x_block bytes apart. */
static void vector_steps(const char *x, int64_t x_block, const char *w, float *sums, int64_t steps, int64_t rows, int begun) {
    for (int64_t r = 0, size; r < rows; r += ROWS_OF[size]) {
        size = size_for(smaller(rows - r, TILE - r % TILE));
        MORE_OF[size](line_at(x, x_block, r), w, sums + r * PANEL, steps, begun);
    }
}

#endif
