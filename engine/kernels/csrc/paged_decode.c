/* Paged decode attention: online softmax over a request's pages, for one query token of it or, with drafts, several that follow one
 * another or branch, as a tree of drafts does. Caches of bf16, fp32, and 8 bits (fp8.h) beside bf16 queries.
 *
 * A work item is (group of requests, a run of kv heads of one unit): all query heads of a kv head are computed together, and all rows of
 * the group block by block as far as they share their pages, then those of each request, so each byte of K and V is read from memory
 * once. Tokens go in blocks of BLOCK from the first one that is seen on, in this order whatever the batch is: a
 * request's result does not depend on its neighbours, on the run, nor on the number of threads. All sums are fp32.
 *
 * Memory is the limit. A block's K is passed over token by token, all heads of the run, as it lies in memory, and then its
 * V; what lies AHEAD_BYTES further on is fetched into the L2 cache meanwhile. So the processor's own prefetcher sees one
 * place that moves on, and does most of it: a core may wait for few lines at a time by itself, and what it computes from
 * the L2 cache needs those places too (head by head, with 16 tokens fetched ahead, reading and computing took turns).
 *
 * Vectors are those of vectors.h; only bf16 dot products (AVX512-BF16) and AVX-512's sums of vectors are written with
 * intrinsics. Blocked online softmax: Milakov and Gimelshein 2018, Dao et al. 2022; grouping the query heads of a kv head:
 * the usual GQA decode kernels (FlashInfer, vLLM, SGLang).
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "fp8.h"
#include "team.h"

#define BLOCK 64         /* tokens whose scores are held at once */
#if defined(HAVE_AVX512)
#define SUB 8            /* query heads computed together */
#define ACCUMULATORS 16  /* vectors of output held in registers */
#else
#define SUB 2            /* registers hold fewer */
#define ACCUMULATORS 4
#endif
#define MAX_VECTORS 8
#define DOTS LANES     /* tokens whose dot products are summed at once */
#define TOGETHER 4       /* tokens whose values are added while output is in registers */
#define AHEAD_BYTES 8192 /* of the run, in the order in which it is read */
#define MOST_HEADS 32    /* query heads of a run: its dot products stay in the L1 cache */
#define ITEMS 4          /* work items for each thread, at least, so that threads end together */
#define LINE_BYTES 64

/* What all layers of a step share. Mirrored by _Step in paged_attention.py. */
struct step {
    const int32_t *page_table;                  /* [B, table_width] */
    const int32_t *kv_lens;                     /* [B], the new token included */
    const int64_t *token_pages, *token_offsets; /* [B] where the new token goes */
    const int64_t *rows;                        /* [B] the order of rows: those of a request beside one another, and so those of a group */
    const int64_t *requests;                    /* [R + 1] the first entry of `rows` of each request, and the end; its kv_lens do not descend */
    const int64_t *groups;                      /* [G + 1] the first request of each group, and the end */
    const int64_t *shared;                      /* [G] tokens from the first one on that lie at the same places for all rows of the group */
    const int32_t *path_starts;                 /* [B] as Paths says: the tokens before it lie at their own positions; NULL: all do */
    const int32_t *path_places;                 /* [B, path_width] the positions at which those from it on lie */
    int64_t batch, num_groups, table_width, path_width;
};

/* Mirrored by _Args in paged_attention.py. Strides of q, k_new, v_new are elements from token to token; heads are dense. */
struct args {
    void *q, *k_new, *v_new, *out; /* [B, heads, dim], [B, kv_heads, dim] x 2, [B, heads, dim] dense */
    void *k_cache, *v_cache;       /* address of this layer's K and V in unit 0 of page 0 */
    const float *sinks;            /* [heads] a score beside those of the tokens; NULL: none */
    const struct step *step;
    int64_t q_stride, k_stride, v_stride;
    int64_t page_stride_bytes, unit_stride_bytes;
    int64_t heads, kv_heads, units, dim, page_size; /* each unit of a page holds kv_heads / units */
    int64_t window;                                 /* the last tokens that a query sees, itself included; 0: all */
    int64_t is_bf16, is_fp8; /* is_fp8: of the cache; is_bf16: of all else, and of the cache unless is_fp8 */
    float scale, cap; /* a score s becomes cap * tanh(s / cap); 0: it stays */
};

