/* Paged decode attention: one query token a request, online softmax over the request's pages. bf16 and fp32 caches.
 *
 * A work item is (request, kv head): all query heads of that kv head are computed together, so each byte of K and V is
 * read from memory once. Tokens go in blocks of BLOCK from position 0 on, in this order whatever the batch is: a
 * request's result does not depend on its neighbours, nor on the number of threads. All sums are fp32.
 *
 * Vectors are those of vectors.h; only bf16 dot products (AVX512-BF16) and AVX-512's sum of a vector are written with
 * intrinsics. Blocked online softmax: Milakov and Gimelshein 2018, Dao et al. 2022; grouping the query heads of a kv head:
 * the usual GQA decode kernels (FlashInfer, vLLM, SGLang).
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#define ABI_VERSION 1
#define BLOCK 64       /* tokens whose scores are held at once */
#define SUB 8          /* query heads computed together */
#define ACCUMULATORS 16 /* vectors of output held in registers */
#define MAX_VECTORS 8
#define AHEAD 8        /* rows of K or V fetched before they are used */
#define LINE_BYTES 64

/* Mirrored by _Args in paged_decode.py. Strides of q, k_new, v_new are elements from token to token; heads are dense. */
struct args {
    void *q, *k_new, *v_new, *out;              /* [B, heads, dim], [B, kv_heads, dim] x 2, [B, heads, dim] dense */
    void *k_cache, *v_cache;                    /* address of this layer's K and V in page 0 */
    const int32_t *page_table;                  /* [B, table_width] */
    const int32_t *kv_lens;                     /* [B], the new token included */
    const int64_t *token_pages, *token_offsets; /* [B] where the new token goes */
    int64_t q_stride, k_stride, v_stride;
    int64_t page_stride_bytes, table_width;
    int64_t batch, heads, kv_heads, dim, page_size;
    int64_t is_bf16, threads;
    float scale;
};

/* One work item: what the block functions share. */
struct item {
    const struct args *a;
    const char *k[2][BLOCK]; /* rows of this kv head: the block at hand, and right behind it the next one */
    const char *v[2][BLOCK];
    int count[2];
    int64_t row_bytes;
    const void *q; /* [group, dim] in the cache's dtype */
    float *o;      /* [group, dim] unnormalised output */
    float *m, *l;  /* [group] running maximum and sum */
    float p[SUB][BLOCK] __attribute__((aligned(64)));
};

/* ---- the block: scores, softmax weights, weighted sum */

/* Rows of one head lie kv_heads rows apart: too far for the hardware's prefetcher, and in few sets of the L1 cache, so
 * rows are fetched a little before their use (into the next block's, too), each row whole. */
INLINE void prefetch(const char *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += LINE_BYTES) __builtin_prefetch(from + at, 0, 3);
}

/* p[g][t] = scale * q[g] . k[t] for `heads` query heads from `first` on. */
INLINE void scores(struct item *it, int first, const int heads, const int is_bf16) {
    const int dim = (int)it->a->dim, n = it->count[0], rows = n + it->count[1];
    const int64_t q_row = it->row_bytes;
    const char *q = (const char *)it->q + first * q_row;
    const float scale = it->a->scale;
    for (int t = 0; t < n; t++) {
        const char *k = it->k[0][t];
        if (t + AHEAD < rows) prefetch(it->k[0][t + AHEAD], it->row_bytes);
#if defined(__AVX512BF16__) && defined(__AVX512F__)
        if (is_bf16) {
            __m512 acc[SUB];
            for (int g = 0; g < heads; g++) acc[g] = _mm512_setzero_ps();
            int at = 0;
            for (; at + 32 <= dim; at += 32) {
                __m512bh kv = (__m512bh)_mm512_loadu_si512(k + at * 2);
                for (int g = 0; g < heads; g++)
                    acc[g] = _mm512_dpbf16_ps(acc[g], (__m512bh)_mm512_loadu_si512(q + g * q_row + at * 2), kv);
            }
            if (at < dim) { /* dim is a multiple of 16: half a vector is left */
                __m512bh kv = (__m512bh)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)(k + at * 2)));
                for (int g = 0; g < heads; g++)
                    acc[g] = _mm512_dpbf16_ps(acc[g], (__m512bh)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)(q + g * q_row + at * 2))), kv);
            }
            for (int g = 0; g < heads; g++) it->p[g][t] = _mm512_reduce_add_ps(acc[g]) * scale;
            continue;
        }
#endif
        f16v acc[SUB];
        for (int g = 0; g < heads; g++) acc[g] = (f16v){0};
        for (int at = 0; at < dim; at += LANES) {
            f16v kv = load(k, at, is_bf16);
            for (int g = 0; g < heads; g++) acc[g] += load(q + g * q_row, at, is_bf16) * kv;
        }
        for (int g = 0; g < heads; g++) it->p[g][t] = sum(acc[g]) * scale;
    }
}

