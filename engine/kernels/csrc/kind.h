/* The kind of arithmetic that a library is compiled for. Mirrored by Kind in build.py. */
#ifndef TANDEM_KIND_H
#define TANDEM_KIND_H

enum kind { NONE = 0, GENERIC = 1, NEON = 2, NEON_BF16 = 3, AVX2 = 4, AVX512 = 5, AVX512_BF16 = 6, AMX = 7 };

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HAVE_AVX512 1
#endif
#if defined(HAVE_AVX512) && defined(__AVX512BF16__)
#define HAVE_AVX512_BF16 1
#endif
#if defined(HAVE_AVX512_BF16) && defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__) && defined(__x86_64__)
#define HAVE_AMX 1
#endif
#if defined(__AVX2__) && defined(__FMA__)
#define HAVE_AVX2 1
#endif
#if defined(__aarch64__) && defined(__ARM_NEON)
#define HAVE_NEON 1
#endif
#if defined(HAVE_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAVE_NEON_BF16 1
#endif

/* Of the vectors; AMX multiplies beside them. */
#if defined(HAVE_AVX512_BF16)
#define VECTOR_KIND AVX512_BF16
#elif defined(HAVE_AVX512)
#define VECTOR_KIND AVX512
#elif defined(HAVE_AVX2)
#define VECTOR_KIND AVX2
#elif defined(HAVE_NEON_BF16)
#define VECTOR_KIND NEON_BF16
#elif defined(HAVE_NEON)
#define VECTOR_KIND NEON
#else
#define VECTOR_KIND GENERIC
#endif

#endif
