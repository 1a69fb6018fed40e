/* Lines of weights times rows, by fp32 multiply-add: AVX512, AVX2, NEON, and any other CPU's vectors (tiles.h says what a line
 * is). Rows become fp32 when they are packed; weights while they are multiplied, or before (`ready`) where many rows share
 * them. Both are exact.
 */
#ifndef TANDEM_LINES_FP32_H
#define TANDEM_LINES_FP32_H
#include "../native.h"

#if defined(HAVE_AVX512)
enum { MAX_ROWS = 8, WHOLE_ROWS = 8, PAIRED_ROWS = 4 };
#elif defined(HAVE_AVX2) || defined(HAVE_NEON)
enum { MAX_ROWS = 6, WHOLE_ROWS = 2, PAIRED_ROWS = 1 }; /* of 16 registers 12 hold sums, of 32 narrower ones 24 */
#else
enum { MAX_ROWS = 2, WHOLE_ROWS = 1, PAIRED_ROWS = 0 };
#endif

/* ---- rows from the left: 32 inputs of a row are fp32 */

typedef float left;
INLINE left to_left(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The sum of a row's inputs over some steps; `x`: its line in the first tile. */
INLINE float sum_of_row(const char *x, int64_t steps, int64_t tile_bytes) {
    struct half both = {0};
    for (int64_t k = 0; k < steps; k++, x += tile_bytes)
        for (int q = 0; q < 2 * PARTS; q++) both.v[q % PARTS] += load_vec(x + q * WIDTH * (int)sizeof(float));
    float lanes[TILE], total = 0.0f;
    store_sums(lanes, both);
    for (int i = 0; i < TILE; i++) total += lanes[i];
    return total;
}

/* ---- lines from the right, which become fp32 where they are used: a line in registers would fill them */

enum { READY_LINE_BYTES = 2 * LINE_BYTES, IS_BF16 = 16, IS_READY = 32 };

struct values {
#if defined(HAVE_AVX512)
    __m512 of_nibble;
#elif defined(HAVE_AVX2)
    __m256 of_nibble; /* the first 8 */
#else
    char none;
#endif
};

struct line {
    const char *from;
    int number; /* of the lines in 64 bytes */
    int form;   /* IS_BF16, IS_READY, or a form of integers */
};

INLINE struct line bf16_line(const char *from) { return (struct line){from, 0, IS_BF16}; }
INLINE struct line ready_line(const char *from) { return (struct line){from, 0, IS_READY}; }

/* What codes of 4 bits stand for: integers less 8, and floats (E2M1: Open Compute Project, "Microscaling Formats (MX)" 1.0). */
static const float OF_INTEGER[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
static const float OF_E2M1[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

INLINE struct values values_for(const int form) {
    const float *table = form == IS_E2M1 ? OF_E2M1 : OF_INTEGER;
#if defined(HAVE_AVX512)
    return (struct values){_mm512_loadu_ps(table)};
#elif defined(HAVE_AVX2)
    return (struct values){_mm256_loadu_ps(table)};
#else
    return (void)table, (struct values){0};
#endif
}

/* The nibble at bit `shift` of each lane, as the number it stands for. */
INLINE vec of_nibbles(uvec lanes, const int shift, const int form, const struct values *v) {
    (void)form, (void)v;
#if defined(HAVE_AVX512)
    return (vec)_mm512_permutexvar_ps((__m512i)(lanes >> shift), v->of_nibble);
#else
    if (form != IS_E2M1) return __builtin_convertvector((ivec)((lanes ^ 0x88888888) << (28 - shift)) >> 28, vec);
    const uvec sign = (lanes << (28 - shift)) & 0x80000000;
#if defined(HAVE_AVX2)
    return (vec)((uvec)_mm256_permutevar8x32_ps(v->of_nibble, (__m256i)(lanes >> shift)) | sign);
#else
    const uvec code = (lanes >> shift) & 7, small = (uvec)(code < 2);
    const uvec normal = (code << 22) + 0x3f000000, tiny = (uvec)(code == 1) & 0x3f000000; /* 2^-1; 0 and 0.5 */
    return (vec)((normal & ~small) | (tiny & small) | sign);
#endif
#endif
}

/* Of the 8 bits that a line has in 64 bytes: even and odd inputs of part q's outputs, in the halves of a lane. */
INLINE ivec pairs_of_bytes(const char *from, const int number, const int q) {
    (void)q;
#if defined(HAVE_AVX512)
    const __m512i all = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_loadu_si512(from));
    return (ivec)_mm512_cvtepi16_epi32(number ? _mm512_extracti64x4_epi64(all, 1) : _mm512_castsi512_si256(all));
#elif defined(HAVE_AVX2)
    const __m128i low = _mm_loadu_si128((const __m128i *)(from + q * 32)), high = _mm_loadu_si128((const __m128i *)(from + q * 32 + 16));
    return (ivec)_mm256_cvtepi16_epi32(number ? _mm_unpackhi_epi64(low, high) : _mm_unpacklo_epi64(low, high));
#else
    typedef int16_t words __attribute__((vector_size(8)));
    words own;
    memcpy(&own, from + q * 16 + number * 8, sizeof own);
    return __builtin_convertvector(own, ivec);
#endif
}

/* Part q of the even inputs, or of the odd. */
INLINE vec part_of(struct line w, const int q, const int odd, const struct values *v) {
    if (w.form == IS_READY) return load_vec(w.from + odd * LINE_BYTES + q * (int)sizeof(vec));
    if (w.form == 8) {
        const ivec both = pairs_of_bytes(w.from, w.number, q);
        return __builtin_convertvector(odd ? both >> 8 : (both << 24) >> 24, vec);
    }
    const uvec lanes = (uvec)load_vec(w.from + q * (int)sizeof(vec));
    if (w.form == IS_BF16) return (vec)(odd ? lanes & 0xffff0000u : lanes << 16);
    return of_nibbles(lanes, odd * 16 + w.number * 4, w.form, v);
}

/* acc[r * apart] += the pair of inputs at x of `rows` rows, times w. */
INLINE void add_line(struct half *acc, const int apart, const char *x, const int rows, struct line w, const struct values *v) {
    for (int odd = 0; odd < 2; odd++) {
        struct half weights;
        for (int q = 0; q < PARTS; q++) weights.v[q] = part_of(w, q, odd, v);
        for (int r = 0; r < rows; r++) {
            const vec own = all_of((const float *)(x + r * STEP * (int)sizeof(left)) + odd);
            for (int q = 0; q < PARTS; q++) acc[r * apart].v[q] = times_plus(own, weights.v[q], acc[r * apart].v[q]);
        }
    }
}

INLINE void store_ready(char *to, struct line w, const struct values *v) {
    for (int odd = 0; odd < 2; odd++)
        for (int q = 0; q < PARTS; q++) store_vec(to + odd * LINE_BYTES + q * (int)sizeof(vec), part_of(w, q, odd, v));
}

/* Part q of a pair of inputs -> its place in a ready line. */
INLINE void put_pair(char *line, const int q, vec even, vec odd) {
    store_vec(line + q * (int)sizeof(vec), even);
    store_vec(line + LINE_BYTES + q * (int)sizeof(vec), odd);
}

/* 64 bytes of integers, and the lines in them. */
struct lines {
    const char *from;
};

INLINE struct lines lines_at(const char *from, const int form, const struct values *v) { return (void)form, (void)v, (struct lines){from}; }
INLINE struct line line_in(const struct lines *all, const int number, const int form) { return (struct line){all->from, number, form}; }

#endif
