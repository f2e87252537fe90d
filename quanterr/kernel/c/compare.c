/* One pass over the codes of two weights: read, decode, add up. C11, no dependency, no Python.
 *
 * Called through ctypes, which releases the interpreter lock for a whole range of rows. exact_sums in
 * kernel/specification.py specifies every sum, and a format's own dequantize specifies every value.
 *
 * Sums. A segment is SEGMENT columns of a row, starting at a multiple of SEGMENT. It is added up in 16 float32 lanes,
 * the same on every instruction set, and the lanes in float64. Segments are added in order, in float64, to a strip of
 * STRIP columns; strips are added to the total in exact integers. So neither the cut into chunks nor the number of
 * threads changes a digit. A segment that float32 cannot sum well is added up in float64 instead: one with elements
 * that are not finite, too large or too small to square, all alike, or dominated by one; or with y far below x.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if !defined(_WIN32)
#include <unistd.h>
#endif
#include "shared.h"
#include "blocks.h"

/* Assumptions about the machine and its compiler; on any other the kernel does not compile, with this message. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "checkpoints are little-endian, and read as they are");
_Static_assert(sizeof(float) == 4 && FLT_RADIX == 2 && FLT_MANT_DIG == 24 && FLT_MAX_EXP == 128 && FLT_MIN_EXP == -125,
               "float is not IEEE-754 binary32");
_Static_assert(sizeof(double) == 8 && DBL_MANT_DIG == 53 && DBL_MAX_EXP == 1024 && DBL_MIN_EXP == -1021,
               "double is not IEEE-754 binary64");
_Static_assert(FLT_EVAL_METHOD == 0, "sums would be rounded elsewhere than on other machines");
_Static_assert(sizeof(void *) == 8, "addresses are not those of a 64-bit system");
_Static_assert(sizeof(int) == 4 && -1 >> 1 == -1, "int is not of 32 bits, or shifts no sign");

#define SEGMENT 512
#define RUN 8    /* elements of a lane added in float32 before float64 takes over */
#define FLUSHED (RUN * LANES)
#define WINDOWS (SEGMENT / WINDOW)
#define STRIP 16384
#define AT_ONCE 64 /* columns of AWQ words that are unpacked together */
#define SIDE_BY_SIDE 16 /* columns that are rotated together */
#define BINS 0x7F80 /* bins of a histogram: one per finite nonnegative bfloat16 number */
#define RELATIVE_OUTLIER 0.01 /* must equal RELATIVE_OUTLIER in quanterr/metrics */

#define APART static __attribute__((noinline)) /* keeps all registers for one loop */

typedef int8_t eight_bytes __attribute__((vector_size(8)));
typedef int32_t eight_ints __attribute__((vector_size(32)));
typedef float eight_floats __attribute__((vector_size(32)));
typedef uint8_t sixteen_bytes __attribute__((vector_size(16)));
typedef uint16_t eight_shorts __attribute__((vector_size(16)));
typedef uint32_t four_words __attribute__((vector_size(16)));
typedef uint64_t two_words __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(4 * WIDTH)));
typedef int8_t signed_bytes __attribute__((vector_size(WIDTH)));
typedef int16_t signed_shorts __attribute__((vector_size(2 * WIDTH)));

enum { CUT_SHORT = -1 }; /* a status; any but this and DONE is -errno */



typedef struct { /* counts and extremes by lane; comparisons give -1, so counts are negative */
    int32_t x_zero[LANES], y_zero[LANES], zero_reference[LANES], outliers[LANES], relative_outliers[LANES];
    int32_t relative_max[LANES], cast_max[LANES], not_e_min[LANES]; /* bits of floats; not_e_min: their complement */
} Counts;

typedef struct {
    int64_t limbs[N_SUMS][LIMBS];
    Counts counts; /* counts of a strip */
    double strip[N_SUMS];
    double x_sq, e_sq, e_max; /* sums and maximum of a row */
    int zeroed;               /* all y of the row are zero */
    float *x_peaks, *e_peaks; /* max |x| and max |e| of each window, in a row of cells; or NULL */
    uint16_t bins[SEGMENT];
} State;

