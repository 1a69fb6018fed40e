/* The short causal convolution of recurrent layers: each channel by itself, then SiLU. The state of a request is its last
 * inputs, in the type of the rows, so a prompt may be cut anywhere without a change of bits.
 */
#include "states.h"
#include "team.h"

#define PARALLEL_ELEMENTS 32768 /* fewer are not worth waking threads for */
#define MAX_TAPS 8

/* Mirrored by recurrent.py. */
struct conv {
    const struct state_rows *step;
    const void *x;       /* [rows, channels], x_stride elements apart */
    const float *weight; /* [taps, channels]: the oldest input's first */
    const float *bias;   /* [channels] or NULL */
    void *state;         /* of slot 0: [channels, taps - 1], the newest input last */
    void *out;           /* [rows, channels] dense */
    int64_t rows, channels, taps, x_stride, slot_stride_bytes, is_bf16;
};

/* Channels at .. at + 16 of one request. */
INLINE void convolve(const struct conv *a, int64_t request, int64_t at, const int64_t taps, const int is_bf16) {
    const int64_t past = taps - 1, n = a->channels - at, size = is_bf16 ? sizeof(bf16) : sizeof(float);
    char *state = (char *)a->state + a->step->slots[request] * a->slot_stride_bytes + at * past * size;
    f16v window[MAX_TAPS], weight[MAX_TAPS], bias = {0};
    float kept[MAX_TAPS * LANES], column[LANES];
    for (int64_t i = 0; i < past; i++) store_f32(kept + i * LANES, load_some(state, i * LANES, n * past - i * LANES, is_bf16));
    for (int64_t j = 0; j < past; j++) {
        for (int64_t c = 0; c < LANES; c++) column[c] = kept[c * past + j];
        window[j] = load_f32(column);
    }
    for (int64_t j = 0; j < taps; j++) weight[j] = load_some(a->weight + j * a->channels, at, n, 0);
    if (a->bias) bias = load_some(a->bias, at, n, 0);
    for (int64_t t = a->step->starts[request]; t < a->step->starts[request + 1]; t++) {
        window[past] = load_some(a->x, t * a->x_stride + at, n, is_bf16);
        f16v sum = bias;
        for (int64_t j = 0; j < taps; j++) sum += weight[j] * window[j];
        store_some(a->out, t * a->channels + at, silu(sum), n, is_bf16);
        for (int64_t j = 0; j < past; j++) window[j] = window[j + 1];
    }
    for (int64_t j = 0; j < past; j++) {
        store_f32(column, window[j]);
        for (int64_t c = 0; c < LANES; c++) kept[c * past + j] = column[c];
    }
    for (int64_t i = 0; i < past && n * past > i * LANES; i++) store_some(state, i * LANES, load_f32(kept + i * LANES), n * past - i * LANES, is_bf16);
}

/* Returns 0: a tape asks (team.c). */
int tandem_conv(const struct conv *a) {
    const int64_t pieces = (a->channels + LANES - 1) / LANES;
    const int64_t items = a->step->batch * pieces, at_once = a->rows * a->channels < PARALLEL_ELEMENTS ? items : 0;
    for (struct loop l = team_loop(items, at_once); team_next(&l);) {
        const int64_t r = l.item / pieces, p = l.item % pieces;
        if (a->taps == 4 && a->is_bf16) convolve(a, r, p * LANES, 4, 1);
        else convolve(a, r, p * LANES, a->taps, (int)a->is_bf16);
    }
    return 0;
}
