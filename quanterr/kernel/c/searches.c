/* Searches for the scales of ggml's types; recipes/searches.py specifies them. C11, no dependency, no Python.
 *
 * A part is a few numbers that share a scale. WIDTH of them are searched side by side, one in each lane, and sums run
 * over the elements of a part in order, so that neither the instruction set nor the number of parts changes a digit.
 * TOGETHER such vectors are searched at once, so that none waits for the sums of another. They are arrays in loops: of
 * vectors wider than the machine's, gcc makes code that takes seven times as long.
 */
#include <stddef.h>
#include "shared.h"

#define PASSES 5
#define SIDE_BY_SIDE 8 /* sums of squares */
#define TOGETHER 3
#define EACH for (int v = 0; v < TOGETHER; v++)

#if WIDTH == 16
#define FIRST_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif WIDTH == 8
#define FIRST_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define FIRST_HALVES 0, 4, 1, 5
#define SECOND_HALVES 2, 6, 3, 7
#endif
#if defined(__clang__)
#define INTERLEAVE(a, b, halves) __builtin_shufflevector(a, b, halves)
#else
#define INTERLEAVE(a, b, halves) __builtin_shuffle(a, b, (ints){halves})
#endif

typedef struct { /* WIDTH parts; each vector holds one element of each */
    floats x[MAX_PART_ELEMENTS], w[MAX_PART_ELEMENTS], products[MAX_PART_ELEMENTS], codes[MAX_PART_ELEMENTS];
} Parts;

static const floats NONE;

INLINE floats round_clamped(floats v, float low, float high) {
    for (int p = 0; p < WIDTH; p++) v[p] = v[p] < low ? low : v[p]; /* NaN stays */
    for (int p = 0; p < WIDTH; p++) v[p] = v[p] > high ? high : v[p];
    return v + ROUNDER - ROUNDER;
}

INLINE void transpose(floats *rows) {
    for (int done = 1; done < WIDTH; done *= 2) {
        floats mixed[WIDTH];
        for (int p = 0; p < WIDTH / 2; p++) {
            mixed[2 * p] = INTERLEAVE(rows[p], rows[p + WIDTH / 2], FIRST_HALVES);
            mixed[2 * p + 1] = INTERLEAVE(rows[p], rows[p + WIDTH / 2], SECOND_HALVES);
        }
        memcpy(rows, mixed, sizeof mixed);
    }
}

/* Loads the parts from `first` on; lanes beyond the last part repeat it. */
INLINE void load_parts(const float *from, int64_t first, int64_t n, int k, floats *to) {
    for (int i = 0; i < k; i += WIDTH) {
        floats rows[WIDTH] = {{0}};
        for (int64_t p = 0; p < WIDTH; p++) {
            const float *part = from + (first + p < n ? first + p : n - 1) * k + i;
            if (i + WIDTH <= k) rows[p] = load(part);
            else memcpy(rows + p, part, (size_t)(k - i) * sizeof(float));
        }
        transpose(rows);
        memcpy(to + i, rows, sizeof rows);
    }
}
INLINE void store_parts(const floats *from, int64_t first, int64_t n, int k, float *to) {
    for (int64_t p = 0; p < WIDTH && first + p < n; p++)
        for (int i = 0; i < k; i++) to[(first + p) * k + i] = from[i][p];
}

/* Loads TOGETHER · WIDTH parts from `first` on and the weights of their errors: `w`, or if it is NULL x² or, with
 * `magnitudes`, |x| plus the floor of the part; no `floors`: 0. */
INLINE void load_all(const float *x, const float *w, int magnitudes, const float *floors, int64_t first, int64_t n, int k,
                     Parts *to) {
    EACH {
        Parts *own = to + v;
        int64_t at = first + v * WIDTH;
        floats floor = NONE;
        load_parts(x, at, n, k, own->x);
        if (w) load_parts(w, at, n, k, own->w);
        for (int64_t p = 0; floors && p < WIDTH; p++) floor[p] = floors[at + p < n ? at + p : n - 1];
        for (int i = 0; i < k; i++) {
            if (!w) own->w[i] = magnitudes ? magnitude(own->x[i]) + floor : own->x[i] * own->x[i];
            own->products[i] = own->w[i] * own->x[i];
        }
    }
}

void quanterr_find_mean_squares(const float *x, int64_t n, int32_t k, float *found) {
    for (int64_t part = 0; part < n; part++, x += k) {
        float sums[SIDE_BY_SIDE] = {0}, total = 0;
        for (int i = 0; i < k; i += SIDE_BY_SIDE)
            for (int j = 0; j < SIDE_BY_SIDE; j++) sums[j] += x[i + j] * x[i + j];
        for (int j = 0; j < SIDE_BY_SIDE; j++) total += sums[j];
        found[part] = total / (float)k;
    }
}

