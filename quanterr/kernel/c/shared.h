/* What the sources of the kernel share: vectors, bits of floats, sums. */
#include <string.h>
#include "kernel.h"
#if defined(_WIN32) && !defined(__clang__)
#error "gcc for Windows misaligns vectors on the stack: use clang, or zig cc"
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define WIDTH 16 /* lanes of a vector */
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define MIN_MAGNITUDE 1e-15f /* scales of ggml's types that are smaller are zero, and so are parts */
#define MAGNITUDE 0x7FFFFFFF
#define ROUNDER 12582912 /* 1.5 · 2^23: adding and subtracting it rounds small numbers to integers, ties to even */

typedef float floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t shorts __attribute__((vector_size(2 * WIDTH)));
typedef uint8_t bytes __attribute__((vector_size(WIDTH)));
typedef double wide_doubles __attribute__((vector_size(4 * WIDTH))); /* half as many */

INLINE int32_t as_bits(float f) { int32_t bits; memcpy(&bits, &f, 4); return bits; }
INLINE float as_float(int32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
INLINE float half(uint16_t h) {
    int32_t m = h & 0x7FFF, sign = (int32_t)((uint32_t)(h & 0x8000) << 16);
    int32_t normal = (m << 13) + (112 << 23), below = as_bits((float)m * 0x1p-24f), special = (m << 13) | 0x7F800000;
    return as_float((m < 0x400 ? below : m < 0x7C00 ? normal : special) | sign);
}
INLINE floats load(const float *from) { floats v; memcpy(&v, from, sizeof v); return v; }
INLINE void store(float *to, floats v) { memcpy(to, &v, sizeof v); }
INLINE floats broadcast(float f) { return f - (floats){0}; } /* keeps the sign of zero */
INLINE floats choose(ints is, floats yes, floats no) { return (floats)((is & (ints)yes) | (~is & (ints)no)); }
INLINE floats magnitude(floats v) { return (floats)((ints)v & MAGNITUDE); }

#define LANES 16 /* number of partial sums that are added up side by side */

INLINE double sum_of(const double *lanes) {
    double half[8], quarter[4];
    for (int i = 0; i < 8; i++) half[i] = lanes[i] + lanes[i + 8];
    for (int i = 0; i < 4; i++) quarter[i] = half[i] + half[i + 4];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

typedef struct { wide_doubles low, high; } Sums; /* one for each lane of a vector */

INLINE Sums load_sums(const double *from) {
    Sums sums;
    memcpy(&sums.low, from, sizeof sums.low);
    memcpy(&sums.high, from + WIDTH / 2, sizeof sums.high);
    return sums;
}
INLINE void store_sums(double *to, Sums sums) {
    memcpy(to, &sums.low, sizeof sums.low);
    memcpy(to + WIDTH / 2, &sums.high, sizeof sums.high);
}
INLINE void add_squares(Sums *sums, floats v) { /* lane by lane: sums in an array would be stored each time */
    double of[WIDTH];
    for (int k = 0; k < WIDTH; k++) of[k] = (double)v[k] * v[k];
    Sums squares = load_sums(of);
    sums->low += squares.low;
    sums->high += squares.high;
}



void measure_sample(Sample *sample, const Rows *rows, double x_max);
