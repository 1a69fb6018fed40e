/* Vectors as wide as this CPU's registers, in GCC/Clang's extensions, with the few instructions that these do not reach. (What
 * vectors.h has is 16 lanes wide everywhere: compilers keep such values in memory where registers are narrower.)
 */
#ifndef TANDEM_NATIVE_H
#define TANDEM_NATIVE_H
#include "kind.h"
#include "vectors.h"
#if defined(HAVE_AVX2) || defined(__SSE__)
#include <immintrin.h>
#elif defined(HAVE_NEON)
#include <arm_neon.h>
#endif

#if defined(HAVE_AVX512)
enum { WIDTH = 16 };
#elif defined(HAVE_AVX2)
enum { WIDTH = 8 };
#else
enum { WIDTH = 4 };
#endif
enum { PARTS = LANES / WIDTH };

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDTH)));

/* 16 outputs' sums. */
struct half {
    vec v[PARTS];
};

INLINE vec load_vec(const void *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store_vec(void *to, vec v) { memcpy(to, &v, sizeof v); }

/* x * w + sum, rounded once where the CPU can. */
INLINE vec times_plus(vec x, vec w, vec sum) {
#if defined(HAVE_AVX512)
    return (vec)_mm512_fmadd_ps((__m512)x, (__m512)w, (__m512)sum);
#elif defined(HAVE_AVX2)
    return (vec)_mm256_fmadd_ps((__m256)x, (__m256)w, (__m256)sum);
#elif defined(HAVE_NEON)
    return (vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)w);
#else
    return sum + x * w;
#endif
}

INLINE vec all_of(const float *x) {
#if defined(HAVE_AVX512)
    return (vec)_mm512_set1_ps(*x);
#elif defined(HAVE_AVX2)
    return (vec)_mm256_broadcast_ss(x);
#elif defined(HAVE_NEON)
    return (vec)vld1q_dup_f32(x);
#else
    return (vec){*x, *x, *x, *x};
#endif
}

INLINE struct half no_sums(void) { return (struct half){0}; }

INLINE struct half load_sums(const float *from) {
    struct half h;
    for (int q = 0; q < PARTS; q++) h.v[q] = load_vec(from + q * WIDTH);
    return h;
}

INLINE void store_sums(float *to, struct half h) {
    for (int q = 0; q < PARTS; q++) store_vec(to + q * WIDTH, h.v[q]);
}

INLINE struct half half_of(f16v x) {
    struct half h;
    memcpy(&h, &x, sizeof h);
    return h;
}

/* 16 elements of a row from element `at` on. */
INLINE struct half load_half(const void *row, int64_t at, const int is_bf16) {
    typedef uint16_t words __attribute__((vector_size(2 * WIDTH)));
    struct half h;
    for (int q = 0; q < PARTS; q++) {
        if (is_bf16) {
            words own;
            memcpy(&own, (const bf16 *)row + at + q * WIDTH, sizeof own);
            h.v[q] = (vec)(__builtin_convertvector(own, uvec) << 16);
        } else {
            h.v[q] = load_vec((const float *)row + at + q * WIDTH);
        }
    }
    return h;
}

/* As load_values of attention.h. */
INLINE void load_halves(struct half *to, const char *row, int64_t at, const int vectors, const int is_bf16) {
    for (int w = 0; w < vectors; w += 2) {
        if (!is_bf16 || vectors == 1) {
            to[w] = load_half(row, at + w * LANES, is_bf16);
            if (vectors > 1) to[w + 1] = load_half(row, at + (w + 1) * LANES, is_bf16);
        } else {
            for (int q = 0; q < PARTS; q++) {
                const uvec pairs = (uvec)load_vec(row + (at + w * LANES) * 2 + q * (int)sizeof(vec));
                to[w].v[q] = (vec)(pairs << 16);
                to[w + 1].v[q] = (vec)(pairs & 0xffff0000u);
            }
        }
    }
}

/* sum + x * y, and sum + x * *y. */
INLINE struct half half_plus(struct half sum, struct half x, struct half y) {
    for (int q = 0; q < PARTS; q++) sum.v[q] = times_plus(x.v[q], y.v[q], sum.v[q]);
    return sum;
}

INLINE struct half half_plus_all(struct half sum, struct half x, const float *y) {
    for (int q = 0; q < PARTS; q++) sum.v[q] = times_plus(x.v[q], all_of(y), sum.v[q]);
    return sum;
}

INLINE struct half half_times(struct half x, const float *y) {
    for (int q = 0; q < PARTS; q++) x.v[q] *= all_of(y);
    return x;
}

/* Of 16 numbers, in the order of sum() of vectors.h. */
INLINE float sum_of_half(struct half x) {
    float lanes[WIDTH];
    for (int step = PARTS / 2; step; step /= 2)
        for (int q = 0; q < step; q++) x.v[q] += x.v[q + step];
    store_vec(lanes, x.v[0]);
    for (int step = WIDTH / 2; step; step /= 2)
        for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
    return lanes[0];
}

/* sums + part * scales (+ *of_x * offsets, if there are some). */
INLINE struct half with_group(struct half sums, struct half part, const float *scales, const float *offsets, const float *of_x) {
    for (int q = 0; q < PARTS; q++) {
        sums.v[q] = times_plus(part.v[q], load_vec(scales + q * WIDTH), sums.v[q]);
        if (offsets) sums.v[q] = times_plus(all_of(of_x), load_vec(offsets + q * WIDTH), sums.v[q]);
    }
    return sums;
}

/* The larger number of each lane. */
INLINE vec larger_vec(vec x, vec y) {
#if defined(HAVE_AVX512)
    return (vec)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(HAVE_AVX2)
    return (vec)_mm256_max_ps((__m256)x, (__m256)y);
#elif defined(HAVE_NEON)
    return (vec)vmaxq_f32((float32x4_t)x, (float32x4_t)y);
#else
    const ivec take = x > y;
    return (vec)(((ivec)x & take) | ((ivec)y & ~take));
#endif
}

#endif