INLINE double larger_of(double a, double b) { return a > b ? a : b; }
INLINE double smaller_of(double a, double b) { return a < b ? a : b; }
INLINE int64_t smaller_number(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- exact sums ---- */

static void add_exactly(int64_t *limbs, double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    uint64_t mantissa = bits & ((1ull << 52) - 1);
    int exponent = (int)(bits >> 52 & 0x7FF);
    if (exponent) mantissa |= 1ull << 52;
    else exponent = 1;
    int64_t sign = bits >> 63 ? -1 : 1;
    int limb = (exponent - 1) >> 5, shift = (exponent - 1) & 31;
    uint64_t low = mantissa & 0xFFFFFFFF, high = mantissa >> 32;
    uint64_t a = low << shift, b = high << shift; /* b counts 2^32; its 21 bits become at most 52 */
    limbs[limb] += sign * (int64_t)(a & 0xFFFFFFFF);
    limbs[limb + 1] += sign * (int64_t)((a >> 32) + (b & 0xFFFFFFFF));
    limbs[limb + 2] += sign * (int64_t)(b >> 32);
}

static void carry(const int64_t *limbs, uint32_t *out) {
    int64_t rest = 0;
    for (int i = 0; i < LIMBS; i++) {
        rest += limbs[i];
        out[i] = (uint32_t)((uint64_t)rest & 0xFFFFFFFF);
        rest = rest >= 0 ? rest >> 32 : -((-rest + 0xFFFFFFFF) >> 32);
    }
}

/* ---- one segment ---- */

INLINE int bin_of(float magnitude) { /* rounded to bfloat16, ties to even */
    int32_t bits = as_bits(magnitude), bin = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return bin < BINS ? bin : BINS - 1;
}

/* Adds up the elements of a segment from `first` on in float64, whatever their values. */
APART void precise(const float *x, const float *y, int first, int n, const float *weights, Run *run, State *s) {
    for (int i = first; i < n; i++) {
        double a = x[i], b = y[i], e = b - a, a_abs = fabs(a), e_abs = fabs(e);
        if (!isfinite(a) || !isfinite(b)) {
            run->nonfinite_x += !isfinite(a);
            run->nonfinite_y += !isfinite(b);
            continue;
        }
        double terms[N_SUMS] = {a, b, e, a_abs, e_abs, a * a, b * b, e * e, a * b, 0, 0, 0};
        run->n++;
        run->y_zero += b == 0;
        if (a == 0) {
            run->x_zero++;
            run->zero_reference += b != 0;
        } else {
            terms[SUM_RELATIVE] = e_abs / a_abs;
            run->relative_max = larger_of(run->relative_max, terms[SUM_RELATIVE]);
        }
        if (run->normal > 0) run->cast_max = larger_of(run->cast_max, e_abs / larger_of(a_abs, run->normal));
        if (s->x_peaks) {
            s->x_peaks[i / WINDOW] = fmaxf(s->x_peaks[i / WINDOW], (float)a_abs);
            s->e_peaks[i / WINDOW] = fmaxf(s->e_peaks[i / WINDOW], (float)e_abs);
        }
        if (weights) {
            terms[SUM_WEIGHTED_X_SQ] = a * a * weights[i];
            terms[SUM_WEIGHTED_E_SQ] = e * e * weights[i];
        }
        for (int k = 0; k < N_SUMS; k++) s->strip[k] += terms[k];
        run->outliers += e_abs > run->outlier;
        run->relative_outliers += e_abs > RELATIVE_OUTLIER * a_abs;
        s->e_max = larger_of(s->e_max, e_abs);
        run->x_max = larger_of(run->x_max, a_abs);
        run->e_min = smaller_of(run->e_min, e_abs);
        run->counts[bin_of((float)e_abs)]++;
    }
}

INLINE int64_t count_of(const int32_t *lanes) {
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total -= lanes[i];
    return total;
}
INLINE int32_t max_of(const int32_t *lanes) {
    int32_t max = lanes[0];
    for (int i = 1; i < LANES; i++) max = lanes[i] > max ? lanes[i] : max;
    return max;
}
#if defined(__AVX512F__)
INLINE ints larger(ints a, ints b) { return (ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
INLINE ints larger(ints a, ints b) { return (ints)_mm256_max_epi32((__m256i)a, (__m256i)b); }
#else
INLINE ints larger(ints a, ints b) { ints m = a > b; return (a & m) | (b & ~m); }
#endif
INLINE int in_range(int32_t bits) { /* zero, or between 2^-40 and 2^40 */
    return bits == 0 || (bits >= (127 - 40) << 23 && bits <= (127 + 40) << 23);
}

typedef struct { /* sums and extremes of a segment by lane */
    double x[LANES], e[LANES], x_abs[LANES], e_abs[LANES], x_sq[LANES], e_sq[LANES], xe[LANES], relative[LANES];
    double weighted_x_sq[LANES], weighted_e_sq[LANES];
    int32_t e_max[WINDOWS][LANES], x_max[WINDOWS][LANES];
    Counts counts;
} Lanes;

#define STORE(to, name) memcpy((to)->name + lane, &name, sizeof name)

INLINE void flush(Sums *sums, floats v) {
    double of[WIDTH];
    for (int k = 0; k < WIDTH; k++) of[k] = v[k];
    Sums wide = load_sums(of);
    sums->low += wide.low;
    sums->high += wide.high;
}

/* Adds up the lanes that one vector holds, from `lane` on. A lane sums RUN elements in float32, then in float64. */
INLINE void products(const float *x, const float *y, int n, int lane, Lanes *t) {
    Sums sums[7] = {0};
    for (int begin = lane; begin < n; begin += FLUSHED) {
        floats x_sum = {0}, e_sum = {0}, x_abs = {0}, e_abs = {0}, x_sq = {0}, e_sq = {0}, xe = {0};
        for (int at = begin; at < n && at < begin + FLUSHED; at += WINDOW) {
            ints e_max = {0}, x_max = {0};
            for (int i = at; i < n && i < at + WINDOW; i += LANES) {
                floats a = load(x + i), e = load(y + i) - a;
                ints xi = (ints)a & MAGNITUDE, ei = (ints)e & MAGNITUDE;
                x_sum += a; e_sum += e; x_abs += (floats)xi; e_abs += (floats)ei;
                x_sq += a * a; e_sq += e * e; xe += a * e;
                e_max = larger(ei, e_max);
                x_max = larger(xi, x_max);
            }
            memcpy(t->e_max[at / WINDOW] + lane, &e_max, sizeof e_max);
            memcpy(t->x_max[at / WINDOW] + lane, &x_max, sizeof x_max);
        }
        flush(sums + 0, x_sum); flush(sums + 1, e_sum); flush(sums + 2, x_abs); flush(sums + 3, e_abs);
        flush(sums + 4, x_sq); flush(sums + 5, e_sq); flush(sums + 6, xe);
    }
    double *to[7] = {t->x, t->e, t->x_abs, t->e_abs, t->x_sq, t->e_sq, t->xe};
    for (int i = 0; i < 7; i++) store_sums(to[i] + lane, sums[i]);
}

APART void add_products(const float *x, const float *y, int n, int lane, Lanes *t) {
    if (n == SEGMENT) products(x, y, SEGMENT, lane, t); /* most are: the compiler then knows how often each loop runs */
    else products(x, y, n, lane, t);
}

/* Returns the largest bits over the windows of n elements, and writes the largest value of each window to `peaks`. */
INLINE int32_t largest(int32_t lanes[WINDOWS][LANES], int n, float *peaks) {
    int32_t all = 0;
    for (int window = 0; window * WINDOW < n; window++) {
        int32_t own = max_of(lanes[window]);
        peaks[window] = as_float(own);
        all = own > all ? own : all;
    }
    return all;
}

/* Adds to the counts of n bins, an even number, in two tables: a count need not wait for the previous one. */
INLINE void add_bins(const uint16_t *bins, int n, uint32_t *counts, uint32_t times) {
    uint32_t *even = counts, *odd = counts + ROOM;
    for (int i = 0; i < n; i += 2) {
        even[bins[i]] += times;
        odd[bins[i + 1]] += times;
    }
}

/* Bins are counted a window behind, while vectors are computed: loads would wait for what has just been stored. */
INLINE void count(const float *x, const float *y, int n, int lane, const Run *run, Lanes *t, uint16_t *bins, int cast) {
    uint32_t *counts = run->counts;
    float outlier = (float)run->outlier;
    ints relative_max = {0}, cast_max = {0}, not_e_min = {0}, normal = {0};
    normal += as_bits((float)run->normal);
    ints x_zero = {0}, y_zero = {0}, zero_reference = {0}, outliers = {0}, relative_outliers = {0};
    Sums total = {0};
    not_e_min += INT32_MIN; /* ~MAGNITUDE */
    for (int begin = lane; begin < n; begin += FLUSHED) {
        floats relative = {0};
        for (int i = begin; i < n && i < begin + FLUSHED; i += LANES) {
            floats a = load(x + i), b = load(y + i), e = b - a;
            ints xi = (ints)a & MAGNITUDE, ei = (ints)e & MAGNITUDE;
            ints x0 = xi == 0, y0 = b == 0;
            ints ri = (ints)((floats)ei / (floats)xi) & ~x0;
            relative += (floats)ri;
            relative_max = larger(ri, relative_max);
            if (cast) cast_max = larger((ints)((floats)ei / (floats)larger(xi, normal)), cast_max);
            relative_outliers += (floats)ri > (float)RELATIVE_OUTLIER;
            x_zero += x0; y_zero += y0; zero_reference += x0 & ~y0;
            outliers += (floats)ei > outlier;
            not_e_min = larger(~ei, not_e_min);
            ints bin = (ei + 0x7FFF + (ei >> 16 & 1)) >> 16;
            shorts narrow = __builtin_convertvector(bin, shorts);
            memcpy(bins + i, &narrow, sizeof narrow);
            if (i >= WINDOW) add_bins(bins + i - WINDOW, WIDTH, counts, 1);
        }
        flush(&total, relative);
    }
    for (int i = lane + (n > WINDOW ? n - WINDOW : 0); i < n; i += LANES) add_bins(bins + i, WIDTH, counts, 1);
    store_sums(t->relative + lane, total);
    Counts *c = &t->counts;
    STORE(c, relative_max); STORE(c, not_e_min); STORE(c, relative_outliers); STORE(c, outliers);
    STORE(c, x_zero); STORE(c, y_zero); STORE(c, zero_reference); STORE(c, cast_max);
}
APART void add_counts(const float *x, const float *y, int n, int lane, const Run *run, Lanes *t, uint16_t *bins) {
    if (n == SEGMENT) count(x, y, SEGMENT, lane, run, t, bins, 0);
    else count(x, y, n, lane, run, t, bins, 0);
}
APART void add_counts_of_cast(const float *x, const float *y, int n, int lane, const Run *run, Lanes *t, uint16_t *bins) {
    count(x, y, n, lane, run, t, bins, 1);
}

/* Merges a segment's counts and extremes into the strip's. */
INLINE void join(Counts *restrict to, const Counts *restrict from) {
    for (int i = 0; i < LANES; i++) {
        to->x_zero[i] += from->x_zero[i];
        to->y_zero[i] += from->y_zero[i];
        to->zero_reference[i] += from->zero_reference[i];
        to->outliers[i] += from->outliers[i];
        to->relative_outliers[i] += from->relative_outliers[i];
        to->relative_max[i] = to->relative_max[i] > from->relative_max[i] ? to->relative_max[i] : from->relative_max[i];
        to->cast_max[i] = to->cast_max[i] > from->cast_max[i] ? to->cast_max[i] : from->cast_max[i];
        to->not_e_min[i] = to->not_e_min[i] > from->not_e_min[i] ? to->not_e_min[i] : from->not_e_min[i];
    }
}

APART void add_weighted(const float *x, const float *y, int n, int lane, const float *weights, Lanes *t) {
    Sums x_total = {0}, e_total = {0};
    for (int i = lane; i < n; i += LANES) {
        floats a = load(x + i), e = load(y + i) - a, w = load(weights + i), x_sq = a * a * w, e_sq = e * e * w;
        flush(&x_total, x_sq); flush(&e_total, e_sq);
    }
    store_sums(t->weighted_x_sq + lane, x_total);
    store_sums(t->weighted_e_sq + lane, e_total);
}

/* Adds up whole vectors of a segment in float32; returns 0, changing no sum, if that is not accurate enough. */
APART int fast(const float *x, const float *y, int n, const float *weights, Run *run, State *s) {
    Lanes t;
    for (int lane = 0; lane < LANES; lane += WIDTH) add_products(x, y, n, lane, &t);
    float x_peaks[WINDOWS] = {0}, e_peaks[WINDOWS] = {0};
    int32_t e_max = largest(t.e_max, n, e_peaks), x_max = largest(t.x_max, n, x_peaks);
    if (!in_range(e_max) || !in_range(x_max)) return 0;
    double sum_x = sum_of(t.x), e = sum_of(t.e), e_abs = sum_of(t.e_abs);
    double x_sq = sum_of(t.x_sq), e_sq = sum_of(t.e_sq), xe = sum_of(t.xe), y_sq = x_sq + 2 * xe + e_sq;
    double x_largest = as_float(x_max), e_largest = as_float(e_max);
    if (2 * x_largest * x_largest > x_sq || 2 * e_largest * e_largest > e_sq) return 0;
    if (x_sq > 0 && sum_x * sum_x > 0.99 * n * x_sq) return 0;
    if (e_sq > 0 && e_abs * e_abs > 0.99 * n * e_sq) return 0;
    if (100 * y_sq < x_sq) return 0;
    for (int lane = 0; lane < LANES; lane += WIDTH)
        (run->normal > 0 ? add_counts_of_cast : add_counts)(x, y, n, lane, run, &t, s->bins);
    double relative = sum_of(t.relative);
    if (!isfinite(relative)) {
        add_bins(s->bins, n, run->counts, -1u); /* takes them back */
        return 0;
    }
    if (weights) {
        for (int lane = 0; lane < LANES; lane += WIDTH) add_weighted(x, y, n, lane, weights, &t);
        s->strip[SUM_WEIGHTED_X_SQ] += sum_of(t.weighted_x_sq);
        s->strip[SUM_WEIGHTED_E_SQ] += sum_of(t.weighted_e_sq);
    }
    s->strip[SUM_X] += sum_x; s->strip[SUM_Y] += sum_x + e; s->strip[SUM_E] += e;
    s->strip[SUM_X_ABS] += sum_of(t.x_abs); s->strip[SUM_E_ABS] += e_abs;
    s->strip[SUM_X_SQ] += x_sq; s->strip[SUM_Y_SQ] += y_sq; s->strip[SUM_E_SQ] += e_sq; s->strip[SUM_XY] += x_sq + xe;
    s->strip[SUM_RELATIVE] += relative;
    run->n += n;
    s->e_max = larger_of(s->e_max, e_largest);
    run->x_max = larger_of(run->x_max, x_largest);
    join(&s->counts, &t.counts);
    for (int window = 0; s->x_peaks && window * WINDOW < n; window++) {
        s->x_peaks[window] = x_peaks[window] > s->x_peaks[window] ? x_peaks[window] : s->x_peaks[window];
        s->e_peaks[window] = e_peaks[window] > s->e_peaks[window] ? e_peaks[window] : s->e_peaks[window];
    }
    return 1;
}

static void begin_strip(State *s) {
    memset(&s->counts, 0, sizeof s->counts);
    for (int i = 0; i < LANES; i++) s->counts.not_e_min[i] = ~0x7F800000; /* complement of infinity */
}

/* Adds a finished strip to the totals. */
static void end_strip(Run *run, State *s) {
    Counts *c = &s->counts;
    int64_t zero_reference = count_of(c->zero_reference);
    run->x_zero += count_of(c->x_zero);
    run->y_zero += count_of(c->y_zero);
    run->zero_reference += zero_reference;
    run->outliers += count_of(c->outliers);
    run->relative_outliers += count_of(c->relative_outliers) + zero_reference;
    run->e_min = smaller_of(run->e_min, (double)as_float(~max_of(c->not_e_min)));
    run->relative_max = larger_of(run->relative_max, (double)as_float(max_of(c->relative_max)));
    run->cast_max = larger_of(run->cast_max, (double)as_float(max_of(c->cast_max)));
    begin_strip(s);
    s->x_sq += s->strip[SUM_X_SQ];
    s->e_sq += s->strip[SUM_E_SQ];
    for (int i = 0; i < N_SUMS; i++) {
        if (s->strip[i] != 0) add_exactly(s->limbs[i], s->strip[i]);
        s->strip[i] = 0;
    }
}

INLINE void segment(const float *x, const float *y, int n, const float *weights, Run *run, State *s) {
    int whole = run->precise ? 0 : n / LANES * LANES;
    if (whole && !fast(x, y, whole, weights, run, s)) whole = 0;
    if (whole < n) precise(x, y, whole, n, weights, run, s);
}

/* ---- rotations ---- */

typedef double doubles __attribute__((vector_size(32)));
INLINE doubles load4(const double *from) { doubles v; memcpy(&v, from, sizeof v); return v; }
INLINE void store4(double *to, doubles v) { memcpy(to, &v, sizeof v); }

/* Multiplies by H4: the sum of four minus twice one of them, the last first. */
static void rotate_fours(double *x, int64_t size, int64_t stride) {
    if (stride == 1)
        for (int64_t i = 0; i < size; i += 4) {
            double a = x[i], b = x[i + 1], c = x[i + 2], d = x[i + 3], total = a + b + c + d;
            store4(x + i, (doubles){0} + total - 2 * (doubles){d, c, b, a});
        }
    else
        for (int64_t i = 0; i < size; i += 4 * stride)
            for (int64_t j = i; j < i + stride; j += 4) {
                double *p = x + j, *q = p + stride, *r = q + stride, *s = r + stride;
                doubles a = load4(p), b = load4(q), c = load4(r), d = load4(s), total = a + b + c + d;
                store4(p, total - 2 * d); store4(q, total - 2 * c); store4(r, total - 2 * b); store4(s, total - 2 * a);
            }
}
static void rotate_pairs(double *x, int64_t n, int64_t stride) {
    for (int64_t i = 0; i < n; i += 2 * stride)
        for (int64_t j = i; j < i + stride; j++) {
            double a = x[j], b = x[j + stride];
            x[j] = a + b;
            x[j + stride] = a - b;
        }
}

/* Adds and subtracts numbers that are 1, 2 and 4 apart. */
static void rotate_eights(double *x, int64_t n) {
    for (double *v = x; v < x + n; v += 8) {
        double a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
        double e = v[4] + v[5], f = v[4] - v[5], g = v[6] + v[7], h = v[6] - v[7];
        double ac = a + c, bd = b + d, a_c = a - c, b_d = b - d, eg = e + g, fh = f + h, e_g = e - g, f_h = f - h;
        v[0] = ac + eg; v[1] = bd + fh; v[2] = a_c + e_g; v[3] = b_d + f_h;
        v[4] = ac - eg; v[5] = bd - fh; v[6] = a_c - e_g; v[7] = b_d - f_h;
    }
}

/* As values: gcc copies memory to memory in halves, and then waits for both. */
INLINE wide_doubles load_wide(const double *from) { wide_doubles v; memcpy(&v, from, sizeof v); return v; }
INLINE void store_wide(double *to, wide_doubles v) { memcpy(to, &v, sizeof v); }

/* Adds and subtracts numbers that are stride, 2 · stride, … radix / 2 · stride apart, in registers; `stride` is a multiple of
 * a vector. */
INLINE void rotate_vectors(double *x, int64_t n, int64_t stride, int radix) {
    for (int64_t i = 0; i < n; i += radix * stride)
        for (int64_t j = i; j < i + stride; j += WIDTH / 2) {
            wide_doubles v[8];
            for (int k = 0; k < radix; k++) v[k] = load_wide(x + j + k * stride);
            for (int apart = 1; apart < radix; apart *= 2)
                for (int k = 0; k < radix; k++) {
                    if (k & apart) continue;
                    wide_doubles a = v[k], b = v[k + apart];
                    v[k] = a + b;
                    v[k + apart] = a - b;
                }
            for (int k = 0; k < radix; k++) store_wide(x + j + k * stride, v[k]);
        }
}
APART void rotate_two(double *x, int64_t n, int64_t stride) { rotate_vectors(x, n, stride, 2); }
APART void rotate_four(double *x, int64_t n, int64_t stride) { rotate_vectors(x, n, stride, 4); }
APART void rotate_eight(double *x, int64_t n, int64_t stride) { rotate_vectors(x, n, stride, 8); }

/* Multiplies n values by Sylvester's matrix along an axis that has this stride and ends with them. */
static void multiply_sylvester(double *x, int64_t n, int64_t stride) {
    if (stride == 1 && n >= 8) rotate_eights(x, n), stride = 8;
    for (; stride < n && stride % (WIDTH / 2); stride *= 2) rotate_pairs(x, n, stride);
    for (; 8 * stride <= n; stride *= 8) rotate_eight(x, n, stride);
    if (4 * stride <= n) rotate_four(x, n, stride), stride *= 4;
    if (2 * stride <= n) rotate_two(x, n, stride);
}

INLINE void widen(const float *restrict from, double *restrict to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = from[i];
}
INLINE void narrow(const double *restrict from, const double *restrict factors, double factor, float *restrict to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = (float)(from[i] * factors[i] * factor);
}

void quanterr_sylvester(const void *from, int32_t wide, int64_t from_stride, float *to, int64_t to_stride,
                               int64_t rows, int64_t cols, int64_t size, int32_t down, const double *of_rows,
                               const double *of_cols, double *room) {
    int64_t height = down ? size : 1, width = down ? SIDE_BY_SIDE : size;
    for (int64_t row = 0; row < rows; row += height)
        for (int64_t col = 0; col < cols; col += width) {
            int64_t w = cols - col < width ? cols - col : width;
            for (int64_t y = 0; y < height; y++) {
                int64_t at = (row + y) * from_stride + col;
                if (wide) memcpy(room + y * w, (const double *)from + at, 8 * (size_t)w);
                else widen((const float *)from + at, room + y * w, w);
            }
            multiply_sylvester(room, height * w, down ? w : 1);
            for (int64_t y = 0; y < height; y++)
                narrow(room + y * w, of_cols + col, of_rows[row + y], to + (row + y) * to_stride + col, w);
        }
}

void quanterr_rotate(float *values, int64_t groups, int64_t size, double unit, double *room) {
    int by_fours = size > 1 && (size & 0x5555555555555555) != 0;
    for (float *own = values; groups--; own += size) {
        for (int64_t i = 0; i < size; i++) room[i] = own[i];
        for (int64_t stride = 1; by_fours && stride < size; stride *= 4) rotate_fours(room, size, stride);
        if (!by_fours) multiply_sylvester(room, size, 1);
        for (int64_t i = 0; i < size; i++) own[i] = (float)(room[i] * unit);
    }
}

/* ---- rotations of both sides ---- */

#if defined(__FMA__) && WIDTH > 4
#define BLOCK 128 /* rows and columns */
#define PART 16
#define PARTS (BLOCK / PART)
#define TOGETHER (WIDTH / 8) /* vectors that are multiplied at a time: as many as registers hold the sums of */

typedef struct { /* TOGETHER vectors of BLOCK numbers, and columns of the matrix */
    const float *x, *matrix;
    int64_t stride, apart; /* steps from one number to the next, and from one vector to the next */
} Factors;

#if WIDTH == 16
INLINE floats multiply_add(floats x, floats y, floats sum) {
    return (floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
}
#else
INLINE floats multiply_add(floats x, floats y, floats sum) {
    return (floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
}
#endif

/* Sylvester's matrix consists of PARTS · PARTS copies of its first PART rows and columns, some with opposite signs. So
 * the sums of a vector's products, of which sum k is for column k · PART + c of the matrix, begin alike: in part 0 all
 * are the same, in part 1 two differ, in parts 2 and 3 four, then eight. Lanes are columns c, or if `down` numbers that
 * are side by side; vectors then differ in c.
 *
 * Adds the products of a part to the first n sums. */
INLINE void add_part(floats sums[TOGETHER][PARTS], int part, int n, Factors of, int down) {
#pragma GCC unroll 1
    for (int k = 0; k < PART; k++)
        for (int i = 0; i < TOGETHER; i++) {
            const float *x = of.x + i * of.apart + (part * PART + k) * of.stride, *sign = of.matrix + k * PART;
            floats v = down ? load(x) : broadcast(*x), f = down ? broadcast(sign[i]) : load(sign);
#pragma GCC unroll 8
            for (int sum = 0; sum < n; sum++)
                sums[i][sum] = multiply_add(v, __builtin_parity(sum & part) ? -f : f, sums[i][sum]);
        }
}
/* Adds the products of all parts in which 2 · n sums differ. */
INLINE void add_parts(floats sums[TOGETHER][PARTS], int n, Factors of, int down) {
    for (int i = 0; i < TOGETHER; i++)
        for (int sum = 0; sum < n; sum++) sums[i][n + sum] = sums[i][sum];
#pragma GCC unroll 4
    for (int part = n; part < 2 * n; part++) add_part(sums, part, 2 * n, of, down);
}
INLINE void add_all_parts(floats sums[TOGETHER][PARTS], Factors of, int down) {
    for (int i = 0; i < TOGETHER; i++) sums[i][0] = (floats){0};
    add_part(sums, 0, 1, of, down);
    add_parts(sums, 1, of, down);
    add_parts(sums, 2, of, down);
    add_parts(sums, 4, of, down);
}

void quanterr_rotate_sides(const float *x, int64_t cols, float unit, const float *of_cols, const float *of_rows,
                                  float *to, int64_t to_stride, float *room) {
    _Alignas(64) float matrix[PART * PART];
    floats sums[TOGETHER][PARTS];
    for (int i = 0; i < PART * PART; i++) matrix[i] = __builtin_parity((i / PART) & i) ? -unit : unit;
    for (int64_t left = 0; left < cols; left += BLOCK, x += BLOCK, of_cols += BLOCK, to += BLOCK) {
        for (int64_t row = 0; row < BLOCK; row += TOGETHER)
            for (int at = 0; at < PART; at += WIDTH) {
                add_all_parts(sums, (Factors){x + row * cols, matrix + at, 1, cols}, 0);
                for (int i = 0; i < TOGETHER; i++)
                    for (int k = 0; k < PARTS; k++)
                        store(room + (k * BLOCK + row + i) * PART + at, sums[i][k] * load(of_cols + k * PART + at));
            }
        for (int64_t col = 0; col < BLOCK; col += WIDTH)
            for (int at = 0; at < PART; at += TOGETHER) {
                add_all_parts(sums, (Factors){room + col / PART * BLOCK * PART + col % PART, matrix + at, PART, 0}, 1);
                for (int i = 0; i < TOGETHER; i++)
                    for (int k = 0; k < PARTS; k++) {
                        int64_t row = k * PART + at + i;
                        store(to + row * to_stride + col, sums[i][k] * of_rows[row]);
                    }
            }
    }
}
#endif

/* ---- decoding ---- */

INLINE float half_at(const uint8_t *p) { uint16_t h; memcpy(&h, p, 2); return half(h); }

INLINE void decode_e4m3(const uint8_t *restrict codes, float *restrict out, int n) {
    for (int i = 0; i < n; i++) {
        int32_t c = codes[i], m = c & 0x7F;
        int32_t normal = (m << 20) + (120 << 23), below = as_bits((float)m * 0x1p-9f);
        int32_t v = m < 8 ? below : m == 0x7F ? 0x7FC00000 : normal;
        out[i] = as_float(v | (int32_t)((uint32_t)(c & 0x80) << 24));
    }
}

INLINE void look_up(const uint8_t *restrict codes, const float *restrict table, float *restrict out, int n, int per_byte) {
    if (per_byte == 1)
        for (int i = 0; i < n; i++) out[i] = table[codes[i]];
    else if (per_byte == 2)
        for (int i = 0; i < n / 2; i++) memcpy(out + 2 * i, table + 2 * codes[i], 8);
    else
        for (int i = 0; i < n / per_byte; i++)
            for (int k = 0; k < per_byte; k++) out[i * per_byte + k] = table[codes[i] * per_byte + k];
}

INLINE void count_ends(Side *side, const uint8_t *codes, int n) {
    uint8_t found[64] = {0}; /* no count exceeds SEGMENT / 64 */
    const uint8_t a = (uint8_t)side->ends[0], b = (uint8_t)side->ends[1], c = (uint8_t)side->ends[2];
    int i = 0;
    for (; i + 64 <= n; i += 64)
        for (int k = 0; k < 64; k++) found[k] += (codes[i + k] == a) | (codes[i + k] == b) | (codes[i + k] == c);
    for (; i < n; i++) found[0] += (codes[i] == a) | (codes[i] == b) | (codes[i] == c);
    for (int k = 0; k < 64; k++) side->saturated += found[k];
}

INLINE uint32_t word_at(const uint8_t *p) { uint32_t word; memcpy(&word, p, 4); return word; }

INLINE int read_bits(const Bits *bits, int n, const uint8_t *block, int i) {
    int number = 0;
#pragma GCC unroll 8
    for (int k = 0; k < n; k++)
        if (bits[k].at)
            number |= (int)(word_at(block + bits[k].at[i]) >> bits[k].shift[i] & (uint32_t)bits[k].mask) << bits[k].up;
    return number;
}

/* Reads the parts of n codes, 16, 8 or 4, that are in bytes next to each other: of run i, from number `first` of it on. Bytes
 * are shifted in pairs, as masks take away what comes from their neighbours. Fewer than 16 come by way of a register, as a
 * vector that memory gets in parts would have to wait. */
INLINE sixteen_bytes read_bytes(const Blocks *b, const uint8_t *block, int i, int first, int n) {
    eight_shorts codes = {0};
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        const Bits *bits = b->codes + k;
        if (!bits->at || bits->spacing != 8) continue;
        const uint8_t *from = block + bits->at[i] + first;
        eight_shorts packed;
        uint64_t low = 0;
        if (n == 16) memcpy(&packed, from, 16);
        else {
            memcpy(&low, from, n == 8 ? 8 : 4);
            packed = (eight_shorts)(two_words){low, 0};
        }
        codes |= (packed >> bits->shift[i] & (uint16_t)(bits->mask * 257)) << bits->up;
    }
    return (sixteen_bytes)codes;
}

/* Reads the parts of a vector of codes that are next to each other in words. */
INLINE ints read_words(const Blocks *b, const uint8_t *block, int i, int first) {
    words codes = {0}, lanes;
    for (uint32_t lane = 0; lane < WIDTH; lane++) lanes[lane] = lane + (uint32_t)first;
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        const Bits *bits = b->codes + k;
        if (!bits->at || bits->spacing == 8) continue;
        words apart = word_at(block + bits->at[i]) >> bits->shift[i] >> lanes * (uint32_t)bits->spacing;
        codes |= (apart & (uint32_t)bits->mask) << bits->up;
    }
    return (ints)codes;
}

/* Widens part k of 16 bytes, by way of 16 bits, as gcc 12 converts bytes to numbers of four times the size one by one. */
INLINE ints widen_part(sixteen_bytes v, int k, int are_signed) {
    bytes part;
#if WIDTH == 16
    part = v;
#elif WIDTH == 8
    uint64_t eight = ((two_words)v)[k];
    memcpy(&part, &eight, 8);
#else
    uint32_t four = ((four_words)v)[k];
    memcpy(&part, &four, 4);
#endif
    if (are_signed) return __builtin_convertvector(__builtin_convertvector((signed_bytes)part, signed_shorts), ints);
    return __builtin_convertvector(__builtin_convertvector(part, shorts), ints);
}

/* Looks up levels; a table has at least 16, and no more are in use if there are `few`. */
INLINE floats look_up_levels(const float *table, ints codes, int few) {
#if defined(__AVX512F__)
    const __m512i at = (__m512i)codes;
    return (floats)(few ? _mm512_permutexvar_ps(at, _mm512_loadu_ps(table)) : _mm512_i32gather_ps(at, table, 4));
#elif defined(__AVX2__)
    const __m256i at = (__m256i)codes;
    if (!few) return (floats)_mm256_i32gather_ps(table, at, 4);
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), at);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), at);
    return (floats)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
