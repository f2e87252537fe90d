/* Codes that may not be the nearest; kernel/doubts.py specifies them. C11, no dependency, no Python. */
#include <math.h>
#include "shared.h"

enum { AT_ONCE = 256, EXPONENT = 0x7F800000 };
#define ROUNDED 0x1p-21f /* error of float32 arithmetic on stored numbers */
#define ABOVE_ONE 1.0001f /* for the roundings of margins themselves */
#define ABOVE 0x1.004p0f /* small floats beside a power of two: in the binade above it, */
#define BELOW 0x1.FF8p-1f /* or below it, where they are nearer to each other */

typedef struct { const float *unit, *shift; int64_t unit_step, shift_step; } Scales; /* of a row; steps of 0 or 1 */

INLINE int32_t find_level(float code, const Doubts *of) {
    int32_t level = 0;
    for (int32_t i = 0; i < of->n_bounds; i++) level += of->bounds[i] < code;
    return level;
}

/* Returns half the distance from a small float to the next one, away from zero if it is `upwards`. */
INLINE float find_room(float code, int upwards, const Doubts *of) {
    const float size = fabsf(code) * (upwards ? ABOVE : BELOW);
    return as_float(as_bits(size < of->normal ? of->normal : size) & EXPONENT) * of->half_step;
}

INLINE int is_doubtful(float x, float y, float unit, float shift, const Doubts *of, int kind) {
    const float size = fabsf(unit), sizes = fabsf(x) + fabsf(shift) + of->half_range * size, code = (y - shift) / unit;
    const float margin = sizes * of->margin + (of->absolute > 0 ? sizes * (of->absolute / size) : 0);
    float room, level = code;
    if (kind == 0) {
        room = 0.5f;
        level = code + ROUNDER - ROUNDER;
    } else if (kind == 1) {
        room = find_room(code, (x - y) * (y - shift) > 0, of);
    } else {
        const int32_t number = find_level(code, of);
        room = of->rooms[number];
        level = of->levels[number];
    }
    const int is_between = fabsf(level * unit + shift - y) > sizes * ROUNDED; /* a value that no code has */
    return !(fabsf(y - x) <= room * size - margin * ABOVE_ONE) | is_between | (size == 0);
}

INLINE int64_t list_row(const float *x, const float *y, Scales scales, int64_t cols, int64_t first, const Doubts *of, int kind,
                        int64_t *places, int64_t n) {
    for (int64_t at = 0; at < cols; at += AT_ONCE) {
        const int64_t width = cols - at < AT_ONCE ? cols - at : AT_ONCE;
        uint8_t found[AT_ONCE];
        uint8_t any = 0;
        for (int64_t k = 0; k < width; k++) {
            const float shift = scales.shift ? scales.shift[(at + k) * scales.shift_step] : 0;
            found[k] = (uint8_t)is_doubtful(x[at + k], y[at + k], scales.unit[(at + k) * scales.unit_step], shift, of, kind);
            any |= found[k];
        }
        for (int64_t k = 0; any && k < width; k++)
            if (found[k]) places[n++] = first + at + k;
    }
    return n;
}

/* The steps are constants where this is inlined, so that the compiler makes vectors of the loop. */
INLINE int64_t list_kind(const Doubts *of, const float *x, const float *y, int64_t rows, int64_t cols, int kind,
                         int64_t *places) {
    int64_t n = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t first = row * cols;
        const float *shift = of->shift ? of->shift + row * of->shift_row : NULL;
        const float *unit = of->unit + row * of->unit_row;
        if (!shift && !of->unit_col)
            n = list_row(x + first, y + first, (Scales){unit, NULL, 0, 0}, cols, first, of, kind, places, n);
        else if (!shift)
            n = list_row(x + first, y + first, (Scales){unit, NULL, 1, 0}, cols, first, of, kind, places, n);
        else
            n = list_row(x + first, y + first, (Scales){unit, shift, of->unit_col, of->shift_col}, cols, first, of, kind,
                         places, n);
    }
    return n;
}

int64_t quanterr_list_doubtful(const Doubts *of, const float *x, const float *y, int64_t rows, int64_t cols,
                               int64_t *places) {
    if (of->n_bounds) return list_kind(of, x, y, rows, cols, 2, places);
    if (of->normal > 0) return list_kind(of, x, y, rows, cols, 1, places);
    return list_kind(of, x, y, rows, cols, 0, places);
}
