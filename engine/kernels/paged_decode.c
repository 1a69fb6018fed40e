/* Paged decode attention: one query token a request, online softmax over the request's pages. bf16 and fp32 caches.
 *
 * A work item is (request, a run of kv heads): all query heads of a kv head are computed together, so each byte of K and V
 * is read from memory once. Tokens go in blocks of BLOCK from position 0 on, in this order whatever the batch is: a
 * request's result does not depend on its neighbours, on the run, nor on the number of threads. All sums are fp32.
 *
 * Memory is the limit, and the hardware's prefetcher follows few places at once: a block's K is passed over WINDOW tokens at a
 * time, all heads of the run, then its V; meanwhile the window that comes next is fetched into the L2 cache, in the order in
 * which it lies in memory. (Not into L1: that takes the places of the lines that are on their way from memory.)
 *
 * Vectors are those of vectors.h; only bf16 dot products (AVX512-BF16) and AVX-512's sums of vectors are written with
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
#define WINDOW LANES   /* tokens of a head at a time */
#define ITEMS 4        /* work items for each thread, at least, so that threads end together */
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

/* A block: rows of K and V of its tokens, at the first kv head of the run. */
struct block {
    int count;
    const char *k[BLOCK], *v[BLOCK];
};

/* One work item: what is shared by the functions below. */
struct item {
    const struct args *a;
    int64_t heads, row_bytes, run_bytes; /* kv heads of the run; of one head, of all of them */
    struct block now, next;
    /* The window that comes next, and how far it is fetched: up to `byte` of the run's bytes of row `token`. */
    const char *const *ahead;
    int ahead_count, token, quota; /* rows of a head to fetch for each that is computed */
    int64_t byte;
    /* The kv head at hand. */
    int64_t in_row;        /* bytes from the first head of the run */
    const char *q;         /* [group, dim] in the cache's dtype */
    float *o, *m, *l, *p, *factor; /* [group, dim] unnormalised output, [group] running maximum and sum, [group, BLOCK] scores and weights, [group] */
    f16v parts[SUB][LANES]; /* of the dot products of a window */
};

/* ---- memory ahead */

INLINE void fetch(struct item *it, int64_t row_bytes) {
    for (int i = 0; i < it->quota && it->token < it->ahead_count; i++) {
        const char *from = it->ahead[it->token] + it->byte;
        for (int64_t at = 0; at < row_bytes; at += LINE_BYTES) __builtin_prefetch(from + at, 0, 2);
        it->byte += row_bytes;
        if (it->byte == it->run_bytes) it->byte = 0, it->token++;
    }
}

/* While `count` rows of each head are computed, `rows` come next: `left` of them or a window. */
static void fetch_next(struct item *it, const char *const *rows, int left, int count) {
    it->ahead = rows;
    it->ahead_count = left < WINDOW ? left : WINDOW;
    it->token = 0;
    it->byte = 0;
    it->quota = (it->ahead_count + count - 1) / count;
}

/* ---- a window of one head: scores, softmax weights, weighted sum */

/* Sums of 16 vectors, each in the order of sum(). */
INLINE f16v sums(f16v *x) {
#if defined(__AVX512F__)
    __m512 *v = (__m512 *)x;
    for (int i = 0; i < 8; i++) v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 8], 0x44), _mm512_shuffle_f32x4(v[i], v[i + 8], 0xee));
    for (int i = 0; i < 4; i++) v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 4], 0x88), _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd));
    for (int i = 0; i < 2; i++) v[i] = _mm512_add_ps(_mm512_shuffle_ps(v[i], v[i + 2], 0x44), _mm512_shuffle_ps(v[i], v[i + 2], 0xee));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xdd));
    return (f16v)_mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15), all);
#else
    f16v r;
    for (int i = 0; i < LANES; i++) r[i] = sum(x[i]);
    return r;
#endif
}