#else
    floats found;
    for (int j = 0; j < WIDTH; j++) found[j] = table[codes[j]];
    return found;
#endif
}

INLINE floats levels_of(const Blocks *b, ints codes) {
    if (b->levels) return look_up_levels(b->levels, codes, b->codes->mask < 16 && !b->codes[1].at);
    return __builtin_convertvector(codes + b->first, floats);
}

/* Writes eight levels times a scale, negated where a bit of `signs` is set. */
INLINE void signed_levels(const int8_t *levels, int signs, float shift, float s, float *restrict out) {
    const eight_ints bits = {1, 2, 4, 8, 16, 32, 64, 128};
    eight_bytes packed;
    memcpy(&packed, levels, sizeof packed);
    eight_ints wide = __builtin_convertvector(packed, eight_ints), minus = (bits & signs) != 0;
    eight_floats values = (__builtin_convertvector(wide, eight_floats) + shift) * s;
    values = (eight_floats)((eight_ints)values ^ (minus & INT32_MIN)); /* also of zeros */
    memcpy(out, &values, sizeof values);
}

/* Writes the eight elements of number i, whose codes stand for several elements each. */
INLINE void decode_eight(const Blocks *b, const int8_t *grid, const uint8_t *block, int i, float shift, float s, float *restrict out) {
    const int width = b->width, codes = 8 / width;
    int8_t levels[8];
    for (int k = 0; k < codes; k++)
        memcpy(levels + k * width, grid + width * read_bits(b->codes, 4, block, codes * i + k), (size_t)width);
    int signs = read_bits(b->minus, 8, block, i);
    signed_levels(levels, b->patterns ? b->patterns[signs] : signs, shift, s, out);
}

