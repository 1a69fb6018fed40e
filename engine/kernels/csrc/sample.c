/* Samples a token a row: temperature, top_k, top_p, min_p and seeded noise, without a sort. The tokens are those of
 * engine/sampler/sampling.py, and the arithmetic is that of fixed_math.py step by step: build without -ffp-contract.
 *
 * Tokens rank by key: the bits of the gap to the best logit, then the token id. A filter is a bound on the key, so top_p needs
 * no running sum: the best score among all tokens counts if the mass ranked before it is below the limit; else that token
 * becomes the bound, and the best score below it is the next try.
 */
#include "vectors.h"
#include "team.h"
#include <math.h>
#include <stdlib.h>

#define BINS 2048 /* of gap bits >> 20 */
#define LARGEST_NOISE 22.9f

typedef uint64_t l16v __attribute__((vector_size(128)));
typedef int64_t s16v __attribute__((vector_size(128)));

/* ---- fixed_math.py and sampling.py */

INLINE f16v log_of_sum(f16v fraction, i16v exponent) {
    const f16v square = fraction * fraction, turns = __builtin_convertvector(exponent, f16v);
    f16v y = fraction * (float)7.0376836292e-2 + (float)-1.1514610310e-1;
    y = y * fraction + (float)1.1676998740e-1;
    y = y * fraction + (float)-1.2420140846e-1;
    y = y * fraction + (float)1.4249322787e-1;
    y = y * fraction + (float)-1.6668057665e-1;
    y = y * fraction + (float)2.0000714765e-1;
    y = y * fraction + (float)-2.4999993993e-1;
    y = y * fraction + (float)3.3333331174e-1;
    y = y * fraction * square;
    y = y + turns * (float)-2.12194440e-4;
    y = y - square * 0.5f;
    return (fraction + y) + turns * 0.693359375f;
}

INLINE f16v split(f16v x, i16v *exponent) {
    const i16v bits = (i16v)x;
    *exponent = (bits - 0x3F3504F3) >> 23;
    return (f16v)(bits - (*exponent << 23)) - 1.0f;
}

INLINE f16v noise_of(u16v bits) {
    const f16v u = (__builtin_convertvector(bits, f16v) + 0.5f) * 0x1p-32f;
    i16v exponent;
    f16v fraction = split((__builtin_convertvector(~bits, f16v) + 0.5f) * 0x1p-32f, &exponent);
    const i16v tail = exponent == 0;
    fraction = (f16v)(((i16v)-u & tail) | ((i16v)fraction & ~tail));
    fraction = split(-log_of_sum(fraction, exponent), &exponent);
    return -log_of_sum(fraction, exponent);
}

INLINE u16v token_bits(uint64_t key, l16v ids) {
    l16v x = key + ids * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return __builtin_convertvector((x ^ (x >> 31)) >> 32, u16v);
}

INLINE s16v mass(f16v x) {
    const i16v small = x < -28.0f;
    x = (f16v)(((i16v)((f16v){0} - 28.0f) & small) | ((i16v)x & ~small));
    const f16v shifted = x * (float)1.44269504088896341 + 12582912.0f, turns = shifted - 12582912.0f;
    f16v r = x - turns * 0.693359375f;
    r = r - turns * (float)-2.12194440e-4;
    f16v y = r * (float)1.9875691500e-4 + (float)1.3981999507e-3;
    y = y * r + (float)8.3334519073e-3;
    y = y * r + (float)4.1665795894e-2;
    y = y * r + (float)1.6666665459e-1;
    y = y * r + (float)5.0000001201e-1;
    y = y * (r * r) + r + 1.0f;
    y = y * (f16v)(((i16v)shifted - (0x4B400000 - 127)) << 23) * 0x1p40f;
    return __builtin_convertvector(y, s16v);
}

/* ---- a row */

struct bound { /* tokens of a lower (gap bits, token id) */
    int32_t gap, id;
};

struct row {
    const float *logits;
    int64_t vocab;
    float best, temperature, log_min_p;
    uint64_t key;
};

INLINE int any(i16v mask) {
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= mask[i];
    return found;
}

/* The gap of 16 tokens; infinite beyond the end. */
INLINE f16v gap_at(const struct row *row, int64_t at) {
    if (at + LANES <= row->vocab) return row->best - load_f32(row->logits + at);
    f16v gap = (f16v){0} + INFINITY;
    for (int64_t i = at; i < row->vocab; i++) gap[i - at] = row->best - row->logits[i];
    return gap;
}

