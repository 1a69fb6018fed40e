/* Attention of prompt chunks over a paged KV cache of bf16 or of 8 bits (fp8.h), causal, K and V read straight from their pages. The new tokens'
 * K and V are written first, so that a chunk and the prefix before it (cached, or of earlier chunks) are read alike.
 *
 * A work item is (blocks of query tokens, kv head): the query heads of a kv head are computed together, and so are requests that have
 * the same pages in front, as far as these reach. It passes over the keys in blocks of KEYS from position 0 on, online softmax from block to block. Everything is transposed, so
 * that a lane is a query and the softmax needs no sum across lanes:
 *
 *     S' [keys, queries]  = K  [keys, dim]   Q' [dim, queries]      K: copied out of its pages into tiles, once a block
 *     P' = exp(S' - max), in the very layout (and rounded to bf16, if so) that the next product takes from the right
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

#include "tiles/blocks.h"
#include "denormals.h"
#include "fp8.h"
#include "team.h"
#include "tiles/tiles.h"
#include "vectors.h"

#define KEYS 256           /* keys of a block: S' and P' of 32 queries stay in the L1 cache */
#define KEY_STEPS (KEYS / STEP)
#define COLUMNS 1024       /* queries of an item, all heads counted: O' stays in the L2 cache, K and V are tiled once for them */
#define ITEMS_A_THREAD 4   /* at least, so that threads finish together */

/* Mirrored by _Args in paged_attention.py. Strides of q, k_new and v_new are elements from token to token; heads are dense.
 * T tokens are written; `requests` of those that they belong to are attended, each a run of rows. */
struct args {
    const bf16 *q, *k_new, *v_new;              /* [T, heads, dim], [T, kv_heads, dim] x 2 */
    bf16 *out;                                  /* [T, heads, dim] dense; rows of no request attended are left alone */
    char *k_cache, *v_cache;                    /* address of this layer's K and V in unit 0 of page 0 */
    const float *sinks;                         /* [heads] a score beside those of the keys; NULL: none */
    const int32_t *page_table;                  /* [requests, table_width] */
    const int64_t *first_rows, *q_lens, *kv_lens; /* [requests]; kv_lens: the new tokens included */
    const int64_t *groups, *shared;             /* [groups + 1] the first request of each, and the end; [groups] tokens in front that lie in the same pages for all */
    const int64_t *token_pages, *token_offsets; /* [T] where each new token goes */
    int64_t q_stride, k_stride, v_stride;
    int64_t page_stride_bytes, unit_stride_bytes, table_width;
    int64_t tokens, requests, num_groups, heads, kv_heads, units, dim, page_size; /* each unit of a page holds kv_heads / units */
    int64_t window;                             /* the last tokens that a query sees, itself included; 0: all */
    int64_t is_fp8, kind;              /* is_fp8: of the cache */
    float scale, cap; /* a score s becomes cap * tanh(s / cap); 0: it stays */
};

/* Query tokens first..first+count-1 of a request's chunk; the first one's position is `position`. */
struct block {
    int64_t request, row, count, position;
};

/* Blocks first..first + count - 1: an item. They see the first `shared` keys alike, a multiple of KEYS. */
struct joint {
    int64_t first, count, shared, pairs, cost;
};

/* What one thread works on: a block of an item. The blocks of one share K, V, P' and S'. Tiles are those of tiles.h; a pair is 32 queries, two tiles from the right. */
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

