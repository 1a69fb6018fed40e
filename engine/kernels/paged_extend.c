/* Attention of prompt chunks over a paged KV cache of bf16 or of 8 bits (fp8.h), causal, K and V read straight from their pages. The new tokens'
 * K and V are written first, so that a chunk and the prefix before it (cached, or of earlier chunks) are read alike.
 *
 * A work item is (request, kv head, block of query tokens): the query heads of a kv head are computed together. It passes
 * over the keys in blocks of KEYS from position 0 on, online softmax from block to block. Everything is transposed, so
 * that a lane is a query and the softmax needs no sum across lanes:
 *
 *     S' [keys, queries]  = K  [keys, dim]   Q' [dim, queries]      K: copied out of its pages into tiles, once a block
 *     P' = exp(S' - max), rounded to bf16 in the very layout that the next product takes from the right
 *     O' [dim, queries]  += V' [dim, keys]   P' [keys, queries]     V': transposed on the way, once a block
 *
 * What a query gives depends on its position and on the K and V up to it, to the bit: not on how the prompt was cut into
 * chunks, nor on the other requests, the order of work or the number of threads. Blocks of keys begin at multiples of KEYS
 * from position 0; a sum over keys is in ascending order; keys past a query weigh 0 and add exact zeros (if finite).
 *
 * Sources: Milakov and Gimelshein 2018, Dao et al. 2022 (blocked online softmax).
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fp8.h"
#include "team.h"
#include "tiles.h"
#include "vectors.h"

#define ABI_VERSION 6
#define KEYS 256           /* keys of a block: S' and P' of 32 queries stay in the L1 cache */
#define KEY_STEPS (KEYS / STEP)
#define COLUMNS 1024       /* queries of an item, all heads counted: O' stays in the L2 cache, K and V are tiled once for them */
#define ITEMS_A_THREAD 4   /* at least, so that threads finish together */

/* Mirrored by _Args in paged_extend.py. Strides of q, k_new and v_new are elements from token to token; heads are dense.
 * T tokens are written; `requests` of those that they belong to are attended, each a run of rows. */
struct args {
    const bf16 *q, *k_new, *v_new;              /* [T, heads, dim], [T, kv_heads, dim] x 2 */
    bf16 *out;                                  /* [T, heads, dim] dense; rows of no request attended are left alone */
    char *k_cache, *v_cache;                    /* address of this layer's K and V in unit 0 of page 0 */
    const float *sinks;                         /* [heads] a score beside those of the keys; NULL: none */
    const int32_t *page_table;                  /* [requests, table_width] */
    const int64_t *first_rows, *q_lens, *kv_lens; /* [requests]; kv_lens: the new tokens included */
    const int64_t *token_pages, *token_offsets; /* [T] where each new token goes */
    int64_t q_stride, k_stride, v_stride;
    int64_t page_stride_bytes, unit_stride_bytes, table_width;
    int64_t tokens, requests, heads, kv_heads, units, dim, page_size; /* each unit of a page holds kv_heads / units */
    int64_t window;                             /* the last tokens that a query sees, itself included; 0: all */
    int64_t is_fp8, kind;              /* is_fp8: of the cache */
    float scale, cap; /* a score s becomes cap * tanh(s / cap); 0: it stays */
};

#if defined(HAVE_AVX512)

/* Query tokens first..first+count-1 of a request's chunk; the first one's position is `position`. */
struct block {
    int64_t request, row, count, position;
};

/* What one thread works on. Tiles are those of tiles.h; a pair is 32 queries, two tiles from the right. */
struct work {
    const struct args *a;
    struct block at;
    int64_t head, group, tiles, pairs; /* tile t * group + g: tokens 16 t .. 16 t + 15 of query head g of this kv head */
    int64_t steps;                     /* of 32 dims, the last one filled up with zeros */
    char *q;                           /* Q' [pair][step][2 tiles] */
    char *k;                           /* K [key tile][step] */
    char *v;                           /* V' [dim tile][key step] */
    char *p;                           /* P' [key step][2 tiles] */
    float *s;                          /* S' [KEYS, 32] */
    float *o;                          /* O' [pair][32 * steps, 32] */
    float *m, *l;                      /* [pair][32] running maximum of S', and sum of P' */
};