INLINE float scale_of(const Blocks *b, const uint8_t *block, int part, float d) {
    if (!b->scales->at) return d * b->step;
    int stored = read_bits(b->scales, 4, block, part);
    if (b->scale_levels) return d * b->scale_levels[stored];
    stored = (b->are_signed ? (int8_t)stored : stored) * b->factor + b->offset;
    if (b->signs->at && read_bits(b->signs, 1, block, part)) stored = -stored;
    return d * (float)stored * b->step;
}

/* Decodes a block of one row, number `row` of its group; d is that of the row, unless the block has its own. */
INLINE void decode_block(const Blocks *b, const int8_t *grid, const uint8_t *block, int row, float d, int run, float *restrict out) {
    const int parts = b->elements / b->part;
    if (b->d->at) d = half((uint16_t)read_bits(b->d, 4, block, row));
    const float d_minima = b->d_minima->at ? half((uint16_t)read_bits(b->d_minima, 1, block, row)) : 0;
#pragma GCC unroll 16
    for (int part = row * parts; part < (row + 1) * parts; part++, out += b->part) {
        const float scale = scale_of(b, block, part, d);
        const float minimum = b->minima->at ? d_minima * (float)read_bits(b->minima, 2, block, part) : -d_minima;
        const float shift = b->flags->at && read_bits(b->flags, 1, block, part) ? b->shift : 0;
        if (run == 0) {
            for (int i = 0; i < b->part / 8; i++) decode_eight(b, grid, block, part * (b->part / 8) + i, shift, scale, out + 8 * i);
            continue;
        }
        for (int i = 0; i < b->part; i += 16 < run ? 16 : run) {
            const int n = 16 < run ? 16 : run, number = part * (b->part / run) + i / run;
            sixteen_bytes of_bytes = read_bytes(b, block, number, i % run, n);
#pragma GCC unroll 4
            for (int k = 0; k * WIDTH < n; k++) {
                ints codes = widen_part(of_bytes, k, b->are_bytes) | read_words(b, block, number, i % run + k * WIDTH);
                floats v = levels_of(b, codes);
                if (b->flags->at) v += shift;
                v *= scale;
                if (b->d_minima->at) v -= minimum;
                memcpy(out + i + k * WIDTH, &v, (size_t)(n < WIDTH ? n : WIDTH) * 4);
            }
        }
    }
}

