/* What the stored scales of a sample of rows allow; measure_rounding of tensors/levels.py and measure_losses of
 * tensors/good_scales.py specify it. C11, no dependency, no Python. Numbers are float32, as torch has them; sums are
 * float64 in LANES lanes, the same on every instruction set.
 */
#include <math.h>
#include "shared.h"

/* As in tensors/levels.py, tensors/good_scales.py and comparison/scale_sampling.py. */
#define HALF_STEP 0.5001
#define ABOVE_NORMAL 64.0
#define SOME 1.2
#define FAR 3.0
#define WIDE 2.2

typedef struct { double x_sq[LANES], e_sq[LANES], steps_sq[LANES]; float far[LANES]; } Errors; /* of rows */
typedef struct { double x_sq[LANES]; float high[LANES], low[LANES]; } Range; /* Σx², max x and max -x of rows */
typedef struct { /* elements that share a scale: (n, cols), from `stride` to `stride` */
    const float *x;
    int64_t n, stride;
    double x_sq, e_sq;
    float unit, needed;
} Group;

INLINE floats all(float value) { return (floats){0} + value; }
INLINE floats larger(floats a, floats b) { return choose(a > b, a, b); }
INLINE floats smaller(floats a, floats b) { return choose(a < b, a, b); }
INLINE floats farther(floats a, floats b) { return choose((ints)a > (ints)b, a, b); } /* of magnitudes; NaN stays */

INLINE float largest_of(const float *lanes) {
    float largest = lanes[0];
    for (int i = 1; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}

/* Returns LANES columns from `col` on, with zeros for those beyond the row. */
INLINE const float *lanes_at(const float *row, int64_t col, int64_t cols, float *room) {
    if (cols - col >= LANES) return row + col;
    memset(room, 0, LANES * sizeof *room);
    memcpy(room, row + col, (size_t)(cols - col) * sizeof *room);
    return room;
}

#define STORE(name) memcpy(t->name + lane, &name, sizeof name)
#define STORE_SUMS(name) store_sums(t->name + lane, name)

INLINE void add_errors(Errors *restrict to, const Errors *restrict from) {
    for (int i = 0; i < LANES; i++) {
        to->x_sq[i] += from->x_sq[i];
        to->e_sq[i] += from->e_sq[i];
        to->steps_sq[i] += from->steps_sq[i];
    }
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        floats far = farther(load(to->far + lane), load(from->far + lane));
        memcpy(to->far + lane, &far, sizeof far);
    }
}

/* Adds up a row: x², e², and e² in steps of the codes; and finds its farthest element, in steps. */
INLINE void scan(const float *x, const float *y, int64_t cols, float unit, const Sample *s, Errors *t, int is_float) {
    const floats inverse = all(1 / unit);
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        Sums x_sq = {{0}, {0}}, e_sq = {{0}, {0}}, steps_sq = {{0}, {0}};
        floats far = {0};
        for (int64_t col = 0; col < cols; col += LANES) {
            float x_room[LANES], y_room[LANES];
            floats a = load(lanes_at(x, col, cols, x_room) + lane), e = load(lanes_at(y, col, cols, y_room) + lane) - a;
            add_squares(&x_sq, a);
            add_squares(&e_sq, e);
            if (is_float) { /* divided by the power of two below the code */
                ints power = (ints)larger((floats)((ints)(a * inverse) & 0xFF << 23), all(s->normal));
                floats step = e * inverse * (floats)((254 << 23) - power);
                add_squares(&steps_sq, step);
                far = farther(magnitude(step), far);
            } else
                far = farther(magnitude(e), far);
        }
        if (!is_float) {
            const double of_step = 1 / (double)unit;
            steps_sq = (Sums){e_sq.low * of_step * of_step, e_sq.high * of_step * of_step};
            far = magnitude(far * inverse);
        }
        STORE_SUMS(x_sq); STORE_SUMS(e_sq); STORE_SUMS(steps_sq); STORE(far);
    }
}
static void scan_floats(const float *x, const float *y, int64_t cols, float unit, const Sample *s, Errors *t) {
    scan(x, y, cols, unit, s, t, 1);
}
static void scan_integers(const float *x, const float *y, int64_t cols, float unit, const Sample *s, Errors *t) {
    scan(x, y, cols, unit, s, t, 0);
}

/* Adds a row to what is known of others. */
static void extend(Range *t, const float *x, int64_t cols) {
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        Sums x_sq = load_sums(t->x_sq + lane);
        floats high = load(t->high + lane), low = load(t->low + lane);
        for (int64_t col = 0; col < cols; col += LANES) {
            float room[LANES];
            floats a = load(lanes_at(x, col, cols, room) + lane);
            add_squares(&x_sq, a);
            high = larger(a, high);
            low = larger(-a, low);
        }
        STORE_SUMS(x_sq); STORE(high); STORE(low);
    }
}

