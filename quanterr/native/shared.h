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
#define LEAST 1e-15f /* scales of ggml's types that are smaller are zero, and so are parts */
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

#define LANES 16 /* in which sums are added up */

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

typedef struct { /* rows that were decoded: x and y, (places, cols) */
    const float *x, *y;
    const int64_t *places; /* of each of n rows, or -1; NULL: its own */
    int64_t n, cols;
    const float *scale, *zero, *shift; /* of y, as in kernel.c */
    int64_t scale_step, scale_height, zero_step, shift_step;
    float factor;          /* of all scales; 0: none */
    const int32_t *columns; /* group of each column; NULL: groups are next to each other */
    const int32_t *order;  /* column from which each was taken, or NULL */
    int64_t n_scales;      /* of the whole weight; 0: unknown */
    const float *near;     /* for each scale: what it may differ from a good one without loss; NULL: nothing */
} Rows;

#define MOST_FACTORS 16
enum { ROUNDED = 1, NEAREST = 2 }; /* all errors are half a step at most; or about as small as the format allows */

typedef struct { /* what the stored scales of a sample of rows allow */
    int32_t kind;             /* of codes */
    int32_t mantissa;         /* bits of codes that are floats, else 0 */
    float lowest, highest, normal;
    float below, above;       /* codes beyond are out of range */
    const float *levels, *bounds, *halves; /* of a table: all values, ascending; what separates them; half the distances; */
    const float *numbers;     /* and their numbers, from 0 on */
    int64_t n_levels;         /* LANES numbers follow those of each array, so that whole vectors can be loaded */
    const float *multiples;   /* of the scale that clips nothing: scales to try */
    int64_t n_multiples;      /* MOST_FACTORS at most */
    double lucky;             /* share of the worst error below which a good scale's is small by accident */
    double most;              /* largest good / stored scale that is not wrong */
    int64_t cols;             /* of a group */
    int32_t per_row;          /* each row has scales of its own; else one for all, or blocks */
    int32_t whole;            /* the sample is the whole weight */
    int32_t transposed;       /* each column has a scale of its own: columns are measured as rows, and a block is a column */
    int64_t every;            /* one of so many rows is used to measure the losses of scales; if codes are looked at closely, */
    int64_t every_closely;    /* one of these; 0: not possible */
    int64_t height;           /* rows of a block */
    int64_t first_block;      /* first row of the blocks that are used instead, their rows and columns; 0: none */
    int64_t block_rows, block_cols;
    float *block_values;      /* room for x in these rows and columns */
    float *ordered;           /* room for (2 · rows + 3) · columns of the sample, if it is transposed or columns of groups */
                              /* are not next to each other */
    float *near;              /* room for a number for each group of the weight, if scales are multiples of a step; else NULL: */
    int64_t run_cells;        /* cells of a run, in which scales have the same step; */
    int64_t run_groups;       /* its groups; */
    float of_largest;         /* and the step, as a multiple of the run's largest |x| */
    void *room;               /* 72 bytes for each group */
    double *columns;          /* room for 9 numbers for each of most_cols columns */
    int64_t most_cols;
    int32_t zeros;            /* out: what zero points have in common */
    int32_t plain;            /* out: 0, unless all codes and scales are as they should be: then ROUNDED or NEAREST */
    double x_sq, e_sq;        /* out: of all rows; all sums are 0 on entry */
    double steps_sq;          /* e² in steps, of ROUNDED codes */
    double best_sq;           /* of the nearest codes of all rows, if NEAREST; and of those out of range alone */
    double clipped_sq, clipped_x_sq;
    double beyond_sq;         /* e² of codes in range that are neither of the two nearest */
    int64_t clipped, off;     /* numbers out of range; and in range but two or more steps from the nearest */
    double group_x_sq;        /* of the groups that are used for the losses */
    double stored_sq, good_sq[2], worst_sq; /* losses of the nearest codes: with the stored scales, good ones, the worst */
    double scale_ratio;       /* median of stored / good scale */
    int64_t scale_n;          /* number of the weight's scales; out: 0 if their range and sum are unknown */
    double scale_low, scale_high, scale_sum;
} Sample;

void measure_sample(Sample *sample, const Rows *rows, double x_max);
