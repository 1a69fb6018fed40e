/* Tiles and softmax of paged_extend.c by AVX-512, for the kinds that multiply bf16. */
#ifndef TANDEM_EXTEND_AVX512_H
#define TANDEM_EXTEND_AVX512_H

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
        if (is_fp8 && i < count) how = code_row(exponent_of(w, rows[i]));
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
        for (int64_t i = key; is_fp8 && i < smaller(key + STEP, count); i++) how[i - key] = code_row(exponent_of(w, rows[i]));
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

/* As weigh. Returns the factor for what was summed before, 0 at the first
 * block. A query that sees none of the keys keeps its sums: they weigh 0. */
INLINE __m512 weights_and_factor(const float *s, char *p, float *m, float *l, int64_t count, const struct sight *at, float scale) {
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

/* S' of one tile's queries -> P', and O' of theirs (NULL: there is none yet) to what it is beside the new maximum. `count` keys, a
 * multiple of 32. A query that sees none of the keys keeps its sums: they weigh 0. */
INLINE void weigh(const float *s, char *p, float *m, float *l, int64_t count, const struct sight *at, float scale, float *o, int64_t dims) {
    const __m512 factor = weights_and_factor(s, p, m, l, count, at, scale);
    if (o) rescale(o, factor, dims);
}

/* ---- results */

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

#endif