/* Returns the levels nearest to codes, as Levels.nearest of tensors/levels.py. */
INLINE floats nearest(floats codes, const Sample *s, int is_float) {
    if (!is_float) return smaller(larger(codes, all(s->lowest)), all(s->highest)) + ROUNDER - ROUNDER;
    const int shift = 23 - s->mantissa;
    const float steps = (float)(1 << s->mantissa) / s->normal;
    floats size = smaller(magnitude(codes), all(s->highest));
    floats normal = (floats)(((ints)larger(size, all(s->normal)) + (1 << (shift - 1))) & -(1 << shift));
    floats below = (smaller(size, all(s->normal)) * steps + ROUNDER - ROUNDER) / steps - s->normal;
    return (floats)((ints)(normal + below) | ((ints)codes & ~MAGNITUDE));
}

static int64_t count_coded(const float *x, int64_t n) {
    int64_t coded = 0;
    for (int64_t i = 0; i < n; i++) coded += x[i] != 0;
    return coded;
}

INLINE const float *scales_of(const Rows *rows, int64_t row) {
    return rows->scale + row / rows->scale_height * rows->scale_step;
}
INLINE int is_usable(float unit) { return unit != 0 && isfinite(unit) && isfinite(1 / unit); }
INLINE int is_power_of_two(float unit) { int exponent; return fabsf(frexpf(unit, &exponent)) == 0.5f; }

INLINE double sum_losses(const Sample *s, const Group *g, float factor, int is_float) {
    double sums[LANES];
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        Sums sum = {{0}, {0}};
        for (int64_t i = 0; i < g->n; i++)
            for (int64_t col = 0; col < s->cols; col += LANES) {
                float room[LANES];
                floats ideal = load(lanes_at(g->x + i * g->stride, col, s->cols, room) + lane) / g->unit / factor;
                add_squares(&sum, (nearest(ideal, s, is_float) - ideal) * factor * g->unit);
            }
        store_sums(sums + lane, sum);
    }
    return sum_of(sums);
}

/* Returns Σe² of the nearest codes of a group if its scale is `factor` times its unit; 1 takes no arithmetic. */
static double sum_errors(const Sample *s, const Group *g, float factor) {
    if (factor == 1) return s->mantissa ? sum_losses(s, g, 1, 1) : sum_losses(s, g, 1, 0);
    return s->mantissa ? sum_losses(s, g, factor, 1) : sum_losses(s, g, factor, 0);
}

/* Returns the worst Σe² of a group with a good scale: half a step for every element that is not zero. */
static double find_worst_loss(const Sample *s, const Group *g) {
    double half = g->needed * g->unit * 0.5f, coded = 0;
    for (int64_t i = 0; i < g->n; i++) coded += (double)count_coded(g->x + i * g->stride, s->cols);
    return half * half * coded;
}

/* Adds up the losses of groups that are judged together; returns whether none stands out. */
static int add_losses(Sample *s, Group *groups, int64_t n) {
    const double least = ABOVE_NORMAL * s->normal / s->highest, share = ldexp(1, -2 * (s->mantissa + 1));
    int lose_nothing = s->mantissa > 0, are_powers = 1, lose_some = 0;
    double x_sq = 0, worst_sq = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!(groups[i].x_sq > 0 && groups[i].needed >= 1 / WIDE)) return 0;
        x_sq += groups[i].x_sq;
        lose_nothing &= groups[i].needed >= least && groups[i].needed <= 1;
        are_powers &= is_power_of_two(groups[i].unit);
    }
    s->group_x_sq += x_sq;
    if (lose_nothing) {
        s->stored_sq += x_sq / 6 * share;
        s->good_sq += x_sq / 6 * share;
        return 1;
    }
    if (are_powers) return 0; /* good scales would be powers of two, too */
    for (int64_t i = 0; i < n; i++) {
        double good_sq = INFINITY, stored_sq = s->block_rows ? sum_errors(s, groups + i, 1) : groups[i].e_sq;
        for (int64_t k = 0; k < s->n_multiples; k++) {
            float factor = groups[i].needed * s->multiples[k];
            double own = s->block_rows && factor == 1 ? stored_sq : sum_errors(s, groups + i, factor);
            good_sq = own < good_sq ? own : good_sq;
        }
        if (!(stored_sq <= FAR * good_sq)) return 0;
        s->stored_sq += stored_sq;
        s->good_sq += good_sq;
        lose_some |= stored_sq > SOME * good_sq;
    }
    for (int64_t i = 0; i < n && lose_some && !s->mantissa; i++) worst_sq += find_worst_loss(s, groups + i);
    s->worst_sq += s->mantissa ? x_sq * share : worst_sq;
    return 1;
}

/* Returns the lower median of positive numbers, which it reorders. */
static double median_of(double *values, int64_t n) {
    int64_t low = 0, high = n - 1, at = (n - 1) / 2;
    while (low < high) { /* Hoare's selection */
        double pivot = values[(low + high) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] < pivot) i++;
            while (values[j] > pivot) j--;
            if (i <= j) { double kept = values[i]; values[i++] = values[j]; values[j--] = kept; }
        }
        if (at <= j) high = j;
        else if (at >= i) low = i;
        else break;
    }
    return values[at];
}

