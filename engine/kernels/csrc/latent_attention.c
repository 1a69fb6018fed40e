/* Latent attention (MLA, absorbed form): every query vector reads the same latents, whose first `rank` elements are the values,
 * too. bf16 and fp32 caches; prompts and single tokens alike.
 *
 * A work item is a tile of query vectors of one request, one behind the other: all heads of a row, then those of the next. It
 * passes over the request's latents in blocks of BLOCK tokens from the first one on, so a vector's result depends on that vector and
 * its tokens alone: not on the batch, the chunk, the tile nor the number of threads. Tokens behind a vector's own weigh exactly 0.
 * Where tokens are chosen, a tile is of one row, and its blocks are of the row's chosen tokens: the others are not read.
 * All sums are fp32. AVX512-BF16 multiplies weights that are rounded to bf16.
 *
 * With many heads arithmetic is the limit, not memory: 4 vectors times 4 tokens share their loads, and so do 4 vectors of a
 * sum of values. Meanwhile the next block is fetched into the L2 cache.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "team.h"

#define BLOCK 64 /* tokens whose scores are held at once */
#define TILE 16  /* query vectors of a work item, at most */
#define SUB 4    /* vectors, and tokens, computed together */
#if defined(HAVE_AVX512)
#define SIDE 4   /* of them, whose sums stay in registers */
#define WIDE 4   /* vectors of 16 elements as well, beside SIDE */
#else
#define SIDE 2
#define WIDE 2
#endif
#define ITEMS 4  /* work items for each thread, at least, so that threads end together */
#define LINE_BYTES 64

/* What all layers of a step share. Mirrored by _Step in latent_attention.py. */
struct step {
    const int32_t *page_table;                  /* [batch, table_width] */
    const int32_t *kv_lens;                     /* [batch], the new tokens included */
    const int32_t *starts;                      /* [batch + 1] the first row of each request */
    const int64_t *token_pages, *token_offsets; /* [rows] where each new token goes */
    const int32_t *path_starts;                 /* [batch] as Paths says: the tokens before it lie at their own positions; NULL: all do */
    const int32_t *path_places;                 /* [batch, path_width] the positions at which those from it on lie */
    int64_t batch, table_width, path_width;
};

/* Mirrored by _Args in latent_attention.py. All rows are dense. */
struct args {
    void *q, *latents, *out; /* [rows, heads, dim], [rows, width], [rows, heads, rank] */
    void *cache;             /* address of this layer's latents in page 0; `width` elements each, of which `dim` are read */
    const int32_t *chosen;   /* [rows, chosen_stride] the tokens that a row sees, in order, as many as it has; NULL: all up to its own */
    const struct step *step;
    int64_t page_stride_bytes, heads, dim, width, rank, page_size, chosen_stride, is_bf16;
    float scale;
};

/* One work item. Vectors behind its last one repeat that, up to a multiple of SUB, and are not stored. */
struct item {
    const struct args *a;
    int vectors, count, next_count;               /* count: tokens of the block */
    const char *rows[BLOCK], *next[BLOCK];        /* of its tokens, and of the next block's */
    const char *q[TILE];
    int64_t seen[TILE];                           /* tokens that each vector sees */
    float *o, *p;                                 /* [TILE, rank] sums, not divided; [TILE, BLOCK] scores, then weights */
    float m[TILE], l[TILE], factor[TILE];         /* running maximum and sum; what is summed before is multiplied by */
};

INLINE int64_t size_of(const struct args *a) { return a->is_bf16 ? 2 : 4; }

/* parts[v * SUB + t] = products of q[v] with row t. */
INLINE void multiply(f16v *parts, const char *const *q, const char *const *rows, const int64_t dim, const int is_bf16) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    if (is_bf16) {
        __m512 acc[SUB * SUB];
        for (int i = 0; i < SUB * SUB; i++) acc[i] = _mm512_setzero_ps();
        int64_t at = 0;
        for (; at + 32 <= dim; at += 32) {
            __m512bh k[SUB];
            for (int t = 0; t < SUB; t++) k[t] = (__m512bh)_mm512_loadu_si512(rows[t] + at * 2);
            for (int v = 0; v < SUB; v++) {
                const __m512bh x = (__m512bh)_mm512_loadu_si512(q[v] + at * 2);
                for (int t = 0; t < SUB; t++) acc[v * SUB + t] = _mm512_dpbf16_ps(acc[v * SUB + t], x, k[t]);
            }
        }
        if (at < dim) { /* dim is a multiple of 16: half a vector is left */
            for (int v = 0; v < SUB; v++) {
                const __m512bh x = (__m512bh)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)(q[v] + at * 2)));
                for (int t = 0; t < SUB; t++)
                    acc[v * SUB + t] = _mm512_dpbf16_ps(acc[v * SUB + t], x, (__m512bh)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)(rows[t] + at * 2))));
            }
        }
        for (int i = 0; i < SUB * SUB; i++) parts[i] = (f16v)acc[i];
        return;
    }