/* Decodes blocks whose description the compiler knows; col and n are multiples of a block's elements. */
APART void decode_known(int element, const uint8_t *codes, const int8_t *grid, int64_t col, int n, float *out) {
#define DECODE(name)                                                                              \
    case name:                                                                                    \
        codes += col / name##_BLOCKS.elements * name##_BLOCKS.n_bytes;                            \
        for (; n > 0; n -= name##_BLOCKS.elements, out += name##_BLOCKS.elements) {               \
            decode_block(&name##_BLOCKS, grid, codes, 0, 1, name##_BLOCKS.run, out);              \
            codes += name##_BLOCKS.n_bytes;                                                       \
        }                                                                                         \
        break;
    switch (element) { EACH_BLOCKS(DECODE) }
#undef DECODE
}

/* Decodes blocks that are described as data; `codes` is where a row would begin if rows were not interleaved. */
static void decode_described(const Side *side, const uint8_t *codes, int64_t row, int64_t col, int n, float *out) {
    const Blocks *b = side->blocks;
    const int8_t *grid = side->table;
    const int k = (int)((row + side->lead) % b->rows);
    const uint8_t *group = codes - k * side->row_bytes;
    float d = 1;
    if (b->head == 2) d = half_at(group + 2 * k);
    else if (b->head) memcpy(&d, group + (int64_t)k * b->head, 4);
    for (int i = 0; i < n; i += b->elements, out += b->elements) {
        const uint8_t *block = group + b->rows * (b->head + (col + i) / b->elements * b->n_bytes);
        if (b->run == 0) decode_block(b, grid, block, k, d, 0, out);
        else if (b->run == 32) decode_block(b, grid, block, k, d, 32, out);
        else if (b->run == 16) decode_block(b, grid, block, k, d, 16, out);
        else if (b->run == 8) decode_block(b, grid, block, k, d, 8, out);
        else decode_block(b, grid, block, k, d, 4, out);
    }
}

/* Scales codes of columns whose groups are `of`. */
static void scale_columns(float *restrict out, int n, const int32_t *restrict of, const float *restrict scale,
                          const float *restrict zero, const float *restrict shift) {
    if (zero) for (int k = 0; k < n; k++) out[k] = (out[k] - zero[of[k]]) * scale[of[k]];
    else if (shift) for (int k = 0; k < n; k++) out[k] = out[k] * scale[of[k]] + shift[of[k]];
    else for (int k = 0; k < n; k++) out[k] *= scale[of[k]];
}

/* Decodes columns col to col + n of a row that begins at `codes`; returns `out`, or the stored floats themselves. */
APART const float *decode(Side *side, const uint8_t *codes, int64_t row, int64_t col, int n, float *out) {
    switch (side->element) {
    case F32:
        if (!side->scale && !side->rotation && !side->values && side->order == ROWS) return (const float *)(codes + 4 * col);
        memcpy(out, codes + 4 * col, 4 * (size_t)n);
        break;
    case BF16:
        for (int i = 0; i < n; i++) {
            uint16_t upper;
            memcpy(&upper, codes + 2 * (col + i), 2);
            out[i] = as_float((int32_t)((uint32_t)upper << 16));
        }
        break;
    case F16:
        for (int i = 0; i < n; i++) out[i] = half_at(codes + 2 * (col + i));
        break;
    case I8:
        for (int i = 0; i < n; i++) out[i] = (float)(int8_t)codes[col + i];
        break;
    case E4M3: decode_e4m3(codes + col, out, n); break;
    case TABLE: look_up(codes + col / side->per_byte, side->table, out, n, side->per_byte); break;
    case BLOCKS: decode_described(side, codes, row, col, n, out); break;
    default: decode_known(side->element, codes, side->table, col, n, out);
    }
    if (side->has_ends) count_ends(side, codes + col, n);
    if (side->scale) {
        const float *scale = side->scale + row / side->scale_height * side->scale_step;
        const float *zero = side->zero ? side->zero + row * side->zero_step : 0;
        const float *shift = side->shift ? side->shift + row * side->shift_step : 0;
        int64_t group = col / side->group;
        int i = 0;
        if (side->columns) {
            scale_columns(out, n, side->columns + col, scale, zero, shift);
            i = n;
        } else if (side->group == 1 && !zero && !shift)
            for (; i < n; i++) out[i] *= scale[col + i];
        for (; i < n; group++) {
            int64_t left = (group + 1) * side->group - col - i;
            int stop = left < n - i ? i + (int)left : n;
            float s = scale[group], z = zero ? zero[group] : 0, b = shift ? shift[group] : 0;
            if (zero) for (int k = i; k < stop; k++) out[k] = (out[k] - z) * s;
            else if (shift) for (int k = i; k < stop; k++) out[k] = out[k] * s + b;
            else for (int k = i; k < stop; k++) out[k] *= s;
            i = stop;
        }
    }
    if (side->factor != 0) for (int i = 0; i < n; i++) out[i] *= side->factor;
    if (side->rotation) {
        double room[SEGMENT];
        quanterr_rotate(out, n / side->rotation, side->rotation, side->unit, room);
    }
    return out;
}

#define TILE_ROWS 32 /* must equal TILE_ROWS of kernel/decoding.py */

/* Transposes words stored down columns into rows of bytes in `tile`; `stored` begins with the first row. */
static void tile_words(const Side *side, int64_t row, int64_t rows, int64_t row_bytes) {
    int64_t words = row_bytes / 4;
    const uint32_t *stored = (const uint32_t *)side->stored + row;
    uint32_t *tile = side->tile;
    for (int64_t first = 0; first < words; first += LANES) { /* whole lines of the cache, as rows of a tile may share theirs */
        uint32_t block[TILE_ROWS][LANES];
        int64_t n = words - first < LANES ? words - first : LANES;
        for (int64_t w = 0; w < n; w++)
            for (int64_t k = 0; k < rows; k++) block[k][w] = stored[(first + w) * side->words + k];
        for (int64_t k = 0; k < rows; k++) memcpy(tile + k * words + first, block[k], (size_t)n * 4);
    }
}

/* Unpacks AWQ words into rows of bytes in `tile`: a word holds one column of 8 rows, in the order 0 2 4 6 1 3 5 7. */
static void tile_awq(const Side *side, int64_t row, int64_t rows, int64_t cols) {
    const uint32_t *stored = (const uint32_t *)side->stored + row / 8;
    uint8_t *tile = side->tile;
    for (int64_t first = 0; first < cols; first += AT_ONCE)
        for (int64_t k = 0; k < rows; k += 8) {
            uint32_t words[AT_ONCE];
            int n = cols - first < AT_ONCE ? (int)(cols - first) : AT_ONCE;
            for (int c = 0; c < n; c++) words[c] = stored[(first + c) * side->words + k / 8];
            for (int i = 0; i < 8; i++) {
                uint8_t *to = tile + (k + i) * cols + first;
                int shift = 4 * (i / 2 + i % 2 * 4);
                for (int c = 0; c < n; c++) to[c] = words[c] >> shift & 15;
            }
        }
}

/* Returns the row of bytes that holds a row of the weight, whose codes are at shifts[row / shared_step % shared_rows]. */
INLINE int64_t bytes_of(const Side *side, int64_t row) {
    return row / (side->shared_step * side->shared_rows) * side->shared_step + row % side->shared_step;
}

/* Reads up to n bytes from `at` on; returns their number, 0 at the end of the file, or -errno. */
#if defined(_WIN32)
typedef struct { uintptr_t internal[2]; uint32_t low, high; void *event; } Overlapped; /* avoids the names in windows.h */
__declspec(dllimport) int __stdcall ReadFile(void *handle, void *to, uint32_t n, uint32_t *done, Overlapped *at);
__declspec(dllimport) uint32_t __stdcall GetLastError(void);
#define END_OF_FILE 38 /* ERROR_HANDLE_EOF */

static int64_t read_at(int32_t file, void *to, int64_t n, int64_t at) {
    Overlapped place = {.low = (uint32_t)at, .high = (uint32_t)(at >> 32)};
    uint32_t done = 0, n_bytes = n < 1 << 30 ? (uint32_t)n : 1 << 30;
    if (ReadFile((void *)(intptr_t)file, to, n_bytes, &done, &place)) return done;
    return GetLastError() == END_OF_FILE ? 0 : -EIO;
}
#else
static int64_t read_at(int32_t file, void *to, int64_t n, int64_t at) {
    ssize_t done;
    do done = pread(file, to, (size_t)n, at);
    while (done < 0 && errno == EINTR);
    return done < 0 ? -errno : done;
}
#endif

static int read_all(int32_t file, char *to, int64_t n, int64_t at) {
    while (n) {
        int64_t done = read_at(file, to, n, at);
        if (done <= 0) return done ? (int)done : CUT_SHORT;
        to += done, n -= done, at += done;
    }
    return DONE;
}
/* The first row of the group that has a row, counted from `offset` or `stored`. */
INLINE int64_t group_of(const Side *side, int64_t row) {
    return side->element == BLOCKS ? (row + side->lead) / side->blocks->rows * side->blocks->rows : row;
}

/* Reads rows, and all rows that are interleaved with them. */
static int read_rows(Side *side, int64_t row, int64_t rows) {
    const int64_t together = side->element == BLOCKS ? side->blocks->rows : 1;
    int64_t first = group_of(side, row) * side->row_bytes;
    int64_t stop = (group_of(side, row + rows - 1) + together) * side->row_bytes;
    int status = read_all(side->file, side->stored, stop - first, side->offset + first);
    for (int i = 0; i < PLACES && side->sampled; i++) {
        int64_t at = side->sampled_at[i], begin = at > first ? at : first, end = at + side->sampled_n;
        if (end > stop) end = stop;
        if (begin < end)
            memcpy(side->sampled + i * side->sampled_n + (begin - at), (char *)side->stored + (begin - first), (size_t)(end - begin));
    }
    return status;
}
INLINE float stored_scale(const Side *side, const uint8_t *stored, int64_t i) {
    const int32_t type = side->scale_type;
    float whole;
    uint16_t shortened;
    if (type == I8) return side->scale_table[stored[i]];
    if (type == F32) {
        memcpy(&whole, stored + 4 * i, sizeof whole);
        return whole;
    }
    memcpy(&shortened, stored + 2 * i, sizeof shortened);
    return type == F16 ? half(shortened) : as_float((int32_t)((uint32_t)shortened << 16));
}

/* Multiplies scales by their factors, and adds the offset. */
static void scale_nested(const Side *side) {
    float *scales = (float *)side->scale;
    for (int64_t i = 0, block = side->nested_first / side->nested_n; i < side->scale_n; block++) {
        const int64_t stop = smaller_number((block + 1) * side->nested_n - side->nested_first, side->scale_n);
        for (; i < stop; i++) scales[i] = scales[i] * side->nested[block] + side->nested_offset;
    }
}

static int read_scales(const Side *side) {
    float *to = (float *)side->scale;
    const int64_t n = side->scale_n, rows = side->scale_rows;
    const int64_t bytes = n * (side->scale_type == F32 ? 4 : side->scale_type == I8 ? 1 : 2);
    uint8_t *stored = (uint8_t *)(to + (rows ? 2 * n : n)) - bytes; /* at the end, so that no scale is overwritten before it is read */
    int status = read_all(side->scale_file, (char *)stored, bytes, side->scale_offset);
    if (!rows)
        for (int64_t i = 0; i < n && side->scale_type != F32; i++) to[i] = stored_scale(side, stored, i);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = row; i < n; i += rows) *to++ = stored_scale(side, stored, i);
    if (side->nested) scale_nested(side);
    return status;
}