/* A block: rows of K and V of its tokens, at the first kv head of the run. */
struct block {
    int count;
    const char *k[BLOCK], *v[BLOCK];
};

/* One work item: what is shared by the functions below. */
struct item {
    const struct args *a;
    int64_t heads, group, row_bytes; /* kv heads of the run; query heads of each; bytes of a head's row in the cache */
    int64_t exponents;               /* of 8 bits: where those of the run's heads lie, from its first row on */
    int count, ahead;                /* tokens of the block at hand; rows that are fetched before they are needed */
    const char *rows[3 * BLOCK];     /* K of the block, then its V, then what is read next */
    const char *q;                   /* [query heads of the run, dim] */
    float *o, *m, *l, *factor;       /* of a row: [query heads, dim] unnormalised output, [query heads] running maximum and sum, [query heads] */
    float *p;                        /* [query heads, BLOCK] scores, then weights */
    f16v *parts;                     /* [query heads, LANES] of the dot products of DOTS tokens */
};

/* Exponent of kv head h in a token's row, which begins at the run's first head. */
INLINE int exponent_of(const struct item *it, const char *row, int64_t h) { return (uint8_t)row[it->exponents + h]; }

/* Row `at` of kv head h, and on the way to it, the one that is needed `ahead` rows later. */
INLINE const char *row_of(const struct item *it, int at, int64_t h, int64_t row_bytes) {
    const char *later = it->rows[at + it->ahead] + h * row_bytes;
    for (int64_t i = 0; i < row_bytes; i += LINE_BYTES) __builtin_prefetch(later + i, 0, 2);
    return it->rows[at] + h * row_bytes;
}

/* ---- scores, softmax weights, weighted sum */

/* parts[g] = products of q[g] with a row of K, for `heads` query heads. `exponent`: of the row, if is_fp8. */
INLINE void multiply_row(f16v *parts, const char *q, const char *k, int exponent, const int heads, const int is_bf16, const int is_fp8, const int dim) {
    const int64_t q_row = (int64_t)dim * (is_bf16 ? 2 : 4);
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    if (is_bf16) {
        __m512 acc[SUB];
        const struct code_row row = is_fp8 ? code_row(exponent) : (struct code_row){_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int g = 0; g < heads; g++) acc[g] = _mm512_setzero_ps();
        int at = 0;
        for (; at + 32 <= dim; at += 32) {
            __m512bh kv = (__m512bh)(is_fp8 ? words_of(_mm256_loadu_si256((const __m256i *)(k + at)), &row) : _mm512_loadu_si512(k + at * 2));
            for (int g = 0; g < heads; g++)
                acc[g] = _mm512_dpbf16_ps(acc[g], (__m512bh)_mm512_loadu_si512(q + g * q_row + at * 2), kv);
        }
        if (at < dim) { /* dim is a multiple of 16: half a vector is left */
            __m512bh kv = (__m512bh)(is_fp8 ? words_of(_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)(k + at))), &row)
                                            : _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)(k + at * 2))));
            for (int g = 0; g < heads; g++)
                acc[g] = _mm512_dpbf16_ps(acc[g], (__m512bh)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)(q + g * q_row + at * 2))), kv);
        }
        for (int g = 0; g < heads; g++) parts[g * LANES] = (f16v)acc[g];
        return;
    }