/* ---- tiles */

/* 16 lines of 16 dwords, transposed in place. */
INLINE void transpose(__m512i r[TILE]) {
    __m512i t[TILE];
    for (int i = 0; i < TILE; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    for (int i = 0; i < TILE; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < TILE; i += 8)
        for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
        r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
    }
}

/* Which of the elements from..from+31 there are. */
INLINE __mmask32 there(int64_t from, int64_t dim) { return dim - from >= STEP ? 0xffffffffu : (1u << (dim - from)) - 1; }

/* Elements from..from+31 of a row, zeros past its end. */
INLINE __m512i line_of(const bf16 *row, int64_t from, int64_t dim) { return _mm512_maskz_loadu_epi16(there(from, dim), row + from); }

PART void tile_queries(const struct work *w) {
    const struct args *a = w->a;
    for (int64_t tile = 0; tile < 2 * w->pairs; tile++) {
        const int64_t token = tile / w->group * TILE, left = tile < w->tiles ? w->at.count - token : 0;
        const bf16 *from = a->q + (w->at.row + token) * a->q_stride + (w->head * w->group + tile % w->group) * a->dim;
        for (int64_t step = 0; step < w->steps; step++) {
            char *to = w->q + (tile / 2 * w->steps + step) * STEP_BYTES + tile % 2 * TILE_BYTES;
            __m512i r[TILE];
            for (int i = 0; i < TILE; i++) r[i] = i < left ? line_of(from + i * a->q_stride, step * STEP, a->dim) : _mm512_setzero_si512();
            transpose(r);
            for (int i = 0; i < TILE; i++) _mm512_store_si512(to + i * LINE_BYTES, r[i]);
        }
    }
}

/* Bytes of a token's row of K or V in a unit: its heads, and behind them, of 8 bits, their exponents. */
INLINE int64_t bytes_of_token(const struct args *a) { return a->kv_heads / a->units * (a->is_fp8 ? a->dim + 1 : a->dim * (int64_t)sizeof(bf16)); }

/* Rows of `count` keys of this kv head from position `from` on. */
static void find_rows(const struct work *w, const char *cache, int64_t from, int64_t count, const char **rows) {
    const struct args *a = w->a;
    const int32_t *pages = a->page_table + w->at.request * a->table_width;
    const int64_t heads = a->kv_heads / a->units; /* of a unit */
    const char *first = cache + w->head / heads * a->unit_stride_bytes + w->head % heads * a->dim * (a->is_fp8 ? 1 : (int64_t)sizeof(bf16));
    int64_t page = from / a->page_size, offset = from % a->page_size;
    for (int64_t i = 0; i < count; i++) {
        rows[i] = first + pages[page] * a->page_stride_bytes + offset * bytes_of_token(a);
        if (++offset == a->page_size) offset = 0, page++;
    }
}

/* How a row of this kv head decodes, of 8 bits. */
INLINE struct code_row decoder_of(const struct work *w, const char *row) {
    const int64_t heads = w->a->kv_heads / w->a->units, head = w->head % heads;
    return code_row((uint8_t)row[(heads - head) * w->a->dim + head]);
}

/* As line_of, of a row of the cache. */
INLINE __m512i kept_line(const char *row, const struct code_row *how, int64_t from, int64_t dim, const int is_fp8) {
    return is_fp8 ? words_of(_mm256_maskz_loadu_epi8(there(from, dim), row + from), how) : line_of((const bf16 *)row, from, dim);
}

