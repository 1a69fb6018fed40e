/* Lines of weights times rows by AVX512-BF16, 32 products to an instruction (tiles.h says what a line is). Rows stay bf16.
 * Integers of 4 and 8 bits are exact in bf16, so nothing is rounded here; so are floats of 4 bits (E2M1).
 */
#ifndef TANDEM_LINES_AVX512_BF16_H
#define TANDEM_LINES_AVX512_BF16_H
#include <immintrin.h>

#include "../vectors.h"

enum { MAX_ROWS = 8, PAIRED_ROWS = 4, WHOLE_ROWS = 8 };

/* 16 outputs' sums. */
struct half {
    __m512 v;
};

INLINE struct half no_sums(void) { return (struct half){_mm512_setzero_ps()}; }
INLINE struct half load_sums(const float *from) { return (struct half){_mm512_loadu_ps(from)}; }
INLINE void store_sums(float *to, struct half h) { _mm512_storeu_ps(to, h.v); }

/* sums + part * scales (+ *of_x * offsets, if there are some). */
INLINE struct half with_group(struct half sums, struct half part, const float *scales, const float *offsets, const float *of_x) {
    sums.v = _mm512_fmadd_ps(part.v, _mm512_load_ps(scales), sums.v);
    if (offsets) sums.v = _mm512_fmadd_ps(_mm512_set1_ps(*of_x), _mm512_load_ps(offsets), sums.v);
    return sums;
}

/* ---- rows from the left */

typedef bf16 left;
INLINE left to_left(bf16 x) { return x; }

/* The sum of a row's inputs over some steps; `x`: its line in the first tile. */
INLINE float sum_of_row(const char *x, int64_t steps, int64_t tile_bytes) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < steps; k++, x += tile_bytes) sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_load_si512(x), ones);
    return _mm512_reduce_add_ps(sum);
}

/* ---- lines from the right */

enum { READY_LINE_BYTES = LINE_BYTES };

struct line {
    __m512i v;
};

/* bf16 of the numbers that integers stand for, by instructions that look bits up. */
struct values {
    __m512i nibbles; /* twice: five bits of a word are looked at, and the fifth is the next nibble's */
#if defined(__AVX512VBMI__)
    __m512i low[2], high[2]; /* bytes of 0 to 127 */
    __m512i high_of_128, signs;
#endif
};

INLINE struct line bf16_line(const char *from) { return (struct line){_mm512_load_si512(from)}; }
INLINE struct line ready_line(const char *from) { return bf16_line(from); }
INLINE void store_ready(char *to, struct line w, const struct values *v) { (void)v, _mm512_store_si512(to, w.v); }

/* acc[r * apart] += the pair of inputs at x of `rows` rows, times w. */
INLINE void add_line(struct half *acc, const int apart, const char *x, const int rows, struct line w, const struct values *v) {
    (void)v;
    for (int r = 0; r < rows; r++) {
        int32_t pair;
        memcpy(&pair, x + r * STEP * (int)sizeof(left), sizeof pair);
        acc[r * apart].v = _mm512_dpbf16_ps(acc[r * apart].v, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w.v);
    }
}

/* Floats of 4 bits: a sign, 2 bits of exponent, 1 of mantissa (Open Compute Project, "Microscaling Formats (MX)" 1.0). */
INLINE __m256i e2m1_values(void) {
    const __m128i positive = _mm_set_epi16(0x40c0, 0x4080, 0x4040, 0x4000, 0x3fc0, 0x3f80, 0x3f00, 0); /* 6, 4, 3, 2, 1.5, 1, 0.5, 0 */
    return _mm256_set_m128i(_mm_or_si128(positive, _mm_set1_epi16((short)0x8000)), positive);
}

/* A value that compilers keep in a register. To make a constant again would take the one port that looks bytes up. */
INLINE __m512i opaque(__m512i constant) {
    __asm__("" : "+v"(constant));
    return constant;
}

INLINE struct values values_for(const int form) {
    const __m512i places = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    struct values v;
    memset(&v, 0, sizeof v);
    if (form != 8) {
        const __m256i half = (__m256i)_mm512_cvtneps_pbh(_mm512_cvtepi32_ps(_mm512_sub_epi32(places, _mm512_set1_epi32(8))));
        v.nibbles = _mm512_broadcast_i64x4(form == IS_E2M1 ? e2m1_values() : half);
    }
#if defined(__AVX512VBMI__)
    if (form == 8) {
        uint8_t low[128], high[128];
        for (int i = 0; i < 128; i += TILE) {
            const __m512i found = (__m512i)_mm512_cvtepi32_ps(_mm512_add_epi32(places, _mm512_set1_epi32(i)));
            _mm_storeu_si128((void *)(low + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(found, 16)));
            _mm_storeu_si128((void *)(high + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(found, 24)));
        }
        for (int i = 0; i < 2; i++) v.low[i] = _mm512_loadu_si512(low + 64 * i), v.high[i] = _mm512_loadu_si512(high + 64 * i);
        v.high_of_128 = opaque(_mm512_set1_epi8(0x43)), v.signs = opaque(_mm512_set1_epi8((char)0x80));
    }
#endif
    return v;
}

/* 64 bytes of integers: the lines in them. */
struct lines {
    __m512i v[MOST_LINES];
};

#if defined(__AVX512VBMI__)
INLINE void expand_bytes(__m512i all, __m512i *lines, const struct values *v) {
    const __m512i size = _mm512_abs_epi8(all); /* of -128 it is 128, whose lower seven bits are 0 */
    const __m512i low = _mm512_permutex2var_epi8(v->low[0], size, v->low[1]);
    const __m512i found = _mm512_mask_mov_epi8(_mm512_permutex2var_epi8(v->high[0], size, v->high[1]), _mm512_movepi8_mask(size), v->high_of_128);
    const __m512i high = _mm512_ternarylogic_epi32(found, all, v->signs, 0xf8); /* its sign */
    lines[0] = _mm512_unpacklo_epi8(low, high);
    lines[1] = _mm512_unpackhi_epi8(low, high);
}
#else
/* Words below 2^8 -> bf16: their floats have zeros behind it. */
INLINE __m512i float_line(__m512i words) {
    const __m512i even = (__m512i)_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16));
    const __m512i odd = (__m512i)_mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16));
    return _mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
}

INLINE void expand_bytes(__m512i all, __m512i *lines, const struct values *v) {
    (void)v;
    const __m512i signs = _mm512_movm_epi8(_mm512_movepi8_mask(all));
    lines[0] = float_line(_mm512_unpacklo_epi8(all, signs));
    lines[1] = float_line(_mm512_unpackhi_epi8(all, signs));
}
#endif

INLINE struct lines lines_at(const char *from, const int form, const struct values *v) {
    struct lines lines;
    const __m512i all = opaque(_mm512_loadu_si512(from)); /* GCC 12 would spill it */
    if (form == 8) {
        expand_bytes(all, lines.v, v);
    } else {
        lines.v[0] = _mm512_permutexvar_epi16(all, v->nibbles);
        lines.v[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(all, 4), v->nibbles);
        lines.v[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(all, 8), v->nibbles);
        lines.v[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(all, 12), v->nibbles);
    }
    return lines;
}

INLINE struct line line_in(const struct lines *all, const int number, const int form) { return (void)form, (struct line){all->v[number]}; }

#endif