/* Scores of one head -> weights relative to the new maximum; returns the factor for what was summed before. */
INLINE float weigh(struct item *it, int head, float *p) {
    const int n = it->count[0];
    for (int t = n; t < BLOCK; t++) p[t] = -INFINITY; /* weight 0 */
    f16v lanes = (f16v){0} + it->m[head];
    for (int t = 0; t < BLOCK; t += LANES) lanes = larger(lanes, load_f32(p + t));
    const float best = largest(lanes);
    f16v total = {0};
    for (int t = 0; t < BLOCK; t += LANES) {
        f16v w = exp_nonpositive(load_f32(p + t) - best);
        store_f32(p + t, w);
        total += w;
    }
    float factor = exp_nonpositive((f16v){0} + (it->m[head] - best))[0]; /* 0 for the first block: its m is -inf */
    it->m[head] = best;
    it->l[head] = it->l[head] * factor + sum(total);
    return factor;
}

/* `vectors` vectors of a row from element `at` on. bf16 comes in pairs of vectors, the even elements and then the odd
 * ones: one load, a shift and a mask for 32 elements. o is kept in this order; element() undoes it. */
INLINE void load_values(f16v *to, const char *row, int64_t at, const int vectors, const int is_bf16) {
    for (int w = 0; w < vectors; w += 2) {
        if (!is_bf16 || vectors == 1) {
            to[w] = load(row, (int)at + w * LANES, is_bf16);
            if (vectors > 1) to[w + 1] = load(row, (int)at + (w + 1) * LANES, is_bf16);
        } else {
            u16v pair;
            memcpy(&pair, row + (at + w * LANES) * 2, sizeof pair);
            to[w] = (f16v)(pair << 16);
            to[w + 1] = (f16v)(pair & 0xffff0000u);
        }
    }
}

/* Where element d of a row is in o. */
INLINE int64_t element(int64_t d, int64_t dim, int is_bf16) {
    int64_t in = d % (2 * LANES), from = d - in;
    return !is_bf16 || from + 2 * LANES > dim ? d : from + in / 2 + (in % 2) * LANES;
}

/* o[g] = o[g] * factor[g] + sum over t of p[g][t] * v[t], for `vectors` vectors of each row from element `at` on. */
INLINE void add_values(struct item *it, int first, const int heads, const float *factor, int64_t at, const int vectors, const int is_bf16) {
    const int n = it->count[0], rows = n + it->count[1];
    const int64_t dim = it->a->dim, size = is_bf16 ? 2 : 4;
    float *o = it->o + first * dim + at;
    f16v acc[ACCUMULATORS], v[MAX_VECTORS];
    for (int g = 0; g < heads; g++)
        for (int w = 0; w < vectors; w++) acc[g * vectors + w] = load_f32(o + g * dim + w * LANES) * factor[g];
    for (int t = 0; t < n; t++) {
        if (t + AHEAD < rows) prefetch(it->v[0][t + AHEAD] + at * size, vectors * LANES * size);
        load_values(v, it->v[0][t], at, vectors, is_bf16);
        for (int g = 0; g < heads; g++)
            for (int w = 0; w < vectors; w++) acc[g * vectors + w] += v[w] * it->p[g][t];
    }
    for (int g = 0; g < heads; g++)
        for (int w = 0; w < vectors; w++) store_f32(o + g * dim + w * LANES, acc[g * vectors + w]);
}

INLINE void block(struct item *it, int first, const int heads, const int is_bf16) {
    const int most = ACCUMULATORS / heads >= 8 ? 8 : ACCUMULATORS / heads >= 4 ? 4 : 2; /* vectors of a row at a time */
    const int64_t dim = it->a->dim;
    float factor[SUB];
    scores(it, first, heads, is_bf16);
    for (int g = 0; g < heads; g++) factor[g] = weigh(it, first + g, it->p[g]);
    int64_t at = 0;
    for (; at + most * LANES <= dim; at += most * LANES) add_values(it, first, heads, factor, at, most, is_bf16);
    for (; at + 2 * LANES <= dim; at += 2 * LANES) add_values(it, first, heads, factor, at, 2, is_bf16);
    if (at < dim) add_values(it, first, heads, factor, at, 1, is_bf16);
}

/* The number of heads is a constant in each copy, so that accumulators stay in registers. */
#define COPY(heads, is_bf16) \
    static __attribute__((noinline)) void block_##heads##_##is_bf16(struct item *it, int first) { block(it, first, heads, is_bf16); }
#define COPIES(is_bf16) \
    COPY(1, is_bf16) COPY(2, is_bf16) COPY(3, is_bf16) COPY(4, is_bf16) COPY(5, is_bf16) COPY(6, is_bf16) COPY(7, is_bf16) COPY(8, is_bf16)
