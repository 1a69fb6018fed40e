/* What a decoder computes between its products, in bf16 with fp32 inside: norms, rotary positions, the gate of the MLP.
 * One pass over memory each, rows apart from one another, rounded where torch's operators in engine/layers round.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

#define ABI_VERSION 1
#define PARALLEL_ELEMENTS 32768 /* fewer are not worth waking threads for */

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

static void add_row(bf16 *x, const bf16 *delta, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) store_bf16(x + i, load_bf16(x + i) + load_bf16(delta + i));
}

static void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, int64_t width, float eps) {
    const float factor = inverse_rms(x, width, eps);
    for (int64_t i = 0; i < width; i += LANES) store_bf16(out + i, load_bf16(x + i) * factor * load_bf16(weight + i));
}

/* A head, in place: rounded after the norm, after its weight, after the cosine and at the end. */
static void turn_head(bf16 *x, const bf16 *weight, const bf16 *cosine, const bf16 *sine, int64_t dim, float eps) {
    const int64_t half = dim / 2;
    const float factor = weight ? inverse_rms(x, dim, eps) : 1.0f;
    for (int64_t i = 0; i < half; i += LANES) {
        f16v low = load_bf16(x + i), high = load_bf16(x + half + i);
        if (weight) {
            low = round_bf16(round_bf16(low * factor) * load_bf16(weight + i));
            high = round_bf16(round_bf16(high * factor) * load_bf16(weight + half + i));
        }
        store_bf16(x + i, round_bf16(low * load_bf16(cosine + i)) + high * load_bf16(sine + i));
        store_bf16(x + half + i, round_bf16(high * load_bf16(cosine + half + i)) + low * load_bf16(sine + half + i));
    }
}

/* x / (1 + e^-x), from e^-|x|, which does not overflow. */
INLINE f16v silu(f16v x) {
    const i16v negative = x < 0.0f;
    const f16v small = exp_nonpositive((f16v)((i16v)x | (int32_t)0x80000000));
    const f16v one = (f16v){0} + 1.0f;
    const f16v above = (f16v)(((i16v)small & negative) | ((i16v)one & ~negative));
    return x * above / (one + small);
}

static void gate_row(const bf16 *gate, const bf16 *up, bf16 *out, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) store_bf16(out + i, round_bf16(silu(load_bf16(gate + i))) * load_bf16(up + i));
}

int tandem_elementwise_abi(void) { return ABI_VERSION; }

/* out = norm(x) * weight, after x += delta where there is one. All dense; width a multiple of 16. */
void tandem_rms_norm(bf16 *x, const bf16 *delta, const bf16 *weight, bf16 *out, int64_t rows, int64_t width, float eps, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1 && rows * width >= PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < rows; r++) {
        if (delta) add_row(x + r * width, delta + r * width, width);
        norm_row(x + r * width, weight, out + r * width, width, eps);
    }
}

/* The first `heads` heads of each row of x, in place. weight [heads, dim] or NULL; cosine, sine: [dim] of a row, `turn`
 * elements from row to row; sine has the sign of the half it is added to. dim a multiple of 32. */
void tandem_norm_turn(bf16 *x, int64_t x_stride, const bf16 *weight, const bf16 *cosine, const bf16 *sine, int64_t turn, int64_t rows, int64_t heads, int64_t dim, float eps, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1 && rows * heads * dim >= PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++)
            turn_head(x + r * x_stride + h * dim, weight ? weight + h * dim : 0, cosine + r * turn, sine + r * turn, dim, eps);
}

/* out [rows, width] = silu(x[:, :width]) * x[:, width:]. width a multiple of 16. */
void tandem_silu_mul(const bf16 *x, bf16 *out, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1 && rows * width >= PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < rows; r++) gate_row(x + r * 2 * width, x + r * 2 * width + width, out + r * width, width);
}
