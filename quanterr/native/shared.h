/* What the sources of the kernel share: exported functions, vectors, bits of floats. */
#include <stdint.h>
#include <string.h>
#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#if !defined(__clang__)
#error "gcc for Windows misaligns vectors on the stack: use clang, or zig cc"
#endif
#else
#define EXPORT __attribute__((visibility("default")))
#endif
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define WIDTH 16 /* lanes of a vector */
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define MAGNITUDE 0x7FFFFFFF
#define ROUNDER 12582912 /* 1.5 · 2^23: adding and subtracting it rounds small numbers to integers, ties to even */

typedef float floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef uint8_t bytes __attribute__((vector_size(WIDTH)));

INLINE float as_float(int32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
