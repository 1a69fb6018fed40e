/* Products of bf16 tiles, summed in fp32: by AMX, or by AVX512-BF16 to the same layout. Knows tiles, not what is in them.
 *
 * What is multiplied from the left lies in tiles of 16 rows x 32 inputs: a row is a line of 64 bytes. From the right come
 * steps of 32 inputs x 32 outputs, two tiles of 16 outputs each: line i of a tile holds inputs 2i and 2i + 1 of each of
 * its outputs, pair by pair (what AMX and AVX512-BF16 both multiply by). Sums are [rows, 32] fp32, inputs in ascending
 * order: a sum does not depend on which rows and outputs are computed beside it.
 *
 * Sources: Intel, "Architecture Instruction Set Extensions Programming Reference" (AMX tiles), and its optimization
 * manual, chapter 20 (2x2 blocks of tiles, operands kept in L1 and L2).
 */
#ifndef TANDEM_TILES_H
#define TANDEM_TILES_H
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vectors.h"

#define TILE 16                     /* rows, or outputs, of a tile */
#define STEP 32                     /* inputs of a tile */
#define PANEL 32                    /* outputs of two tiles */
#define LINE_BYTES 64
#define TILE_BYTES 1024
#define STEP_BYTES (2 * TILE_BYTES) /* two tiles from the right */

#define PART static __attribute__((noinline)) /* of some milliseconds: a profiler tells them apart */

enum kind { NONE = 0, AVX512 = 1, AMX = 2 };

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HAVE_AVX512 1

/* Memory of later steps. Past its end nothing is read: a prefetch does not fault. */
INLINE void fetch(const char *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += LINE_BYTES) _mm_prefetch(from + at, _MM_HINT_T1);
}

/* ---- AVX512-BF16: at most 8 rows of a tile by two tiles of outputs */

enum { ROWS = 8 };

/* sums [rows, 32] = x times w over `steps` steps, on top of what is there if `begun`. Step k fetches `ahead_bytes`. */
INLINE void avx512_block(const char *x, const char *w, float *sums, int64_t steps, const int rows, const int begun, const char *ahead, const int64_t ahead_bytes) {
    __m512 acc[ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) acc[r][half] = begun ? _mm512_load_ps(sums + r * PANEL + half * TILE) : _mm512_setzero_ps();
    for (int64_t k = 0; k < steps; k++, x += TILE_BYTES, w += STEP_BYTES) {
        fetch(ahead + k * ahead_bytes, ahead_bytes);
        for (int i = 0; i < TILE; i++) {
            const __m512bh low = (__m512bh)_mm512_load_si512(w + i * LINE_BYTES);
            const __m512bh high = (__m512bh)_mm512_load_si512(w + TILE_BYTES + i * LINE_BYTES);
            for (int r = 0; r < rows; r++) {
                int32_t pair;
                memcpy(&pair, x + r * LINE_BYTES + i * sizeof pair, sizeof pair);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
                acc[r][0] = _mm512_dpbf16_ps(acc[r][0], both, low);
                acc[r][1] = _mm512_dpbf16_ps(acc[r][1], both, high);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) _mm512_store_ps(sums + r * PANEL + half * TILE, acc[r][half]);
}
#endif

/* ---- AMX: at most 32 rows by two tiles of outputs */

#if defined(HAVE_AVX512) && defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__) && defined(__x86_64__)
#define HAVE_AMX 1

/* GCC's tile intrinsics do not say which memory they read. */
INLINE void settle(void) { __asm__ volatile("" ::: "memory"); }

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

/* Tiles 0 to 3: sums (rows 0-15 x outputs 0-15 and 16-31, then rows 16-31, or rows 0-15 of a second panel). 4, 5: x.
 * 6, 7: weights. */
INLINE void configure(int64_t rows) {
    struct tile_config c = {.palette = 1};
    const int64_t low = smaller(rows, TILE), high = rows > TILE ? rows - TILE : low;
    const uint8_t of_tile[8] = {(uint8_t)low, (uint8_t)low, (uint8_t)high, (uint8_t)high, (uint8_t)low, (uint8_t)high, TILE, TILE};
    for (int t = 0; t < 8; t++) c.bytes[t] = LINE_BYTES, c.rows[t] = of_tile[t];
    settle();
    _tile_loadconfig(&c);
}

/* Tiles 0 to 3 become the sums [32, 32] that are there if `begun`, else zeros. Rows 16-31 only if `two`. */
INLINE void begin_sums(const float *sums, const int two, const int begun) {
    const float *const below = sums + TILE * PANEL;
    const int stride = PANEL * sizeof(float);
    if (begun) {
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + TILE, stride);
        if (two) {
            _tile_loadd(2, below, stride);
            _tile_loadd(3, below + TILE, stride);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
}

INLINE void end_sums(float *sums, const int two) {
    float *const below = sums + TILE * PANEL;
    const int stride = PANEL * sizeof(float);
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + TILE, stride);
    if (two) {
        _tile_stored(2, below, stride);
        _tile_stored(3, below + TILE, stride);
    }
}

/* Sums `number` (0 to 3) += x, which tile 4 holds, times the tile at `w`. */
INLINE void add_product(const char *w, const int number) {
    if (number % 2) _tile_loadd(7, w, LINE_BYTES);
    else _tile_loadd(6, w, LINE_BYTES);
    if (number == 0) _tile_dpbf16ps(0, 4, 6);
    else if (number == 1) _tile_dpbf16ps(1, 4, 7);
    else if (number == 2) _tile_dpbf16ps(2, 4, 6);
    else _tile_dpbf16ps(3, 4, 7);
}

/* As avx512_block; rows 16-31 (if `two`) are those of the tiles x_block bytes behind. */
INLINE void amx_block(const char *x, int64_t x_block, const char *w, float *sums, int64_t steps, const int two, const int begun, const char *ahead, const int64_t ahead_bytes) {
    settle();
    begin_sums(sums, two, begun);
    for (int64_t k = 0; k < steps; k++, x += TILE_BYTES, w += STEP_BYTES) {
        fetch(ahead + k * ahead_bytes, ahead_bytes);
        _tile_loadd(4, x, LINE_BYTES);
        _tile_loadd(6, w, LINE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + TILE_BYTES, LINE_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, x + x_block, LINE_BYTES);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    end_sums(sums, two);
    settle();
}
#endif

/* The best kind this process may use. AMX needs the kernel's leave, once a process: it enlarges signal frames. */
INLINE enum kind best_kind(void) {
#if defined(HAVE_AMX)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0) return AMX;
#endif
#if defined(HAVE_AVX512)
    return AVX512;
#else
    return NONE;
#endif
}

#endif