INLINE const uint8_t *row_of(const Side *side, int64_t row, int64_t first) {
    if (side->order != ROWS) return (const uint8_t *)side->tile + (row - first) * side->row_bytes;
    return (const uint8_t *)side->stored + (row + side->lead - (side->file < 0 ? 0 : group_of(side, first))) * side->row_bytes;
}

INLINE double ratio(double e_sq, double x_sq) { return x_sq > 0 ? e_sq / x_sq : INFINITY; }

/* Inserts a row into the worst rows if it is among them; of equal rows the first stays. */
static void keep_row(Run *run, const State *s, int64_t row) {
    double own = ratio(s->e_sq, s->x_sq);
    int64_t at = run->n_kept;
    while (at > 0 && own > ratio(run->kept_e_sq[at - 1], run->kept_x_sq[at - 1])) at--;
    if (at == KEPT_ROWS) return;
    int64_t behind = (run->n_kept < KEPT_ROWS ? run->n_kept : KEPT_ROWS - 1) - at;
    memmove(run->kept_rows + at + 1, run->kept_rows + at, (size_t)behind * sizeof *run->kept_rows);
    memmove(run->kept_x_sq + at + 1, run->kept_x_sq + at, (size_t)behind * sizeof *run->kept_x_sq);
    memmove(run->kept_e_sq + at + 1, run->kept_e_sq + at, (size_t)behind * sizeof *run->kept_e_sq);
    memmove(run->kept_e_max + at + 1, run->kept_e_max + at, (size_t)behind * sizeof *run->kept_e_max);
    memmove(run->kept_zeroed + at + 1, run->kept_zeroed + at, (size_t)behind * sizeof *run->kept_zeroed);
    run->kept_rows[at] = row;
    run->kept_x_sq[at] = s->x_sq;
    run->kept_e_sq[at] = s->e_sq;
    run->kept_e_max[at] = s->e_max;
    run->kept_zeroed[at] = s->zeroed;
    run->n_kept += run->n_kept < KEPT_ROWS;
}