INLINE i16v lanes(int64_t at) { return (i16v){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (int32_t)at; }

INLINE i16v below(f16v gap, i16v ids, struct bound bound) {
    return ((i16v)gap < bound.gap) | (((i16v)gap == bound.gap) & (ids < bound.id));
}

INLINE int32_t gap_bits(const struct row *row, int64_t id) {
    const float gap = row->best - row->logits[id];
    int32_t bits;
    memcpy(&bits, &gap, sizeof bits);
    return bits;
}

/* The token below `bound` of the best score, at least as probable as min_p asks; `otherwise` if there is none. */
static int64_t best_score(const struct row *row, struct bound bound, int64_t otherwise) {
    f16v best = (f16v){0} - INFINITY;
    i16v best_ids = {0};
    float most = -INFINITY;
    for (int64_t at = 0; at < row->vocab; at += LANES) {
        const f16v gap = gap_at(row, at), scaled = -gap / row->temperature;
        const i16v ids = lanes(at);
        const i16v kept = below(gap, ids, bound) & (scaled >= row->log_min_p);
        if (!any(kept & (scaled + LARGEST_NOISE > most))) continue;
        f16v score = scaled + noise_of(token_bits(row->key, __builtin_convertvector((u16v)ids, l16v)));
        const i16v better = kept & (score > best);
        best = (f16v)(((i16v)score & better) | ((i16v)best & ~better));
        best_ids = (ids & better) | (best_ids & ~better);
        most = largest(best);
    }
    if (most == -INFINITY) return otherwise;
    int32_t id = INT32_MAX;
    for (int i = 0; i < LANES; i++)
        if (best[i] == most && best_ids[i] < id) id = best_ids[i];
    return id;
}

static int64_t mass_below(const struct row *row, struct bound bound) {
    s16v total = {0};
    for (int64_t at = 0; at < row->vocab; at += LANES) {
        const f16v gap = gap_at(row, at);
        const i16v kept = below(gap, lanes(at), bound);
        if (any(kept)) total += mass(-gap / row->temperature) & __builtin_convertvector(kept, s16v);
    }
    int64_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += total[i];
    return sum;
}

static int compare(const void *x, const void *y) {
    const int64_t a = *(const int64_t *)x, b = *(const int64_t *)y;
    return (a > b) - (a < b);
}

/* The bound with `count` tokens below it, count < vocab. `keys` [vocab]: scratch. */
static struct bound top_k_bound(const struct row *row, int64_t count, int64_t *keys) {
    int64_t bins[BINS] = {0}, before = 0, found = 0;
    int32_t bin = 0;
    for (int64_t id = 0; id < row->vocab; id++) bins[gap_bits(row, id) >> 20]++;
    while (before + bins[bin] <= count) before += bins[bin++];
    for (int64_t id = 0; id < row->vocab; id++) {
        const int32_t bits = gap_bits(row, id);
        if (bits >> 20 == bin) keys[found++] = ((int64_t)bits << 32) | id;
    }
    qsort(keys, (size_t)found, sizeof *keys, compare);
    const int64_t key = keys[count - before];
    return (struct bound){(int32_t)(key >> 32), (int32_t)key};
}

static int64_t sample_row(const struct row *row, int64_t top_k, float top_p, int64_t greedy, int64_t *keys) {
    struct bound bound = {INT32_MAX, 0};
    if (!isfinite(row->best)) return greedy;
    if (top_k < row->vocab) bound = top_k_bound(row, top_k, keys);
    int64_t token = best_score(row, bound, greedy);
    if (top_p >= 1.0f) return token;
    const double limit = (double)top_p * (double)mass_below(row, bound);
    for (;;) {
        bound = (struct bound){gap_bits(row, token), (int32_t)token};
        if ((double)mass_below(row, bound) < limit) return token;
        token = best_score(row, bound, greedy);
    }
}

/* Mirrored by rows.py. */
struct sample {
    const float *logits;              /* [n, vocab] with rows `stride` apart */
    const int64_t *rows;              /* [count]: which are sampled; the arrays below are parallel to it */
    const float *best;                /* [count]: the row's largest logit */
    const int64_t *greedy;            /* and its first token */
    const int64_t *keys;
    const float *temperature, *top_p, *log_min_p;
    const int64_t *top_k;             /* vocab: off */
    int64_t *tokens;                  /* [count] */
    int64_t count, vocab, stride;
};

/* Returns 0, or 1 without memory for the keys of top_k. */
int tandem_sample(const struct sample *a) {
    for (struct loop l = team_loop(a->count, 1); team_next(&l);) {
        const int64_t i = l.item;
        const struct row row = {a->logits + a->rows[i] * a->stride, a->vocab, a->best[i], a->temperature[i], a->log_min_p[i],
                                (uint64_t)a->keys[i]};
        int64_t *keys = a->top_k[i] < a->vocab ? malloc((size_t)a->vocab * sizeof *keys) : 0;
        if (a->top_k[i] < a->vocab && !keys) return 1;
        a->tokens[i] = sample_row(&row, a->top_k[i], a->top_p[i], a->greedy[i], keys);
        free(keys);
    }
    return 0;
}

/* Noise of bits [n], n a multiple of 16, and masses of x [n]: for the tests. */
int tandem_noise(const uint32_t *bits, float *noise, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        u16v r;
        memcpy(&r, bits + i, sizeof r);
        store_f32(noise + i, noise_of(r));
    }
    return 0;
}