/* p[g][from + t] = scale * q[g] . k[from + t] for t < n and `heads` query heads from `first` on. */
INLINE void scores(struct item *it, int first, int from, int n, const int heads, const int is_bf16, const int fixed) {
    const int dim = fixed ? fixed : (int)it->a->dim;
    const int64_t q_row = (int64_t)dim * (is_bf16 ? 2 : 4);
    const char *q = it->q + first * q_row;
    for (int t = 0; t < n; t++) {
        const char *k = it->now.k[from + t] + it->in_row;
        fetch(it, q_row);
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
            for (int g = 0; g < heads; g++) it->parts[g][t] = (f16v)acc[g];
        } else
#endif
        {
            f16v acc[SUB];
            for (int g = 0; g < heads; g++) acc[g] = (f16v){0};
            for (int at = 0; at < dim; at += LANES) {
                f16v kv = load(k, at, is_bf16);
                for (int g = 0; g < heads; g++) acc[g] += load(q + g * q_row, at, is_bf16) * kv;
            }
            for (int g = 0; g < heads; g++) it->parts[g][t] = acc[g];
        }
    }
    for (int g = 0; g < heads; g++) store_f32(it->p + (first + g) * BLOCK + from, sums(it->parts[g]) * it->a->scale);
}

/* Scores of a block and one query head -> weights relative to the new maximum; and the factor for what was summed before. */
static void weigh(struct item *it, int g) {
    const int n = it->now.count, end = (n + LANES - 1) / LANES * LANES;
    float *p = it->p + g * BLOCK;
    for (int t = n; t < end; t++) p[t] = -INFINITY; /* weight 0 */
    f16v lanes = (f16v){0} + it->m[g];
    for (int t = 0; t < end; t += LANES) lanes = larger(lanes, load_f32(p + t));
    const float best = largest(lanes);
    f16v total = {0};
    for (int t = 0; t < end; t += LANES) {
        f16v w = exp_nonpositive(load_f32(p + t) - best);
        store_f32(p + t, w);
        total += w;
    }
    it->factor[g] = exp_nonpositive((f16v){0} + (it->m[g] - best))[0]; /* 0 for the first block: its m is -inf */
    it->m[g] = best;
    it->l[g] = it->l[g] * it->factor[g] + sum(total);
}

/* `vectors` vectors of a row from element `at` on. bf16 comes in pairs of vectors, the even elements and then the odd
 * ones: one load, a shift and a mask for 32 elements. o is kept in this order; write_row undoes it. */
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

/* o[g] += sum over t < n of p[g][from + t] * v[from + t], for `vectors` vectors of each row from element `at` on; o[g] is
 * first multiplied by factor[g] in a block's first window. */
INLINE void add_values(struct item *it, int first, int from, int n, const int heads, int64_t at, const int vectors, const int is_bf16, const int64_t dim) {
    const int64_t size = is_bf16 ? 2 : 4;
    float *o = it->o + first * dim + at;
    const float *p = it->p + first * BLOCK + from;
    f16v acc[ACCUMULATORS], v[MAX_VECTORS];
    for (int g = 0; g < heads; g++)
        for (int w = 0; w < vectors; w++) acc[g * vectors + w] = load_f32(o + g * dim + w * LANES) * (from ? 1.0f : it->factor[first + g]);
    for (int t = 0; t < n; t++) {
        fetch(it, dim * size);
        load_values(v, it->now.v[from + t] + it->in_row, at, vectors, is_bf16);
        for (int g = 0; g < heads; g++)
            for (int w = 0; w < vectors; w++) acc[g * vectors + w] += v[w] * p[g * BLOCK + t];
    }
    for (int g = 0; g < heads; g++)
        for (int w = 0; w < vectors; w++) store_f32(o + g * dim + w * LANES, acc[g * vectors + w]);
}

INLINE void values(struct item *it, int first, int from, int n, const int heads, const int is_bf16, const int fixed) {
    const int most = ACCUMULATORS / heads >= 8 ? 8 : ACCUMULATORS / heads >= 4 ? 4 : 2; /* vectors of a row at a time */
    const int64_t dim = fixed ? fixed : it->a->dim;
    int64_t at = 0;
    for (; at + most * LANES <= dim; at += most * LANES) add_values(it, first, from, n, heads, at, most, is_bf16, dim);
    for (; at + 2 * LANES <= dim; at += 2 * LANES) add_values(it, first, from, n, heads, at, 2, is_bf16, dim);
    if (at < dim) add_values(it, first, from, n, heads, at, 1, is_bf16, dim);
}

/* The number of heads is a constant in each copy, so that accumulators stay in registers; so is the usual size of a head. */
enum kind { FP32, BF16, BF16_OF_128, KINDS };
typedef void (*window_fn)(struct item *, int first, int from, int n);
#define COPY(what, kind, heads, is_bf16, dim) \
    static __attribute__((noinline)) void what##_##kind##_##heads(struct item *it, int first, int from, int n) { what(it, first, from, n, heads, is_bf16, dim); }