INLINE void add_costs(const Parts *parts, int k, const floats *scale, const floats *minimum, int absolute, floats *to) {
    EACH to[v] = NONE;
    for (int i = 0; i < k; i++) EACH {
        floats error = parts[v].codes[i] * scale[v] + minimum[v] - parts[v].x[i];
        to[v] += (absolute ? magnitude(error) : error * error) * parts[v].w[i];
    }
}

void quanterr_search_minimum(const float *x, const float *w, const float *floors, int64_t n, int32_t k,
                                    float low, float high, const float *numerators, int32_t n_numerators,
                                    int32_t absolute, float *scales, float *minima, float *codes) {
    Parts parts[TOGETHER];
    floats one = NONE + 1;
    for (int64_t first = 0; first < n; first += TOGETHER * WIDTH) {
        load_all(x, w, 1, floors, first, n, k, parts);
        floats largest[TOGETHER], sum_w[TOGETHER], sum_x[TOGETHER], scale[TOGETHER], minimum[TOGETHER], cost[TOGETHER];
        floats best[TOGETHER], best_scale[TOGETHER], best_minimum[TOGETHER], chosen_minimum[TOGETHER], chosen[TOGETHER];
        ints flat[TOGETHER];
        EACH {
            Parts *own = parts + v;
            largest[v] = minimum[v] = own->x[0];
            sum_w[v] = sum_x[v] = NONE;
            for (int i = 0; i < k; i++) {
                minimum[v] = choose(own->x[i] < minimum[v], own->x[i], minimum[v]);
                largest[v] = choose(own->x[i] > largest[v], own->x[i], largest[v]);
                sum_w[v] += own->w[i];
                sum_x[v] += own->products[i];
            }
            best_minimum[v] = chosen_minimum[v] = minimum[v] = choose(minimum[v] > 0, NONE, minimum[v]);
            flat[v] = largest[v] - minimum[v] <= 0;
            floats spread = choose(flat[v], one, largest[v] - minimum[v]);
            best_scale[v] = scale[v] = spread / high;
            chosen[v] = one / spread * high;
            for (int i = 0; i < k; i++) own->codes[i] = round_clamped((own->x[i] - minimum[v]) * chosen[v], low, high);
        }
        add_costs(parts, k, scale, minimum, absolute, best);
        for (int t = 0; t < n_numerators; t++) {
            floats tried[TOGETHER], inverse[TOGETHER], sum_xl[TOGETHER], sum_l[TOGETHER], sum_l2[TOGETHER];
            ints better[TOGETHER];
            EACH {
                tried[v] = best_minimum[v];
                inverse[v] = one / choose(flat[v], one, largest[v] - tried[v]) * numerators[t];
                sum_xl[v] = sum_l[v] = sum_l2[v] = NONE;
            }
            for (int i = 0; i < k; i++) EACH {
                Parts *own = parts + v;
                floats code = round_clamped((own->x[i] - tried[v]) * inverse[v], low, high), weighted = own->w[i] * code;
                own->codes[i] = code;
                sum_xl[v] += own->products[i] * code;
                sum_l[v] += weighted;
                sum_l2[v] += weighted * code;
            }
            EACH {
                floats determinant = sum_w[v] * sum_l2[v] - sum_l[v] * sum_l[v];
                scale[v] = (sum_w[v] * sum_xl[v] - sum_x[v] * sum_l[v]) / determinant;
                minimum[v] = (sum_l2[v] * sum_x[v] - sum_l[v] * sum_xl[v]) / determinant;
                scale[v] = choose(minimum[v] > 0, sum_xl[v] / sum_l2[v], scale[v]);
                minimum[v] = choose(minimum[v] > 0, NONE, minimum[v]);
                better[v] = determinant > 0;
            }
            add_costs(parts, k, scale, minimum, absolute, cost);
            EACH {
                better[v] &= cost[v] < best[v];
                best[v] = choose(better[v], cost[v], best[v]);
                best_scale[v] = choose(better[v], scale[v], best_scale[v]);
                best_minimum[v] = choose(better[v], minimum[v], best_minimum[v]);
                chosen_minimum[v] = choose(better[v], tried[v], chosen_minimum[v]);
                chosen[v] = choose(better[v], inverse[v], chosen[v]);
            }
        }
        EACH {
            Parts *own = parts + v;
            best_scale[v] = choose(flat[v], NONE, best_scale[v]);
            best_minimum[v] = -best_minimum[v];
            store_parts(best_scale + v, first + v * WIDTH, n, 1, scales);
            store_parts(best_minimum + v, first + v * WIDTH, n, 1, minima);
            if (!codes) continue;
            for (int i = 0; i < k; i++) own->codes[i] = round_clamped((own->x[i] - chosen_minimum[v]) * chosen[v], low, high);
            store_parts(own->codes, first + v * WIDTH, n, k, codes);
        }
    }
}

INLINE floats find_largest(const floats *x, int k) { /* the element of largest magnitude in each part, the first on a tie */
    floats largest = x[0];
    for (int i = 1; i < k; i++) largest = choose(magnitude(x[i]) > magnitude(largest), x[i], largest);
    return largest;
}