#endif
    for (int i = 0; i < SUB; i += SIDE)
        for (int j = 0; j < SUB; j += SIDE) {
            struct half acc[SIDE * SIDE];
            for (int n = 0; n < SIDE * SIDE; n++) acc[n] = no_sums();
            for (int64_t at = 0; at < dim; at += LANES) {
                struct half k[SIDE];
                for (int t = 0; t < SIDE; t++) k[t] = load_half(rows[j + t], at, is_bf16);
                for (int v = 0; v < SIDE; v++) {
                    const struct half x = load_half(q[i + v], at, is_bf16);
                    for (int t = 0; t < SIDE; t++) acc[v * SIDE + t] = half_plus(acc[v * SIDE + t], x, k[t]);
                }
            }
            for (int n = 0; n < SIDE * SIDE; n++) memcpy(parts + (i + n / SIDE) * SUB + j + n % SIDE, acc + n, sizeof *acc);
        }
}

INLINE void fetch(const char *row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE_BYTES) __builtin_prefetch(row + i, 0, 2);
}

/* p[v][t] = scale * q[v] . rows[t] */
INLINE void scores(struct item *it, const int is_bf16) {
    const int64_t dim = it->a->dim, row_bytes = dim * (is_bf16 ? 2 : 4);
    for (int from = 0; from < it->count; from += SUB) {
        const char *rows[SUB];
        for (int t = 0; t < SUB; t++) {
            rows[t] = it->rows[from + t < it->count ? from + t : it->count - 1];
            if (from + t < it->next_count) fetch(it->next[from + t], row_bytes);
        }
        for (int v = 0; v < it->vectors; v += SUB) {
            f16v parts[SUB * SUB];
            multiply(parts, it->q + v, rows, dim, is_bf16);
            float found[SUB * SUB];
            store_f32(found, sums(parts) * it->a->scale);
            for (int i = 0; i < SUB; i++) memcpy(it->p + (v + i) * BLOCK + from, found + i * SUB, SUB * sizeof(float));
        }
    }
}

#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512BW__)
#define PAIRS 1
/* A vector's weights in bf16, in the place of the block's scores. Behind the last token they are 0, up to whole vectors. */
INLINE void round_weights(float *p, int count) {
    for (int t = 0; t < count; t += 2 * LANES) {
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)load_f32(p + t + LANES), (__m512)load_f32(p + t));
        memcpy((bf16 *)p + t, &both, sizeof both);
    }
}

/* As add_values, by products of pairs of tokens. Elements are in the order of load_values. */
INLINE void add_pairs(struct item *it, int v, int64_t at, const int wide) {
    const int64_t rank = it->a->rank;
    float *o = it->o + v * rank + at;
    const float *p = it->p + v * BLOCK;
    __m512 acc[SUB * SUB];
    for (int i = 0; i < SUB; i++)
        for (int w = 0; w < wide; w++) acc[i * SUB + w] = (__m512)(load_f32(o + i * rank + w * LANES) * it->factor[v + i]);
    for (int t = 0; t < it->count; t += 2) {
        const char *first = it->rows[t] + at * 2, *second = it->rows[t + 1 < it->count ? t + 1 : t] + at * 2;
        __m512bh both[SUB];
        for (int w = 0; w < wide; w += 2) {
            const __m512i a = _mm512_loadu_si512(first + w * LANES * 2), b = _mm512_loadu_si512(second + w * LANES * 2);
            both[w] = (__m512bh)_mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16));
            both[w + 1] = (__m512bh)_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(a, 16), b);
        }
        for (int i = 0; i < SUB; i++) {
            int32_t pair;
            memcpy(&pair, p + i * BLOCK + t / 2, sizeof pair);
            const __m512bh weights = (__m512bh)_mm512_set1_epi32(pair);
            for (int w = 0; w < wide; w++) acc[i * SUB + w] = _mm512_dpbf16_ps(acc[i * SUB + w], weights, both[w]);
        }
    }
    for (int i = 0; i < SUB; i++)
        for (int w = 0; w < wide; w++) store_f32(o + i * rank + w * LANES, (f16v)acc[i * SUB + w]);
}
#else
#define PAIRS 0
INLINE void round_weights(float *p, int count) { (void)p, (void)count; }
INLINE void add_pairs(struct item *it, int v, int64_t at, const int wide) { (void)it, (void)v, (void)at, (void)wide; }
#endif