/* Adds rows of (at most) a group's columns to their group, whose good scale is a multiple of its unit. */
static void join_rows(Group *g, const Range *rows, int64_t n, const Sample *s) {
    const float high = largest_of(rows->high), low = -largest_of(rows->low);
    float up = (g->unit > 0 ? high : low) / g->unit / s->highest, down = (g->unit > 0 ? low : high) / g->unit / s->lowest;
    g->n += n;
    g->x_sq += sum_of(rows->x_sq);
    g->needed = up > g->needed ? up : g->needed;
    g->needed = down > g->needed ? down : g->needed;
}

static void describe_scales(Sample *s, const Rows *rows) {
    s->scale_n = rows->n_scales;
    s->scale_low = s->scale_high = *rows->scale;
    for (int64_t i = 0; i < s->scale_n; i++) {
        double scale = rows->scale[i];
        if (!(scale >= s->scale_low)) s->scale_low = scale;
        if (scale > s->scale_high) s->scale_high = scale;
        s->scale_sum += scale;
    }
}

/* Adds up a sample of rows; returns whether all codes are the nearest. Collects the groups of every few rows. */
static int scan_rows(Sample *s, const Rows *rows, Group *groups, int64_t *n) {
    const int64_t used = rows->cols / s->cols * s->cols; /* columns of whole groups */
    const float most = (float)(HALF_STEP / (1 << s->mantissa));
    Errors all_rows = {{0}, {0}, {0}, {0}};
    for (int64_t row = 0; row < rows->n; row++) {
        int64_t place = rows->places ? rows->places[row] : row;
        if (place < 0) continue;
        for (int64_t col = 0; col < rows->cols; col += s->cols) {
            const float *x = rows->x + place * rows->cols + col, *y = rows->y + place * rows->cols + col;
            float unit = scales_of(rows, row)[col / s->cols];
            int64_t width = rows->cols - col < s->cols ? rows->cols - col : s->cols;
            Errors own;
            if (!is_usable(unit)) return 0;
            (s->mantissa ? scan_floats : scan_integers)(x, y, width, unit, s, &own);
            add_errors(&all_rows, &own);
            if (s->block_rows || place % s->every || col >= used) continue;
            if (s->per_row || !*n) groups[(*n)++] = (Group){.x = x, .stride = s->every * rows->cols, .unit = unit};
            Range range = {{0}, {0}, {0}};
            extend(&range, x, width);
            join_rows(groups + *n - 1, &range, 1, s);
            groups[*n - 1].e_sq += sum_of(own.e_sq);
        }
        for (int i = 0; i < LANES; i++)
            if (!(all_rows.far[i] <= most)) return 0;
    }
    s->x_sq = sum_of(all_rows.x_sq);
    s->e_sq = sum_of(all_rows.e_sq);
    s->steps_sq = ldexp(sum_of(all_rows.steps_sq), 2 * s->mantissa);
    return 1;
}

/* Collects the groups of a row of blocks, whose values begin at `x`. */
static void scan_blocks(const Sample *s, const Rows *rows, int64_t first, const float *x, Group *groups) {
    for (int64_t col = 0; col < s->block_cols; col += s->cols, groups++) {
        *groups = (Group){.x = x + col, .stride = s->block_cols, .unit = scales_of(rows, first)[col / s->cols]};
        Range range = {{0}, {0}, {0}};
        if (!is_usable(groups->unit)) continue;
        for (int64_t i = 0; i < s->height; i++) extend(&range, groups->x + i * groups->stride, s->cols);
        join_rows(groups, &range, s->height, s);
    }
}

void measure_sample(Sample *s, const Rows *rows, double x_max) {
    Group *groups = s->room;
    int64_t n = 0;
    describe_scales(s, rows);
    if (!scan_rows(s, rows, groups, &n)) return;
    if (n && !s->per_row && !s->whole) groups->needed = (float)(x_max / fabs(groups->unit) / s->highest);
    if (!s->block_rows && !(n && add_losses(s, groups, n))) return;
    for (int64_t row = 0; row < s->block_rows; row += s->height) {
        int64_t across = s->block_cols / s->cols;
        scan_blocks(s, rows, s->first_block + row, s->block_values + row * s->block_cols, groups + n);
        if (!add_losses(s, groups + n, across)) return;
        n += across;
    }
    double *ratios = (double *)(groups + n);
    for (int64_t i = 0; i < n; i++) {
        float size = fabsf(groups[i].unit);
        ratios[i] = (double)size / (double)(groups[i].needed * size);
        if (!isfinite(ratios[i])) return;
    }
    s->plain = isfinite(s->group_x_sq) && isfinite(s->stored_sq) && isfinite(s->good_sq) && isfinite(s->worst_sq);
    s->scale_ratio = median_of(ratios, n);
}
