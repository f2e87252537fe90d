/* Rounding of numbers to codes in units of their groups; kernel/rounding.py specifies it, and recipes/superblocks.py
 * the blocks of ggml's K types. C11, no dependency, no Python. Every operation is float32's, element by element, so that
 * all instruction sets round alike.
 */
#include <math.h>
#include "shared.h"

#define SUPERBLOCK 256 /* elements of a block of a K type */
#define PARTS 16
#define RUN 16 /* codes of a superblock that are written at once */

typedef uint16_t pairs __attribute__((vector_size(WIDTH)));
typedef uint8_t packed_bytes __attribute__((vector_size(WIDTH / 2)));
typedef uint16_t pairs_of_bytes __attribute__((vector_size(RUN)));
typedef float fours __attribute__((vector_size(16)));
typedef int32_t ints_of_four __attribute__((vector_size(16)));




INLINE floats clamp(floats v, float low, float high) { /* NaN stays */
    v = choose(v < low, (floats){0} + low, v);
    return choose(v > high, (floats){0} + high, v);
}

/* Returns the codes of the nearest small floats, ties to even. All bits but the sign of NaN are 1. */
INLINE ints to_small_floats(floats v, const Codes *c) {
    int32_t dropped = 23 - c->mantissa, ruler = (127 + dropped + c->min_exponent) << 23; /* in the step of subnormals */
    ints size = (ints)v & MAGNITUDE;
    ints subnormal = (ints)((floats)size + as_float(ruler)) - ruler;
    ints normal = (size - ((126 + c->min_exponent) << 23) + (1 << (dropped - 1)) - 1 + (size >> dropped & 1)) >> dropped;
    ints is_small = size < (127 + c->min_exponent) << 23, is_nan = size > 0xFF << 23;
    ints code = (is_small & subnormal) | (~is_small & normal);
    ints sign = ((ints)v >> 31 & 1) << c->sign;
    if (c->one_zero) sign &= code != 0;
    return (~is_nan & code) | (is_nan & ((1 << c->sign) - 1)) | sign;
}

INLINE ints find_codes(floats v, int kind, const Codes *c) {
    if (kind == INTEGERS) return __builtin_convertvector(clamp(v, c->low, c->high) + ROUNDER - ROUNDER, ints) + c->first;
    if (kind == TRUNCATED) return __builtin_convertvector(clamp(v, c->low, c->high), ints) + c->first;
    if (kind == AWAY) { /* what is not finite becomes 0 */
        ints size = (ints)v & MAGNITUDE, sign = (ints)v >> 31;
        size &= size < 0xFF << 23;
        ints whole = __builtin_convertvector((floats)size, ints);
        whole -= (floats)size - __builtin_convertvector(whole, floats) >= 0.5f;
        return (whole ^ sign) - sign;
    }
    if (kind == FLOATS) return to_small_floats(clamp(v, c->low, c->high), c);
    ints code = (ints){0} + c->first;
    for (int64_t b = 0; b < c->n_bounds; b++) code ^= (ints)(v > c->bounds[b]) & c->changes[b];
    return code;
}

typedef struct { float before, unit, after; int multiply; } Step; /* of a group */

INLINE bytes round_vector(const float *x, size_t n, Step step, int kind, const Codes *c) {
    floats v = {0};
    memcpy(&v, x, n * sizeof(float));
    v -= step.before;
    v = (step.multiply ? v * step.unit : v / step.unit) + step.after;
    return __builtin_convertvector(find_codes(v, kind, c), bytes);
}

INLINE void store_codes(bytes found, size_t n, int packing, uint8_t *to) {
    if (packing == BYTES) {
        memcpy(to, &found, n);
        return;
    }
    pairs two = (pairs)found;
    two = packing == LOW_FIRST ? two | two >> 4 : two << 4 | two >> 8;
    packed_bytes packed = __builtin_convertvector(two & 0xFF, packed_bytes);
    memcpy(to, &packed, n / 2);
}