#endif
    struct half acc[SUB];
    for (int g = 0; g < heads; g++) acc[g] = no_sums();
    for (int at = 0; at < dim; at += LANES) {
        const struct half kv = is_fp8 ? half_of(load_codes(k + at, exponent)) : load_half(k, at, is_bf16);
        for (int g = 0; g < heads; g++) acc[g] = half_plus(acc[g], load_half(q + g * q_row, at, is_bf16), kv);
    }
    for (int g = 0; g < heads; g++) memcpy(parts + g * LANES, acc + g, sizeof *acc);
}

/* p[r][from + t] = scale * q[r] . k[from + t] for t < n <= DOTS, of each kv head `heads` query heads from `first` on. */
INLINE void scores(struct item *it, int first, int from, int n, const int heads, const int is_bf16, const int is_fp8, const int fixed) {
    const int dim = fixed ? fixed : (int)it->a->dim;
    const int64_t q_bytes = (int64_t)dim * (is_bf16 ? 2 : 4), row_bytes = is_fp8 ? dim : q_bytes;
    for (int t = 0; t < n; t++)
        for (int64_t h = 0; h < it->heads; h++) {
            const int64_t r = h * it->group + first;
            const int exponent = is_fp8 ? exponent_of(it, it->rows[from + t], h) : 0;
            multiply_row(it->parts + r * LANES + t, it->q + r * q_bytes, row_of(it, from + t, h, row_bytes), exponent, heads, is_bf16, is_fp8, dim);
        }
    for (int64_t h = 0; h < it->heads; h++)
        for (int64_t r = h * it->group + first; r < h * it->group + first + heads; r++)
            store_f32(it->p + r * BLOCK + from, sums(it->parts + r * LANES) * it->a->scale);
}

/* Scores of a block and one query head -> weights relative to the new maximum; and the factor for what was summed before. */
static void weigh(struct item *it, int64_t g) {
    const int n = it->count, end = (n + LANES - 1) / LANES * LANES;
    float *p = it->p + g * BLOCK;
    if (it->a->cap)
        for (int t = 0; t < end; t += LANES) store_f32(p + t, tanh_of(load_f32(p + t) / it->a->cap) * it->a->cap);
    it->factor[g] = weights_of(p, n, it->m + g, it->l + g);
}

/* o[g] += sum over t < n of p[g][t] * v[t], for `vectors` vectors of each row from element `at` on; o[g] is first multiplied
 * by factor[g] where there is one. exponents[t]: of v[t], if is_fp8. */
INLINE void add_values(float *o, const float *p, const float *factor, const char *const *v, const int *exponents, int n, const int heads, int64_t at, const int vectors, const int is_bf16, const int is_fp8, const int64_t dim) {
    struct half acc[ACCUMULATORS], row[MAX_VECTORS];
    for (int g = 0; g < heads; g++)
        for (int w = 0; w < vectors; w++) {
            acc[g * vectors + w] = load_sums(o + g * dim + at + w * LANES);
            if (factor) acc[g * vectors + w] = half_times(acc[g * vectors + w], factor + g);
        }
    for (int t = 0; t < n; t++) {
        if (is_fp8) {
            f16v codes[MAX_VECTORS];
            load_code_values(codes, v[t], at, vectors, exponents[t]);
            for (int w = 0; w < vectors; w++) row[w] = half_of(codes[w]);
        } else {
            load_halves(row, v[t], at, vectors, is_bf16);
        }
        for (int g = 0; g < heads; g++)
            for (int w = 0; w < vectors; w++) acc[g * vectors + w] = half_plus_all(acc[g * vectors + w], row[w], p + g * BLOCK + t);
    }
    for (int g = 0; g < heads; g++)
        for (int w = 0; w < vectors; w++) store_sums(o + g * dim + at + w * LANES, acc[g * vectors + w]);
}

