/* Products of tiles by AMX: at most 32 rows by two tiles of outputs.
 *
 * Sources: Intel, "Architecture Instruction Set Extensions Programming Reference" (AMX tiles), and its optimization
 * manual, chapter 20 (2x2 blocks of tiles, operands kept in L1 and L2).
 */
#ifndef TANDEM_AMX_H
#define TANDEM_AMX_H
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Whether this process may. It needs the kernel's leave, once: it enlarges signal frames. */
INLINE int amx_allowed(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

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

/* As product_block; rows 16-31 (if `two`) are those of the tiles x_block bytes behind. */
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