/* `count` keys into tiles of K, filled up with zeros to a multiple of 32. */
INLINE void tile_keys(const struct work *w, int64_t from, int64_t count, const int is_fp8) {
    const char *rows[KEYS];
    find_rows(w, w->a->k_cache, from, count, rows);
    for (int64_t i = 0; i < ceil_div(count, STEP) * STEP; i++) {
        struct code_row how;
        if (is_fp8 && i < count) how = decoder_of(w, rows[i]);
        for (int64_t step = 0; step < w->steps; step++) {
            char *to = w->k + (i / TILE * w->steps + step) * TILE_BYTES + i % TILE * LINE_BYTES;
            _mm512_store_si512(to, i < count ? kept_line(rows[i], &how, step * STEP, w->a->dim, is_fp8) : _mm512_setzero_si512());
        }
    }
}

/* The same keys' V, transposed. Two keys' elements of a dim become a dword; unpacking leaves dims 0-3, 8-11, 16-19 and
 * 24-27 of 32 in one line and the rest in another. */
INLINE void tile_values(const struct work *w, int64_t from, int64_t count, const int is_fp8) {
    const char *rows[KEYS];
    struct code_row how[STEP];
    find_rows(w, w->a->v_cache, from, count, rows);
    for (int64_t key = 0; key < count; key += STEP) {
        for (int64_t i = key; is_fp8 && i < smaller(key + STEP, count); i++) how[i - key] = decoder_of(w, rows[i]);
        for (int64_t step = 0; step < w->steps; step++) {
            __m512i low[TILE], high[TILE];
            for (int i = 0; i < TILE; i++) {
                const int64_t even = key + 2 * i, odd = even + 1;
                const __m512i x = even < count ? kept_line(rows[even], how + 2 * i, step * STEP, w->a->dim, is_fp8) : _mm512_setzero_si512();
                const __m512i y = odd < count ? kept_line(rows[odd], how + 2 * i + 1, step * STEP, w->a->dim, is_fp8) : _mm512_setzero_si512();
                low[i] = _mm512_unpacklo_epi16(x, y);
                high[i] = _mm512_unpackhi_epi16(x, y);
            }
            transpose(low);
            transpose(high);
            for (int i = 0; i < TILE; i++) {
                const int64_t dim = i / 4 * 8 + i % 4; /* of 32 */
                const int64_t tile = 2 * step + dim / TILE;
                char *to = w->v + (tile * KEY_STEPS + key / STEP) * TILE_BYTES + dim % TILE * LINE_BYTES;
                _mm512_store_si512(to, low[i]);
                _mm512_store_si512(to + 4 * LINE_BYTES, high[i]);
            }
        }
    }
}

PART void tile_bf16_keys(const struct work *w, int64_t from, int64_t count) { tile_keys(w, from, count, 0); }
PART void tile_fp8_keys(const struct work *w, int64_t from, int64_t count) { tile_keys(w, from, count, 1); }
PART void tile_bf16_values(const struct work *w, int64_t from, int64_t count) { tile_values(w, from, count, 0); }
PART void tile_fp8_values(const struct work *w, int64_t from, int64_t count) { tile_values(w, from, count, 1); }

/* sums [32, 32] = 32 rows of tiles x, x_block bytes from tile to tile, times `steps` steps of `right`. */
INLINE void product(const struct work *w, const char *x, int64_t x_block, const char *right, float *sums, int64_t steps, const int begun) {
#if defined(HAVE_AMX)
    if (w->a->kind == AMX) {
        amx_block(x, x_block, right, sums, steps, 1, begun, right, 0);
        return;
    }
#endif
    for (int row = 0; row < 2 * TILE; row += ROWS)
        avx512_block(x + row / TILE * x_block + row % TILE * LINE_BYTES, right, sums + row * PANEL, steps, ROWS, begun, right, 0);
}

/* ---- softmax */

/* 2^x for x <= 0 or barely above: a minimax polynomial on [0, 1), relative error 3e-06, next to nothing beside the rounding
 * to bf16 that follows. The exponent is the floor of x; very small results are 0. */
