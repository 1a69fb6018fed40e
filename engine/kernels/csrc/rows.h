/* Passes over one row of bf16 with fp32 inside, rounded where torch's operators in engine/layers round. What a row gives
 * depends on the row alone. Widths are multiples of 16.
 */
#ifndef TANDEM_ROWS_H
#define TANDEM_ROWS_H
#include <math.h>

#include "vectors.h"

/* The sum of squares of x, in an order that depends on `width` alone. */
INLINE float squares(const bf16 *x, int64_t width) {
    f16v even = {0}, odd = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        const f16v a = load_bf16(x + i), b = load_bf16(x + i + LANES);
        even += a * a;
        odd += b * b;
    }
    if (i < width) {
        const f16v a = load_bf16(x + i);
        even += a * a;
    }
    return sum(even + odd);
}

INLINE float inverse_rms(const bf16 *x, int64_t width, float eps) { return 1.0f / sqrtf(squares(x, width) / (float)width + eps); }

INLINE void add_row(bf16 *x, const bf16 *delta, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) store_bf16(x + i, load_bf16(x + i) + load_bf16(delta + i));
}

INLINE void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, int64_t width, float eps) {
    const float factor = inverse_rms(x, width, eps);
    for (int64_t i = 0; i < width; i += LANES) store_bf16(out + i, load_bf16(x + i) * factor * load_bf16(weight + i));
}

/* norm_row with weight + offset in the place of weight. */
INLINE void offset_norm_row(const bf16 *x, const bf16 *weight, bf16 *out, int64_t width, float eps, float offset) {
    const float factor = inverse_rms(x, width, eps);
    for (int64_t i = 0; i < width; i += LANES) store_bf16(out + i, load_bf16(x + i) * factor * (load_bf16(weight + i) + offset));
}

/* x / (1 + e^-y), from e^-|y|, which does not overflow. */
INLINE f16v times_sigmoid(f16v x, f16v y) {
    const i16v negative = y < 0.0f;
    const f16v small = exp_nonpositive((f16v)((i16v)y | (int32_t)0x80000000));
    const f16v one = (f16v){0} + 1.0f;
    const f16v above = (f16v)(((i16v)small & negative) | ((i16v)one & ~negative));
    return x * above / (one + small);
}

INLINE f16v silu(f16v x) { return times_sigmoid(x, x); }

/* x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2 */
INLINE f16v gelu(f16v x) { return times_sigmoid(x, x * 1.59576912160573071f * (x * x * 0.044715f + 1.0f)); }

/* 1 / (1 + e^-x), from e^-|x|. */
INLINE f16v sigmoids(f16v x) {
    const i16v negative = x < 0.0f;
    const f16v small = exp_nonpositive((f16v)((i16v)x | (int32_t)0x80000000));
    const f16v one = (f16v){0} + 1.0f;
    return (f16v)(((i16v)small & negative) | ((i16v)one & ~negative)) / (one + small);
}

INLINE void gate_row(const bf16 *gate, const bf16 *up, bf16 *out, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) store_bf16(out + i, round_bf16(silu(load_bf16(gate + i))) * load_bf16(up + i));
}

INLINE void gelu_gate_row(const bf16 *gate, const bf16 *up, bf16 *out, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) store_bf16(out + i, round_bf16(gelu(load_bf16(gate + i))) * load_bf16(up + i));
}

#endif