/* Rounds n elements that share a unit. */
INLINE void round_group(const float *x, int64_t n, Step step, int packing, int kind, const Codes *c, uint8_t *codes) {
    if (packing == HALVES) {
        for (int64_t i = 0; i < n / 2; i += WIDTH) {
            bytes low = round_vector(x + i, WIDTH, step, kind, c), high = round_vector(x + n / 2 + i, WIDTH, step, kind, c);
            store_codes(low | high << 4, WIDTH, BYTES, codes + i);
        }
        return;
    }
    int per_byte = packing == BYTES ? 1 : 2;
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH)
        store_codes(round_vector(x + i, WIDTH, step, kind, c), WIDTH, packing, codes + i / per_byte);
    if (i == n) return;
    size_t rest = (size_t)(n - i);
    store_codes(round_vector(x + i, rest, step, kind, c), rest, packing, codes + i / per_byte);
}

INLINE void round_rows(const Numbers *all, int packing, int kind, const Codes *c) {
    int per_byte = packing == BYTES ? 1 : 2;
    for (int64_t row = 0; row < all->rows; row++) {
        const float *x = all->x + row * all->cols;
        uint8_t *codes = all->codes + row * all->row_bytes;
        int64_t at = row * all->step;
        for (int64_t first = 0; first < all->cols; first += all->group, at++) {
            int64_t n = all->cols - first < all->group ? all->cols - first : all->group;
            float before = all->before ? all->before[at] : 0;
            float after = all->after ? all->after[at] : -0.0f; /* adding 0 would lose the sign of -0 */
            Step step = {before, all->units[at], after, all->multiply};
            round_group(x + first, n, step, packing, kind, c, codes + first / per_byte);
        }
    }
}

INLINE void round_all(Numbers all, int kind, Codes c) { /* copies, which no code that is written can change */
    switch (all.packing) {
        case BYTES: round_rows(&all, BYTES, kind, &c); break;
        case LOW_FIRST: round_rows(&all, LOW_FIRST, kind, &c); break;
        case HIGH_FIRST: round_rows(&all, HIGH_FIRST, kind, &c); break;
        default: round_rows(&all, HALVES, kind, &c);
    }
}

void quanterr_round(const Numbers *n, const Codes *c) {
    switch (c->kind) {
        case INTEGERS: round_all(*n, INTEGERS, *c); break;
        case TRUNCATED: round_all(*n, TRUNCATED, *c); break;
        case AWAY: round_all(*n, AWAY, *c); break;
        case FLOATS: round_all(*n, FLOATS, *c); break;
        default: round_all(*n, LISTED, *c);
    }
}




/* What follows is done for WIDTH blocks side by side, one in each lane. */

INLINE ints to_halves(floats v) { /* ties to even */
    const Codes halves = {.mantissa = 10, .min_exponent = -14, .sign = 15};
    ints size = (ints)v & MAGNITUDE, sign = (ints)v >> 16 & 0x8000, is_nan = size > 0xFF << 23;
    ints beyond = sign | 0x7C00 | (is_nan & 0x200), is_beyond = size >= 0x477FF000;
    return (is_beyond & beyond) | (~is_beyond & to_small_floats(v, &halves));
}

INLINE ints rank(floats numbers, int by_magnitude) { /* integers in the order of numbers, NaN above all */
    ints size = (ints)numbers & MAGNITUDE, is_nan = size > 0xFF << 23, minus = by_magnitude ? (ints){0} : (ints)numbers >> 31;
    return (is_nan & INT32_MAX) | (~is_nan & ((size ^ minus) - minus));
}