INLINE __m512 exp2_of(__m512 x) {
    const __m512 r = _mm512_reduce_ps(x, 0x01 /* x - floor(x) */ | _MM_FROUND_NO_EXC);
    __m512 y = _mm512_fmadd_ps(r, _mm512_set1_ps(1.34266843e-02f), _mm512_set1_ps(5.22424742e-02f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.41280205e-01f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.93044845e-01f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, x);
}

/* Of a tile's 16 queries and a block's keys. `ahead`: the first query's position less that of the first key. Keys from..to - 1,
 * multiples of 4, are seen by all queries. */
struct sight {
    int64_t ahead, window, from, to;
};

INLINE struct sight sight_of(int64_t ahead, int64_t window, int64_t count) {
    const int64_t behind = window ? ahead + TILE - window : 0; /* keys that the last query does not see any more */
    const int64_t from = behind <= 0 ? 0 : smaller(count, ceil_div(behind, 4) * 4);
    const int64_t to = ahead < 0 ? 0 : smaller(count, (ahead + 1) / 4 * 4);
    return (struct sight){ahead, window, from, to};
}

/* Which queries see key `key`. */
INLINE __mmask16 seeing(const struct sight *at, int64_t key) {
    const int64_t first = key - at->ahead, end = at->window ? first + at->window : TILE;
    const unsigned from = first <= 0 ? 0xffffu : first >= TILE ? 0 : 0xffffu << first;
    const unsigned to = end >= TILE ? 0xffffu : end <= 0 ? 0 : (1u << end) - 1;
    return (__mmask16)(from & to);
}

INLINE __m512 maximum(const float *s, int64_t count, const struct sight *at) {
    const __m512 none = _mm512_set1_ps(-INFINITY);
    __m512 best[4] = {none, none, none, none};
    int64_t i = 0;
    for (; i < at->from; i++) best[0] = _mm512_mask_max_ps(best[0], seeing(at, i), best[0], _mm512_load_ps(s + i * PANEL));
    for (; i < at->to; i += 4)
        for (int j = 0; j < 4; j++) best[j] = _mm512_max_ps(best[j], _mm512_load_ps(s + (i + j) * PANEL));
    for (; i < count; i++) best[0] = _mm512_mask_max_ps(best[0], seeing(at, i), best[0], _mm512_load_ps(s + i * PANEL));
    return _mm512_max_ps(_mm512_max_ps(best[0], best[1]), _mm512_max_ps(best[2], best[3]));
}

/* Two keys' weights -> their line of P'. */
INLINE void put_pair(char *p, int64_t key, __m512 even, __m512 odd) {
    const __m512i interleaved = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    char *to = p + key / STEP * STEP_BYTES + key % STEP / 2 * LINE_BYTES;
    _mm512_store_si512(to, _mm512_permutexvar_epi16(interleaved, (__m512i)_mm512_cvtne2ps_pbh(odd, even)));
}

/* The weights of keys i and i + 1, for the queries that see them. */
INLINE void add_pair(const float *s, char *p, int64_t i, const __mmask16 first, const __mmask16 second, __m512 times, __m512 offset, __m512 *even, __m512 *odd) {
    const __m512 x = _mm512_maskz_mov_ps(first, exp2_of(_mm512_fmsub_ps(_mm512_load_ps(s + i * PANEL), times, offset)));
    const __m512 y = _mm512_maskz_mov_ps(second, exp2_of(_mm512_fmsub_ps(_mm512_load_ps(s + (i + 1) * PANEL), times, offset)));
    *even = _mm512_add_ps(*even, x);
    *odd = _mm512_add_ps(*odd, y);
    put_pair(p, i, x, y);
}

/* S' of one tile's queries -> P'. `count` keys, a multiple of 32. Returns the factor for what was summed before, 0 at the first
 * block. A query that sees none of the keys keeps its sums: they weigh 0. */
INLINE __m512 weigh(const float *s, char *p, float *m, float *l, int64_t count, const struct sight *at, float scale) {
    const __m512 before = _mm512_load_ps(m), now = _mm512_max_ps(before, maximum(s, count, at));
    const __m512 times = _mm512_set1_ps(scale), offset = _mm512_mul_ps(now, times);
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i < at->from; i += 2) add_pair(s, p, i, seeing(at, i), seeing(at, i + 1), times, offset, &even, &odd);
    for (; i < at->to; i += 2) add_pair(s, p, i, 0xffff, 0xffff, times, offset, &even, &odd);
    for (; i < count; i += 2) add_pair(s, p, i, seeing(at, i), seeing(at, i + 1), times, offset, &even, &odd);
    const __mmask16 begun = _mm512_cmp_ps_mask(before, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    const __mmask16 same = _mm512_cmp_ps_mask(before, now, _CMP_EQ_OQ);
    __m512 factor = _mm512_maskz_mov_ps(begun, exp2_of(_mm512_fmsub_ps(before, times, offset)));
    factor = _mm512_mask_mov_ps(factor, same, _mm512_set1_ps(1.0f)); /* the residue of a product is no reason to rescale */
    _mm512_store_ps(m, now);
    _mm512_store_ps(l, _mm512_fmadd_ps(_mm512_load_ps(l), factor, _mm512_add_ps(even, odd)));
    return factor;
}

/* O' of one tile's queries, where any factor is not 1 (times 1 changes no bit). */
INLINE void rescale(float *o, __m512 factor, int64_t dims) {
    if (_mm512_cmp_ps_mask(factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0) return;
    for (int64_t d = 0; d < dims; d++) _mm512_store_ps(o + d * PANEL, _mm512_mul_ps(_mm512_load_ps(o + d * PANEL), factor));
}

/* ---- one work item */

/* S', not scaled yet, so that times the scale it is capped. */
PART void cap_scores(float *s, int64_t count, float scale, float cap) {
    for (int64_t i = 0; i < count * PANEL; i += LANES) store_f32(s + i, tanh_of(load_f32(s + i) * (scale / cap)) * (cap / scale));
}

/* Sinks are keys before all others, whose values are 0; m is not scaled. */
static void begin_weights(const struct work *w) {
    for (int64_t i = 0; i < w->pairs * PANEL; i++) w->m[i] = -INFINITY, w->l[i] = 0.0f;
    if (w->a->sinks)
        for (int64_t i = 0; i < w->tiles * TILE; i++) w->m[i] = w->a->sinks[w->head * w->group + i / TILE % w->group] / w->a->scale, w->l[i] = 1.0f;
}

/* Position of a tile's first query. */
INLINE int64_t position_of(const struct work *w, int64_t tile) { return w->at.position + tile / w->group * TILE; }

/* Where the first block of keys begins that the query at `position` sees; blocks begin at multiples of KEYS. */
INLINE int64_t first_block(const struct work *w, int64_t position) {
    const int64_t window = w->a->window;
    return window && position >= window ? (position - window + 1) / KEYS * KEYS : 0;
}

/* A block of keys from position `from` on, for one pair of tiles. */
PART void attend_pair(const struct work *w, int64_t pair, int64_t from) {
    const int64_t last_tile = smaller(2 * pair + 1, w->tiles - 1);
    const int64_t end = smaller(position_of(w, last_tile) + TILE, w->at.position + w->at.count); /* past the last key seen */
    const int64_t count = smaller(KEYS, ceil_div(end - from, STEP) * STEP);
    const int64_t first = first_block(w, position_of(w, 2 * pair));
    if (end <= from || from < first) return;
    const int64_t dims = w->steps * STEP;
    float *o = w->o + pair * dims * PANEL;
    for (int64_t key = 0; key < count; key += 2 * TILE)
        product(w, w->k + key / TILE * w->steps * TILE_BYTES, w->steps * TILE_BYTES, w->q + pair * w->steps * STEP_BYTES, w->s + key * PANEL, w->steps, 0);
    if (w->a->cap) cap_scores(w->s, count, w->a->scale, w->a->cap);
    const float scale = w->a->scale * 1.44269504088896341f; /* for powers of 2 */
    for (int side = 0; side < 2; side++) {
        const int64_t at = pair * PANEL + side * TILE, ahead = position_of(w, smaller(2 * pair + side, last_tile)) - from;
        const struct sight sight = sight_of(ahead, w->a->window, count);
        const __m512 factor = weigh(w->s + side * TILE, w->p + side * TILE_BYTES, w->m + at, w->l + at, count, &sight, scale);
        if (from > first) rescale(o + side * TILE, factor, dims);
    }
    for (int64_t d = 0; d < dims; d += 2 * TILE) {
        const char *v = w->v + d / TILE * KEY_STEPS * TILE_BYTES;
        if (from > first) product(w, v, KEY_STEPS * TILE_BYTES, w->p, o + d * PANEL, count / STEP, 1);
        else product(w, v, KEY_STEPS * TILE_BYTES, w->p, o + d * PANEL, count / STEP, 0);
    }
}

PART void write_tile(const struct work *w, int64_t tile) {
    const struct args *a = w->a;
    const int64_t token = tile / w->group * TILE, rows = smaller(TILE, w->at.count - token), side = tile % 2 * TILE;
    const float *o = w->o + tile / 2 * w->steps * STEP * PANEL + side;
    const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(w->l + tile / 2 * PANEL + side));
    bf16 *out = a->out + ((w->at.row + token) * a->heads + w->head * w->group + tile % w->group) * a->dim;
    for (int64_t d = 0; d < a->dim; d += STEP) {
        const __mmask32 kept = there(d, a->dim);
        __m512i low[TILE], high[TILE];
        for (int i = 0; i < TILE; i++) {
            low[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(o + (d + i) * PANEL), inverse);
            high[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(o + (d + TILE + i) * PANEL), inverse);
        }
        transpose(low);
        transpose(high);
        for (int64_t i = 0; i < rows; i++) _mm512_mask_storeu_epi16(out + i * a->heads * a->dim + d, kept, (__m512i)_mm512_cvtne2ps_pbh((__m512)high[i], (__m512)low[i]));
    }
}

PART void attend(struct work *w, struct loop *l) {
    const int64_t end = w->at.position + w->at.count;
    w->tiles = ceil_div(w->at.count, TILE) * w->group;
    w->pairs = ceil_div(w->tiles, 2);
    tile_queries(w);
    begin_weights(w);
    for (int64_t from = first_block(w, w->at.position); from < end; from += KEYS) {
        const int64_t count = smaller(KEYS, end - from);
        (w->a->is_fp8 ? tile_fp8_keys : tile_bf16_keys)(w, from, count);
        (w->a->is_fp8 ? tile_fp8_values : tile_bf16_values)(w, from, count);
        for (int64_t pair = 0; pair < w->pairs; pair++) attend_pair(w, pair, from);
    }
    for (int64_t tile = 0; tile < w->tiles && team_claims(l); tile++) write_tile(w, tile);
}

/* ---- all of them */

/* The memory behind a work's pointers, for items of at most `pairs` pairs. NULL when there is none. */
static char *place(struct work *w, int64_t pairs) {
    const size_t tile_q = (size_t)(pairs * w->steps * STEP_BYTES), tile_kv = (size_t)(KEYS / TILE * w->steps * TILE_BYTES);
    const size_t p = (size_t)(KEY_STEPS * STEP_BYTES), s = KEYS * PANEL * sizeof(float), ml = (size_t)(pairs * PANEL) * sizeof(float);
    char *memory = aligned_alloc(LINE_BYTES, tile_q + 2 * tile_kv + p + s + (size_t)(w->steps * STEP) * ml + 2 * ml);
    if (!memory) return NULL;
    w->q = memory;
    w->k = w->q + tile_q;
    w->v = w->k + tile_kv;
    w->p = w->v + tile_kv;
    w->s = (float *)(w->p + p);
    w->m = w->s + KEYS * PANEL;
    w->l = w->m + pairs * PANEL;
    w->o = w->l + pairs * PANEL;
    return memory;
}

static int longest_first(const void *x, const void *y) {
    const struct block *a = x, *b = y;
    const int64_t i = a->count * (2 * a->position + a->count), j = b->count * (2 * b->position + b->count);
    return (i < j) - (i > j);
}

static int64_t count_blocks(const struct args *a, int64_t tokens) {
    int64_t count = 0;
    for (int64_t r = 0; r < a->requests; r++) count += ceil_div(a->q_lens[r], tokens);
    return count;
}

/* Query tokens of a block: as many as fit, fewer where threads would run out of items. */
static int64_t tokens_of_blocks(const struct args *a) {
    const int64_t threads = team_threads();
    int64_t tokens = COLUMNS / (a->heads / a->kv_heads) / TILE * TILE;
    if (tokens < TILE) tokens = TILE;
    while (threads > 1 && tokens >= 4 * TILE && count_blocks(a, tokens) * a->kv_heads < ITEMS_A_THREAD * threads) tokens = tokens / 2 / TILE * TILE;
    return tokens;
}

static void cut(const struct args *a, int64_t tokens, struct block *to) {
    for (int64_t r = 0; r < a->requests; r++)
        for (int64_t first = 0; first < a->q_lens[r]; first += tokens) {
            const int64_t count = smaller(tokens, a->q_lens[r] - first);
            *to++ = (struct block){r, a->first_rows[r] + first, count, a->kv_lens[r] - a->q_lens[r] + first};
        }
}

/* A token's heads of one unit into the cache. */
static void write_row(const struct args *a, char *to, const bf16 *row) {
    const int64_t heads = a->kv_heads / a->units;
    if (!a->is_fp8) memcpy(to, row, (size_t)(heads * a->dim) * sizeof(bf16));
    else
        for (int64_t h = 0; h < heads; h++) to[heads * a->dim + h] = (char)put_codes(to + h * a->dim, row + h * a->dim, a->dim);
}

static void write_token(const struct args *a, int64_t t) {
    const int64_t row = a->kv_heads / a->units * a->dim;
    int64_t at = a->token_pages[t] * a->page_stride_bytes + a->token_offsets[t] * bytes_of_token(a);
    for (int64_t unit = 0; unit < a->units; unit++, at += a->unit_stride_bytes) {
        write_row(a, a->k_cache + at, a->k_new + t * a->k_stride + unit * row);
        write_row(a, a->v_cache + at, a->v_new + t * a->v_stride + unit * row);
    }
}

/* Makes zeros of denormals, as the rounding of P' to bf16 does in any case: keys that weigh next to nothing (their
 * scores 87 below the best) would else take six times the rest, as measured where most were so. Returns what is to be set
 * again. */
INLINE unsigned flush_denormals(void) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    return before;
}