/* The exponent of a row of this kv head, of 8 bits. */
INLINE int exponent_of(const struct work *w, const char *row) {
    const int64_t heads = w->a->kv_heads / w->a->units, head = w->head % heads;
    return (uint8_t)row[(heads - head) * w->a->dim + head];
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

/* Their tiles, softmax and results: tile_queries, tile_keys, tile_values, weigh, write_tile. */
#if defined(HAVE_AVX512_BF16)
#include "extend_avx512.h"
#else
#include "extend_native.h"
#endif

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
    (void)w;
    vector_steps(x, x_block, right, sums, steps, 2 * TILE, begun);
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
        product(w, w->k + key / TILE * w->steps * LEFT_TILE_BYTES, w->steps * LEFT_TILE_BYTES, w->q + pair * w->steps * READY_STEP_BYTES, w->s + key * PANEL, w->steps, 0);
    if (w->a->cap) cap_scores(w->s, count, w->a->scale, w->a->cap);
    const float scale = w->a->scale * 1.44269504088896341f; /* for powers of 2 */
    for (int side = 0; side < 2; side++) {
        const int64_t at = pair * PANEL + side * TILE, ahead = position_of(w, smaller(2 * pair + side, last_tile)) - from;
        const struct sight sight = sight_of(ahead, w->a->window, count);
        weigh(w->s + side * TILE, w->p + side * TILE * READY_LINE_BYTES, w->m + at, w->l + at, count, &sight, scale, from > first ? o + side * TILE : NULL, dims);
    }
    for (int64_t d = 0; d < dims; d += 2 * TILE) {
        const char *v = w->v + d / TILE * KEY_STEPS * LEFT_TILE_BYTES;
        if (from > first) product(w, v, KEY_STEPS * LEFT_TILE_BYTES, w->p, o + d * PANEL, count / STEP, 1);
        else product(w, v, KEY_STEPS * LEFT_TILE_BYTES, w->p, o + d * PANEL, count / STEP, 0);
    }
}

static void begin_block(struct work *w) {
    w->tiles = ceil_div(w->at.count, TILE) * w->group;
    w->pairs = ceil_div(w->tiles, 2);
    tile_queries(w);
    begin_weights(w);
}

/* Keys from..from + keys - 1, which all of `count` blocks see. */
static void attend_keys(const struct work *w, int64_t count, int64_t from, int64_t keys) {
    (w->a->is_fp8 ? tile_fp8_keys : tile_bf16_keys)(w, from, keys);
    (w->a->is_fp8 ? tile_fp8_values : tile_bf16_values)(w, from, keys);
    for (int64_t i = 0; i < count; i++)
        for (int64_t pair = 0; pair < w[i].pairs; pair++) attend_pair(w + i, pair, from);
}

PART void attend(struct work *w, const struct joint *j, struct loop *l) {
    for (int64_t i = 0; i < j->count; i++) begin_block(w + i);
    for (int64_t from = 0; from < j->shared; from += KEYS) attend_keys(w, j->count, from, KEYS);
    for (int64_t i = 0; i < j->count; i++) {
        const int64_t end = w[i].at.position + w[i].at.count;
        for (int64_t from = j->shared ? j->shared : first_block(w + i, w[i].at.position); from < end; from += KEYS)
            attend_keys(w + i, 1, from, smaller(KEYS, end - from));
    }
    for (int64_t i = 0; i < j->count; i++)
        for (int64_t tile = 0; tile < w[i].tiles && team_claims(l); tile++) write_tile(w + i, tile);
}

/* ---- all of them */

