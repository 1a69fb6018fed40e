/* Lines of weights times rows by NEON's bf16 dot products, 8 products to an instruction (tiles.h says what a line is). Rows stay
 * bf16. Integers of 4 and 8 bits are exact in bf16; so are floats of 4 bits (E2M1).
 */
#ifndef TANDEM_LINES_NEON_BF16_H
#define TANDEM_LINES_NEON_BF16_H
#include "../native.h"

enum { MAX_ROWS = 6, WHOLE_ROWS = 2, PAIRED_ROWS = 1 }; /* 32 registers: 24 hold sums */

/* ---- rows from the left */

typedef bf16 left;
INLINE left to_left(bf16 x) { return x; }

INLINE bfloat16x8_t load_words(const void *from) { return vreinterpretq_bf16_u16(vld1q_u16(from)); }

/* The sum of a row's inputs over some steps; `x`: its line in the first tile. */
INLINE float sum_of_row(const char *x, int64_t steps, int64_t tile_bytes) {
    uint16_t one = 0x3f80;
    __asm__("" : "+r"(one)); /* GCC 12 would load the constant by an instruction for fp16 */
    const bfloat16x8_t ones = vreinterpretq_bf16_u16(vdupq_n_u16(one));
    float32x4_t sum = vdupq_n_f32(0.0f);
    for (int64_t k = 0; k < steps; k++, x += tile_bytes)
        for (int q = 0; q < PARTS; q++) sum = vbfdotq_f32(sum, load_words(x + 16 * q), ones);
    return vaddvq_f32(sum);
}

/* ---- lines from the right */

enum { READY_LINE_BYTES = LINE_BYTES };

struct line {
    bfloat16x8_t v[PARTS];
};

/* Bytes of the bf16 that nibbles stand for: the lower of all, then the upper. */
struct values {
    uint8x16x2_t of_nibble;
};

INLINE struct line bf16_line(const char *from) {
    struct line w;
    for (int q = 0; q < PARTS; q++) w.v[q] = load_words(from + 16 * q);
    return w;
}

INLINE struct line ready_line(const char *from) { return bf16_line(from); }

INLINE void store_ready(char *to, struct line w, const struct values *v) {
    (void)v;
    for (int q = 0; q < PARTS; q++) vst1q_u16((uint16_t *)(to + 16 * q), vreinterpretq_u16_bf16(w.v[q]));
}

/* acc[r * apart] += the pair of inputs at x of `rows` rows, times w. */
INLINE void add_line(struct half *acc, const int apart, const char *x, const int rows, struct line w, const struct values *v) {
    (void)v;
    for (int r = 0; r < rows; r++) {
        const bfloat16x8_t pair = vreinterpretq_bf16_u32(vld1q_dup_u32((const uint32_t *)(x + r * STEP * (int)sizeof(left))));
        for (int q = 0; q < PARTS; q++) acc[r * apart].v[q] = (vec)vbfdotq_f32((float32x4_t)acc[r * apart].v[q], w.v[q], pair);
    }
}

/* Part q of a pair of inputs -> its place in a ready line, rounded. */
INLINE void put_pair(char *line, const int q, vec even, vec odd) {
    const uint16x8_t low = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32((float32x4_t)even)), high = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32((float32x4_t)odd));
    vst1q_u16((uint16_t *)(line + 16 * q), vzip1q_u16(low, high));
}

INLINE struct values values_for(const int form) {
    static const uint16_t integers[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    static const uint16_t floats[16] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    const uint8x16x2_t bytes = vld2q_u8((const uint8_t *)(form == IS_E2M1 ? floats : integers));
    return (struct values){bytes};
}

/* 64 bytes of integers, and the lines in them. */
struct lines {
    const char *from;
    const struct values *values;
};

INLINE struct lines lines_at(const char *from, const int form, const struct values *v) { return (void)form, (struct lines){from, v}; }

/* Nibble `number` of 8 words -> bf16: each byte of a word looks its own half up. */
INLINE bfloat16x8_t of_nibbles(uint16x8_t words, const int number, const struct values *v) {
    const uint16x8_t own = vandq_u16(vshlq_u16(words, vdupq_n_s16((int16_t)(-4 * number))), vdupq_n_u16(15));
    const uint16x8_t both = vorrq_u16(vsliq_n_u16(own, own, 8), vdupq_n_u16(0x1000));
    return vreinterpretq_bf16_u8(vqtbl2q_u8(v->of_nibble, vreinterpretq_u8_u16(both)));
}

/* 8 integers of 8 bits -> bf16: their floats have zeros behind it. */
INLINE bfloat16x8_t of_bytes(const char *from) {
    const int16x8_t words = vmovl_s8(vld1_s8((const int8_t *)from));
    const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))), high = vcvtq_f32_s32(vmovl_s16(vget_high_s16(words)));
    return vreinterpretq_bf16_u16(vuzp2q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high)));
}

INLINE struct line line_in(const struct lines *all, const int number, const int form) {
    struct line w;
    for (int q = 0; q < PARTS; q++)
        w.v[q] = form == 8 ? of_bytes(all->from + 16 * q + 8 * number) : of_nibbles(vld1q_u16((const uint16_t *)(all->from + 16 * q)), number, all->values);
    return w;
}

#endif