/* Returns where the decoded row is kept, or NULL. */
INLINE float *kept_row(const Side *side, const Run *run, int64_t row) {
    int64_t place = run->places ? run->places[row] : row;
    return side->values && place >= 0 ? side->values + place * run->cols : 0;
}

/* Keeps the columns of a row that belong to the blocks of a sample. */
INLINE void keep_blocks(const Run *run, const float *x, int64_t row, int64_t col, int n) {
    int64_t at = row - run->first_block, left = run->block_cols - col;
    if (at < 0 || at >= run->block_rows || left <= 0) return;
    n = left < n ? (int)left : n;
    if (run->transposed)
        for (int k = 0; k < n; k++) run->block_values[(col + k) * run->block_rows + at] = x[k];
    else
        memcpy(run->block_values + at * run->block_cols + col, x, sizeof *x * (size_t)n);
}

INLINE int64_t count_windows(const Run *run) { return (run->cols + WINDOW - 1) / WINDOW; }

/* Merges the windows of a finished row of cells into its cells, and begins the next. */
static void end_cells(const Run *run, int64_t row) {
    const int64_t windows = count_windows(run), across = (windows + run->cell_windows - 1) / run->cell_windows;
    const int64_t down = (run->rows_above + run->rows + run->cell_rows - 1) / run->cell_rows;
    float *peaks = run->peaks + (run->rows_above + row) / run->cell_rows * across, *from = run->windows;
    for (int side = 0; side < 2; side++, peaks += down * across, from += windows) {
        if (across == windows) {
            memcpy(peaks, from, (size_t)windows * sizeof *peaks);
            continue;
        }
        for (int64_t cell = 0, window = 0; cell < across; cell++) {
            int32_t largest = 0; /* magnitudes are ordered like their bits */
            for (; window < windows && window < (cell + 1) * run->cell_windows; window++)
                largest = as_bits(from[window]) > largest ? as_bits(from[window]) : largest;
            peaks[cell] = as_float(largest);
        }
    }
    memset(run->windows, 0, (size_t)(2 * windows) * sizeof *run->windows);
}


INLINE double share_of(const float *peaks, int64_t n, int64_t cell) {
    return peaks[cell] > 0 ? peaks[n + cell] / peaks[cell] : 0;
}

int quanterr_stands_out(const float *peaks, int64_t down, int64_t across, const int64_t (*parts)[4], int64_t n,
                               double min_usual, double ratio) {
    const int64_t cells = down * across;
    double sorted[MAX_PARTS];
    for (int64_t i = 0; i < n; i++) {
        int64_t at = i;
        double own = 0;
        for (int64_t row = parts[i][0]; row < parts[i][1]; row++)
            for (int64_t col = parts[i][2]; col < parts[i][3]; col++)
                own = fmax(own, share_of(peaks, cells, row * across + col));
        for (; at && sorted[at - 1] > own; at--) sorted[at] = sorted[at - 1];
        sorted[at] = own;
    }
    const double usual = fmax((sorted[(n - 1) / 2] + sorted[n / 2]) / 2, min_usual);
    const float bar = (float)(ratio * usual * (1 - 1e-6)); /* a little lower, as quotients are rounded */
    int found = 0;
    for (int64_t cell = 0; cell < cells; cell++) found |= peaks[cell] > 0 && peaks[cells + cell] > bar * peaks[cell];
    return found;
}

static void add_row(Side *x, Side *y, const uint8_t *x_codes, const uint8_t *y_codes, int64_t row, Run *run, State *s) {
    float xs[SEGMENT] __attribute__((aligned(64))), ys[SEGMENT] __attribute__((aligned(64)));
    float *x_kept = kept_row(x, run, row), *y_kept = kept_row(y, run, row);
    const float *weights = run->importance ? run->importance + row * run->importance_step : 0;
    int64_t n_before = run->n, y_zero_before = run->y_zero;
    s->x_sq = s->e_sq = s->e_max = 0;
    for (int64_t col = 0; col < run->cols; col += SEGMENT) {
        int n = run->cols - col < SEGMENT ? (int)(run->cols - col) : SEGMENT;
        const float *a = decode(x, x_codes, row, col, n, x_kept ? x_kept + col : xs);
        const float *b = decode(y, y_codes, row, col, n, y_kept ? y_kept + col : ys);
        if (run->peaks) {
            s->x_peaks = run->windows + col / WINDOW;
            s->e_peaks = s->x_peaks + count_windows(run);
        }
        segment(a, b, n, weights ? weights + col : 0, run, s);
        if (run->block_values) keep_blocks(run, a, row, col, n);
        if ((col + SEGMENT) % STRIP == 0) end_strip(run, s);
    }
    end_strip(run, s);
    if (run->peaks && (row + 1 == run->rows || !((run->rows_above + row + 1) % run->cell_rows))) end_cells(run, row);
    if (run->row_sums) {
        run->row_sums[row] = s->x_sq;
        run->row_sums[run->rows + row] = s->e_sq;
        run->row_sums[2 * run->rows + row] = s->e_max;
    }
    s->zeroed = run->y_zero - y_zero_before == run->n - n_before;
    run->dead_rows += s->zeroed && s->x_sq > 0;
    if (s->e_max > run->e_max) {
        run->e_max = s->e_max;
        run->worst_row = row;
    }
    if (s->e_sq > 0 || run->rows == 1) keep_row(run, s, row); /* pieces of a row are joined later */
}

/* Moves the counts of both tables into the histogram and zeroes the tables. */
static void take_counts(Run *run) {
    uint32_t *even = run->counts, *odd = run->counts + ROOM;
    int64_t last = bin_of((float)run->e_max), first = last + 1;
    run->zero_errors = (int64_t)even[0] + odd[0];
    for (int64_t left = run->n - run->zero_errors; left > 0 && first > 1; left -= (int64_t)even[first] + odd[first]) first--;
    run->first_bin = first;
    run->n_bins = last - first + 1;
    for (int64_t bin = first; bin <= last; bin++) run->histogram[bin - first] = (int64_t)even[bin] + odd[bin];
    even[0] = odd[0] = 0;
    for (int64_t bin = first; bin <= last; bin++) even[bin] = odd[bin] = 0;
}

/* Finds the bins of the histogram that hold the errors at the given ranks. */
static void find_ranks(Run *run) {
    int64_t count = run->zero_errors, seen = 0;
    for (int i = 0; i < RANKS; i++) {
        while (count < run->ranks[i] && seen < run->n_bins) count += run->histogram[seen++];
        run->rank_bins[i] = seen ? run->first_bin + seen - 1 : 0;
    }
}

void quanterr_add_counts(int64_t *to, const int64_t *const *from, const int64_t *at, const int64_t *n, int64_t many) {
    for (int64_t i = 0; i < many; i++)
        for (int64_t bin = 0; bin < n[i]; bin++) to[at[i] + bin] += from[i][bin];
}

/* Reads rows that share bytes with others, and takes them apart into bytes in `tile`. */
static int tile_shared(Side *side, int64_t first, int64_t rows, int64_t cols) {
    const int64_t step = side->shared_step;
    uint8_t *to = side->tile;
    int status = DONE;
    for (int64_t row = side->first_row + first, stop = row + rows, end; row < stop && status == DONE; row = end) {
        end = step == 1 || row + step - row % step > stop ? stop : row + step - row % step; /* rows of bytes follow each other */
        const int64_t from = bytes_of(side, row), n = bytes_of(side, end - 1) + 1 - from;
        const uint8_t *stored = (const uint8_t *)side->stored + (side->file < 0 ? from * cols : 0);
        if (side->file >= 0) status = read_all(side->file, side->stored, n * cols, side->offset + from * cols);
        for (int64_t k = row; k < end; k++, to += cols) {
            const uint8_t *codes = stored + (bytes_of(side, k) - from) * cols;
            const int shift = side->shifts[k / step % side->shared_rows], largest = side->largest_code;
            for (int64_t col = 0; col < cols; col++) to[col] = (uint8_t)(codes[col] >> shift & largest);
        }
    }
    return status;
}

static int load_rows(Side *side, int64_t first, int64_t rows, int64_t cols) {
    if (side->order == SHARED_BYTES) return tile_shared(side, first, rows, cols);
    int status = side->file >= 0 ? read_rows(side, first, rows) : DONE;
    if (side->order == WORDS_DOWN) tile_words(side, first, rows, side->row_bytes);
    if (side->order == AWQ_WORDS) tile_awq(side, first, rows, cols);
    return status;
}

/* Loads a row again, and the rows that are reordered with it; returns NULL if it cannot be read. */
static const uint8_t *load_row(Side *side, int64_t row, const Run *run) {
    int64_t height = side->order == ROWS ? 1 : run->rows_at_once, first = row / height * height;
    int64_t rows = run->rows - first < height ? run->rows - first : height;
    return load_rows(side, first, rows, run->cols) == DONE ? row_of(side, row, first) : 0;
}

