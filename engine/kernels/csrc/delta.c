/* Gated delta rule (Yang et al. 2024, "Gated Delta Networks"), token by token in fp32, with the norm and gate behind it.
 *
 * Of a value head with state S [keys, values]: S *= exp(g), u = b (v - S^T k), S += k u^T, o = S^T q. Columns of S know nothing of
 * one another: a thread takes a head, keeps 64 columns in its cache and passes all tokens of a request over them. That is fewer
 * operations than the form that multiplies 64 tokens at a time, and a prompt has the bits of single tokens, wherever it is cut.
 */
#include "states.h"
#include "team.h"

/* Mirrored by recurrent.py. */
struct delta {
    const struct state_rows *step;
    const void *mixed;  /* [rows, q | k | v] dense: key heads [keys], as many, value heads [values] */
    const void *gates;  /* [rows, beta | time], value heads each, before sigmoid and softplus; gates_stride apart */
    const void *z;      /* [rows, value heads * values], z_stride apart */
    const float *decay; /* [value heads]: -exp(A_log) */
    const float *bias;  /* [value heads]: of time */
    const float *norm;  /* [values] */
    void *state;        /* of slot 0: [value heads, keys, values] fp32 */
    float *sums;        /* [rows, value heads * values]: scratch */
    void *out;          /* [rows, value heads * values] dense: norm(o) * silu(z) */
    int64_t gates_stride, z_stride, slot_stride_bytes, key_heads, value_heads, keys, values, is_bf16;
    float eps;
};

/* to[0 .. size) = from / |from| * scale. */
INLINE void unit_vector(const void *from, int64_t at, int64_t size, float scale, float *to, int is_bf16) {
    f16v squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        const f16v x = load_some(from, at + i, size - i, is_bf16);
        squares += x * x;
    }
    const float factor = scale / sqrtf(sum(squares) + 1e-6f);
    for (int64_t i = 0; i < size; i += LANES) store_some(to, i, load_some(from, at + i, size - i, is_bf16) * factor, size - i, 0);
}

/* Columns `at`.. of one head's state over all tokens of a request. */
INLINE void pass_tokens(const struct delta *a, int64_t request, int64_t head, int64_t at, float *state, const int64_t keys, const int is_bf16) {
    const int64_t key_head = head / (a->value_heads / a->key_heads), all_keys = a->key_heads * keys;
    const int64_t width = 2 * all_keys + a->value_heads * a->values, left = a->values - at;
    float query[keys], key[keys], own[left >= BLOCK ? 1 : keys * BLOCK];
    int64_t stride;
    float *block = block_take(state, keys, a->values, at, own, &stride);
    for (int64_t t = a->step->starts[request]; t < a->step->starts[request + 1]; t++) {
        const float beta = sigmoid(load_one(a->gates, t * a->gates_stride + head, is_bf16));
        const float time = load_one(a->gates, t * a->gates_stride + a->value_heads + head, is_bf16);
        const float decay = expf(a->decay[head] * softplus(time + a->bias[head]));
        unit_vector(a->mixed, t * width + key_head * keys, keys, 1.0f / sqrtf((float)keys), query, is_bf16);
        unit_vector(a->mixed, t * width + all_keys + key_head * keys, keys, 1.0f, key, is_bf16);
        const struct block known = block_read(block, stride, key, keys);
        struct block value = block_load(a->mixed, t * width + 2 * all_keys + head * a->values + at, left, is_bf16);
        for (int v = 0; v < VECTORS; v++) value.of[v] = (value.of[v] - known.of[v] * decay) * beta;
        const struct block o = block_advance(block, stride, decay, key, query, keys, value);
        block_store(a->sums + (t * a->value_heads + head) * a->values, at, left, o);
    }
    block_put(state, keys, a->values, at, own);
}

INLINE void norm_and_gate(const struct delta *a, int64_t t, int64_t head, int is_bf16) {
    const int64_t values = a->values, at = (t * a->value_heads + head) * values;
    f16v squares = {0};
    for (int64_t i = 0; i < values; i += LANES) {
        const f16v x = load_some(a->sums, at + i, values - i, 0);
        squares += x * x;
    }
    const float factor = 1.0f / sqrtf(sum(squares) / (float)values + a->eps);
    for (int64_t i = 0; i < values; i += LANES) {
        const int64_t n = values - i;
        const f16v gate = silu(load_some(a->z, t * a->z_stride + head * values + i, n, is_bf16));
        const f16v x = load_some(a->sums, at + i, n, 0) * factor * load_some(a->norm, i, n, 0);
        store_some(a->out, at + i, x * gate, n, is_bf16);
    }
}

INLINE void pass_head(const struct delta *a, int64_t request, int64_t head, const int64_t keys, const int is_bf16) {
    float *state = (float *)((char *)a->state + a->step->slots[request] * a->slot_stride_bytes) + head * keys * a->values;
    for (int64_t at = 0; at < a->values; at += BLOCK) pass_tokens(a, request, head, at, state, keys, is_bf16);
    for (int64_t t = a->step->starts[request]; t < a->step->starts[request + 1]; t++) norm_and_gate(a, t, head, is_bf16);
}

/* Returns 0: a tape asks (team.c). */
int tandem_delta(const struct delta *a) {
    for (struct loop l = team_loop(a->step->batch * a->value_heads, 0); team_next(&l);) {
        const int64_t r = l.item / a->value_heads, h = l.item % a->value_heads;
        if (a->keys == 128 && a->is_bf16) pass_head(a, r, h, 128, 1);
        else pass_head(a, r, h, a->keys, (int)a->is_bf16);
    }
    return 0;
}
