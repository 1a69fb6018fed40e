/* What a decoder computes between its products, in bf16 with fp32 inside: norms, rotary positions, the gate of the MLP.
 * One pass over memory each, rows apart from one another, rounded where torch's operators in engine/layers round.
 */
#include "rows.h"
#include "team.h"

#define PARALLEL_ELEMENTS 32768 /* fewer are not worth waking threads for */

/* A head, in place: rounded after the norm, after its weight, after the cosine and at the end. */
INLINE void turn_head(bf16 *x, const bf16 *weight, const float *cosine, const float *sine, const int64_t dim, float eps, float offset) {
    const int64_t half = dim / 2;
    const float factor = weight ? inverse_rms(x, dim, eps) : 1.0f;
    for (int64_t i = 0; i < half; i += LANES) {
        f16v low = load_bf16(x + i), high = load_bf16(x + half + i);
        if (weight) {
            low = round_bf16(round_bf16(low * factor) * (load_bf16(weight + i) + offset));
            high = round_bf16(round_bf16(high * factor) * (load_bf16(weight + half + i) + offset));
        }
        store_bf16(x + i, round_bf16(low * load_f32(cosine + i)) + high * load_f32(sine + i));
        store_bf16(x + half + i, round_bf16(high * load_f32(cosine + half + i)) + low * load_f32(sine + half + i));
    }
}

/* All heads of a row. Their angles are the same, and widened once; a head of 128 stays in registers. */
static void turn_row(bf16 *x, const bf16 *weight, const bf16 *cosine, const bf16 *sine, int64_t heads, int64_t dim, float eps, float offset) {
    float angles[2 * dim];
    for (int64_t i = 0; i < dim; i += LANES) {
        store_f32(angles + i, load_bf16(cosine + i));
        store_f32(angles + dim + i, load_bf16(sine + i));
    }
    for (int64_t h = 0; h < heads; h++, x += dim) {
        const bf16 *own = weight ? weight + h * dim : 0;
        if (dim == 128) turn_head(x, own, angles, angles + 128, 128, eps, offset);
        else turn_head(x, own, angles, angles + dim, dim, eps, offset);
    }
}

/* The threads share rows that are worth it. */
static struct loop rows_of(int64_t rows, int64_t elements) { return team_loop(rows, elements < PARALLEL_ELEMENTS ? rows : 0); }

/* Arguments are mirrored by rows.py. Each function returns 0: a tape asks (team.c). */

struct norm {
    bf16 *x;                    /* [rows, width] dense; width a multiple of 16 */
    const bf16 *delta, *weight; /* [rows, width] or NULL; [width] */
    bf16 *out;
    int64_t rows, width;
    float eps, offset;
};

/* out = norm(x) * weight, after x += delta where there is one. */
int tandem_rms_norm(const struct norm *a) {
    for (struct loop l = rows_of(a->rows, a->rows * a->width); team_next(&l);) {
        const int64_t r = l.item;
        if (a->delta) add_row(a->x + r * a->width, a->delta + r * a->width, a->width);
        norm_row(a->x + r * a->width, a->weight, a->out + r * a->width, a->width, a->eps);
    }
    return 0;
}

/* The same with weight + offset. */
int tandem_offset_norm(const struct norm *a) {
    for (struct loop l = rows_of(a->rows, a->rows * a->width); team_next(&l);) {
        const int64_t r = l.item;
        if (a->delta) add_row(a->x + r * a->width, a->delta + r * a->width, a->width);
        offset_norm_row(a->x + r * a->width, a->weight, a->out + r * a->width, a->width, a->eps, a->offset);
    }
    return 0;
}

/* x *= offset. */
int tandem_scale(const struct norm *a) {
    for (struct loop l = rows_of(a->rows, a->rows * a->width); team_next(&l);)
        for (bf16 *x = a->x + l.item * a->width, *end = x + a->width; x < end; x += LANES) store_bf16(x, load_bf16(x) * a->offset);
    return 0;
}

/* x += delta. */
int tandem_add(const struct norm *a) {
    for (struct loop l = rows_of(a->rows, a->rows * a->width); team_next(&l);) add_row(a->x + l.item * a->width, a->delta + l.item * a->width, a->width);
    return 0;
}

struct turn {
    bf16 *x;                       /* heads of a row are dense; dim a multiple of 32 */
    const bf16 *weight;            /* [heads, dim] or NULL */
    const bf16 *cosine, *sine;     /* [dim] of a row; sine has the sign of the half it is added to */
    int64_t x_stride, turn_stride; /* elements from row to row */
    int64_t rows, heads, dim;
    float eps, offset; /* offset: added to weight */
};

/* The first `heads` heads of each row of x, in place. */
int tandem_norm_turn(const struct turn *a) {
    for (struct loop l = rows_of(a->rows, a->rows * a->heads * a->dim); team_next(&l);) {
        const int64_t r = l.item;
        turn_row(a->x + r * a->x_stride, a->weight, a->cosine + r * a->turn_stride, a->sine + r * a->turn_stride, a->heads, a->dim, a->eps, a->offset);
    }
    return 0;
}

struct gate {
    const bf16 *x; /* [rows, 2 * width] dense; width a multiple of 16 */
    bf16 *out;     /* [rows, width] */
    int64_t rows, width;
};

/* out = silu(x[:, :width]) * x[:, width:]. */
int tandem_silu_mul(const struct gate *a) {
    for (struct loop l = rows_of(a->rows, a->rows * a->width); team_next(&l);) {
        const bf16 *x = a->x + l.item * 2 * a->width;
        gate_row(x, x + a->width, a->out + l.item * a->width, a->width);
    }
    return 0;
}

/* out = gelu(x[:, :width]) * x[:, width:]. */
int tandem_gelu_mul(const struct gate *a) {
    for (struct loop l = rows_of(a->rows, a->rows * a->width); team_next(&l);) {
        const bf16 *x = a->x + l.item * 2 * a->width;
        gelu_gate_row(x, x + a->width, a->out + l.item * a->width, a->width);
    }
    return 0;
}

struct sigmoid_gate {
    const bf16 *gates; /* [rows, width], gates_stride apart; width a multiple of 16 */
    const bf16 *x;     /* [rows, width] dense */
    bf16 *out;
    int64_t gates_stride, rows, width;
};

/* out = sigmoid(gates) * x. */
int tandem_sigmoid_mul(const struct sigmoid_gate *a) {
    for (struct loop l = rows_of(a->rows, a->rows * a->width); team_next(&l);) {
        const int64_t r = l.item;
        for (int64_t i = 0; i < a->width; i += LANES)
            store_bf16(a->out + r * a->width + i, round_bf16(sigmoids(load_bf16(a->gates + r * a->gates_stride + i))) * load_bf16(a->x + r * a->width + i));
    }
    return 0;
}
