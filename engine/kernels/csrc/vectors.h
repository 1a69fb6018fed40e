/* Vectors of 16 fp32 lanes for the kernels here: GCC/Clang vector extensions, which the compiler lowers to AVX-512, AVX2,
 * NEON or scalar code. Knows numbers, not layers. */
#ifndef TANDEM_VECTORS_H
#define TANDEM_VECTORS_H
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float f16v __attribute__((vector_size(64)));
typedef int32_t i16v __attribute__((vector_size(64)));
typedef uint32_t u16v __attribute__((vector_size(64)));
typedef uint16_t h16v __attribute__((vector_size(32)));
typedef uint16_t bf16;

/* ---- loads and stores */

INLINE f16v load_f32(const float *x) {
    f16v r;
    memcpy(&r, x, sizeof r);
    return r;
}

INLINE void store_f32(float *x, f16v r) { memcpy(x, &r, sizeof r); }

INLINE f16v load_bf16(const bf16 *x) {
    h16v h;
    memcpy(&h, x, sizeof h);
    return (f16v)(__builtin_convertvector(h, u16v) << 16);
}

INLINE f16v load(const void *row, int at, int is_bf16) {
    return is_bf16 ? load_bf16((const bf16 *)row + at) : load_f32((const float *)row + at);
}

INLINE bf16 to_bf16(float x) { /* round to nearest even; a NaN stays one */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* The same for 16 numbers: in the upper halves of 32 bits, as values, and into memory. Of the last two the CPU's own
 * rounding makes zeros of denormals (below 1.2e-38). */
INLINE u16v bf16_bits(f16v x) {
    const u16v bits = (u16v)x, nan = (u16v)(x != x);
    const u16v even = bits + 0x7fff + ((bits >> 16) & 1);
    return ((even & ~nan) | ((bits | 0x400000) & nan)) & 0xffff0000u;
}

#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512VL__)
INLINE void store_bf16(bf16 *to, f16v x) {
    const __m256bh h = _mm512_cvtneps_pbh((__m512)x);
    memcpy(to, &h, sizeof h);
}

INLINE f16v round_bf16(f16v x) {
    const __m256i h = (__m256i)_mm512_cvtneps_pbh((__m512)x);
    return (f16v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
}
#else
INLINE f16v round_bf16(f16v x) { return (f16v)bf16_bits(x); }

INLINE void store_bf16(bf16 *to, f16v x) {
    const h16v h = __builtin_convertvector(bf16_bits(x) >> 16, h16v);
    memcpy(to, &h, sizeof h);
}
#endif

/* 32 numbers -> a line of bf16; `around` the caches, for which it must be aligned. */
INLINE void store_line(bf16 *to, f16v low, f16v high, const int around) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    const __m512i line = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    if (around) _mm512_stream_si512((void *)to, line);
    else _mm512_storeu_si512(to, line);
#else
    (void)around;
    store_bf16(to, low);
    store_bf16(to + LANES, high);
#endif
}

/* Of what went around the caches. */
INLINE void end_stores_around(void) {
#if defined(__AVX512F__)
    _mm_sfence();
#endif
}

/* ---- the first `count` of 16 numbers, at most all; behind those that are read are zeros */

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
INLINE __mmask16 first_lanes(int64_t count) { return count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }
INLINE f16v load_some_bf16(const bf16 *x, int64_t count) { return (f16v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), x)), 16); }
INLINE void store_some_f32(float *to, f16v x, int64_t count) { _mm512_mask_storeu_ps(to, first_lanes(count), (__m512)x); }
INLINE void store_some_bf16(bf16 *to, f16v x, int64_t count) {
    h16v h;
    store_bf16((bf16 *)&h, x);
    _mm256_mask_storeu_epi16(to, first_lanes(count), (__m256i)h);
}
#else
INLINE size_t first_lanes(int64_t count) { return (size_t)(count >= LANES ? LANES : count <= 0 ? 0 : count); }
INLINE f16v load_some_bf16(const bf16 *x, int64_t count) {
    bf16 own[LANES] = {0};
    memcpy(own, x, first_lanes(count) * sizeof *x);
    return load_bf16(own);
}
INLINE void store_some_f32(float *to, f16v x, int64_t count) { memcpy(to, &x, first_lanes(count) * sizeof *to); }
INLINE void store_some_bf16(bf16 *to, f16v x, int64_t count) {
    bf16 own[LANES];
    store_bf16(own, x);
    memcpy(to, own, first_lanes(count) * sizeof *to);
}
#endif

/* ---- sums and maxima */

INLINE float sum(f16v x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float r[LANES];
    memcpy(r, &x, sizeof r);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) r[i] += r[i + step];
    return r[0];
#endif
}

INLINE f16v larger(f16v x, f16v y) { /* x where they compare, and y is NaN */
    i16v take = y > x;
    return (f16v)(((i16v)y & take) | ((i16v)x & ~take));
}

INLINE float largest(f16v x) { /* any number if there is a NaN */
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float r[LANES];
    memcpy(r, &x, sizeof r);
    float best = r[0];
    for (int i = 1; i < LANES; i++) best = r[i] > best ? r[i] : best;
    return best;
#endif
}

/* e^x for x <= 0: range reduction by ln 2, then a polynomial (Cephes expf, relative error 2e-7). Below -87: 0. */
INLINE f16v exp_nonpositive(f16v x) {
    const f16v low = (f16v){0} - 87.0f, magic = (f16v){0} + 12582912.0f;
    i16v underflow = x < low; /* false for NaN, which must pass */
    x = (f16v)(((i16v)low & underflow) | ((i16v)x & ~underflow));
    f16v shifted = x * 1.44269504088896341f + magic; /* rounds to the nearest integer */
    f16v n = shifted - magic;
    f16v r = x - n * 0.693359375f - n * -2.12194440e-4f;
    f16v y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    i16v power = ((i16v)shifted - (i16v)magic + 127) << 23;
    return (f16v)((i16v)(y * (f16v)power) & ~underflow);
}

/* From e^-2|x|, which does not overflow; absolute error 2e-7. */
INLINE f16v tanh_of(f16v x) {
    const i16v sign = (i16v)x & (int32_t)0x80000000;
    const f16v one = (f16v){0} + 1.0f, small = exp_nonpositive((f16v)((i16v)x | (int32_t)0x80000000) * 2.0f);
    return (f16v)((i16v)((one - small) / (one + small)) | sign);
}

#endif