COPIES(0)
COPIES(1)
#define NAMES(b) {0, block_1_##b, block_2_##b, block_3_##b, block_4_##b, block_5_##b, block_6_##b, block_7_##b, block_8_##b}
static void (*const BLOCKS[2][SUB + 1])(struct item *, int) = {NAMES(0), NAMES(1)};

/* ---- one request and kv head */

/* Rows of tokens from..from+BLOCK-1 into side 1, after side 1 has become side 0. */
static void advance(struct item *it, const int32_t *pages, int64_t from, int64_t kv_len, int64_t head) {
    const struct args *a = it->a;
    memcpy(it->k[0], it->k[1], sizeof it->k[1]);
    memcpy(it->v[0], it->v[1], sizeof it->v[1]);
    it->count[0] = it->count[1];
    int64_t left = kv_len - from;
    it->count[1] = left <= 0 ? 0 : left < BLOCK ? (int)left : BLOCK;
    int64_t page = from / a->page_size, offset = from % a->page_size;
    for (int t = 0; t < it->count[1]; t++) {
        int64_t at = pages[page] * a->page_stride_bytes + (offset * a->kv_heads + head) * it->row_bytes;
        it->k[1][t] = (const char *)a->k_cache + at;
        it->v[1][t] = (const char *)a->v_cache + at;
        if (++offset == a->page_size) offset = 0, page++;
    }
}

static void write_token(const struct args *a, int64_t request, int64_t head, int64_t row_bytes) {
    int64_t size = row_bytes / a->dim;
    int64_t at = a->token_pages[request] * a->page_stride_bytes + (a->token_offsets[request] * a->kv_heads + head) * row_bytes;
    memcpy((char *)a->k_cache + at, (char *)a->k_new + (request * a->k_stride + head * a->dim) * size, row_bytes);
    memcpy((char *)a->v_cache + at, (char *)a->v_new + (request * a->v_stride + head * a->dim) * size, row_bytes);
}

static void write_output(const struct item *it, int64_t request, int64_t head, int64_t group) {
    const struct args *a = it->a;
    int64_t at = (request * a->heads + head * group) * a->dim;
    for (int64_t g = 0; g < group; g++) {
        float inverse = it->l[g] == 0.0f ? 0.0f : 1.0f / it->l[g]; /* NaN passes: it must reach the logits */
        for (int64_t d = 0; d < a->dim; d++) {
            float x = it->o[g * a->dim + element(d, a->dim, a->is_bf16 != 0)] * inverse;
            if (a->is_bf16) ((bf16 *)a->out)[at + g * a->dim + d] = to_bf16(x);
            else ((float *)a->out)[at + g * a->dim + d] = x;
        }
    }
}

static void attend(const struct args *a, int64_t request, int64_t head, float *scratch) {
    const int64_t group = a->heads / a->kv_heads, size = a->is_bf16 ? 2 : 4;
    const int32_t *pages = a->page_table + request * a->table_width;
    struct item it;
    it.a = a;
    it.row_bytes = a->dim * size;
    it.q = (char *)a->q + (request * a->q_stride + head * group * a->dim) * size;
    it.o = scratch;
    it.m = scratch + group * a->dim;
    it.l = it.m + group;
    it.count[1] = 0;
    memset(it.o, 0, group * a->dim * sizeof(float));
    for (int64_t g = 0; g < group; g++) it.m[g] = -INFINITY, it.l[g] = 0.0f;
    write_token(a, request, head, it.row_bytes);
    advance(&it, pages, 0, a->kv_lens[request], head);
    for (int64_t from = 0; from < a->kv_lens[request]; from += BLOCK) {
        advance(&it, pages, from + BLOCK, a->kv_lens[request], head);
        for (int64_t first = 0; first < group; first += SUB) {
            int64_t heads = group - first < SUB ? group - first : SUB;
            BLOCKS[a->is_bf16 != 0][heads](&it, (int)first);
        }
    }
    write_output(&it, request, head, group);
}

int tandem_paged_decode_abi(void) { return ABI_VERSION; }

/* Writes the new tokens' K and V, then attends. Returns 0, or -1 when out of memory. */
int tandem_paged_decode(const struct args *a) {
    const int64_t group = a->heads / a->kv_heads, items = a->batch * a->kv_heads;
    const size_t scratch_bytes = (size_t)(group * (a->dim + 2)) * sizeof(float);
    int failed = 0;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
    {
        float *scratch = malloc(scratch_bytes);
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < items; i++)
            if (scratch) attend(a, i / a->kv_heads, i % a->kv_heads, scratch);
        free(scratch);
    }
    return failed ? -1 : 0;
}