/* The same for tokens from..from + n - 1 of the block (n <= TOGETHER) and of each kv head `heads` query heads from `first` on. */
INLINE void values(struct item *it, int first, int from, int n, const int heads, const int is_bf16, const int is_fp8, const int fixed) {
    const int most = ACCUMULATORS / heads >= 8 ? 8 : ACCUMULATORS / heads >= 4 ? 4 : 2; /* vectors of a row at a time */
    const int64_t dim = fixed ? fixed : it->a->dim, row_bytes = dim * (is_fp8 ? 1 : is_bf16 ? 2 : 4);
    for (int64_t h = 0; h < it->heads; h++) {
        const char *v[TOGETHER];
        int e[TOGETHER];
        for (int t = 0; t < n; t++) {
            v[t] = row_of(it, it->count + from + t, h, row_bytes);
            e[t] = is_fp8 ? exponent_of(it, it->rows[it->count + from + t], h) : 0;
        }
        const int64_t r = h * it->group + first;
        float *o = it->o + r * dim;
        const float *p = it->p + r * BLOCK + from, *factor = from ? NULL : it->factor + r;
        int64_t at = 0;
        for (; at + most * LANES <= dim; at += most * LANES) add_values(o, p, factor, v, e, n, heads, at, most, is_bf16, is_fp8, dim);
        for (; at + 2 * LANES <= dim; at += 2 * LANES) add_values(o, p, factor, v, e, n, heads, at, 2, is_bf16, is_fp8, dim);
        if (at < dim) add_values(o, p, factor, v, e, n, heads, at, 1, is_bf16, is_fp8, dim);
    }
}

/* The number of heads is a constant in each copy, so that accumulators stay in registers; so is the usual size of a head. */
enum cached { FP32, BF16, BF16_OF_128, FP8, FP8_OF_128, KINDS };
typedef void (*tokens_fn)(struct item *, int first, int from, int n);
#define COPY(what, kind, heads, is_bf16, is_fp8, dim) \
    static __attribute__((noinline)) void what##_##kind##_##heads(struct item *it, int first, int from, int n) { what(it, first, from, n, heads, is_bf16, is_fp8, dim); }
#if SUB == 8
#define COPIES(what, kind, is_bf16, is_fp8, dim) \
    COPY(what, kind, 1, is_bf16, is_fp8, dim) COPY(what, kind, 2, is_bf16, is_fp8, dim) COPY(what, kind, 3, is_bf16, is_fp8, dim) COPY(what, kind, 4, is_bf16, is_fp8, dim) \
    COPY(what, kind, 5, is_bf16, is_fp8, dim) COPY(what, kind, 6, is_bf16, is_fp8, dim) COPY(what, kind, 7, is_bf16, is_fp8, dim) COPY(what, kind, 8, is_bf16, is_fp8, dim)