/* The memory behind the pointers of an item's first block, for items of at most `pairs` pairs. NULL when there is none. */
static char *place(struct work *w, int64_t pairs) {
    const size_t tile_q = (size_t)(pairs * w->steps * READY_STEP_BYTES), tile_kv = (size_t)(KEYS / TILE * w->steps * LEFT_TILE_BYTES);
    const size_t p = (size_t)(KEY_STEPS * READY_STEP_BYTES), s = KEYS * PANEL * sizeof(float), ml = (size_t)(pairs * PANEL) * sizeof(float);
    char *memory = team_scratch((int64_t)(tile_q + 2 * tile_kv + p + s + (size_t)(w->steps * STEP) * ml + 2 * ml));
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

/* Where a block's own part lies: behind that of the one before it. */
static void follow(struct work *w, const struct work *before, const struct block *at) {
    const int64_t pairs = before->pairs;
    *w = *before;
    w->at = *at;
    w->q += pairs * w->steps * READY_STEP_BYTES;
    w->o += pairs * w->steps * STEP * PANEL;
    w->m += pairs * PANEL;
    w->l += pairs * PANEL;
}

static int longest_first(const void *x, const void *y) {
    const struct joint *a = x, *b = y;
    return (a->cost < b->cost) - (a->cost > b->cost);
}

static int64_t pairs_of(int64_t tokens, int64_t group) { return ceil_div(ceil_div(tokens, TILE) * group, 2); }

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

static struct block *cut(const struct args *a, int64_t r, int64_t tokens, struct block *to) {
    for (int64_t first = 0; first < a->q_lens[r]; first += tokens) {
        const int64_t count = smaller(tokens, a->q_lens[r] - first);
        *to++ = (struct block){r, a->first_rows[r] + first, count, a->kv_lens[r] - a->q_lens[r] + first};
    }
    return to;
}

/* Blocks first..end - 1 -> items of at most `most` pairs, or of one block where nothing is shared. Return how many. */
static int64_t join(const struct block *blocks, int64_t first, int64_t end, int64_t shared, int64_t group, int64_t most, struct joint *to) {
    int64_t count = 0;
    for (int64_t i = first; i < end; i++) {
        const int64_t pairs = pairs_of(blocks[i].count, group), cost = blocks[i].count * (2 * blocks[i].position + blocks[i].count);
        if (!count || !shared || to[count - 1].pairs + pairs > most) to[count++] = (struct joint){.first = i, .shared = shared};
        struct joint *last = to + count - 1;
        last->count++, last->pairs += pairs, last->cost += cost;
    }
    return count;
}

/* All blocks and items, whose number it returns. */
static int64_t plan(const struct args *a, int64_t tokens, int64_t most, struct block *blocks, struct joint *joints) {
    int64_t count = 0, first = 0;
    for (int64_t g = 0; g < a->num_groups; g++) {
        struct block *end = blocks + first;
        for (int64_t r = a->groups[g]; r < a->groups[g + 1]; r++) end = cut(a, r, tokens, end);
        const int64_t shared = a->window ? 0 : a->shared[g] / KEYS * KEYS;
        count += join(blocks, first, end - blocks, shared, a->heads / a->kv_heads, most, joints + count);
        first = end - blocks;
    }
    qsort(joints, (size_t)count, sizeof *joints, longest_first);
    return count;
}

/* The blocks of an item, for one kv head. */
static void set_up(struct work *w, const struct block *blocks, const struct joint *j, int64_t head) {
    w->at = blocks[j->first], w->head = head;
    for (int64_t i = 0; i < j->count; i++) {
        if (i) follow(w + i, w + i - 1, blocks + j->first + i);
        w[i].pairs = pairs_of(w[i].at.count, w->group);
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

/* Keys that weigh next to nothing (their scores 87 below the best) would take six times the rest, as measured where most were
 * so: denormals are zeros here, as bf16 products have it in any case. */
static int extend(const struct args *a) {
    const int64_t tokens = tokens_of_blocks(a), group = a->heads / a->kv_heads, most = pairs_of(tokens, group);
    const size_t count = (size_t)count_blocks(a, tokens) + 1;
    struct block *blocks = malloc(count * sizeof *blocks);
    struct joint *joints = malloc(count * sizeof *joints);
    struct work *w = malloc((size_t)most * sizeof *w); /* a block has a pair */
    char *memory = NULL;
    if (blocks && joints && w) {
        w[0] = (struct work){.a = a, .group = group, .steps = ceil_div(a->dim, STEP)};
        memory = place(w, most);
    }
    if (memory) {
        const int64_t items = plan(a, tokens, most, blocks, joints);
        const uint64_t rounding = flush_denormals();
        for (struct loop l = team_loop(a->tokens, 0); team_next(&l);) write_token(a, l.item);
#if defined(HAVE_AMX)
        if (a->kind == AMX) configure(2 * TILE);
#endif
        for (struct loop l = team_repeats(items * a->kv_heads); team_next(&l);) {
            const struct joint *j = joints + l.item / a->kv_heads;
            set_up(w, blocks, j, l.item % a->kv_heads);
            attend(w, j, &l);
        }
#if defined(HAVE_AMX)
        if (a->kind == AMX) _tile_release();
#endif
        round_as(rounding);
    }
    free(w);
    free(joints);
    free(blocks);
    return memory ? 0 : -1;
}

/* ---- the library's face */

int tandem_paged_extend_kind(void) { return best_kind(); }

/* Writes the new tokens' K and V, then attends. Returns 0, or -1 when out of memory. */
int tandem_paged_extend(const struct args *a) {
    return extend(a);
}
