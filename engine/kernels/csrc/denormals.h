/* Whether the CPU computes with denormals. */
#ifndef TANDEM_DENORMALS_H
#define TANDEM_DENORMALS_H
#include <stdint.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

/* Makes zeros of denormals. Returns what is to be set again. */
static inline uint64_t flush_denormals(void) {
#if defined(__SSE__)
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040); /* of results, and of operands */
    return before;
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | 1 << 24));
    return before;
#else
    return 0;
#endif
}

static inline void round_as(uint64_t before) {
#if defined(__SSE__)
    _mm_setcsr((unsigned)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
    (void)before;
#endif
}

#endif
