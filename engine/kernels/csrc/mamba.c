/* Mamba2's state space (Dao and Gu 2024, "Transformers are SSMs"), token by token in fp32, with the gate and norm behind it.
 *
 * Of a head with state S [keys, values]: S = exp(t A) S + B (t x)^T, o = S^T C + D x; B and C are those of the head's group. Threads
 * take heads as in delta.c, and then groups of rows, since the norm is over all heads of a group.
 */
#include "states.h"
#include "team.h"

/* Mirrored by recurrent.py. */
struct mamba {
    const struct state_rows *step;
    const void *mixed;  /* [rows, x | B | C] dense: heads * values, groups * keys twice */
    const void *time;   /* [rows, heads] before softplus, time_stride apart */
    const void *gate;   /* [rows, heads * values], gate_stride apart */
    const float *decay; /* [heads]: A = -exp(A_log) */
    const float *bias;  /* [heads]: of time */
    const float *skip;  /* [heads]: D */
    const float *norm;  /* [heads * values] or NULL: no norm */
    void *state;        /* of slot 0: [heads, keys, values] fp32 */
    float *sums;        /* [rows, heads * values]: scratch */
    void *out;          /* [rows, heads * values] dense */
    int64_t time_stride, gate_stride, slot_stride_bytes, rows, heads, groups, keys, values, gate_first, is_bf16;
    float eps, shortest, longest; /* time is cut to this range */
};

INLINE void widen(const void *from, int64_t at, int64_t size, float *to, int is_bf16) {
    for (int64_t i = 0; i < size; i += LANES) store_some(to, i, load_some(from, at + i, size - i, is_bf16), size - i, 0);
}

/* Columns `at`.. of one head's state over all tokens of a request. */
INLINE void pass_tokens(const struct mamba *a, int64_t request, int64_t head, int64_t at, float *state, const int64_t keys, const int is_bf16) {
    const int64_t inner = a->heads * a->values, width = inner + 2 * a->groups * keys, left = a->values - at;
    const int64_t own_keys = inner + head / (a->heads / a->groups) * keys;
    float query[keys], key[keys], own[left >= BLOCK ? 1 : keys * BLOCK];
    int64_t stride;
    float *block = block_take(state, keys, a->values, at, own, &stride);
    for (int64_t t = a->step->starts[request]; t < a->step->starts[request + 1]; t++) {
        float time = softplus(load_one(a->time, t * a->time_stride + head, is_bf16) + a->bias[head]);
        time = time < a->shortest ? a->shortest : time > a->longest ? a->longest : time;
        widen(a->mixed, t * width + own_keys, keys, key, is_bf16);
        widen(a->mixed, t * width + own_keys + a->groups * keys, keys, query, is_bf16);
        const struct block x = block_load(a->mixed, t * width + head * a->values + at, left, is_bf16);
        struct block value = x;
        for (int v = 0; v < VECTORS; v++) value.of[v] *= time;
        struct block o = block_advance(block, stride, expf(time * a->decay[head]), key, query, keys, value);
        for (int v = 0; v < VECTORS; v++) o.of[v] += x.of[v] * a->skip[head];
        block_store(a->sums + t * inner + head * a->values, at, left, o);
    }
    block_put(state, keys, a->values, at, own);
}

INLINE void pass_head(const struct mamba *a, int64_t request, int64_t head, const int64_t keys, const int is_bf16) {
    float *state = (float *)((char *)a->state + a->step->slots[request] * a->slot_stride_bytes) + head * keys * a->values;
    for (int64_t at = 0; at < a->values; at += BLOCK) pass_tokens(a, request, head, at, state, keys, is_bf16);
}

INLINE f16v gated(const struct mamba *a, int64_t t, int64_t at, int64_t n, f16v x) {
    return x * silu(load_some(a->gate, t * a->gate_stride + at, n, (int)a->is_bf16));
}

/* The heads of a group in a row: gated; or with a norm before or behind the gate. */
static void finish(const struct mamba *a, int64_t t, int64_t group) {
    const int64_t inner = a->heads * a->values, size = inner / a->groups, from = group * size;
    float factor = 1.0f;
    if (a->norm) {
        f16v squares = {0};
        for (int64_t i = 0; i < size; i += LANES) {
            f16v x = load_some(a->sums, t * inner + from + i, size - i, 0);
            if (a->gate_first) x = gated(a, t, from + i, size - i, x);
            squares += x * x;
        }
        factor = 1.0f / sqrtf(sum(squares) / (float)size + a->eps);
    }
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t n = size - i;
        f16v x = gated(a, t, from + i, n, load_some(a->sums, t * inner + from + i, n, 0)) * factor;
        if (a->norm) x *= load_some(a->norm, from + i, n, 0);
        store_some(a->out, t * inner + from + i, x, n, (int)a->is_bf16);
    }
}

/* Returns 0: a tape asks (team.c). */
int tandem_mamba(const struct mamba *a) {
    for (struct loop l = team_loop(a->step->batch * a->heads, 0); team_next(&l);) {
        const int64_t r = l.item / a->heads, h = l.item % a->heads;
        if (a->keys == 128 && a->is_bf16) pass_head(a, r, h, 128, 1);
        else pass_head(a, r, h, a->keys, (int)a->is_bf16);
    }
    for (struct loop l = team_loop(a->rows * a->groups, 0); team_next(&l);) finish(a, l.item / a->groups, l.item % a->groups);
    return 0;
}
