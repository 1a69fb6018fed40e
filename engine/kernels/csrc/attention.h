/* What attention kernels share: sums of vectors, rows of values, weights of a block by online softmax (Milakov and Gimelshein
 * 2018, Dao et al. 2022). */
#ifndef TANDEM_ATTENTION_H
#define TANDEM_ATTENTION_H
#include <math.h>

#include "native.h"
#include "vectors.h"

/* Sums of 16 vectors, each in the order of sum(). */
INLINE f16v sums(f16v *x) {
#if defined(__AVX512F__)
    __m512 *v = (__m512 *)x;
    for (int i = 0; i < 8; i++) v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 8], 0x44), _mm512_shuffle_f32x4(v[i], v[i + 8], 0xee));
    for (int i = 0; i < 4; i++) v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 4], 0x88), _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd));
    for (int i = 0; i < 2; i++) v[i] = _mm512_add_ps(_mm512_shuffle_ps(v[i], v[i + 2], 0x44), _mm512_shuffle_ps(v[i], v[i + 2], 0xee));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xdd));
    return (f16v)_mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15), all);
#else
    f16v r;
    for (int i = 0; i < LANES; i++) {
        struct half h;
        memcpy(&h, x + i, sizeof h);
        r[i] = sum_of_half(h);
    }
    return r;
#endif
}

/* The first n scores of a block -> weights relative to the new maximum *m, whose sum goes to *l; room for whole vectors.
 * Returns the factor for what was summed before: 0 for the first block, whose m is -inf. */
INLINE float weights_of(float *p, int n, float *m, float *l) {
    const int end = (n + LANES - 1) / LANES * LANES;
    for (int t = n; t < end; t++) p[t] = -INFINITY; /* weight 0 */
    f16v lanes = (f16v){0} + *m;
    for (int t = 0; t < end; t += LANES) lanes = larger(lanes, load_f32(p + t));
    const float best = largest(lanes);
    f16v total = {0};
    for (int t = 0; t < end; t += LANES) {
        f16v w = exp_nonpositive(load_f32(p + t) - best);
        store_f32(p + t, w);
        total += w;
    }
    const float factor = exp_nonpositive((f16v){0} + (*m - best))[0];
    *m = best;
    *l = *l * factor + sum(total);
    return factor;
}

/* `vectors` vectors of a row from element `at` on. bf16 comes in pairs of vectors, the even elements and then the odd
 * ones: one load, a shift and a mask for 32 elements. Sums are kept in this order; store_divided undoes it. */
INLINE void load_values(f16v *to, const char *row, int64_t at, const int vectors, const int is_bf16) {
    for (int w = 0; w < vectors; w += 2) {
        if (!is_bf16 || vectors == 1) {
            to[w] = load(row, (int)at + w * LANES, is_bf16);
            if (vectors > 1) to[w + 1] = load(row, (int)at + (w + 1) * LANES, is_bf16);
        } else {
            u16v pair;
            memcpy(&pair, row + (at + w * LANES) * 2, sizeof pair);
            to[w] = (f16v)(pair << 16);
            to[w + 1] = (f16v)(pair & 0xffff0000u);
        }
    }
}

/* o / l, [dim] in the order of load_values, into element `at` of `out`. */
INLINE void store_divided(const float *o, float l, void *out, int64_t at, int64_t dim, int64_t is_bf16) {
    const float inverse = l == 0.0f ? 0.0f : 1.0f / l; /* NaN passes: it must reach the logits */
    int64_t d = 0;
    for (; is_bf16 && d + 2 * LANES <= dim; d += 2 * LANES) {
        const u16v pairs = bf16_bits(load_f32(o + d) * inverse) >> 16 | bf16_bits(load_f32(o + d + LANES) * inverse);
        memcpy((bf16 *)out + at + d, &pairs, sizeof pairs);
    }
    for (; d < dim; d += LANES) {
        if (is_bf16) store_bf16((bf16 *)out + at + d, load_f32(o + d) * inverse);
        else store_f32((float *)out + at + d, load_f32(o + d) * inverse);
    }
}

#endif
