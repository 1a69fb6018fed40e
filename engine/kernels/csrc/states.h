/* What kernels of recurrent layers share: which rows of a step are whose, where a request's state lies, and partial vectors. */
#ifndef TANDEM_STATES_H
#define TANDEM_STATES_H
#include "rows.h"

/* A step of `batch` requests. Mirrored by recurrent.py; a tape's calls point here, too. */
struct state_rows {
    const int64_t *starts; /* [batch + 1]: request i has rows starts[i] .. starts[i + 1] */
    const int32_t *slots;  /* [batch]: of its state; slot 0 is scratch, which any row may write */
    int64_t batch;
};

/* The first n <= 16 lanes of a row of numbers, zeros behind them. */
INLINE f16v load_some(const void *row, int64_t at, int64_t n, int is_bf16) {
    if (n >= LANES) return is_bf16 ? load_bf16((const bf16 *)row + at) : load_f32((const float *)row + at);
    float r[LANES] = {0};
    for (int64_t i = 0; i < n; i++)
        if (is_bf16) {
            const uint32_t bits = (uint32_t)((const bf16 *)row)[at + i] << 16;
            memcpy(r + i, &bits, sizeof bits);
        } else
            r[i] = ((const float *)row)[at + i];
    return load_f32(r);
}

INLINE void store_some(void *row, int64_t at, f16v x, int64_t n, int is_bf16) {
    float r[LANES];
    bf16 h[LANES];
    if (n >= LANES) {
        if (is_bf16) store_bf16((bf16 *)row + at, x);
        else store_f32((float *)row + at, x);
    } else if (is_bf16) {
        store_bf16(h, x);
        memcpy((bf16 *)row + at, h, sizeof(bf16) * (size_t)n);
    } else {
        store_f32(r, x);
        memcpy((float *)row + at, r, sizeof(float) * (size_t)n);
    }
}

INLINE float load_one(const void *row, int64_t at, int is_bf16) {
    if (!is_bf16) return ((const float *)row)[at];
    const uint32_t bits = (uint32_t)((const bf16 *)row)[at] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

INLINE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* ---- a block of a state: `keys` rows of BLOCK columns, `stride` floats apart. The caller gives the same columns to all calls,
 * so what a column becomes does not depend on how tokens are cut into calls. */
#define VECTORS 4
#define BLOCK (VECTORS * LANES)

struct block {
    f16v of[VECTORS];
};

/* sum_i key[i] * state[i]; `keys` is even. */
INLINE struct block block_read(const float *state, int64_t stride, const float *key, int64_t keys) {
    struct block even = {0}, odd = {0};
    for (int64_t i = 0; i < keys; i += 2)
        for (int v = 0; v < VECTORS; v++) {
            even.of[v] += key[i] * load_f32(state + i * stride + v * LANES);
            odd.of[v] += key[i + 1] * load_f32(state + (i + 1) * stride + v * LANES);
        }
    for (int v = 0; v < VECTORS; v++) even.of[v] += odd.of[v];
    return even;
}

/* state[i] = decay * state[i] + key[i] * value; returns sum_i query[i] * state[i]. */
INLINE struct block block_advance(float *state, int64_t stride, float decay, const float *key, const float *query, int64_t keys, struct block value) {
    struct block even = {0}, odd = {0};
    for (int64_t i = 0; i < keys; i += 2)
        for (int v = 0; v < VECTORS; v++) {
            float *at = state + i * stride + v * LANES;
            const f16v first = load_f32(at) * decay + key[i] * value.of[v];
            const f16v second = load_f32(at + stride) * decay + key[i + 1] * value.of[v];
            store_f32(at, first);
            store_f32(at + stride, second);
            even.of[v] += query[i] * first;
            odd.of[v] += query[i + 1] * second;
        }
    for (int v = 0; v < VECTORS; v++) even.of[v] += odd.of[v];
    return even;
}

/* Columns `at`.. of a state [keys, width]: in place where a whole block is left, else a copy in `own`, which `block_put` returns. */
INLINE float *block_take(float *state, int64_t keys, int64_t width, int64_t at, float *own, int64_t *stride) {
    const int64_t left = width - at;
    *stride = left >= BLOCK ? width : BLOCK;
    if (left >= BLOCK) return state + at;
    for (int64_t i = 0; i < keys; i++) {
        memset(own + i * BLOCK, 0, sizeof(float) * BLOCK);
        memcpy(own + i * BLOCK, state + i * width + at, sizeof(float) * (size_t)left);
    }
    return own;
}

INLINE void block_put(float *state, int64_t keys, int64_t width, int64_t at, const float *own) {
    const int64_t left = width - at;
    if (left >= BLOCK) return;
    for (int64_t i = 0; i < keys; i++) memcpy(state + i * width + at, own + i * BLOCK, sizeof(float) * (size_t)left);
}

INLINE struct block block_load(const void *row, int64_t at, int64_t left, int is_bf16) {
    struct block x = {0};
    for (int v = 0; v < VECTORS && v * LANES < left; v++) x.of[v] = load_some(row, at + v * LANES, left - v * LANES, is_bf16);
    return x;
}

INLINE void block_store(float *row, int64_t at, int64_t left, struct block x) {
    for (int v = 0; v < VECTORS && v * LANES < left; v++) store_some(row, at + v * LANES, x.of[v], left - v * LANES, 0);
}

#endif
