/* Rows of 8 bits, as engine/kv/fp8.py defines them: e4m3 codes, and apart from them the exponent of their scale. Read as bf16,
 * which holds every such value: what reads bf16 rows gives the same bits with these.
 */
#ifndef TANDEM_FP8_H
#define TANDEM_FP8_H
#include "vectors.h"

#define MIN_EXPONENT 32
#define BAD_EXPONENT 247
#define BAD_CODE 0x7f
#define CODE_BIAS 120 /* from an exponent in e4m3 to one in bf16 */

typedef uint8_t b16v __attribute__((vector_size(16)));

/* ---- reading */

/* 16 codes of a row whose exponent is `exponent` -> fp32. */
INLINE f16v values_of(u16v x, int exponent) {
    const u16v magnitude = x & 0x7f, small = (u16v)(magnitude < 8);
    const u16v bias = (u16v){0} + ((uint32_t)(CODE_BIAS + exponent - 127) << 23);
    const u16v unit = (u16v){0} + ((uint32_t)(exponent - 9) << 23); /* of denormal codes: 2^-9 times the scale */
    const u16v denormal = (u16v)(__builtin_convertvector((i16v)magnitude, f16v) * (f16v)unit);
    return (f16v)((((magnitude << 20) + bias) & ~small) | (denormal & small) | (x & 0x80) << 24);
}

INLINE f16v load_codes(const char *codes, int exponent) {
    b16v bytes;
    memcpy(&bytes, codes, sizeof bytes);
    return values_of(__builtin_convertvector(bytes, u16v), exponent);
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define HAVE_CODE_LINES 1

/* What decodes a row: `bias` for the words of normal numbers, `denormals` the words of codes 0 to 7. */
struct code_row {
    __m512i bias, denormals;
};

INLINE struct code_row code_row(int exponent) {
    const __m512i scale = _mm512_set1_epi16((short)((exponent - 127) << 7)), bias = _mm512_add_epi16(scale, _mm512_set1_epi16(CODE_BIAS << 7));
    const __m512i units = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    return (struct code_row){bias, _mm512_mask_add_epi16(units, 0xfe, units, scale)};
}

/* 32 codes -> bf16. */
INLINE __m512i words_of(__m256i codes, const struct code_row *row) {
    const __m512i x = _mm512_cvtepu8_epi16(codes), magnitude = _mm512_slli_epi16(x, 4);
    const __mmask32 small = _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x78));
    __m512i words = _mm512_add_epi16(_mm512_and_si512(magnitude, _mm512_set1_epi16(0x7f0)), row->bias);
    words = _mm512_mask_permutexvar_epi16(words, small, x, row->denormals); /* it reads the low 5 bits: the sign is none of them */
    return _mm512_ternarylogic_epi32(words, _mm512_slli_epi16(x, 8), _mm512_set1_epi16((short)0x8000), 0xf8); /* words | sign & 0x8000 */
}
#endif

/* As load_values of attention.h, in the same order, from element `at` of a row whose exponent is `exponent` on. */
INLINE void load_code_values(f16v *to, const char *row, int64_t at, const int vectors, int exponent) {
#if defined(HAVE_CODE_LINES)
    const struct code_row how = code_row(exponent);
#endif
    for (int w = 0; w < vectors; w += 2) {
        const char *from = row + at + w * LANES;
        if (vectors == 1) {
            to[w] = load_codes(from, exponent);
            continue;
        }
#if defined(HAVE_CODE_LINES)
        const u16v pair = (u16v)words_of(_mm256_loadu_si256((const __m256i *)from), &how);
        to[w] = (f16v)(pair << 16);
        to[w + 1] = (f16v)(pair & 0xffff0000u);
#else
        h16v pair;
        memcpy(&pair, from, sizeof pair);
        to[w] = values_of(__builtin_convertvector(pair & 0xff, u16v), exponent);
        to[w + 1] = values_of(__builtin_convertvector(pair >> 8, u16v), exponent);
#endif
    }
}

/* ---- writing */

/* 16 numbers of at most 448 -> codes, rounded to nearest even. Denormal codes by the unit of 2^14, which is 2^-9. */
INLINE b16v codes_of(f16v x) {
    const u16v bits = (u16v)x & 0x7fffffff, small = (u16v)(bits < (u16v){0} + 0x3c800000); /* 2^-6 */
    const u16v normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (CODE_BIAS << 3);
    const u16v denormal = (u16v)((f16v)bits + 16384.0f) - 0x46800000;
    return __builtin_convertvector((normal & ~small) | (denormal & small) | ((u16v)x >> 24 & 0x80), b16v);
}

/* A row of bf16 -> its codes; returns the exponent of their scale. dim: a multiple of 16. */
INLINE uint8_t put_codes(char *to, const bf16 *row, int64_t dim) {
    h16v most = {0};
    for (int64_t i = 0; i < dim; i += LANES) {
        h16v x;
        memcpy(&x, row + i, sizeof x);
        x &= 0x7fff;
        const h16v take = (h16v)(x > most);
        most = (x & take) | (most & ~take);
    }
    uint16_t largest = 0;
    for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    if (largest >= 0x7f80) {
        memset(to, BAD_CODE, (size_t)dim);
        return BAD_EXPONENT;
    }
    int exponent = (largest >> 7) - 8 + ((largest & 0x7f) > 0x60);
    if (exponent < MIN_EXPONENT) exponent = MIN_EXPONENT;
    const uint32_t bits = (uint32_t)(254 - exponent) << 23; /* 2^(127 - exponent) */
    float inverse;
    memcpy(&inverse, &bits, sizeof inverse);
    for (int64_t i = 0; i < dim; i += LANES) {
        const b16v codes = codes_of(load_bf16(row + i) * inverse);
        memcpy(to + i, &codes, sizeof codes);
    }
    return (uint8_t)exponent;
}

#endif