#define COPIES(what, kind, is_bf16, dim) \
    COPY(what, kind, 1, is_bf16, dim) COPY(what, kind, 2, is_bf16, dim) COPY(what, kind, 3, is_bf16, dim) COPY(what, kind, 4, is_bf16, dim) \
    COPY(what, kind, 5, is_bf16, dim) COPY(what, kind, 6, is_bf16, dim) COPY(what, kind, 7, is_bf16, dim) COPY(what, kind, 8, is_bf16, dim)
#define KINDS_OF(what) COPIES(what, FP32, 0, 0) COPIES(what, BF16, 1, 0) COPIES(what, BF16_OF_128, 1, 128)
KINDS_OF(scores)
KINDS_OF(values)
#define NAMES(what, kind) \
    {0, what##_##kind##_1, what##_##kind##_2, what##_##kind##_3, what##_##kind##_4, what##_##kind##_5, what##_##kind##_6, what##_##kind##_7, what##_##kind##_8}
static const window_fn SCORES[KINDS][SUB + 1] = {NAMES(scores, FP32), NAMES(scores, BF16), NAMES(scores, BF16_OF_128)};
static const window_fn VALUES[KINDS][SUB + 1] = {NAMES(values, FP32), NAMES(values, BF16), NAMES(values, BF16_OF_128)};

/* ---- one request and run of kv heads */

/* Rows of tokens from..from + BLOCK - 1 of `request`, as far as there are any, at kv head `head`. */
static void locate(const struct args *a, int64_t request, int64_t from, int64_t head, int64_t row_bytes, struct block *to) {
    const int32_t *pages = a->page_table + request * a->table_width;
    const int64_t left = a->kv_lens[request] - from;
    to->count = left <= 0 ? 0 : left < BLOCK ? (int)left : BLOCK;
    int64_t page = from / a->page_size, offset = from % a->page_size;
    for (int t = 0; t < to->count; t++) {
        const int64_t at = pages[page] * a->page_stride_bytes + (offset * a->kv_heads + head) * row_bytes;
        to->k[t] = (const char *)a->k_cache + at;
        to->v[t] = (const char *)a->v_cache + at;
        if (++offset == a->page_size) offset = 0, page++;
    }
}

/* K and V of the new token, for the kv heads of the run. */
static void write_token(const struct item *it, int64_t request, int64_t head) {
    const struct args *a = it->a;
    const int64_t size = it->row_bytes / a->dim;
    const int64_t at = a->token_pages[request] * a->page_stride_bytes + (a->token_offsets[request] * a->kv_heads + head) * it->row_bytes;
    memcpy((char *)a->k_cache + at, (char *)a->k_new + (request * a->k_stride + head * a->dim) * size, it->run_bytes);
    memcpy((char *)a->v_cache + at, (char *)a->v_new + (request * a->v_stride + head * a->dim) * size, it->run_bytes);
}

/* o / l of one query head, in the order of its elements (load_values). */
INLINE void write_row(const struct args *a, const float *o, float l, int64_t at) {
    const float inverse = l == 0.0f ? 0.0f : 1.0f / l; /* NaN passes: it must reach the logits */
    int64_t d = 0;
    for (; a->is_bf16 && d + 2 * LANES <= a->dim; d += 2 * LANES) {
        const u16v pairs = bf16_bits(load_f32(o + d) * inverse) >> 16 | bf16_bits(load_f32(o + d + LANES) * inverse);
        memcpy((bf16 *)a->out + at + d, &pairs, sizeof pairs);
    }
    for (; d < a->dim; d += LANES) {
        if (a->is_bf16) store_bf16((bf16 *)a->out + at + d, load_f32(o + d) * inverse);
        else store_f32((float *)a->out + at + d, load_f32(o + d) * inverse);
    }
}

/* Floats that a kv head has of its own: o, m, l, p, factor. */
INLINE int64_t own_floats(const struct args *a) { return a->heads / a->kv_heads * (a->dim + BLOCK + 3); }

static void at_head(struct item *it, int64_t request, int64_t first, int64_t h, float *scratch) {
    const struct args *a = it->a;
    const int64_t group = a->heads / a->kv_heads;
    it->in_row = h * it->row_bytes;
    it->q = (char *)a->q + (request * a->q_stride + (first + h) * group * a->dim) * (it->row_bytes / a->dim);
    it->o = scratch + h * own_floats(a);
    it->m = it->o + group * a->dim;
    it->l = it->m + group;
    it->p = it->l + group;
    it->factor = it->p + group * BLOCK;
}

/* One window of all heads of the run: scores, and weights where it is the block's last; or values. */
static void pass(struct item *it, int64_t request, int64_t first, int of_values, int from, int n, float *scratch) {
    const struct args *a = it->a;
    const int group = (int)(a->heads / a->kv_heads), last = from + n == it->now.count;
    const window_fn *const work = (of_values ? VALUES : SCORES)[!a->is_bf16 ? FP32 : a->dim == 128 ? BF16_OF_128 : BF16];
    for (int64_t h = 0; h < it->heads; h++) {
        at_head(it, request, first, h, scratch);
        for (int g = 0; g < group; g += SUB) work[group - g < SUB ? group - g : SUB](it, g, from, n);
        if (last && !of_values)
            for (int g = 0; g < group; g++) weigh(it, g);
    }
}

/* A block's K, then its V, a window at a time, and behind each what comes after it. */
static void add_block(struct item *it, int64_t request, int64_t first, float *scratch) {
    const int count = it->now.count;
    for (int of_values = 0; of_values < 2; of_values++)
        for (int from = 0; from < count; from += WINDOW) {
            const int left = count - from, n = left < WINDOW ? left : WINDOW;
            if (left > WINDOW) fetch_next(it, (of_values ? it->now.v : it->now.k) + from + WINDOW, left - WINDOW, n);
            else if (!of_values) fetch_next(it, it->now.v, count, n);
            else fetch_next(it, it->next.k, it->next.count, n);
            pass(it, request, first, of_values, from, n, scratch);
        }
}

/* Items are (request, run) in this order. `coming`: the item that this thread is likely to have next. */
static void attend(const struct args *a, int64_t number, int64_t coming, int64_t runs, float *scratch) {
    const int64_t group = a->heads / a->kv_heads;
    const int64_t request = number / runs, first = number % runs * a->kv_heads / runs;
    struct item it;
    it.a = a;
    it.heads = (number % runs + 1) * a->kv_heads / runs - first;
    it.row_bytes = a->dim * (a->is_bf16 ? 2 : 4);
    it.run_bytes = it.heads * it.row_bytes;
    write_token(&it, request, first);
    memset(scratch, 0, it.heads * own_floats(a) * sizeof(float));
    for (int64_t h = 0; h < it.heads; h++) {
        at_head(&it, request, first, h, scratch);
        for (int64_t g = 0; g < group; g++) it.m[g] = -INFINITY;
    }
    locate(a, request, 0, first, it.row_bytes, &it.next);
    for (int64_t from = 0; from < a->kv_lens[request]; from += BLOCK) {
        it.now = it.next;
        locate(a, request, from + BLOCK, first, it.row_bytes, &it.next);
        if (!it.next.count && coming < a->batch * runs)
            locate(a, coming / runs, 0, coming % runs * a->kv_heads / runs, it.row_bytes, &it.next);
        add_block(&it, request, first, scratch);
    }
    for (int64_t h = 0; h < it.heads; h++) {
        at_head(&it, request, first, h, scratch);
        for (int64_t g = 0; g < group; g++)
            write_row(a, it.o + g * a->dim, it.l[g], (request * a->heads + (first + h) * group + g) * a->dim);
    }
}

/* Into how many runs the kv heads of each request are cut, so that the longest request keeps no thread busy alone. */
static int64_t runs_of(const struct args *a) {
    int64_t longest = 0, all = 0;
    for (int64_t i = 0; i < a->batch; i++) {
        longest = a->kv_lens[i] > longest ? a->kv_lens[i] : longest;
        all += a->kv_lens[i];
    }
    const int64_t runs = a->threads > 1 ? (ITEMS * a->threads * longest + all - 1) / all : 1;
    return runs < a->kv_heads ? runs : a->kv_heads;
}

int tandem_paged_decode_abi(void) { return ABI_VERSION; }

/* Writes the new tokens' K and V, then attends. Returns 0, or -1 when out of memory. */
int tandem_paged_decode(const struct args *a) {
    if (a->batch == 0) return 0;
    const int64_t runs = runs_of(a), items = a->batch * runs;
    const size_t scratch_bytes = (size_t)((a->kv_heads + runs - 1) / runs * own_floats(a)) * sizeof(float);
    int failed = 0;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
    {
        float *scratch = malloc(scratch_bytes);
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < items; i++)
            if (scratch) attend(a, i, i + a->threads, runs, scratch);
        free(scratch);
    }
    return failed ? -1 : 0;
}