void quanterr_search_symmetric(const float *x, const float *w, int64_t n, int32_t k, float low, float high,
                                      const float *numerators, int32_t n_numerators, float *scales, float *codes) {
    Parts parts[TOGETHER];
    for (int64_t first = 0; first < n; first += TOGETHER * WIDTH) {
        load_all(x, w, 0, NULL, first, n, k, parts);
        floats reciprocal[TOGETHER], best[TOGETHER], best_scale[TOGETHER], best_inverse[TOGETHER];
        ints zero[TOGETHER];
        EACH {
            floats largest = find_largest(parts[v].x, k), one = NONE + 1;
            zero[v] = magnitude(largest) < MIN_MAGNITUDE;
            reciprocal[v] = one / choose(zero[v], one, largest);
            best[v] = best_scale[v] = best_inverse[v] = NONE;
        }
        for (int t = 0; t < n_numerators; t++) {
            floats inverse[TOGETHER], sum_lx[TOGETHER], sum_l2[TOGETHER];
            EACH {
                inverse[v] = reciprocal[v] * numerators[t];
                sum_lx[v] = sum_l2[v] = NONE;
            }
            for (int i = 0; i < k; i++) EACH {
                floats code = round_clamped(parts[v].x[i] * inverse[v], low, high);
                sum_lx[v] += parts[v].products[i] * code;
                sum_l2[v] += parts[v].w[i] * code * code;
            }
            EACH {
                ints better = (sum_l2[v] > 0) & ((sum_lx[v] * sum_lx[v] > best[v] * sum_l2[v]) | ((ints){0} - !t));
                floats scale = sum_lx[v] / sum_l2[v];
                best[v] = choose(better, scale * sum_lx[v], best[v]);
                best_scale[v] = choose(better, scale, best_scale[v]);
                best_inverse[v] = choose(better, inverse[v], best_inverse[v]);
            }
        }
        EACH {
            floats scale = choose(zero[v], NONE, best_scale[v]), *own = parts[v].codes;
            store_parts(&scale, first + v * WIDTH, n, 1, scales);
            if (!codes) continue;
            for (int i = 0; i < k; i++) own[i] = round_clamped(parts[v].x[i] * best_inverse[v], low, high);
            store_parts(own, first + v * WIDTH, n, k, codes);
        }
    }
}

INLINE int any(const ints *is) {
    int32_t found = 0;
    EACH for (int p = 0; p < WIDTH; p++) found |= is[v][p];
    return found != 0;
}

void quanterr_refine(const float *x, const float *w, int64_t n, int32_t k, float low, float high, float *codes,
                            float *scales) {
    Parts parts[TOGETHER];
    floats one = NONE + 1;
    for (int64_t first = 0; first < n; first += TOGETHER * WIDTH) {
        load_all(x, w, 0, NULL, first, n, k, parts);
        floats sum_lx[TOGETHER], sum_l2[TOGETHER];
        ints zero[TOGETHER] = {{0}}, changed[TOGETHER];
        EACH {
            Parts *own = parts + v;
            if (codes) load_parts(codes, first + v * WIDTH, n, k, own->codes);
            else {
                floats largest = find_largest(own->x, k);
                zero[v] = magnitude(largest) < MIN_MAGNITUDE;
                floats inverse = one / choose(zero[v], one, largest) * low;
                for (int i = 0; i < k; i++) own->codes[i] = round_clamped(own->x[i] * inverse, low, high);
            }
            sum_lx[v] = sum_l2[v] = NONE;
            for (int i = 0; i < k; i++) {
                sum_lx[v] += own->products[i] * own->codes[i];
                sum_l2[v] += own->w[i] * own->codes[i] * own->codes[i];
            }
            changed[v] = (ints){0} - 1;
        }
        for (int pass = 0; pass < PASSES && any(changed); pass++) {
            EACH changed[v] = (ints){0};
            for (int i = 0; i < k; i++) EACH {
                Parts *own = parts + v;
                floats w = own->w[i], product = own->products[i], code = own->codes[i];
                floats lx = sum_lx[v] - product * code, l2 = sum_l2[v] - w * code * code;
                floats new = round_clamped(own->x[i] * l2 / choose(lx > 0, lx, one), low, high);
                floats new_lx = lx + product * new, new_l2 = l2 + w * new * new;
                ints better = (lx > 0) & (new != code) & (new_l2 > 0) &
                               (new_lx * new_lx * sum_l2[v] > sum_lx[v] * sum_lx[v] * new_l2);
                own->codes[i] = choose(better, new, code);
                sum_lx[v] = choose(better, new_lx, sum_lx[v]);
                sum_l2[v] = choose(better, new_l2, sum_l2[v]);
                changed[v] |= better;
            }
        }
        EACH {
            floats scale = choose((sum_l2[v] > 0) & ~zero[v], sum_lx[v] / sum_l2[v], NONE);
            store_parts(&scale, first + v * WIDTH, n, 1, scales);
            if (codes) store_parts(parts[v].codes, first + v * WIDTH, n, k, codes);
        }
    }
}
