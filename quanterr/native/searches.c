/* Searches for the scales of ggml's types; recipes/searches.py specifies them. C11, no dependency, no Python.
 *
 * A part is a few numbers that share a scale. WIDTH of them are searched side by side, one in each lane, and sums run
 * over the elements of a part in order, so that neither the instruction set nor the number of parts changes a digit.
 * With vectors wider than the machine's, gcc's code would take seven times as long.
 */
#include "shared.h"

#define MOST_SEARCHED 64 /* elements of a part, at most */
#define LEAST 1e-15f     /* a part whose elements are all smaller is zero */
#define PASSES 5

INLINE floats round_clamped(floats v, float low, float high) {
    for (int p = 0; p < WIDTH; p++) v[p] = v[p] < low ? low : v[p]; /* NaN stays */
    for (int p = 0; p < WIDTH; p++) v[p] = v[p] > high ? high : v[p];
    return v + ROUNDER - ROUNDER;
}

/* Loads the parts from `first` on, an element of each at a time; lanes beyond the last part repeat it. */
INLINE void load_parts(const float *from, int64_t first, int64_t n, int k, floats *to) {
    for (int64_t p = 0; p < WIDTH; p++) {
        const float *part = from + (first + p < n ? first + p : n - 1) * k;
        for (int i = 0; i < k; i++) to[i][p] = part[i];
    }
}
INLINE void store_parts(const floats *from, int64_t first, int64_t n, int k, float *to) {
    for (int64_t p = 0; p < WIDTH && first + p < n; p++)
        for (int i = 0; i < k; i++) to[(first + p) * k + i] = from[i][p];
}

INLINE floats cost(const floats *x, const floats *w, const floats *codes, int k, floats scale, floats low, int absolute) {
    floats total = {0};
    for (int i = 0; i < k; i++) {
        floats error = codes[i] * scale + low - x[i];
        total += (absolute ? magnitude(error) : error * error) * w[i];
    }
    return total;
}

/* Searches scale and minimum of n parts of k elements, and codes from 0 to most; `numerators` are those of the inverse
 * scales to try. */
EXPORT void quanterr_search_minimum(const float *x_in, const float *w_in, int64_t n, int32_t k, float most,
                                    const float *numerators, int32_t n_numerators, int32_t absolute, float *scales,
                                    float *minima, float *codes_out) {
    floats x[MOST_SEARCHED], w[MOST_SEARCHED], products[MOST_SEARCHED], codes[MOST_SEARCHED];
    for (int64_t first = 0; first < n; first += WIDTH) {
        load_parts(x_in, first, n, k, x);
        load_parts(w_in, first, n, k, w);
        floats low = x[0], high = x[0], sum_w = {0}, sum_x = {0};
        for (int i = 0; i < k; i++) {
            low = choose(x[i] < low, x[i], low);
            high = choose(x[i] > high, x[i], high);
            products[i] = w[i] * x[i];
            sum_w += w[i];
            sum_x += products[i];
        }
        low = choose(low > 0, (floats){0}, low);
        ints flat = high - low <= 0;
        floats one = (floats){0} + 1, spread = choose(flat, one, high - low);
        floats best_scale = spread / most, best_low = low, chosen_low = low, chosen = one / spread * most;
        for (int i = 0; i < k; i++) codes[i] = round_clamped((x[i] - low) * chosen, 0, most);
        floats best = cost(x, w, codes, k, best_scale, low, absolute);
        for (int t = 0; t < n_numerators; t++) {
            floats own_low = best_low, inverse = one / choose(flat, one, high - best_low) * numerators[t];
            floats sum_xl = {0}, sum_l = {0}, sum_l2 = {0};
            for (int i = 0; i < k; i++) {
                floats code = round_clamped((x[i] - own_low) * inverse, 0, most), weighted = w[i] * code;
                codes[i] = code;
                sum_xl += products[i] * code;
                sum_l += weighted;
                sum_l2 += weighted * code;
            }
            floats determinant = sum_w * sum_l2 - sum_l * sum_l;
            floats scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
            floats least = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
            scale = choose(least > 0, sum_xl / sum_l2, scale);
            least = choose(least > 0, (floats){0}, least);
            floats found = cost(x, w, codes, k, scale, least, absolute);
            ints better = (determinant > 0) & (found < best);
            best = choose(better, found, best);
            best_scale = choose(better, scale, best_scale);
            best_low = choose(better, least, best_low);
            chosen_low = choose(better, own_low, chosen_low);
            chosen = choose(better, inverse, chosen);
        }
        for (int i = 0; i < k; i++) codes[i] = round_clamped((x[i] - chosen_low) * chosen, 0, most);
        best_scale = choose(flat, (floats){0}, best_scale);
        best_low = -best_low;
        store_parts(&best_scale, first, n, 1, scales);
        store_parts(&best_low, first, n, 1, minima);
        store_parts(codes, first, n, k, codes_out);
    }
}

