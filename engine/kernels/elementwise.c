/* What a decoder computes between its products, in bf16 with fp32 inside: norms, rotary positions, the gate of the MLP.
 * One pass over memory each, rows apart from one another, rounded where torch's operators in engine/layers round.
 */
#include "rows.h"

#define ABI_VERSION 1
#define PARALLEL_ELEMENTS 32768 /* fewer are not worth waking threads for */

/* A head, in place: rounded after the norm, after its weight, after the cosine and at the end. */
INLINE void turn_head(bf16 *x, const bf16 *weight, const float *cosine, const float *sine, const int64_t dim, float eps) {
    const int64_t half = dim / 2;
    const float factor = weight ? inverse_rms(x, dim, eps) : 1.0f;
    for (int64_t i = 0; i < half; i += LANES) {
        f16v low = load_bf16(x + i), high = load_bf16(x + half + i);
        if (weight) {
            low = round_bf16(round_bf16(low * factor) * load_bf16(weight + i));
            high = round_bf16(round_bf16(high * factor) * load_bf16(weight + half + i));
        }
        store_bf16(x + i, round_bf16(low * load_f32(cosine + i)) + high * load_f32(sine + i));
        store_bf16(x + half + i, round_bf16(high * load_f32(cosine + half + i)) + low * load_f32(sine + half + i));
    }
}

/* All heads of a row. Their angles are the same, and widened once; a head of 128 stays in registers. */
static void turn_row(bf16 *x, const bf16 *weight, const bf16 *cosine, const bf16 *sine, int64_t heads, int64_t dim, float eps) {
    float angles[2 * dim];
    for (int64_t i = 0; i < dim; i += LANES) {
        store_f32(angles + i, load_bf16(cosine + i));
        store_f32(angles + dim + i, load_bf16(sine + i));
    }
    for (int64_t h = 0; h < heads; h++, x += dim) {
        const bf16 *own = weight ? weight + h * dim : 0;
        if (dim == 128) turn_head(x, own, angles, angles + 128, 128, eps);
        else turn_head(x, own, angles, angles + dim, dim, eps);
    }
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
    for (int64_t r = 0; r < rows; r++) turn_row(x + r * x_stride, weight, cosine + r * turn, sine + r * turn, heads, dim, eps);
}

/* out [rows, width] = silu(x[:, :width]) * x[:, width:]. width a multiple of 16. */
void tandem_silu_mul(const bf16 *x, bf16 *out, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1 && rows * width >= PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < rows; r++) gate_row(x + r * 2 * width, x + r * 2 * width + width, out + r * width, width);
}
