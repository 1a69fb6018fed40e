/* Steps of integer weights -> lines as tiles.h multiplies them. Nothing is rounded here: scales and offsets belong to the sums of
 * a group of inputs.
 *
 * A step of 32 inputs x 32 outputs is 32 lines of 32 integers, in the order of the bf16 step's lines:
 *
 *   4 bits   64 bytes are 32 words; nibble j of word i, less 8 (or a float's bits), is integer i of line j of four
 *   8 bits   of 16 bytes 8 belong to a line, 8 to the next: 64 bytes are two lines
 *
 * Panels lie in pairs, the last of an odd number alone. A pair is one run of memory, group after group of inputs: for each step
 * one panel's and the other's, then the scales of all their outputs, then the offsets, if there are any, fp32. A core that reads
 * one run gets 1.5 times the bytes of one that reads two (docs/reports/benchmarks.md).
 */
#ifndef TANDEM_INTEGER_STEPS_H
#define TANDEM_INTEGER_STEPS_H
#include "tiles.h"

#define INTEGERS_AHEAD 8192 /* bytes that are fetched before their use; measured from 1024 to 32768 */
#define INTEGERS_SOON 512   /* bytes that come into the L1 cache before they become tiles */

/* A form of integers is 4 or 8 bits, or IS_E2M1. */
INLINE int64_t integer_step_bytes(int64_t form) { return form == 8 ? PANEL * STEP : PANEL * STEP / 2; }

/* Lines in 64 bytes. */
INLINE int lines_of(const int form) { return form == 8 ? 2 : 4; }

/* A tile, whose lines lie one behind the other -> `ready` lines. `fetched`: later ones lie behind it and are fetched line by line. */
INLINE void expand_tile(const char *from, char *to, const struct values *values, const int form, const int fetched) {
    const int64_t bytes = integer_step_bytes(form) / 2;
    for (int64_t at = 0; at < bytes; at += LINE_BYTES, to += lines_of(form) * READY_LINE_BYTES) {
        if (fetched) {
            fetch(from + at + INTEGERS_AHEAD, LINE_BYTES);
            __builtin_prefetch(from + at + INTEGERS_SOON, 0, 3);
        }
        const struct lines all = lines_at(from + at, form, values);
        for (int j = 0; j < lines_of(form); j++) store_ready(to + j * READY_LINE_BYTES, line_in(&all, j, form), values);
    }
}

/* Some steps that lie `apart` bytes apart -> ready ones, one behind the other. */
INLINE void expand_steps(const char *from, int64_t apart, char *to, int64_t steps, const int form) {
    const struct values values = values_for(form);
    const int64_t bytes = integer_step_bytes(form);
    for (int64_t k = 0; k < steps; k++, from += apart, to += READY_STEP_BYTES) {
        fetch(from + INTEGERS_AHEAD, bytes);
        expand_tile(from, to, &values, form, 0);
        expand_tile(from + bytes / 2, to + TILE * READY_LINE_BYTES, &values, form, 0);
    }
}

INLINE void expand(const char *from, int64_t apart, char *to, int64_t steps, int64_t form) {
    if (form == 4) expand_steps(from, apart, to, steps, 4);
    else if (form == 8) expand_steps(from, apart, to, steps, 8);
    else expand_steps(from, apart, to, steps, IS_E2M1);
}

/* acc [row][half panel] += a step of `halves` half panels from number `first` on of a pair, without a way through memory. Of the
 * first `fetched` half panels later lines are fetched. */
INLINE void add_step(const char *x, const char *w, struct half *acc, const struct values *values, const int rows, int first, const int halves, const int form, int fetched) {
    const int64_t bytes = integer_step_bytes(form) / 2;
    for (int i = 0; i < TILE; i += lines_of(form)) {
        for (int h = 0; h < fetched; h++) fetch(w + h * bytes + i / lines_of(form) * LINE_BYTES + INTEGERS_AHEAD, LINE_BYTES);
        for (int h = 0; h < halves; h++) {
            const struct lines all = lines_at(w + (first + h) * bytes + i / lines_of(form) * LINE_BYTES, form, values);
            for (int j = 0; j < lines_of(form); j++) add_line(acc + h, halves, x + (i + j) * 2 * (int)sizeof(left), rows, line_in(&all, j, form), values);
        }
    }
}

#endif
