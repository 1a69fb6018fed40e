/* Tiles and softmax of paged_extend.c by vectors as wide as the CPU's: the kinds without AVX512-BF16. */
#ifndef TANDEM_EXTEND_NATIVE_H
#define TANDEM_EXTEND_NATIVE_H

/* ---- tiles */

/* Elements from..from+31 of a row of bf16, zeros past its end. */
INLINE void some_of(const bf16 *row, int64_t from, int64_t dim, bf16 *to) {
    const int64_t count = smaller(STEP, dim - from);
    memcpy(to, row + from, (size_t)count * sizeof *to);
    memset(to + count, 0, (size_t)(STEP - count) * sizeof *to);
}

PART void tile_queries(const struct work *w) {
    const struct args *a = w->a;
    for (int64_t tile = 0; tile < 2 * w->pairs; tile++) {
        const int64_t token = tile / w->group * TILE, left = tile < w->tiles ? w->at.count - token : 0;
        const bf16 *from = a->q + (w->at.row + token) * a->q_stride + (w->head * w->group + tile % w->group) * a->dim;
        for (int64_t step = 0; step < w->steps; step++) {
            char *to = w->q + ((tile / 2 * w->steps + step) * 2 + tile % 2) * TILE * READY_LINE_BYTES;
            bf16 rows[TILE][STEP], line[2 * TILE];
            memset(rows, 0, sizeof rows);
            for (int64_t i = 0; i < smaller(left, TILE); i++) some_of(from + i * a->q_stride, step * STEP, a->dim, rows[i]);
            for (int pair = 0; pair < TILE; pair++) {
                for (int i = 0; i < 2 * TILE; i++) line[i] = rows[i / 2][2 * pair + i % 2];
                store_ready(to + pair * READY_LINE_BYTES, bf16_line((const char *)line), NULL);
            }
        }
    }
}

/* Elements from..from+31 of a row of the cache, zeros past its end. */
INLINE void kept_of(const struct work *w, const char *row, int64_t from, left *to, const int is_fp8) {
    bf16 words[STEP];
    if (is_fp8) {
        const int exponent = exponent_of(w, row);
        for (int64_t at = 0; at < STEP; at += LANES)
            store_bf16(words + at, from + at < w->a->dim ? load_codes(row + from + at, exponent) : (f16v){0});
    } else {
        some_of((const bf16 *)row, from, w->a->dim, words);
    }
    for (int i = 0; i < STEP; i++) to[i] = to_left(words[i]);
}

/* `count` keys into tiles of K, filled up with zeros to a multiple of 32. */
INLINE void tile_keys(const struct work *w, int64_t from, int64_t count, const int is_fp8) {
    const char *rows[KEYS];
    find_rows(w, w->a->k_cache, from, count, rows);
    for (int64_t i = 0; i < ceil_div(count, STEP) * STEP; i++)
        for (int64_t step = 0; step < w->steps; step++) {
            left *to = (left *)(w->k + (i / TILE * w->steps + step) * LEFT_TILE_BYTES + i % TILE * LEFT_LINE_BYTES);
            if (i < count) kept_of(w, rows[i], step * STEP, to, is_fp8);
            else memset(to, 0, LEFT_LINE_BYTES);
        }
}

/* The same keys' V, transposed. */
INLINE void tile_values(const struct work *w, int64_t from, int64_t count, const int is_fp8) {
    const char *rows[KEYS];
    find_rows(w, w->a->v_cache, from, count, rows);
    for (int64_t key = 0; key < count; key += STEP)
        for (int64_t step = 0; step < w->steps; step++) {
            left own[STEP][STEP];
            memset(own, 0, sizeof own);
            for (int64_t i = 0; i < smaller(STEP, count - key); i++) kept_of(w, rows[key + i], step * STEP, own[i], is_fp8);
            for (int dim = 0; dim < STEP; dim++) {
                left *to = (left *)(w->v + ((2 * step + dim / TILE) * KEY_STEPS + key / STEP) * LEFT_TILE_BYTES + dim % TILE * LEFT_LINE_BYTES);
                for (int i = 0; i < STEP; i++) to[i] = own[i][dim];
            }
        }
}

/* ---- softmax */

INLINE vec all_same(float x) { return all_of(&x); }

/* `x` where `mask`, else `y`. */
INLINE vec chosen(ivec mask, vec x, vec y) { return (vec)(((ivec)x & mask) | ((ivec)y & ~mask)); }

/* 2^x for x <= 0 or barely above: a minimax polynomial on [-0.5, 0.5], relative error 2e-07. Below 2^-126 it is 0. */
INLINE vec exp2_of(vec x) {
    const vec low = all_same(-126.0f), magic = all_same(12582912.0f); /* adding it rounds to the nearest integer */
    const ivec underflow = x < low; /* false for NaN, which must pass */
    x = chosen(underflow, low, x);
    const vec shifted = x + magic, r = x - (shifted - magic);
    vec y = times_plus(r, all_same(1.32647385e-03f), all_same(9.67151309e-03f));
    y = times_plus(y, r, all_same(5.55073370e-02f));
    y = times_plus(y, r, all_same(2.40222421e-01f));
    y = times_plus(y, r, all_same(6.93146978e-01f));
    y = times_plus(y, r, all_same(1.0f));
    const ivec power = ((ivec)shifted - (ivec)magic + 127) << 23;
    return (vec)((ivec)(y * (vec)power) & ~underflow);
}

