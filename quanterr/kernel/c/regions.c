/* Sums over the rows, columns and tiles of a sample; Sampler of samples/codes.py specifies them. C11, no dependency,
 * no Python. Products are float64 and added up in LANES lanes, the same on every instruction set.
 */
#include <math.h>
#include "shared.h"

enum { X_SQ, E_SQ, BEST_SQ, XY, Y_SQ, OUTSIDE, SCATTER, N_PRODUCTS };
enum { OFF, CLIPPED, BEYOND_SQ, CLIPPED_SQ, CLIPPED_X_SQ, N_TOTALS };

typedef int64_t longs __attribute__((vector_size(4 * WIDTH)));
typedef struct { const float *x, *y, *best, *steps; const uint8_t *outside; } Elements; /* of a row */

INLINE wide_doubles load_wide(const double *from) { wide_doubles v; memcpy(&v, from, sizeof v); return v; }
INLINE void add_wide(double *to, wide_doubles v) { v += load_wide(to); memcpy(to, &v, sizeof v); }
INLINE wide_doubles only(longs where, wide_doubles v) { return (wide_doubles)(where & (longs)v); }
#define WIDEN(name, from)                                          \
    double name##_of[WIDTH / 2];                                   \
    for (int k = 0; k < WIDTH / 2; k++) name##_of[k] = (from)[k];  \
    const wide_doubles name = load_wide(name##_of)

/* Adds the products of some columns of a row, a multiple of LANES, to those of each column and of the row, and to the totals. */
INLINE void add_columns(Elements of, int cols, double (*columns)[TILE], double row[N_PRODUCTS][LANES],
                        double totals[N_TOTALS][LANES]) {
    for (int lane = 0; lane < LANES; lane += WIDTH / 2) {
        wide_doubles sums[N_PRODUCTS] = {{0}}, counts[N_TOTALS] = {{0}};
        for (int col = lane; col < cols; col += LANES) {
            WIDEN(x, of.x + col);
            WIDEN(y, of.y + col);
            WIDEN(nearest, of.best + col);
            WIDEN(steps, of.steps + col);
            WIDEN(outside, of.outside + col);
            const wide_doubles e = y - x, best = nearest - x, x_sq = x * x, e_sq = e * e, best_sq = best * best;
            const wide_doubles products[N_PRODUCTS] = {x_sq, e_sq, best_sq, x * y, y * y, outside, x_sq * e_sq};
            const longs out = outside > 0, on_one_side = ((e > 0) & (best > 0)) | ((e < 0) & (best < 0));
            for (int k = 0; k < N_PRODUCTS; k++) {
                sums[k] += products[k];
                add_wide(columns[k] + col, products[k]);
            }
            counts[OFF] -= __builtin_convertvector(~out & (steps > 1.5), wide_doubles);
            counts[CLIPPED] += outside;
            counts[BEYOND_SQ] += only(~out & (steps > 0.5) & on_one_side, e_sq);
            counts[CLIPPED_SQ] += only(out, best_sq);
            counts[CLIPPED_X_SQ] += only(out, x_sq);
        }
        for (int k = 0; k < N_PRODUCTS; k++) memcpy(row[k] + lane, sums + k, sizeof *sums);
        for (int k = 0; k < N_TOTALS; k++) add_wide(totals[k] + lane, counts[k]);
    }
}

typedef struct { float values[4][TILE]; uint8_t outside[TILE]; } Padded;

INLINE Elements pad(Elements of, int n, Padded *room) { /* zeros follow n columns */
    const float *from[4] = {of.x, of.y, of.best, of.steps};
    memset(room, 0, sizeof *room);
    for (int k = 0; k < 4; k++) memcpy(room->values[k], from[k], (size_t)n * sizeof(float));
    memcpy(room->outside, of.outside, (size_t)n);
    return (Elements){room->values[0], room->values[1], room->values[2], room->values[3], room->outside};
}

int quanterr_sum_regions(const float *x, const float *y, const float *best, const float *steps,
                                const uint8_t *outside, int64_t rows, int64_t cols, double *of_rows, double *of_cols,
                                double *of_tiles, double *totals) {
    double all[N_TOTALS][LANES] = {{0}};
    int32_t finite = 1;
    for (int64_t i = 0; i < rows * cols; i++) finite &= fabsf(y[i] + best[i] + x[i]) < INFINITY;
    if (!finite) return 0;
    memset(of_rows, 0, (size_t)(N_PRODUCTS * rows) * sizeof *of_rows);
    for (int64_t first = 0; first < cols; first += TILE) {
        const int width = cols - first < TILE ? (int)(cols - first) : TILE;
        double columns[N_PRODUCTS][TILE] = {{0}};
        for (int64_t row = 0; row < rows; row++) {
            const int64_t at = row * cols + first;
            double sums[N_PRODUCTS][LANES];
            Padded room;
            Elements of = {x + at, y + at, best + at, steps + at, outside + at};
            if (width % LANES) of = pad(of, width, &room);
            add_columns(of, (width + LANES - 1) / LANES * LANES, columns, sums, all);
            for (int k = 0; k < N_PRODUCTS; k++) {
                const double sum = sum_of(sums[k]);
                of_rows[k * rows + row] += sum;
                if (width == TILE) of_tiles[(k * rows + row) * (cols / TILE) + first / TILE] = sum;
            }
        }
        for (int k = 0; k < N_PRODUCTS; k++) memcpy(of_cols + k * cols + first, columns[k], (size_t)width * sizeof **columns);
    }
    for (int k = 0; k < N_TOTALS; k++) totals[k] = sum_of(all[k]);
    return 1;
}
