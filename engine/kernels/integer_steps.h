/* Steps of integer weights -> steps of bf16 tiles as tiles.h multiplies them. Integers of 4 and 8 bits are exact in bf16, so
 * nothing is rounded here: scales and offsets belong to the sums of a group of inputs. So are floats of 4 bits (E2M1).
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

#if defined(HAVE_AVX512)
#define INTEGERS_AHEAD 8192 /* bytes that are fetched before their use; measured from 1024 to 32768 */
#define INTEGERS_SOON 512   /* bytes that come into the L1 cache before they become tiles */

INLINE int64_t integer_step_bytes(int64_t bits) { return PANEL * STEP * bits / 8; }

enum { MOST_LINES = 4 }; /* in 64 bytes */
INLINE int lines_of(const int bits) { return bits == 4 ? 4 : 2; }

/* bf16 of the numbers that integers stand for, by instructions that look bits up. */
struct values {
    __m512i nibbles; /* twice: five bits of a word are looked at, and the fifth is the next nibble's */
#if defined(__AVX512VBMI__)
    __m512i low[2], high[2]; /* bytes of 0 to 127 */
    __m512i high_of_128, signs;
#endif
};

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

INLINE struct values values_of(const int bits, const int64_t e2m1) {
    const __m512i places = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    struct values v = {0};
    if (bits == 4) {
        const __m256i half = (__m256i)_mm512_cvtneps_pbh(_mm512_cvtepi32_ps(_mm512_sub_epi32(places, _mm512_set1_epi32(8))));
        v.nibbles = _mm512_broadcast_i64x4(e2m1 ? e2m1_values() : half);
    }
#if defined(__AVX512VBMI__)
    if (bits == 8) {
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

#if defined(__AVX512VBMI__)
INLINE void expand_bytes(__m512i all, __m512i *lines, struct values v) {
    const __m512i size = _mm512_abs_epi8(all); /* of -128 it is 128, whose lower seven bits are 0 */
    const __m512i low = _mm512_permutex2var_epi8(v.low[0], size, v.low[1]);
    const __m512i found = _mm512_mask_mov_epi8(_mm512_permutex2var_epi8(v.high[0], size, v.high[1]), _mm512_movepi8_mask(size), v.high_of_128);
    const __m512i high = _mm512_ternarylogic_epi32(found, all, v.signs, 0xf8); /* its sign */
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

INLINE void expand_bytes(__m512i all, __m512i *lines, struct values v) {
    const __m512i signs = _mm512_movm_epi8(_mm512_movepi8_mask(all));
    lines[0] = float_line(_mm512_unpacklo_epi8(all, signs));
    lines[1] = float_line(_mm512_unpackhi_epi8(all, signs));
}
#endif

/* 64 bytes -> the bf16 lines in them. */
INLINE void expand_lines(const char *from, __m512i *lines, struct values v, const int bits) {
    const __m512i all = opaque(_mm512_loadu_si512(from)); /* GCC 12 would spill it */
    if (bits == 4) {
        lines[0] = _mm512_permutexvar_epi16(all, v.nibbles);
        lines[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(all, 4), v.nibbles);
        lines[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(all, 8), v.nibbles);
        lines[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(all, 12), v.nibbles);
    } else {
        expand_bytes(all, lines, v);
    }
}

/* A tile, whose lines lie one behind the other -> bf16. `fetched`: later ones lie behind it and are fetched line by line. */
INLINE void expand_tile(const char *from, char *to, struct values values, const int bits, const int fetched) {
    const int64_t bytes = integer_step_bytes(bits) / 2;
    __m512i lines[MOST_LINES];
    for (int64_t at = 0; at < bytes; at += LINE_BYTES, to += lines_of(bits) * LINE_BYTES) {
        if (fetched) {
            fetch(from + at + INTEGERS_AHEAD, LINE_BYTES);
            _mm_prefetch(from + at + INTEGERS_SOON, _MM_HINT_T0);
        }
        expand_lines(from + at, lines, values, bits);
        for (int j = 0; j < lines_of(bits); j++) _mm512_store_si512(to + j * LINE_BYTES, lines[j]);
    }
}

/* Some steps that lie `apart` bytes apart -> bf16, one behind the other. */
INLINE void expand_steps(const char *from, int64_t apart, char *to, int64_t steps, const int bits, int64_t e2m1) {
    const struct values values = values_of(bits, e2m1);
    const int64_t bytes = integer_step_bytes(bits);
    for (int64_t k = 0; k < steps; k++, from += apart, to += STEP_BYTES) {
        fetch(from + INTEGERS_AHEAD, bytes);
        expand_tile(from, to, values, bits, 0);
        expand_tile(from + bytes / 2, to + TILE_BYTES, values, bits, 0);
    }
}

INLINE void expand(const char *from, int64_t apart, char *to, int64_t steps, int64_t bits, int64_t e2m1) {
    if (bits == 4) expand_steps(from, apart, to, steps, 4, e2m1);
    else expand_steps(from, apart, to, steps, 8, 0);
}

/* acc [row][half panel] += a step of one panel or two, without a way through memory. Two for few rows: an instruction needs the
 * sum of the one before, and others fill the time. `fetched`: bytes to fetch for later, 0 where another pass does. */
INLINE void add_step(const char *x, const char *w, __m512 acc[][4], struct values values, const int rows, const int panels, const int bits, int64_t fetched) {
    const int64_t bytes = integer_step_bytes(bits);
    for (int64_t at = 0; at < fetched; at += LINE_BYTES) _mm_prefetch(w + INTEGERS_AHEAD + at, _MM_HINT_T0);
    for (int i = 0; i < TILE; i += lines_of(bits))
        for (int p = 0; p < panels; p++) {
            __m512i low[MOST_LINES], high[MOST_LINES];
            const char *from = w + p * bytes + i / lines_of(bits) * LINE_BYTES;
            expand_lines(from, low, values, bits);
            expand_lines(from + bytes / 2, high, values, bits);
            for (int j = 0; j < lines_of(bits); j++)
                for (int r = 0; r < rows; r++) {
                    int32_t pair;
                    memcpy(&pair, x + r * LINE_BYTES + (i + j) * sizeof pair, sizeof pair);
                    const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
                    acc[r][2 * p] = _mm512_dpbf16_ps(acc[r][2 * p], both, (__m512bh)low[j]);
                    acc[r][2 * p + 1] = _mm512_dpbf16_ps(acc[r][2 * p + 1], both, (__m512bh)high[j]);
                }
        }
}

/* The sum of a row's inputs over some steps; `x`: its line in the first tile. */
INLINE float sum_of_row(const char *x, int64_t steps) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < steps; k++, x += TILE_BYTES) sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_load_si512(x), ones);
    return _mm512_reduce_add_ps(sum);
}

/* What 16 outputs' sums become by a group: `part` is theirs over it, `of_x` its inputs'. offsets: or NULL. */
INLINE __m512 with_group(__m512 sums, __m512 part, const float *scales, const float *offsets, const float *of_x) {
    sums = _mm512_fmadd_ps(part, _mm512_load_ps(scales), sums);
    return offsets ? _mm512_fmadd_ps(_mm512_set1_ps(*of_x), _mm512_load_ps(offsets), sums) : sums;
}
#endif

#endif