/* o[v] = o[v] * factor[v] + sum over tokens t of p[v][t] * row t, for SUB vectors from v on and `wide` vectors of 16 elements from `at` on. */
INLINE void add_values(struct item *it, int v, int64_t at, const int wide, const int is_bf16) {
    const int64_t rank = it->a->rank;
    float *o = it->o + v * rank + at;
    const float *p = it->p + v * BLOCK;
    for (int from = 0; from < SUB; from += SIDE) {
        struct half acc[SIDE * SUB], row[SUB];
        for (int i = 0; i < SIDE; i++)
            for (int w = 0; w < wide; w++) acc[i * SUB + w] = half_times(load_sums(o + (from + i) * rank + w * LANES), it->factor + v + from + i);
        for (int t = 0; t < it->count; t++) {
            load_halves(row, it->rows[t], at, wide, is_bf16);
            for (int i = 0; i < SIDE; i++)
                for (int w = 0; w < wide; w++) acc[i * SUB + w] = half_plus_all(acc[i * SUB + w], row[w], p + (from + i) * BLOCK + t);
        }
        for (int i = 0; i < SIDE; i++)
            for (int w = 0; w < wide; w++) store_sums(o + (from + i) * rank + w * LANES, acc[i * SUB + w]);
    }
}

/* `pairs`: by products of pairs of tokens, of bf16 in a rank that is a multiple of 32. */
INLINE void values(struct item *it, const int is_bf16, const int pairs) {
    const int64_t rank = it->a->rank;
    if (pairs)
        for (int v = 0; v < it->vectors; v++) round_weights(it->p + v * BLOCK, it->count);
    for (int64_t at = 0, step; at < rank; at += step) {
        const int64_t left = (rank - at) / LANES;
        step = (left >= WIDE ? WIDE : left >= 2 ? 2 : 1) * LANES;
        for (int v = 0; v < it->vectors; v += SUB) {
            if (left >= WIDE && pairs) add_pairs(it, v, at, WIDE);
            else if (left >= WIDE) add_values(it, v, at, WIDE, is_bf16);
            else if (left >= 2 && pairs) add_pairs(it, v, at, 2);
            else if (left >= 2) add_values(it, v, at, 2, is_bf16);
            else add_values(it, v, at, 1, is_bf16);
        }
    }
}

/* The type is a constant in each copy. */
static __attribute__((noinline)) void scores_bf16(struct item *it) { scores(it, 1); }
static __attribute__((noinline)) void scores_fp32(struct item *it) { scores(it, 0); }
static __attribute__((noinline)) void values_bf16(struct item *it) { values(it, 1, 0); }
static __attribute__((noinline)) void values_pairs(struct item *it) { values(it, 1, 1); }
static __attribute__((noinline)) void values_fp32(struct item *it) { values(it, 0, 0); }

/* Of a block of `count` tokens of `request` from `from` on, those of its path, where they lie. */
static void follow_path(const struct args *a, int64_t request, int64_t from, int count, const char **to) {
    const struct step *s = a->step;
    const int32_t *pages = s->page_table + request * s->table_width, *places = s->path_places + request * s->path_width;
    const int64_t start = s->path_starts[request], row_bytes = a->width * size_of(a);
    for (int64_t t = start > from ? start - from : 0; t < count; t++) {
        const int64_t place = places[from + t - start];
        to[t] = (const char *)a->cache + pages[place / a->page_size] * a->page_stride_bytes + place % a->page_size * row_bytes;
    }
}

/* Rows of tokens from..from + BLOCK - 1 of `request`, or of `chosen` if that is not NULL, as far as there are any before `end`; returns
 * how many. */