static int extend(const struct args *a) {
    const int64_t tokens = tokens_of_blocks(a), count = count_blocks(a, tokens), group = a->heads / a->kv_heads;
    struct block *blocks = malloc((size_t)(count + 1) * sizeof *blocks);
    if (!blocks) return -1;
    cut(a, tokens, blocks);
    qsort(blocks, (size_t)count, sizeof *blocks, longest_first);
    struct work w = {.a = a, .group = group, .steps = ceil_div(a->dim, STEP)};
    char *memory = place(&w, ceil_div(ceil_div(tokens, TILE) * group, 2));
    if (memory) {
        const unsigned rounding = flush_denormals();
        for (struct loop l = team_loop(a->tokens, 0); team_next(&l);) write_token(a, l.item);
#if defined(HAVE_AMX)
        if (a->kind == AMX) configure(2 * TILE);
#endif
        for (struct loop l = team_repeats(count * a->kv_heads); team_next(&l);) {
            w.at = blocks[l.item / a->kv_heads];
            w.head = l.item % a->kv_heads;
            attend(&w, &l);
        }
#if defined(HAVE_AMX)
        if (a->kind == AMX) _tile_release();
#endif
        _mm_setcsr(rounding);
    }
    free(memory);
    free(blocks);
    return memory ? 0 : -1;
}
#endif

/* ---- the library's face */

int tandem_paged_extend_abi(void) { return ABI_VERSION; }

int tandem_paged_extend_kind(void) { return best_kind(); }

/* Writes the new tokens' K and V, then attends. Returns 0, or -1 when out of memory or of a kind that this library was
 * not built for. */
int tandem_paged_extend(const struct args *a) {
#if defined(HAVE_AVX512)
    return extend(a);
#else
    return -1;
#endif
}