/* Rounds scales or minima of n parts in place to integers of a unit, and returns it as float16. */
INLINE ints to_integers(floats *numbers, int n, int limit, int is_signed) {
    const floats none = {0};
    ints highest = rank(numbers[0], is_signed);
    floats largest = numbers[0], inverse, found;
    for (int i = 1; i < n; i++) {
        ints own = rank(numbers[i], is_signed), is_larger = own > highest;
        highest = (is_larger & own) | (~is_larger & highest);
        largest = choose(is_larger, numbers[i], largest);
    }
    if (is_signed) {
        ints is_none = magnitude(largest) < MIN_MAGNITUDE;
        inverse = choose(is_none, none, 1 / largest * (float)-limit);
        found = choose(is_none, none, 1 / inverse);
    } else {
        inverse = choose(largest > 0, 1 / largest * (float)limit, none);
        found = largest / (float)limit;
    }
    for (int i = 0; i < n; i++) {
        floats number = clamp(numbers[i] * inverse, is_signed ? (float)-limit : 0, (float)(is_signed ? limit - 1 : limit));
        numbers[i] = choose(number == number, number + ROUNDER - ROUNDER, none);
    }
    return to_halves(found);
}

/* Writes the bits of numbers to a block, where its description puts them and where they are 0. */
INLINE void write_bits(const Bits *bits, int n, const int *numbers, int count, uint8_t *block) {
    for (int k = 0; k < n; k++)
        for (int i = 0; i < count && bits[k].at; i++) {
            uint8_t *to = block + bits[k].at[i] + bits[k].shift[i] / 8; /* byte by byte: words would wait for each other */
            uint32_t left = ((uint32_t)numbers[i] >> bits[k].up & (uint32_t)bits[k].mask) << bits[k].shift[i] % 8;
            to[0] |= (uint8_t)left;
            if (left > 0xFF) to[1] |= (uint8_t)(left >> 8); /* numbers of 16 bits begin with a byte */
        }
}

/* Packs the codes of a block, which are in bytes next to each other. Bytes are shifted in pairs, as masks take away what
 * comes from their neighbours. */
INLINE void write_codes(const Blocks *b, const uint8_t *codes, uint8_t *block) {
    for (int k = 0; k < 4 && b->codes[k].at; k++) {
        const Bits *bits = b->codes + k;
        for (int i = 0; i < SUPERBLOCK; i += RUN) {
            uint8_t *to = block + bits->at[i / b->run] + i % b->run;
            pairs_of_bytes these, there;
            memcpy(&these, codes + i, RUN);
            memcpy(&there, to, RUN);
            there |= (these >> bits->up & (uint16_t)(bits->mask * 257)) << bits->shift[i / b->run];
            memcpy(to, &there, RUN);
        }
    }
}

typedef struct { float steps[PARTS], minima[PARTS]; } Scales; /* stored scales and minima of a block's parts */

/* Encodes the scales and, unless NULL, minima of up to WIDTH blocks; integers of scales and minima are `highest` at most. */
INLINE void encode_scales(const float *scales, const float *minima, int n, const Blocks *b, int parts, int highest,
                          Scales *found, uint8_t *out) {
    floats own[PARTS], mins[PARTS];
    for (int p = 0; p < WIDTH; p++) /* lanes beyond the last block repeat it */
        for (int i = 0; i < parts; i++) {
            own[i][p] = scales[(p < n ? p : n - 1) * parts + i];
            mins[i][p] = minima ? minima[(p < n ? p : n - 1) * parts + i] : 0;
        }
    ints unit = to_integers(own, parts, highest, !minima), min_unit = to_integers(mins, parts, highest, 0);
    for (int p = 0; p < n; p++, out += b->n_bytes) {
        const int units[2] = {(uint16_t)unit[p], (uint16_t)min_unit[p]};
        int own_codes[PARTS], min_codes[PARTS];
        for (int i = 0; i < parts; i++) {
            own_codes[i] = (int)own[i][p] - b->offset;
            min_codes[i] = (int)mins[i][p];
            float step = half((uint16_t)units[0]) * own[i][p];
            found[p].steps[i] = fabsf(step) > 0 ? step : INFINITY; /* INFINITY for NaN, too */
            found[p].minima[i] = -(half((uint16_t)units[1]) * mins[i][p]);
        }
        memset(out, 0, (size_t)b->n_bytes);
        write_bits(b->scales, 4, own_codes, parts, out);
        write_bits(b->minima, 2, min_codes, parts, out);
        write_bits(b->d, 1, units, 1, out);
        write_bits(b->d_minima, 1, units + 1, 1, out);
    }
}

