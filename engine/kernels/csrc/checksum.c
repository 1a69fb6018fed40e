/* Checksums of words (engine/kv/page_checksum.py) in one pass. Compilers make vectors of these loops. */
#include <stdint.h>

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* The sum over i of mix(WORD + key + (i + 1) * step). */
#define SUM_OF(name, type, WORD)                                                                                    \
    static uint64_t name(const type *words, const uint64_t *bits, int64_t count, uint64_t key, uint64_t step) {     \
        uint64_t sum = 0;                                                                                           \
        (void)bits;                                                                                                 \
        for (int64_t i = 0; i < count; i++) key += step, sum += mix((WORD) + key);                                  \
        return sum;                                                                                                 \
    }
SUM_OF(sum_of_8, uint64_t, words[i])
SUM_OF(sum_of_bits, uint64_t, words[i] & bits[i])
SUM_OF(sum_of_4, int32_t, (uint64_t)(int64_t)words[i])
SUM_OF(sum_of_2, int16_t, (uint64_t)(int64_t)words[i])

/* Mirrored by checksum.py. */
struct sums {
    const void *words;
    const int64_t *starts; /* [rows]: of each the first word */
    const uint64_t *keys;  /* [rows] */
    const uint64_t *bits;  /* [period]: which bits of words of 8 bytes count, and so on; NULL: all */
    uint64_t *sums;        /* [rows] */
    int64_t rows, count, step, word_bytes, period;
};

int tandem_word_sums(const struct sums *a) {
    for (int64_t r = 0; r < a->rows; r++) {
        a->sums[r] = 0;
        for (int64_t i = 0; i < a->count; i += a->period) {
            const void *words = (const char *)a->words + (a->starts[r] + i) * a->word_bytes;
            const int64_t count = a->count - i < a->period ? a->count - i : a->period;
            const uint64_t step = (uint64_t)a->step, key = a->keys[r] + (uint64_t)i * step;
            a->sums[r] += a->word_bytes == 2 ? sum_of_2(words, 0, count, key, step)
                        : a->word_bytes == 4 ? sum_of_4(words, 0, count, key, step)
                        : a->bits            ? sum_of_bits(words, a->bits, count, key, step)
                                             : sum_of_8(words, 0, count, key, step);
        }
    }
    return 0;
}