/* Which queries of part q see key `key`. */
INLINE ivec seeing(const struct sight *at, int64_t key, const int q) {
    const int64_t first = key - at->ahead, end = at->window ? first + at->window : TILE;
    const int32_t from = (int32_t)(first < 0 ? 0 : smaller(first, TILE)), to = (int32_t)(end < 0 ? 0 : smaller(end, TILE));
    ivec lanes;
    for (int i = 0; i < WIDTH; i++) lanes[i] = q * WIDTH + i;
    return (ivec)(lanes >= from) & (ivec)(lanes < to);
}

INLINE vec score_at(const float *s, int64_t key, const int q) { return load_vec(s + key * PANEL + q * WIDTH); }

/* The largest score that each query of part q sees. */
INLINE vec largest_of(const float *s, int64_t count, const struct sight *at, const int q) {
    const vec none = all_same(-INFINITY);
    vec best[4] = {none, none, none, none};
    int64_t i = 0;
    for (; i < at->from; i++) best[0] = larger_vec(best[0], chosen(seeing(at, i, q), score_at(s, i, q), none));
    for (; i < at->to; i += 4)
        for (int j = 0; j < 4; j++) best[j] = larger_vec(best[j], score_at(s, i + j, q));
    for (; i < count; i++) best[0] = larger_vec(best[0], chosen(seeing(at, i, q), score_at(s, i, q), none));
    return larger_vec(larger_vec(best[0], best[1]), larger_vec(best[2], best[3]));
}

/* The weights of keys i and i + 1 -> their line of P', and into the sums of even and odd keys; `all`: each query sees them. */
INLINE void add_pair(const float *s, char *p, int64_t i, const struct sight *at, const int q, const int all, vec times, vec less, vec *even, vec *odd) {
    vec x = exp2_of(times_plus(score_at(s, i, q), times, less)), y = exp2_of(times_plus(score_at(s, i + 1, q), times, less));
    if (!all) {
        x = (vec)((ivec)x & seeing(at, i, q));
        y = (vec)((ivec)y & seeing(at, i + 1, q));
    }
    *even += x;
    *odd += y;
    put_pair(p + i / STEP * READY_STEP_BYTES + i % STEP / 2 * READY_LINE_BYTES, q, x, y);
}

/* O' of part q's queries, where any factor is not 1 (times 1 changes no bit). */
INLINE void rescale(float *o, vec factor, int64_t dims) {
    const ivec changed = factor != all_same(1.0f);
    int any = 0;
    for (int i = 0; i < WIDTH; i++) any |= changed[i];
    if (!any) return;
    for (int64_t d = 0; d < dims; d++) store_vec(o + d * PANEL, load_vec(o + d * PANEL) * factor);
}

/* Part q of weigh. */
INLINE void weigh_part(const float *s, char *p, float *m, float *l, int64_t count, const struct sight *at, float scale, float *o, int64_t dims, const int q) {
    const vec before = load_vec(m), now = larger_vec(before, largest_of(s, count, at, q)), times = all_same(scale), less = now * -times;
    vec even = all_same(0.0f), odd = even;
    int64_t i = 0;
    for (; i < at->from; i += 2) add_pair(s, p, i, at, q, 0, times, less, &even, &odd);
    for (; i < at->to; i += 2) add_pair(s, p, i, at, q, 1, times, less, &even, &odd);
    for (; i < count; i += 2) add_pair(s, p, i, at, q, 0, times, less, &even, &odd);
    const ivec begun = before != all_same(-INFINITY), same = before == now;
    vec factor = (vec)((ivec)exp2_of(times_plus(before, times, less)) & begun);
    factor = chosen(same, all_same(1.0f), factor); /* the residue of a product is no reason to rescale */
    store_vec(m, now);
    store_vec(l, times_plus(load_vec(l), factor, even + odd));
    if (o) rescale(o, factor, dims);
}

/* S' of one tile's queries -> P', and O' of theirs (NULL: there is none yet) to what it is beside the new maximum. `count` keys, a
 * multiple of 32. A query that sees none of the keys keeps its sums: they weigh 0. */
PART void weigh(const float *s, char *p, float *m, float *l, int64_t count, const struct sight *at, float scale, float *o, int64_t dims) {
    for (int q = 0; q < PARTS; q++) weigh_part(s, p, m + q * WIDTH, l + q * WIDTH, count, at, scale, o ? o + q * WIDTH : NULL, dims, q);
}

/* ---- results */

PART void write_tile(const struct work *w, int64_t tile) {
    const struct args *a = w->a;
    const int64_t token = tile / w->group * TILE, rows = smaller(TILE, w->at.count - token), side = tile % 2 * TILE;
    const float *o = w->o + tile / 2 * w->steps * STEP * PANEL + side;
    bf16 *out = a->out + ((w->at.row + token) * a->heads + w->head * w->group + tile % w->group) * a->dim;
    for (int64_t i = 0; i < rows; i++) {
        const float inverse = 1.0f / w->l[tile / 2 * PANEL + side + i];
        for (int64_t d = 0; d < a->dim; d += LANES) {
            float column[LANES];
            for (int j = 0; j < LANES; j++) column[j] = o[(d + j) * PANEL + i] * inverse;
            store_bf16(out + i * a->heads * a->dim + d, load_f32(column));
        }
    }
}

#endif