/* Finds the element with the largest finite |e| in the worst row. Its row is decoded again: to keep track of columns
 * would cost more. */
static int find_worst(Side *x, Side *y, Run *run) {
    float xs[SEGMENT] __attribute__((aligned(64))), ys[SEGMENT] __attribute__((aligned(64)));
    const int64_t x_saturated = x->saturated, y_saturated = y->saturated;
    const uint8_t *x_codes = load_row(x, run->worst_row, run), *y_codes = load_row(y, run->worst_row, run);
    double e_max = 0;
    if (!x_codes || !y_codes) return CUT_SHORT;
    for (int64_t col = 0; col < run->cols; col += SEGMENT) {
        int n = run->cols - col < SEGMENT ? (int)(run->cols - col) : SEGMENT;
        const float *a = decode(x, x_codes, run->worst_row, col, n, xs), *b = decode(y, y_codes, run->worst_row, col, n, ys);
        for (int i = 0; i < n; i++) {
            double e = fabs((double)b[i] - a[i]);
            if (!(e > e_max) || !isfinite(e)) continue;
            e_max = e;
            run->worst_col = col + i;
            run->worst_x = a[i];
            run->worst_y = b[i];
        }
    }
    x->saturated = x_saturated;
    y->saturated = y_saturated;
    return DONE;
}

int quanterr_decode(Side *side, int64_t all_rows, int64_t cols, int64_t rows_at_once) {
    int status = read_scales(side);
    for (int64_t first = 0; first < all_rows; first += rows_at_once) {
        int64_t rows = all_rows - first < rows_at_once ? all_rows - first : rows_at_once;
        if (status == DONE) status = load_rows(side, first, rows, cols);
        if (status != DONE) return status;
        for (int64_t row = first; row < first + rows; row++)
            for (int64_t col = 0; col < cols; col += SEGMENT) {
                int n = cols - col < SEGMENT ? (int)(cols - col) : SEGMENT;
                decode(side, row_of(side, row, first), row, col, n, side->values + row * cols + col);
            }
    }
    return DONE;
}

/* Adds up x² and e² of a segment, lane by lane. */
APART void add_energies(const float *x, const float *y, int n, double *x_sq, double *e_sq) {
    const int whole = n / LANES * LANES;
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        Sums of_x = load_sums(x_sq + lane), of_e = load_sums(e_sq + lane);
        for (int i = lane; i < whole; i += LANES) {
            floats a = load(x + i);
            add_squares(&of_x, a);
            add_squares(&of_e, load(y + i) - a);
        }
        store_sums(x_sq + lane, of_x);
        store_sums(e_sq + lane, of_e);
    }
    for (int i = whole; i < n; i++) {
        float e = y[i] - x[i];
        x_sq[i - whole] += (double)x[i] * x[i];
        e_sq[i - whole] += (double)e * e;
    }
}

int quanterr_measure(Side *x, Side *y, int64_t all_rows, int64_t cols, int64_t rows_at_once, double *energies) {
    float xs[SEGMENT] __attribute__((aligned(64))), ys[SEGMENT] __attribute__((aligned(64)));
    double x_sq[LANES] = {0}, e_sq[LANES] = {0};
    int status = read_scales(x);
    if (status == DONE) status = read_scales(y);
    for (int64_t first = 0; first < all_rows; first += rows_at_once) {
        int64_t rows = all_rows - first < rows_at_once ? all_rows - first : rows_at_once;
        if (status == DONE) status = load_rows(x, first, rows, cols);
        if (status == DONE) status = load_rows(y, first, rows, cols);
        if (status != DONE) return status;
        for (int64_t row = first; row < first + rows; row++)
            for (int64_t col = 0; col < cols; col += SEGMENT) {
                int n = cols - col < SEGMENT ? (int)(cols - col) : SEGMENT;
                const float *a = decode(x, row_of(x, row, first), row, col, n, xs);
                add_energies(a, decode(y, row_of(y, row, first), row, col, n, ys), n, x_sq, e_sq);
            }
    }
    energies[0] = sum_of(x_sq);
    energies[1] = sum_of(e_sq);
    return DONE;
}

static int compare(Side *x, Side *y, Run *run) {
    State s;
    memset(&s, 0, sizeof s);
    begin_strip(&s);
    run->e_min = INFINITY;
    if (run->peaks) memset(run->windows, 0, (size_t)(2 * count_windows(run)) * sizeof *run->windows);
    int status = read_scales(x);
    if (status == DONE) status = read_scales(y);
    for (int64_t first = 0; first < run->rows && status == DONE; first += run->rows_at_once) {
        int64_t rows = run->rows - first < run->rows_at_once ? run->rows - first : run->rows_at_once;
        status = load_rows(x, first, rows, run->cols);
        if (status == DONE) status = load_rows(y, first, rows, run->cols);
        for (int64_t row = first; row < first + rows && status == DONE; row++)
            add_row(x, y, row_of(x, row, first), row_of(y, row, first), row, run, &s);
    }
    take_counts(run);
    find_ranks(run);
    if (status == DONE && run->e_max > 0) status = find_worst(x, y, run);
    for (int i = 0; i < N_SUMS; i++) carry(s.limbs[i], run->sums + i * LIMBS);
    return status;
}

int quanterr_compare(Side *x, Side *y, Run *runs, int64_t n) {
    int status = DONE;
    for (int64_t i = 0; i < n && status == DONE; i++) {
        if (i) {
            runs[i].histogram = runs[i - 1].histogram + runs[i - 1].n_bins;
            runs[i].sums = runs[i - 1].sums + N_SUMS * LIMBS;
        }
        status = compare(x + i, y + i, runs + i);
    }
    return status;
}


void quanterr_look_up_tiles(const uint32_t *stored, int64_t rows, int64_t cols, int64_t row_words, int64_t col_words,
                                   const Code *codes, int64_t height, int64_t width, uint32_t mask, const float *table,
                                   float *out) {
    for (int64_t col = 0; col < cols; col++)
        for (int64_t row = 0; row < rows; row++) {
            const uint32_t *words = stored + row * row_words + col * col_words;
            const Code *code = codes;
            for (int64_t y = 0; y < height; y++) {
                float *to = out + ((row * height + y) * cols + col) * width;
                for (int64_t x = 0; x < width; x++, code++)
                    to[x] = table[(words[code->low] | (uint64_t)words[code->high] << 32) >> code->shift & mask];
            }
        }
}

/* The sums of the float16 numbers in both halves of (code · factor + term) & 0x8FFF8FFF ^ 0x3B603B60: the bits that are
 * kept or set make them normal. */
static void generate(const uint32_t *codes, int64_t n, uint32_t factor, uint32_t term, float *out) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t halves = ((codes[i] * factor + term) & 0x8FFF8FFF) ^ 0x3B603B60, bias = (127 - 15) << 23;
        const uint32_t low = ((halves & 0x8000) << 16 | (halves & 0x7FFF) << 13) + bias;
        const uint32_t high = ((halves & 0x80000000) | (halves & 0x7FFF0000) >> 3) + bias;
        float x, y; /* an array would keep the loop from being vectorized */
        memcpy(&x, &low, sizeof x);
        memcpy(&y, &high, sizeof y);
        out[i] = x + y;
    }
}

#define MAX_CODES 256 /* maximum number of codes of a tile whose values are computed */

void quanterr_generate_tiles(const uint32_t *stored, int64_t rows, int64_t cols, int64_t row_words,
                                    int64_t col_words, const Code *codes, int64_t height, int64_t width, uint32_t factor,
                                    uint32_t term, float *out) {
    const int64_t n = height * width;
    int32_t low[MAX_CODES], high[MAX_CODES], shift[MAX_CODES];
    uint32_t found[MAX_CODES];
    float values[MAX_CODES];
    for (int64_t i = 0; i < n; i++) low[i] = codes[i].low, high[i] = codes[i].high, shift[i] = codes[i].shift;
    for (int64_t col = 0; col < cols; col++)
        for (int64_t row = 0; row < rows; row++) {
            const uint32_t *words = stored + row * row_words + col * col_words;
            for (int64_t i = 0; i < n; i++)
                found[i] = (words[low[i]] >> shift[i] | words[high[i]] << 1 << (31 - shift[i])) & 0xFFFF;
            generate(found, n, factor, term, values);
            for (int64_t y = 0; y < height; y++)
                memcpy(out + ((row * height + y) * cols + col) * width, values + y * width, width * sizeof *values);
        }
}

/* The hash of kernel.h, which compute_hash of kernel/structs.py must equal. */
uint64_t quanterr_header(void) { return HEADER; } /* build.py defines HEADER */

int quanterr_instructions(void) {
#if defined(__x86_64__)
    const uint32_t needed = 1u << 27 | 1u << 12, avx2 = 1u << 5, avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F DQ BW VL */
    uint32_t a, b, c, d, saved, high; /* saved: the registers that the system saves per thread */
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & needed) != needed) return 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if ((saved & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & avx2)) return 0;
    return (saved & 0xE6) == 0xE6 && (b & avx512) == avx512 ? 2 : 1;
#else
    return 0;
#endif
}