static int locate(const struct args *a, int64_t request, const int32_t *chosen, int64_t from, int64_t end, const char **to) {
    const int32_t *pages = a->step->page_table + request * a->step->table_width;
    const int64_t row_bytes = a->width * size_of(a);
    const int count = end <= from ? 0 : end - from < BLOCK ? (int)(end - from) : BLOCK;
    if (chosen) {
        for (int t = 0; t < count; t++) {
            const int64_t token = chosen[from + t];
            to[t] = (const char *)a->cache + pages[token / a->page_size] * a->page_stride_bytes + token % a->page_size * row_bytes;
        }
        return count;
    }
    int64_t page = from / a->page_size, offset = from % a->page_size;
    for (int t = 0; t < count; t++) {
        to[t] = (const char *)a->cache + pages[page] * a->page_stride_bytes + offset * row_bytes;
        if (++offset == a->page_size) offset = 0, page++;
    }
    if (a->step->path_starts) follow_path(a, request, from, count, to);
    return count;
}

/* Tokens of the block that vector v of the tile does not see score -inf; returns how many it sees. */
static int hide(const struct item *it, int v, int64_t from) {
    const int64_t left = it->seen[v] - from;
    const int seen = left < 0 ? 0 : left < it->count ? (int)left : it->count;
    float *p = it->p + v * BLOCK;
    for (int t = seen; t < it->count; t++) p[t] = -INFINITY;
    return seen;
}

/* Query vectors first..first + count - 1 of `request`. */
static void attend(const struct args *a, struct loop *l, int64_t request, int64_t first, int count, float *scratch) {
    const int64_t start = a->step->starts[request], rows = a->step->starts[request + 1] - start;
    const int64_t before = a->step->kv_lens[request] - rows, vector = start * a->heads + first;
    struct item it;
    it.a = a;
    it.vectors = (count + SUB - 1) / SUB * SUB;
    it.o = scratch;
    it.p = scratch + TILE * a->rank;
    memset(it.o, 0, it.vectors * a->rank * sizeof(float));
    for (int v = 0; v < it.vectors; v++) {
        const int own = v < count ? v : count - 1;
        it.q[v] = (const char *)a->q + (vector + own) * a->dim * size_of(a);
        it.seen[v] = before + (first + own) / a->heads + 1;
        if (a->chosen && it.seen[v] > a->chosen_stride) it.seen[v] = a->chosen_stride;
        it.m[v] = -INFINITY, it.l[v] = 0;
    }
    const int64_t end = it.seen[count - 1];
    const int32_t *chosen = a->chosen ? a->chosen + vector / a->heads * a->chosen_stride : NULL;
    it.next_count = locate(a, request, chosen, 0, end, it.next);
    for (int64_t from = 0; from < end; from += BLOCK) {
        it.count = it.next_count;
        memcpy(it.rows, it.next, sizeof it.rows);
        it.next_count = locate(a, request, chosen, from + BLOCK, end, it.next);
        if (a->is_bf16) scores_bf16(&it);
        else scores_fp32(&it);
        for (int v = 0; v < it.vectors; v++) {
            float *p = it.p + v * BLOCK;
            if (hide(&it, v, from)) it.factor[v] = weights_of(p, it.count, it.m + v, it.l + v);
            else memset(p, 0, BLOCK * sizeof(float)), it.factor[v] = 1.0f;
        }
        if (a->is_bf16 && PAIRS && a->rank % (2 * LANES) == 0) values_pairs(&it);
        else if (a->is_bf16) values_bf16(&it);
        else values_fp32(&it);
    }
    for (int v = 0; v < count && team_claims(l); v++)
        store_divided(it.o + v * a->rank, it.l[v], a->out, (vector + v) * a->rank, a->rank, a->is_bf16);
}

static void write_token(const struct args *a, int64_t row) {
    const int64_t bytes = a->width * size_of(a);
    char *page = (char *)a->cache + a->step->token_pages[row] * a->page_stride_bytes;
    memcpy(page + a->step->token_offsets[row] * bytes, (char *)a->latents + row * bytes, bytes);
}

/* Vectors of an item: fewer where there would be too few items. Changes no result. */
static int tile_of(const struct args *a) {
    const int64_t vectors = a->step->starts[a->step->batch] * a->heads;
    const int64_t threads = team_threads();
    int tile = TILE;
    while (threads > 1 && tile > SUB && vectors < tile * ITEMS * threads) tile /= 2;
    return tile;
}

/* Vectors that are cut into tiles together: all of a request, or of a row where each row has tokens of its own. */
static int64_t group_of(const struct args *a, int64_t request) {
    return a->chosen ? a->heads : (a->step->starts[request + 1] - a->step->starts[request]) * a->heads;
}