#define NAMES(what, kind) \
    {0, what##_##kind##_1, what##_##kind##_2, what##_##kind##_3, what##_##kind##_4, what##_##kind##_5, what##_##kind##_6, what##_##kind##_7, what##_##kind##_8}
#else
#define COPIES(what, kind, is_bf16, is_fp8, dim) COPY(what, kind, 1, is_bf16, is_fp8, dim) COPY(what, kind, 2, is_bf16, is_fp8, dim)
#define NAMES(what, kind) {0, what##_##kind##_1, what##_##kind##_2}
#endif
#define KINDS_OF(what) \
    COPIES(what, FP32, 0, 0, 0) COPIES(what, BF16, 1, 0, 0) COPIES(what, BF16_OF_128, 1, 0, 128) COPIES(what, FP8, 1, 1, 0) COPIES(what, FP8_OF_128, 1, 1, 128)
KINDS_OF(scores)
KINDS_OF(values)
static const tokens_fn SCORES[KINDS][SUB + 1] = {NAMES(scores, FP32), NAMES(scores, BF16), NAMES(scores, BF16_OF_128), NAMES(scores, FP8), NAMES(scores, FP8_OF_128)};
static const tokens_fn VALUES[KINDS][SUB + 1] = {NAMES(values, FP32), NAMES(values, BF16), NAMES(values, BF16_OF_128), NAMES(values, FP8), NAMES(values, FP8_OF_128)};

/* ---- one group of requests and run of kv heads */

/* Bytes of a token's row of K or V in a unit: its heads, and behind them, of 8 bits, their exponents. */
INLINE int64_t bytes_of_token(const struct args *a, int64_t row_bytes) { return a->kv_heads / a->units * (row_bytes + (a->is_fp8 ? 1 : 0)); }

/* Byte of a page, from this layer's K or V in unit 0 on, where the row of token `offset` and kv head `head` lies. */
INLINE int64_t in_page(const struct args *a, int64_t offset, int64_t head, int64_t row_bytes) {
    const int64_t heads = a->kv_heads / a->units;
    return head / heads * a->unit_stride_bytes + offset * bytes_of_token(a, row_bytes) + head % heads * row_bytes;
}

/* Rows of tokens from..from + BLOCK - 1 that query `row` sees, as far as there are any, at kv head `head`; each at its own position. */
static void locate(const struct args *a, int64_t row, int64_t from, int64_t head, int64_t row_bytes, struct block *to) {
    const int32_t *pages = a->step->page_table + row * a->step->table_width;
    const int64_t left = a->step->kv_lens[row] - from;
    to->count = left <= 0 ? 0 : left < BLOCK ? (int)left : BLOCK;
    const int64_t first = in_page(a, 0, head, row_bytes), token_bytes = bytes_of_token(a, row_bytes);
    int64_t page = from / a->page_size, offset = from % a->page_size;
    for (int t = 0; t < to->count; t++) {
        const int64_t at = pages[page] * a->page_stride_bytes + first + offset * token_bytes;
        to->k[t] = (const char *)a->k_cache + at;
        to->v[t] = (const char *)a->v_cache + at;
        if (++offset == a->page_size) offset = 0, page++;
    }
}

/* `shared`, a block from token `from` on, as query `row` sees it: its path's tokens where they lie, in `own`, if there are any. */
static const struct block *of_path(const struct args *a, int64_t row, int64_t from, int64_t head, int64_t row_bytes, const struct block *shared, struct block *own) {
    const struct step *s = a->step;
    if (!s->path_starts || from + shared->count <= s->path_starts[row]) return shared;
    const int32_t *pages = s->page_table + row * s->table_width, *places = s->path_places + row * s->path_width;
    const int64_t start = s->path_starts[row], end = s->kv_lens[row] - from;
    *own = *shared;
    for (int64_t t = start > from ? start - from : 0; t < end && t < shared->count; t++) {
        const int64_t place = places[from + t - start];
        const int64_t at = pages[place / a->page_size] * a->page_stride_bytes + in_page(a, place % a->page_size, head, row_bytes);
        own->k[t] = (const char *)a->k_cache + at;
        own->v[t] = (const char *)a->v_cache + at;
    }
    return own;
}

/* Rows of bf16, of the kv heads of the run, into the cache. */
static void write_codes(const struct item *it, char *to, const bf16 *rows) {
    const int64_t dim = it->a->dim;
    for (int64_t h = 0; h < it->heads; h++) to[it->exponents + h] = (char)put_codes(to + h * dim, rows + h * dim, dim);
}

/* K and V of the new token of `row`, for the kv heads of the run, which begins at `head`. */
static void write_token(const struct item *it, int64_t row, int64_t head) {
    const struct args *a = it->a;
    const int64_t size = it->row_bytes / a->dim, bytes = it->heads * it->row_bytes;
    const int64_t at = a->step->token_pages[row] * a->page_stride_bytes + in_page(a, a->step->token_offsets[row], head, it->row_bytes);
    if (a->is_fp8) {
        write_codes(it, (char *)a->k_cache + at, (const bf16 *)a->k_new + row * a->k_stride + head * a->dim);
        write_codes(it, (char *)a->v_cache + at, (const bf16 *)a->v_new + row * a->v_stride + head * a->dim);
        return;
    }
    memcpy((char *)a->k_cache + at, (char *)a->k_new + (row * a->k_stride + head * a->dim) * size, bytes);
    memcpy((char *)a->v_cache + at, (char *)a->v_new + (row * a->v_stride + head * a->dim) * size, bytes);
}

/* The first `count` rows of `now`, and those that are read after it. */
static void line_up(struct item *it, const struct block *now, int count, const struct block *next) {
    const char **to = it->rows;
    it->count = count;
    for (int t = 0; t < count; t++) *to++ = now->k[t];
    for (int t = 0; t < count; t++) *to++ = now->v[t];
    for (int t = 0; t < next->count; t++) *to++ = next->k[t];
    const char *last = to[-1];
    for (const char **end = it->rows + 2 * count + it->ahead; to < end;) *to++ = last;
}

static void add_block(struct item *it) {
    const int is_128 = it->a->dim == 128;
    const enum cached kind = it->a->is_fp8 ? (is_128 ? FP8_OF_128 : FP8) : !it->a->is_bf16 ? FP32 : is_128 ? BF16_OF_128 : BF16;
    const int group = (int)it->group, count = it->count;
    for (int from = 0; from < count; from += DOTS)
        for (int g = 0; g < group; g += SUB) SCORES[kind][group - g < SUB ? group - g : SUB](it, g, from, count - from < DOTS ? count - from : DOTS);
    for (int64_t r = 0; r < it->heads * it->group; r++) weigh(it, r);
    for (int from = 0; from < count; from += TOGETHER)
        for (int g = 0; g < group; g += SUB) VALUES[kind][group - g < SUB ? group - g : SUB](it, g, from, count - from < TOGETHER ? count - from : TOGETHER);
}

/* Floats of scratch for each query head of a run: parts, p, factor, rounded up to whole vectors; and for each of its rows: o, m, l. */
INLINE int64_t shared_floats(void) { return LANES * LANES + BLOCK + LANES; }
INLINE int64_t row_floats(const struct args *a) { return a->dim + LANES; }

/* What rows share. */
static void lay_out(struct item *it, float *scratch) {
    const int64_t heads = it->heads * it->group;
    it->parts = (f16v *)scratch;
    it->p = scratch + heads * LANES * LANES;
    it->factor = it->p + heads * BLOCK;
}

/* Row number `at` of the group is the next that is computed. */
INLINE void choose_row(struct item *it, float *scratch, int64_t row, int64_t at, int64_t head) {
    const struct args *a = it->a;
    const int64_t heads = it->heads * it->group;
    it->o = scratch + heads * shared_floats() + at * heads * row_floats(a);
    it->m = it->o + heads * a->dim;
    it->l = it->m + heads;
    it->q = (char *)a->q + (row * a->q_stride + head * it->group * a->dim) * (a->is_bf16 ? 2 : 4);
}

/* A sink is a token before all others, whose value is 0. */
static void begin_row(struct item *it, int64_t head) {
    const int64_t heads = it->heads * it->group;
    memset(it->o, 0, heads * it->a->dim * sizeof(float));
    for (int64_t h = 0; h < heads; h++) it->m[h] = -INFINITY, it->l[h] = 0;
    if (it->a->sinks)
        for (int64_t h = 0; h < heads; h++) it->m[h] = it->a->sinks[head * it->group + h], it->l[h] = 1;
}

/* The first token that the query of `row` sees. */
INLINE int64_t first_seen(const struct args *a, int64_t row) {
    const int64_t kv_len = a->step->kv_lens[row];
    return a->window && kv_len > a->window ? kv_len - a->window : 0;
}

/* Items are (group, run) in this order, or with rows in place of groups. Return the first kv head of the run. */
static int64_t open_item(const struct args *a, int64_t number, int64_t runs, struct item *it) {
    const int64_t first = number % runs * a->kv_heads / runs, of_unit = a->kv_heads / a->units;
    it->a = a;
    it->heads = (number % runs + 1) * a->kv_heads / runs - first;
    it->group = a->heads / a->kv_heads;
    it->row_bytes = a->dim * (a->is_fp8 ? 1 : a->is_bf16 ? 2 : 4);
    it->exponents = (of_unit - first % of_unit) * a->dim + first % of_unit;
    return first;
}

/* Rows of a request read what the rows before them write: all write before any attends. */
static void write_all(const struct args *a, int64_t runs) {
    for (struct loop l = team_loop(a->step->batch * runs, 0); team_next(&l);) {
        struct item it;
        const int64_t first = open_item(a, l.item, runs, &it);
        write_token(&it, l.item / runs, first);
    }
}

/* Row number `i` of the step's order. */
INLINE int64_t row_at(const struct args *a, int64_t i) { return a->step->rows[i]; }

/* A block from token `from` on, for those of rows number first..end - 1 that see some of it. `before`: rows of the group before them. */
static void attend_block(struct item *it, int64_t first, int64_t end, int64_t before, int64_t from, int64_t head, const struct block *now, const struct block *next, float *scratch) {
    const struct args *a = it->a;
    struct block own;
    it->count = 0;
    for (int64_t i = first; i < end; i++) {
        const int64_t row = row_at(a, i), left = a->step->kv_lens[row] - from;
        const int count = left < now->count ? (int)left : now->count;
        if (count <= 0) continue;
        const struct block *seen = of_path(a, row, from, head, it->row_bytes, now, &own);
        if (seen == &own || count != it->count) line_up(it, seen, count, next);
        choose_row(it, scratch, row, before + i - first, head);
        add_block(it);
        if (seen == &own) it->count = 0; /* another row's path is another */
    }
}

/* Where a thread reads next, beyond what it has: tokens of `row` from `from` on, at kv head `head`; row -1: nowhere. */
struct place {
    int64_t row, from, head;
};

/* Tokens from..until - 1 of rows that have them at the same places, but for their paths; the last one sees most. */
static void attend_tokens(struct item *it, int64_t first, int64_t end, int64_t before, int64_t from, int64_t until, int64_t head, const struct place *coming, float *scratch) {
    const struct args *a = it->a;
    const int64_t last = row_at(a, end - 1);
    struct block now, next;
    locate(a, last, from, head, it->row_bytes, &next);
    for (; from < until; from += BLOCK) {
        now = next;
        locate(a, last, from + BLOCK, head, it->row_bytes, &next);
        if (!next.count && coming->row >= 0) locate(a, coming->row, coming->from, coming->head, it->row_bytes, &next);
        attend_block(it, first, end, before, from, head, &now, &next, scratch);
    }
}

/* Of request `request`, the tokens that it does not share. */
static void attend_request(struct item *it, int64_t request, int64_t before, int64_t shared, int64_t head, const struct place *coming, float *scratch) {
    const struct args *a = it->a;
    const int64_t first = a->step->requests[request], end = a->step->requests[request + 1], last = row_at(a, end - 1);
    if (first_seen(a, last) == 0) {
        attend_tokens(it, first, end, before, shared, a->step->kv_lens[last], head, coming, scratch);
        return;
    }
    for (int64_t i = first; i < end; i++) /* each window begins elsewhere */
        attend_tokens(it, i, i + 1, before + i - first, first_seen(a, row_at(a, i)), a->step->kv_lens[row_at(a, i)], head, coming, scratch);
}

/* Where group `group` begins to be read, if there is one. */
static struct place begin_of(const struct args *a, int64_t group, int64_t head) {
    if (group >= a->step->num_groups) return (struct place){-1, 0, 0};
    const int64_t row = row_at(a, a->step->requests[a->step->groups[group]]);
    return (struct place){row, first_seen(a, row), head};
}

/* The tokens that a group shares, in whole blocks. */
INLINE int64_t shared_by(const struct args *a, int64_t group) { return a->window ? 0 : a->step->shared[group] / BLOCK * BLOCK; }

static void attend(const struct args *a, struct loop *l, int64_t runs, float *scratch) {
    struct item it;
    const struct step *s = a->step;
    const int64_t head = open_item(a, l->item, runs, &it), group = l->item / runs, shared = shared_by(a, group);
    const int64_t begin = s->groups[group], end = s->groups[group + 1], first = s->requests[begin], last = s->requests[end];
    const int64_t after = l->item + 1; /* what this thread is likely to have next */
    it.ahead = (int)(AHEAD_BYTES / (it.heads * it.row_bytes) + 1);
    if (it.ahead > BLOCK) it.ahead = BLOCK;
    lay_out(&it, scratch);
    for (int64_t i = first; i < last; i++) choose_row(&it, scratch, row_at(a, i), i - first, head), begin_row(&it, head);
    const struct place nowhere = {-1, 0, 0};
    if (shared) attend_tokens(&it, first, last, 0, 0, shared, head, &nowhere, scratch);
    for (int64_t request = begin; request < end; request++) {
        const struct place next = request + 1 < end ? (struct place){row_at(a, s->requests[request + 1]), shared, head} : begin_of(a, after / runs, after % runs * a->kv_heads / runs);
        attend_request(&it, request, s->requests[request] - first, shared, head, &next, scratch);
    }
    for (int64_t i = first; i < last && team_claims(l); i++) {
        choose_row(&it, scratch, row_at(a, i), i - first, head);
        for (int64_t h = 0; h < it.heads * it.group; h++)
            store_divided(it.o + h * a->dim, it.l[h], a->out, (row_at(a, i) * a->heads + head * it.group + h) * a->dim, a->dim, a->is_bf16);
    }
}

/* The first entry of the step's order of a group's rows; of the last group plus one: their end. */
INLINE int64_t first_of(const struct step *s, int64_t group) { return s->requests[s->groups[group]]; }

/* Into how many runs the kv heads of each group are cut, so that none has too many query heads, and the longest group
 * keeps no thread busy alone; a multiple of the units, so that each run lies in one. */
static int64_t runs_of(const struct args *a) {
    int64_t longest = 0, all = 0;
    for (int64_t g = 0; g < a->step->num_groups; g++) {
        int64_t tokens = 0;
        for (int64_t i = first_of(a->step, g); i < first_of(a->step, g + 1); i++) tokens += a->step->kv_lens[row_at(a, i)];
        longest = tokens > longest ? tokens : longest;
        all += tokens;
    }
    const int64_t least = (a->heads + MOST_HEADS - 1) / MOST_HEADS, threads = team_threads();
    int64_t runs = threads > 1 ? (ITEMS * threads * longest + all - 1) / all : 1;
    runs = runs < least ? least : runs;
    runs = (runs + a->units - 1) / a->units * a->units;
    return runs < a->kv_heads ? runs : a->kv_heads;
}

/* Writes the new tokens' K and V, then attends. Returns 0, or -1 when out of memory. */
int tandem_paged_decode(const struct args *a) {
    if (a->step->batch == 0) return 0;
    const int64_t runs = runs_of(a), items = a->step->num_groups * runs;
    int64_t rows = 1; /* of a group, at most */
    for (int64_t g = 0; g < a->step->num_groups; g++) {
        const int64_t own = first_of(a->step, g + 1) - first_of(a->step, g);
        rows = own > rows ? own : rows;
    }
    const int64_t heads = (a->kv_heads + runs - 1) / runs * (a->heads / a->kv_heads);
    float *scratch = team_scratch(heads * (shared_floats() + rows * row_floats(a)) * (int64_t)sizeof(float));
    if (!scratch) return -1;
    write_all(a, runs);
    for (struct loop l = team_repeats(items); team_next(&l);) attend(a, &l, runs, scratch);
    return 0;
}