/* Encodes n blocks of a K type that has so many parts; `minima` may be NULL. */
INLINE void encode_superblocks(const float *x, const float *scales, const float *minima, int64_t n, const Blocks *b,
                               int parts, int highest, uint8_t *out) {
    int largest = 0;
    for (int k = 0; k < 4; k++) largest |= b->codes[k].mask << b->codes[k].up;
    const float low = (float)b->first;
    const Codes to = {.kind = INTEGERS, .first = -b->first, .low = low, .high = low + (float)largest};
    const int size = SUPERBLOCK / parts;
    Scales found[WIDTH];
    for (int64_t block = 0; block < n; block++, out += b->n_bytes, x += SUPERBLOCK) {
        if (block % WIDTH == 0)
            encode_scales(scales + block * parts, minima ? minima + block * parts : NULL,
                          n - block < WIDTH ? (int)(n - block) : WIDTH, b, parts, highest, found, out);
        const Scales *own = found + block % WIDTH;
        uint8_t codes[SUPERBLOCK];
        for (int i = 0; i < parts; i++)
            round_group(x + i * size, size, (Step){own->minima[i], own->steps[i], -0.0f, 0}, BYTES, INTEGERS, &to,
                        codes + i * size);
        write_codes(b, codes, out);
    }
}

void quanterr_encode_superblocks(const float *x, const float *scales, const float *minima, int64_t n, const Blocks *type,
                                 int32_t highest, uint8_t *out) {
    if (type->part == 16) encode_superblocks(x, scales, minima, n, type, 16, highest, out);
    else encode_superblocks(x, scales, minima, n, type, 8, highest, out);
}

INLINE int32_t find_magnitude(const float *x, int64_t n) { /* compares bits, which are ordered like magnitudes */
    int32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t bits = as_bits(x[i]) & MAGNITUDE;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

void quanterr_find_magnitudes(const float *x, int64_t n, int64_t k, float *found) {
    if (k == 16) /* without loops */
        for (; n >= 16; n -= 16, x += 16) *found++ = as_float(find_magnitude(x, 16));
    for (; n > 0; n -= k, x += k) *found++ = as_float(find_magnitude(x, n < k ? n : k));
}

INLINE fours lower(fours a, fours b) { return (fours)(((a < b) & (ints_of_four)a) | (~(a < b) & (ints_of_four)b)); }

void quanterr_find_largest(const float *x, int64_t n, int64_t k, float *found) {
    for (int64_t group = 0; group < n; group++, x += k) {
        fours lows[2] = {{0}, {0}}, highs[2] = {{0}, {0}}; /* lows of -x; two chains, so that no step waits for the last */
        float low = 0, high = 0;
        int64_t i = 0;
        for (; i + 8 <= k; i += 8)
            for (int j = 0; j < 2; j++) {
                fours v;
                memcpy(&v, x + i + 4 * j, sizeof v);
                lows[j] = lower(v, lows[j]);
                highs[j] = lower(-v, highs[j]);
            }
        fours all_lows = lower(lows[0], lows[1]), all_highs = lower(highs[0], highs[1]);
        for (int j = 0; j < 4; j++) {
            low = all_lows[j] < low ? all_lows[j] : low;
            high = -all_highs[j] > high ? -all_highs[j] : high;
        }
        for (; i < k; i++) {
            low = x[i] < low ? x[i] : low;
            high = x[i] > high ? x[i] : high;
        }
        for (i = 0; high == -low && i + 1 < k && x[i] != high && x[i] != low;) i++; /* NaN is neither */
        found[group] = high == -low ? x[i] : high > -low ? high : low;
    }
}