/* Writes the new tokens' latents, then attends. Returns 0, or -1 when out of memory. */
int tandem_latent_attention(const struct args *a) {
    const int64_t batch = a->step->batch;
    if (batch == 0) return 0;
    const int tile = tile_of(a);
    int64_t *ends = malloc(batch * sizeof(int64_t)); /* items of the requests up to each one */
    if (!ends) return -1;
    for (int64_t i = 0; i < batch; i++) {
        const int64_t group = group_of(a, i), groups = (a->step->starts[i + 1] - a->step->starts[i]) * a->heads / group;
        ends[i] = (i ? ends[i - 1] : 0) + groups * ((group + tile - 1) / tile);
    }
    float *scratch = aligned_alloc(LINE_BYTES, TILE * (a->rank + BLOCK) * sizeof(float));
    if (scratch) {
        for (struct loop l = team_loop(a->step->starts[batch], 0); team_next(&l);) write_token(a, l.item);
        for (struct loop l = team_repeats(ends[batch - 1]); team_next(&l);) {
            const int64_t i = ends[batch - 1] - 1 - l.item; /* a prompt's last rows see most */
            int64_t request = 0;
            while (ends[request] <= i) request++;
            const int64_t group = group_of(a, request), tiles = (group + tile - 1) / tile;
            const int64_t at = i - (request ? ends[request - 1] : 0), inside = at % tiles * tile, left = group - inside;
            attend(a, &l, request, at / tiles * group + inside, left < tile ? (int)left : tile, scratch);
        }
    }
    free(scratch);
    free(ends);
    return scratch ? 0 : -1;
}

/* The index of sparse attention: rows of one request and all its tokens. Mirrored by _Scores in latent_attention.py. */
struct index_scores {
    const void *q;        /* [rows, heads, dim] */
    const float *weights; /* [rows, heads] */
    const char *keys;     /* address of this layer's first key in page 0; keys are row_bytes apart */
    const int32_t *pages; /* of the request */
    float *out;           /* [rows, tokens] */
    int64_t rows, heads, dim, tokens, page_stride_bytes, row_bytes, page_size, is_bf16;
};

/* out[r][t] = sum over heads, in their order, of weight * relu(q . key), for tokens from..from + SUB - 1. */
INLINE void score_tokens(const struct index_scores *a, int64_t from, const int is_bf16) {
    const int64_t size = is_bf16 ? 2 : 4, left = a->tokens - from, count = left < SUB ? left : SUB;
    const char *rows[SUB];
    for (int64_t t = 0; t < SUB; t++) {
        const int64_t token = from + (t < count ? t : count - 1);
        rows[t] = a->keys + a->pages[token / a->page_size] * a->page_stride_bytes + token % a->page_size * a->row_bytes;
    }
    for (int64_t r = 0; r < a->rows; r++) {
        float total[SUB] = {0};
        for (int64_t head = 0; head < a->heads; head += SUB) {
            const char *q[SUB];
            for (int64_t i = 0; i < SUB; i++)
                q[i] = (const char *)a->q + (r * a->heads + (head + i < a->heads ? head + i : a->heads - 1)) * a->dim * size;
            f16v parts[SUB * SUB];
            multiply(parts, q, rows, a->dim, is_bf16);
            float found[SUB * SUB];
            store_f32(found, sums(parts));
            for (int64_t i = 0; i < SUB && head + i < a->heads; i++)
                for (int t = 0; t < SUB; t++)
                    total[t] += a->weights[r * a->heads + head + i] * (found[i * SUB + t] > 0 ? found[i * SUB + t] : 0);
        }
        memcpy(a->out + r * a->tokens + from, total, count * sizeof(float));
    }
}

/* The type is a constant in each copy. */
static __attribute__((noinline)) void score_bf16(const struct index_scores *a, int64_t from) { score_tokens(a, from, 1); }
static __attribute__((noinline)) void score_fp32(const struct index_scores *a, int64_t from) { score_tokens(a, from, 0); }

int tandem_index_scores(const struct index_scores *a) {
    for (struct loop l = team_loop((a->tokens + SUB - 1) / SUB, 0); team_next(&l);) {
        if (a->is_bf16) score_bf16(a, l.item * SUB);
        else score_fp32(a, l.item * SUB);
    }
    return 0;
}