INLINE floats find_largest(const floats *x, int k) { /* of each part, by magnitude, the first */
    floats largest = x[0];
    for (int i = 1; i < k; i++) largest = choose(magnitude(x[i]) > magnitude(largest), x[i], largest);
    return largest;
}

/* Searches the scale of n parts of k elements, and codes from -most to most - 1; `numerators` as above. */
EXPORT void quanterr_search_symmetric(const float *x_in, const float *w_in, int64_t n, int32_t k, float most,
                                      const float *numerators, int32_t n_numerators, float *scales, float *codes_out) {
    floats x[MOST_SEARCHED], w[MOST_SEARCHED], products[MOST_SEARCHED];
    for (int64_t first = 0; first < n; first += WIDTH) {
        load_parts(x_in, first, n, k, x);
        load_parts(w_in, first, n, k, w);
        for (int i = 0; i < k; i++) products[i] = w[i] * x[i];
        floats largest = find_largest(x, k), one = (floats){0} + 1;
        ints zero = magnitude(largest) < LEAST;
        floats reciprocal = one / choose(zero, one, largest), best = {0}, best_scale = {0}, best_inverse = {0};
        for (int t = 0; t < n_numerators; t++) {
            floats inverse = reciprocal * numerators[t], sum_lx = {0}, sum_l2 = {0};
            for (int i = 0; i < k; i++) {
                floats code = round_clamped(x[i] * inverse, -most, most - 1);
                sum_lx += products[i] * code;
                sum_l2 += w[i] * code * code;
            }
            ints better = (sum_l2 > 0) & ((sum_lx * sum_lx > best * sum_l2) | ((ints){0} - !t));
            floats scale = sum_lx / sum_l2;
            best = choose(better, scale * sum_lx, best);
            best_scale = choose(better, scale, best_scale);
            best_inverse = choose(better, inverse, best_inverse);
        }
        for (int i = 0; i < k; i++) x[i] = round_clamped(x[i] * best_inverse, -most, most - 1);
        best_scale = choose(zero, (floats){0}, best_scale);
        store_parts(&best_scale, first, n, 1, scales);
        store_parts(x, first, n, k, codes_out);
    }
}

INLINE int any(ints is) {
    int32_t found = 0;
    for (int p = 0; p < WIDTH; p++) found |= is[p];
    return found != 0;
}

/* Refines the scales of n parts of k elements and their codes, from low to high, changing each code where the fit
 * gains. */
EXPORT void quanterr_refine(const float *x_in, const float *w_in, int64_t n, int32_t k, float low, float high,
                            float *codes_in, float *scales) {
    floats x[MOST_SEARCHED], w[MOST_SEARCHED], codes[MOST_SEARCHED];
    for (int64_t first = 0; first < n; first += WIDTH) {
        load_parts(x_in, first, n, k, x);
        load_parts(w_in, first, n, k, w);
        load_parts(codes_in, first, n, k, codes);
        floats sum_lx = {0}, sum_l2 = {0}, one = (floats){0} + 1;
        for (int i = 0; i < k; i++) {
            sum_lx += w[i] * x[i] * codes[i];
            sum_l2 += w[i] * codes[i] * codes[i];
        }
        ints changed = (ints){0} - 1;
        for (int pass = 0; pass < PASSES && any(changed); pass++) {
            changed = (ints){0};
            for (int i = 0; i < k; i++) {
                floats product = w[i] * x[i], code = codes[i];
                floats lx = sum_lx - product * code, l2 = sum_l2 - w[i] * code * code;
                floats new = round_clamped(x[i] * l2 / choose(lx > 0, lx, one), low, high);
                floats new_lx = lx + product * new, new_l2 = l2 + w[i] * new * new;
                ints better = (lx > 0) & (new != code) & (new_l2 > 0) &
                               (new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2);
                codes[i] = choose(better, new, code);
                sum_lx = choose(better, new_lx, sum_lx);
                sum_l2 = choose(better, new_l2, sum_l2);
                changed |= better;
            }
        }
        floats scale = choose(sum_l2 > 0, sum_lx / sum_l2, (floats){0});
        store_parts(&scale, first, n, 1, scales);
        store_parts(codes, first, n, k, codes_in);
    }
}
