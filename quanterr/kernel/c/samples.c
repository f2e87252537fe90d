/* What the stored scales of a sample of rows allow; measure_rounding and find_nearest of samples/nearest.py, and
 * measure_losses of samples/good_scales.py specify it. C11, no dependency, no Python. Numbers are float32, as torch has
 * them; sums are float64 in LANES lanes, the same on every instruction set.
 */
#include <math.h>
#include "shared.h"
#if WIDTH > 4
#include <immintrin.h>
#endif

#define MAX_ROWS 1024 /* maximum number of rows of a sample that is searched for regions */
#define TRUSTED 0x1p-100 /* minimum energy of a region: float32 loses the squares of much smaller ones */

enum { X_SQ, E_SQ, BEST_SQ, XE, N_PRODUCTS }; /* of an element */

typedef struct { double x_sq[LANES], e_sq[LANES], steps_sq[LANES]; float far[LANES]; } Errors; /* of rows */
typedef struct { double x_sq[LANES]; float high[LANES], low[LANES]; } Range; /* Σx², max x and max -x of rows */
typedef struct { /* elements that share a scale: (n, cols), from `stride` to `stride` */
    const float *x;
    int64_t n, stride;
    double x_sq, e_sq;
    float unit, needed, zero, high, low; /* zero: the code of zero; high and low: codes that are needed, from zero on */
    float near;                          /* a good scale within this distance of the unit is no better than the unit */
} Group;
typedef struct { double x_sq, e_sq, best_sq, clipped_sq, clipped_x_sq, beyond_sq; int64_t clipped, off; } Nearest; /* codes */
typedef struct { float unit, zero; } Scale;
typedef struct { float factor, start, first; } Trial; /* a scale to try, as a multiple of a group's unit: code `start` is
                                                       * where `first` is then */

/* Of a NaN and a number, the second is taken. A compiler would select after a comparison, which takes longer. */
#if WIDTH == 16
INLINE floats larger(floats a, floats b) { return (floats)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE floats smaller(floats a, floats b) { return (floats)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE floats pick(floats from, ints at) { return (floats)_mm512_permutexvar_ps((__m512i)at, (__m512)from); }
#elif WIDTH == 8
INLINE floats larger(floats a, floats b) { return (floats)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE floats smaller(floats a, floats b) { return (floats)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE floats larger(floats a, floats b) { return choose(a > b, a, b); }
INLINE floats smaller(floats a, floats b) { return choose(a < b, a, b); }
#endif
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

static void add_nearest(Nearest *to, const Nearest *from) {
    to->x_sq += from->x_sq;
    to->e_sq += from->e_sq;
    to->best_sq += from->best_sq;
    to->clipped_sq += from->clipped_sq;
    to->clipped_x_sq += from->clipped_x_sq;
    to->beyond_sq += from->beyond_sq;
    to->clipped += from->clipped;
    to->off += from->off;
}
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
    const floats inverse = broadcast(1 / unit);
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        Sums x_sq = {{0}, {0}}, e_sq = {{0}, {0}}, steps_sq = {{0}, {0}};
        floats far = {0};
        for (int64_t col = 0; col < cols; col += LANES) {
            float x_room[LANES], y_room[LANES];
            floats a = load(lanes_at(x, col, cols, x_room) + lane), e = load(lanes_at(y, col, cols, y_room) + lane) - a;
            add_squares(&x_sq, a);
            add_squares(&e_sq, e);
            if (is_float) { /* divided by the power of two below the code */
                ints power = (ints)larger((floats)((ints)(a * inverse) & 0xFF << 23), broadcast(s->normal));
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

/* Returns values[i] for each number, where i is how many of n - 1 ascending bounds are below it. */
INLINE floats look_up(floats numbers, const float *bounds, const float *values, int64_t n) {
#if WIDTH == 16
    if (n <= WIDTH) { /* bisection: comparing with each bound takes three times as long */
        const floats all = load(bounds);
        ints at = (numbers > bounds[7]) & 8;
        at |= (numbers > pick(all, at + 3)) & 4;
        at |= (numbers > pick(all, at + 1)) & 2;
        at |= (numbers > pick(all, at)) & 1;
        return pick(load(values), at);
    }
#endif
    floats found = broadcast(values[0]);
    for (int64_t i = 1; i < n; i++) found = choose(numbers > bounds[i - 1], broadcast(values[i]), found);
    return found;
}

/* Returns the levels nearest to codes, as Levels.nearest of kernel/levels.py. */
INLINE floats nearest(floats codes, const Sample *s, int kind) {
    if (kind == LISTED) return look_up(codes, s->bounds, s->levels, s->n_levels);
    if (kind != FLOATS) return smaller(larger(codes, broadcast(s->lowest)), broadcast(s->highest)) + ROUNDER - ROUNDER;
    const int shift = 23 - s->mantissa;
    const float steps = (float)(1 << s->mantissa) / s->normal;
    floats size = smaller(magnitude(codes), broadcast(s->highest));
    floats normal = (floats)(((ints)larger(size, broadcast(s->normal)) + (1 << (shift - 1))) & -(1 << shift));
    floats below = (smaller(size, broadcast(s->normal)) * steps + ROUNDER - ROUNDER) / steps - s->normal;
    return (floats)((ints)(normal + below) | ((ints)codes & ~MAGNITUDE));
}

/* Returns the numbers of levels: neighbours differ by one; as Levels.numbers of kernel/levels.py. */
INLINE floats number_of(floats levels, const Sample *s, int kind) {
    if (kind == LISTED) return look_up(levels, s->bounds, s->numbers, s->n_levels);
    if (kind != FLOATS) return levels;
    const floats size = magnitude(levels), normal = broadcast(s->normal);
    const ints above = ((ints)larger(size, normal) - (ints)normal) >> (23 - s->mantissa);
    const floats number = __builtin_convertvector(above, floats) + smaller(size, normal) * ((float)(1 << s->mantissa) / s->normal);
    return (floats)((ints)number | ((ints)levels & ~MAGNITUDE));
}

/* Adds up a row with its nearest codes. Returns whether the stored ones are as near; or, with `products`, writes the products
 * there, (N_PRODUCTS, max_cols), and returns whether no scale may be lost. */
INLINE int look_closely(const float *x, const float *y, int64_t cols, Scale scale, const Sample *s, Nearest *t,
                        float *products, int kind) {
    const floats inverse = broadcast(1 / scale.unit);
    const float near = (float)s->limits->near;
    double x_sqs[LANES], e_sqs[LANES], best_sqs[LANES], clipped_sqs[LANES], clipped_x_sqs[LANES], beyond_sqs[LANES];
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        Sums x_sq = {{0}, {0}}, e_sq = {{0}, {0}}, best_sq = {{0}, {0}};
        Sums clipped_sq = {{0}, {0}}, clipped_x_sq = {{0}, {0}}, beyond_sq = {{0}, {0}};
        ints clipped = {0}, off = {0}, apart = {0};
        for (int64_t col = 0; col < cols; col += LANES) {
            float x_room[LANES], y_room[LANES];
            floats a = load(lanes_at(x, col, cols, x_room) + lane), b = load(lanes_at(y, col, cols, y_room) + lane);
            floats code = a * inverse + scale.zero, level = nearest(code, s, kind);
            floats stored = b * inverse + scale.zero, e = b - a, best = (level - scale.zero) * scale.unit - a;
            stored = kind == FLOATS || kind == LISTED ? nearest(stored, s, kind) : stored + ROUNDER - ROUNDER; /* also beyond */
            ints same = level == stored, out = (code < s->below) | (code > s->above);
            apart |= out & (b == 0); /* the scale may be lost */
            if (!products) apart |= ~same & ~(magnitude(e) <= magnitude(best) * near);
            best = choose(same | (magnitude(e) < magnitude(best)), e, best);
            clipped -= out;
            if (products) {
                const floats each[N_PRODUCTS] = {a * a, e * e, best * best, a * e};
                for (int k = 0; k < N_PRODUCTS; k++) store(products + k * s->max_cols + col + lane, each[k]);
                off -= (magnitude(number_of(level, s, kind) - number_of(stored, s, kind)) > 1.5f) & ~out;
            }
            add_squares(&x_sq, a);
            add_squares(&e_sq, e);
            add_squares(&best_sq, best);
            add_squares(&clipped_sq, (floats)(out & (ints)best));
            add_squares(&clipped_x_sq, (floats)(out & (ints)a));
            add_squares(&beyond_sq, (floats)(~same & ~out & (e * best > 0) & (ints)e));
        }
        for (int k = 0; k < WIDTH; k++) {
            if (apart[k]) return 0;
            t->clipped += clipped[k];
            t->off += off[k];
        }
        store_sums(x_sqs + lane, x_sq);
        store_sums(e_sqs + lane, e_sq);
        store_sums(best_sqs + lane, best_sq);
        store_sums(clipped_sqs + lane, clipped_sq);
        store_sums(clipped_x_sqs + lane, clipped_x_sq);
        store_sums(beyond_sqs + lane, beyond_sq);
    }
    t->x_sq = sum_of(x_sqs), t->e_sq = sum_of(e_sqs), t->best_sq = sum_of(best_sqs);
    t->clipped_sq = sum_of(clipped_sqs), t->clipped_x_sq = sum_of(clipped_x_sqs), t->beyond_sq = sum_of(beyond_sqs);
    return 1;
}
static int find_nearest(const float *x, const float *y, int64_t cols, Scale scale, const Sample *s, Nearest *t, float *products) {
#define LOOK(products, kind) look_closely(x, y, cols, scale, s, t, products, kind)
    switch (s->kind) {
    case INTEGERS: return products ? LOOK(products, INTEGERS) : LOOK(0, INTEGERS);
    case FLOATS: return products ? LOOK(products, FLOATS) : LOOK(0, FLOATS);
    case LISTED: return products ? LOOK(products, LISTED) : LOOK(0, LISTED);
    default: return products ? LOOK(products, SHIFTED) : LOOK(0, SHIFTED);
    }
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

/* Regions of a sample: rows, columns or tiles; of each, e², and e² as a multiple of the least e² and of x². */
typedef struct { double *e_sq, *excess, *share; int64_t n, max_n; } Regions;

INLINE Regions place_regions(const Sample *s, double *room, int64_t first, int64_t max_n) {
    return (Regions){room + first, room + s->max_cols + first, room + 2 * s->max_cols + first, 0, max_n};
}

/* Adds a region of these sums; returns 0 if a factor explains much of its error, as where a scale is wrong or lost, or if
 * its values are so small that squares were lost. */
static int add_region(const Sample *s, Regions *to, const double sums[N_PRODUCTS]) {
    const double x_sq = sums[X_SQ], e_sq = sums[E_SQ];
    if (to->n == to->max_n || !(x_sq >= TRUSTED)) return 0;
    to->e_sq[to->n] = e_sq;
    to->excess[to->n] = e_sq > 0 ? e_sq / (sums[BEST_SQ] + s->limits->floor * x_sq) : 1;
    to->share[to->n++] = e_sq / x_sq;
    return sums[XE] * sums[XE] <= s->limits->like * x_sq * e_sq;
}

/* Adds a row, its tiles, and its products to those of each column; returns as add_region. */
static int add_row(Sample *s, Regions *rows, Regions *tiles, const float *products, int64_t cols) {
    double row[N_PRODUCTS] = {0};
    for (int64_t first = 0; first < cols; first += TILE) {
        double tile[N_PRODUCTS];
        for (int k = 0; k < N_PRODUCTS; k++) {
            const float *of_row = products + k * s->max_cols;
            double *columns = s->columns + k * s->max_cols, sums[LANES] = {0};
            for (int64_t col = first; col < first + TILE && col < cols; col += LANES)
                for (int i = 0; i < LANES; i++) {
                    sums[i] += of_row[col + i];
                    columns[col + i] += of_row[col + i];
                }
            tile[k] = sum_of(sums);
            row[k] += tile[k];
        }
        if (first + TILE <= cols && !add_region(s, tiles, tile)) return 0;
    }
    return cols < s->limits->min_elements || add_region(s, rows, row);
}

/* Divides n values, from `step` to `step`, by their median. */
static void divide_by_median(double *values, int64_t n, int64_t step, double *room) {
    for (int64_t i = 0; i < n; i++) room[i] = values[i * step];
    const double median = median_of(room, n);
    for (int64_t i = 0; i < n; i++) values[i * step] /= median;
}

/* Divides the errors of tiles, (down, across), by the medians of their columns, then of their rows: errors accumulate in the
 * last columns of a group, and where a row has an outlier. */
static void divide_by_medians(const Sample *s, double *e_sq, int64_t down, int64_t across, double *room) {
    const int64_t min_regions = s->limits->min_regions;
    for (int64_t col = 0; col < across && down >= min_regions; col++) divide_by_median(e_sq + col, down, across, room);
    for (int64_t row = 0; row < down && across >= min_regions; row++) divide_by_median(e_sq + row * across, across, 1, room);
}

/* Returns whether no region stands out from the others and from the whole sample. `across` is the number of tiles in a row;
 * 0 for rows, -1 for columns. */
static int are_alike(const Sample *s, const Regions *of, double *room, int64_t across) {
    if (!of->n) return 1;
    memcpy(room, of->excess, (size_t)of->n * sizeof *room);
    const double usual = fmin(fmax(median_of(room, of->n), 1), fmax(s->e_sq / s->best_sq, 1));
    const int compensated = usual > s->limits->compensated;
    const double max_share = compensated ? s->limits->worse * s->e_sq / s->x_sq : s->limits->better * s->best_sq / s->x_sq;
    if (compensated && across < 0) return 1;
    for (int64_t i = 0, divided = 0; i < of->n; i++) {
        if (of->excess[i] <= s->limits->part * usual * usual * usual || of->share[i] <= max_share) continue;
        if (!compensated || across == 0) return 0;
        if (!divided++) divide_by_medians(s, of->e_sq, of->n / across, across, room);
        if (!(of->e_sq[i] <= s->limits->apart)) return 0;
    }
    return 1;
}

/* Returns whether no row, tile or column of the sample stands out. */
static int are_regions_alike(const Sample *s, const Regions *rows, const Regions *tiles, int64_t n_rows, int64_t cols) {
    double *room = s->columns + N_PRODUCTS * s->max_cols; /* where the products of the last row are */
    if (!are_alike(s, rows, room, 0) || !are_alike(s, tiles, room, cols / TILE)) return 0;
    Regions columns = {tiles->e_sq, tiles->excess, tiles->share, 0, s->max_cols};
    for (int64_t col = 0; col < cols && n_rows >= s->limits->min_elements; col++) {
        double sums[N_PRODUCTS];
        for (int k = 0; k < N_PRODUCTS; k++) sums[k] = s->columns[k * s->max_cols + col];
        if (!add_region(s, &columns, sums)) return 0;
        const double xy = sums[X_SQ] + sums[XE], y_sq = xy + sums[XE] + sums[E_SQ];
        if (xy * xy < s->limits->unlike * sums[X_SQ] * y_sq) return 0;
    }
    return are_alike(s, &columns, room, -1);
}

INLINE Scale scale_of(const Rows *rows, int64_t row, int64_t group) {
    Scale scale = {rows->scale[row / rows->scale_height * rows->scale_step + group], 0};
    if (rows->factor != 0) scale.unit *= rows->factor;
    if (rows->zero) scale.zero = rows->zero[row * rows->zero_step + group];
    if (rows->shift) scale.zero = -rows->shift[row * rows->shift_step + group] / scale.unit;
    return scale;
}
INLINE int is_usable(float unit) { return unit != 0 && isfinite(unit) && isfinite(1 / unit); }
INLINE int is_power_of_two(float unit) { int exponent; return fabsf(frexpf(unit, &exponent)) == 0.5f; }

/* Returns half the distance of the levels around codes, or their distance from the first or last level. */
INLINE floats room_of(const Sample *s, floats codes, int kind) {
    if (kind != LISTED) return broadcast(0.5f);
    return larger(look_up(codes, s->levels + 1, s->halves, s->n_levels - 1), larger(s->lowest - codes, codes - s->highest));
}

/* Returns the errors of the nearest codes of x / unit, if a group's scale is a multiple of its unit. */
INLINE floats find_errors(const Sample *s, const Group *g, floats codes, Trial of, int kind) {
    floats ideal = kind == SHIFTED ? (codes + g->zero - of.start) / of.factor + of.first : codes / of.factor;
    return (nearest(ideal, s, kind) - ideal) * of.factor * g->unit;
}

/* Finds Σe² of the nearest codes of a group for each of n scales. */
INLINE void sum_errors_of(const Sample *s, const Group *g, const Trial *trials, int64_t n, double *e_sq, int kind) {
    double sums[MAX_FACTORS][LANES];
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        Sums own[MAX_FACTORS];
        for (int64_t k = 0; k < n; k++) own[k] = (Sums){{0}, {0}};
        for (int64_t i = 0; i < g->n; i++)
            for (int64_t col = 0; col < s->cols; col += LANES) {
                float room[LANES];
                floats codes = load(lanes_at(g->x + i * g->stride, col, s->cols, room) + lane) / g->unit;
                for (int64_t k = 0; k < n; k++) add_squares(own + k, find_errors(s, g, codes, trials[k], kind));
            }
        for (int64_t k = 0; k < n; k++) store_sums(sums[k] + lane, own[k]);
    }
    for (int64_t k = 0; k < n; k++) e_sq[k] = sum_of(sums[k]);
}
static void sum_errors(const Sample *s, const Group *g, const Trial *trials, int64_t n, double *e_sq) {
    switch (s->kind) {
    case INTEGERS: sum_errors_of(s, g, trials, n, e_sq, INTEGERS); break;
    case FLOATS: sum_errors_of(s, g, trials, n, e_sq, FLOATS); break;
    case LISTED: sum_errors_of(s, g, trials, n, e_sq, LISTED); break;
    default: sum_errors_of(s, g, trials, n, e_sq, SHIFTED);
    }
}

/* Returns Σe² of a group in the worst case with a good scale: half a step where x is not zero. `last` is the last factor
 * tried. */
INLINE double sum_worst_errors_of(const Sample *s, const Group *g, float last, int kind) {
    double sums[LANES];
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        Sums sum = {{0}, {0}};
        for (int64_t i = 0; i < g->n; i++)
            for (int64_t col = 0; col < s->cols; col += LANES) {
                float room[LANES];
                floats x = load(lanes_at(g->x + i * g->stride, col, s->cols, room) + lane);
                floats worst = g->needed * g->unit * room_of(s, x / g->unit / last, kind);
                add_squares(&sum, choose(x == 0, broadcast(0), worst));
            }
        store_sums(sums + lane, sum);
    }
    return sum_of(sums);
}
static double sum_worst_errors(const Sample *s, const Group *g, float last) {
    return s->kind == LISTED ? sum_worst_errors_of(s, g, last, LISTED) : sum_worst_errors_of(s, g, last, INTEGERS);
}


/* Finds what the zero points of groups have in common, and by which factor the steps of each must grow. */
static void compare_zeros(Sample *s, Group *groups, int64_t n) {
    float lowest = groups->zero, highest = groups->zero;
    s->zeros = WHOLE;
    for (int64_t i = 0; i < n; i++) {
        lowest = groups[i].zero < lowest ? groups[i].zero : lowest;
        highest = groups[i].zero > highest ? groups[i].zero : highest;
        if (!(fabsf(groups[i].zero - rintf(groups[i].zero)) < (float)s->limits->moved)) s->zeros = FRACTIONS;
    }
    if (highest - lowest < (float)s->limits->fixed) s->zeros = ONE;
    for (Group *g = groups; g < groups + n; g++) {
        const float above = s->highest - g->zero, below = g->zero - s->lowest;
        const float up = above > 0 ? g->high / above : 0, down = below > 0 ? -g->low / below : 0;
        g->needed = s->zeros == ONE ? (up > down ? up : down) : (g->high - g->low) / (s->highest - s->lowest);
    }
}

/* Returns how many scales to try for a group, and which. */
static int64_t list_trials(const Sample *s, const Group *g, int are_powers, Trial *trials) {
    const int64_t n = are_powers ? 2 : s->n_multiples;
    float start = s->zeros == ONE ? g->zero : g->zero + g->low;
    if (are_powers) { /* the smallest scale that clips nothing, and that of OCP's rule, from exponents alone */
        int exponent, of_highest, of_largest;
        float mantissa = frexpf(g->needed, &exponent);
        frexpf(s->highest, &of_highest);
        frexpf(g->needed * s->highest, &of_largest);
        trials[0].factor = ldexpf(1, exponent - (mantissa == 0.5f));
        trials[1].factor = ldexpf(1, of_largest - of_highest);
    } else
        for (int64_t k = 0; k < n; k++) trials[k].factor = g->needed * s->multiples[k];
    for (int64_t k = 0; k < n; k++) {
        float factor = trials[k].factor;
        if (s->zeros == WHOLE) start = g->zero - rintf((g->zero - start) / factor) * factor; /* whole steps below zero */
        trials[k].start = start, trials[k].first = s->zeros == ONE ? g->zero : s->lowest;
    }
    return n;
}

/* Adds up the losses of groups that are judged together; returns whether none stands out. */
static int add_losses(Sample *s, Group *groups, int64_t n) {
    const double min_needed = s->limits->above_normal * s->normal / s->highest, share = ldexp(1, -2 * (s->mantissa + 1));
    const int is_float = s->kind == FLOATS;
    int lose_nothing = is_float, are_powers = 1, lose_some = 0;
    double x_sq = 0, worst_sq = 0;
    const Trial stored = {1, 0, 0};
    Trial trials[MAX_FACTORS];
    if (s->kind == SHIFTED) compare_zeros(s, groups, n);
    for (int64_t i = 0; i < n; i++) {
        if (!(groups[i].x_sq > 0 && groups[i].needed >= 1 / s->limits->wide)) return 0;
        x_sq += groups[i].x_sq;
        lose_nothing &= groups[i].needed >= min_needed && groups[i].needed <= 1;
        are_powers &= is_power_of_two(groups[i].unit);
    }
    s->group_x_sq += x_sq;
    if (lose_nothing) {
        s->stored_sq += x_sq / 6 * share;
        s->good_sq[0] += x_sq / 6 * share;
        s->good_sq[1] += x_sq / 6 * share;
        return 1;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t tried = list_trials(s, groups + i, are_powers, trials);
        double good_sq[2] = {INFINITY, 0}, stored_sq = groups[i].e_sq, tried_sq[MAX_FACTORS];
        if (s->block_rows) sum_errors(s, groups + i, &stored, 1, &stored_sq);
        if (s->block_rows && tried == 1 && trials->factor == 1) tried_sq[0] = stored_sq;
        else sum_errors(s, groups + i, trials, tried, tried_sq);
        for (int64_t k = 0; k < tried; k++) {
            if (are_powers) good_sq[k] = tried_sq[k]; /* in the end, the rule with the larger loss over all groups counts */
            else good_sq[0] = tried_sq[k] < good_sq[0] ? tried_sq[k] : good_sq[0];
        }
        if (fabsf(fabsf(groups[i].unit) - groups[i].needed * fabsf(groups[i].unit)) <= groups[i].near)
            for (int k = 0; k < 2; k++) good_sq[k] = fmax(good_sq[k], k && !are_powers ? 0 : stored_sq);
        double good = fmax(good_sq[0], good_sq[1]);
        if (s->never_clips && !are_powers && groups[i].needed > s->max_ratio) return 0;
        if (!(stored_sq <= s->limits->far * good)) { /* a search may have preferred the stored scale, or the good one is a fluke */
            double worst = is_float ? groups[i].x_sq * share : sum_worst_errors(s, groups + i, trials[tried - 1].factor);
            double lost_db = 10 * log10(stored_sq / (good < s->lucky * worst ? worst : good));
            int fits = groups[i].needed > s->limits->fits && groups[i].needed < s->max_ratio && (lost_db < s->limits->clipped_db || groups[i].needed <= 1);
            if (!(lost_db <= s->limits->group_db || fits)) return 0;
        }
        s->stored_sq += stored_sq;
        s->good_sq[0] += good_sq[0];
        s->good_sq[1] += good_sq[1];
        lose_some |= stored_sq > s->limits->some * good_sq[are_powers];
    }
    for (int64_t i = 0; i < n && lose_some && !is_float; i++) {
        int64_t tried = list_trials(s, groups + i, are_powers, trials);
        worst_sq += sum_worst_errors(s, groups + i, trials[tried - 1].factor);
    }
    s->worst_sq += is_float ? x_sq * share : worst_sq;
    return 1;
}

/* Adds rows of (at most) a group's columns to their group, whose good scale is a multiple of its unit. */
static void join_rows(Group *g, const Range *rows, int64_t n, const Sample *s) {
    const float largest = largest_of(rows->high), smallest = -largest_of(rows->low);
    const float high = (g->unit > 0 ? largest : smallest) / g->unit, low = (g->unit > 0 ? smallest : largest) / g->unit;
    g->n += n;
    g->x_sq += sum_of(rows->x_sq);
    if (s->kind == SHIFTED) { /* a group of one row, whose zero point decides which scale it needs */
        g->high = high, g->low = low;
        return;
    }
    float up = high / s->highest, down = low / s->lowest;
    g->needed = up > g->needed ? up : g->needed;
    g->needed = down > g->needed ? down : g->needed;
}

static void describe_scales(Sample *s, const Rows *rows) {
    if (s->scale_n != rows->n_scales) s->scale_n = 0;
    if (!s->scale_n) return;
    s->scale_low = s->scale_high = *rows->scale;
    for (int64_t i = 0; i < s->scale_n; i++) {
        double scale = rows->scale[i];
        if (!(scale >= s->scale_low)) s->scale_low = scale;
        if (scale > s->scale_high) s->scale_high = scale;
        s->scale_sum += scale;
    }
}

/* Puts the products of a row in the order of the weight's columns. */
static void put_back(const Sample *s, const Rows *rows, float *products) {
    float *room = s->ordered + 2 * rows->cols;
    for (int k = 0; k < N_PRODUCTS; k++, products += s->max_cols) {
        memcpy(room, products, (size_t)rows->cols * sizeof *room);
        for (int64_t i = 0; i < rows->cols; i++) products[rows->order[i]] = room[i];
    }
}

/* Returns the number of rows that are in the sample. */
static int64_t count_sampled(const Rows *rows) {
    int64_t n = 0;
    for (int64_t row = 0; row < rows->n; row++) n += !rows->places || rows->places[row] >= 0;
    return n;
}

/* Copies rows with the columns of each group next to each other; returns 0 if groups differ in size. */
static int put_in_order(const Sample *s, const Rows *from, Rows *to) {
    const int64_t cols = from->cols, n = cols / s->cols, places = count_sampled(from);
    int32_t *order = (int32_t *)s->ordered, *next = order + cols;
    if (cols % s->cols) return 0;
    memset(next, 0, (size_t)n * sizeof *next);
    for (int64_t col = 0; col < cols; col++)
        if (from->columns[col] >= n || next[from->columns[col]]++ == s->cols) return 0;
    for (int32_t group = 0; group < n; group++) next[group] = group * (int32_t)s->cols;
    for (int32_t col = 0; col < cols; col++) order[next[from->columns[col]]++] = col;
    float *x = s->ordered + 3 * cols, *y = x + places * cols;
    for (int64_t i = 0; i < places * cols; i += cols)
        for (int64_t col = 0; col < cols; col++) {
            x[i + col] = from->x[i + order[col]];
            y[i + col] = from->y[i + order[col]];
        }
    *to = *from;
    to->x = x, to->y = y, to->order = order;
    return 1;
}

/* Copies rows whose columns have scales of their own, with columns as rows. */
static void transpose(const Sample *s, const Rows *from, Rows *to) {
    const int64_t n = count_sampled(from);
    float *x = s->ordered, *y = x + n * from->cols;
    for (int64_t first = 0; first < from->cols; first += LANES) /* a line of the cache at once */
        for (int64_t row = 0; row < n; row++)
            for (int64_t col = first; col < from->cols && col < first + LANES; col++) {
                x[col * n + row] = from->x[row * from->cols + col];
                y[col * n + row] = from->y[row * from->cols + col];
            }
    *to = (Rows){
        .x = x, .y = y, .n = from->cols, .cols = n,
        .scale = from->scale, .scale_step = 1, .scale_height = 1, .factor = from->factor,
    };
}

enum { HALF_A_STEP, AS_NEAR, BY_REGIONS }; /* what is required of errors: so much at most; as little as of the nearest codes; or
                                              no row, column or tile that stands out */

/* Adds up a sample of rows, and collects the groups of every few rows. Returns whether all errors are as required. */
static int scan_rows(Sample *s, const Rows *rows, Group *groups, int64_t *n, int required) {
    const int64_t every = required == HALF_A_STEP ? s->every : s->every_closely;
    const int64_t used = rows->cols / s->cols * s->cols; /* columns of whole groups */
    const float max_far = (float)(s->limits->half_step / (1 << s->mantissa));
    float *products = required == BY_REGIONS ? (float *)(s->columns + N_PRODUCTS * s->max_cols) : 0;
    double *room = s->columns + (N_PRODUCTS + 2) * s->max_cols; /* 2: products are floats */
    Regions tiles = place_regions(s, room, 0, s->max_cols - MAX_ROWS), of_rows = place_regions(s, room, tiles.max_n, MAX_ROWS);
    int64_t n_rows = 0;
    Errors all_rows = {{0}, {0}, {0}, {0}};
    Nearest all_near = {0};
    *n = 0;
    for (int64_t row = 0; row < rows->n; row++) {
        int64_t place = rows->places ? rows->places[row] : row;
        if (place < 0) continue;
        for (int64_t col = 0; col < rows->cols; col += s->cols) {
            const float *x = rows->x + place * rows->cols + col, *y = rows->y + place * rows->cols + col;
            Scale scale = scale_of(rows, row, col / s->cols);
            int64_t width = rows->cols - col < s->cols ? rows->cols - col : s->cols;
            Errors own;
            Nearest nearest_codes = {0};
            if (!is_usable(scale.unit)) return 0;
            if (required == HALF_A_STEP) {
                (s->kind == FLOATS ? scan_floats : scan_integers)(x, y, width, scale.unit, s, &own);
                add_errors(&all_rows, &own);
            } else {
                if (!find_nearest(x, y, width, scale, s, &nearest_codes, products ? products + col : 0)) return 0;
                add_nearest(&all_near, &nearest_codes);
            }
            if (s->block_rows || place % every || col >= used) continue;
            if (s->per_row || !*n)
                groups[(*n)++] = (Group){
                    .x = x, .stride = every * rows->cols, .unit = scale.unit, .zero = scale.zero,
                    .near = rows->near ? rows->near[place * (rows->cols / s->cols) + col / s->cols] : -1,
                };
            Range range = {{0}, {0}, {0}};
            extend(&range, x, width);
            join_rows(groups + *n - 1, &range, 1, s);
            groups[*n - 1].e_sq += required == HALF_A_STEP ? sum_of(own.e_sq) : nearest_codes.best_sq;
        }
        for (int i = 0; i < LANES; i++)
            if (!(all_rows.far[i] <= max_far)) return 0;
        if (products && rows->order) put_back(s, rows, products);
        if (products && !add_row(s, &of_rows, &tiles, products, rows->cols)) return 0;
        n_rows++;
    }
    s->x_sq = required == HALF_A_STEP ? sum_of(all_rows.x_sq) : all_near.x_sq;
    s->e_sq = required == HALF_A_STEP ? sum_of(all_rows.e_sq) : all_near.e_sq;
    s->steps_sq = ldexp(sum_of(all_rows.steps_sq), 2 * s->mantissa);
    s->best_sq = all_near.best_sq, s->beyond_sq = all_near.beyond_sq;
    s->clipped_sq = all_near.clipped_sq, s->clipped_x_sq = all_near.clipped_x_sq;
    s->clipped = all_near.clipped, s->off = all_near.off;
    return !products || are_regions_alike(s, &of_rows, &tiles, n_rows, rows->cols);
}

/* Adds up a sample of rows as closely as their codes require; returns 0 if none of the ways will do, else how they were. */
static int scan_codes(Sample *s, const Rows *rows, Group *groups, int64_t *n) {
    if (s->kind != LISTED && scan_rows(s, rows, groups, n, HALF_A_STEP)) return ROUNDED;
    if (!s->every_closely) return 0;
    if (scan_rows(s, rows, groups, n, AS_NEAR)) return NEAREST;
    if (rows->cols % LANES || s->cols % LANES || s->transposed) return 0;
    if (s->max_cols < rows->cols || s->max_cols < MAX_ROWS) return 0;
    for (int k = 0; k < N_PRODUCTS; k++) memset(s->columns + k * s->max_cols, 0, (size_t)rows->cols * sizeof *s->columns);
    return scan_rows(s, rows, groups, n, BY_REGIONS) ? NEAREST : 0;
}

/* Returns a group of rows of s->cols columns, from `stride` to `stride`. */
static Group collect(const Sample *s, float unit, const float *x, int64_t rows, int64_t stride) {
    Group group = {.x = x, .stride = stride, .unit = unit, .near = -1};
    Range range = {{0}, {0}, {0}};
    if (!is_usable(unit)) return group;
    for (int64_t i = 0; i < rows; i++) extend(&range, x + i * stride, s->cols);
    join_rows(&group, &range, rows, s);
    return group;
}

/* Collects the groups of the row of blocks that begins with row `row` of the blocks; returns how many. */
static int64_t scan_blocks(const Sample *s, const Rows *rows, int64_t row, Group *groups) {
    const float *x = s->block_values + row * s->block_cols;
    const int64_t n = s->transposed ? s->block_cols : s->block_cols / s->cols;
    for (int64_t i = 0; i < n; i++) {
        if (s->transposed) groups[i] = collect(s, scale_of(rows, i, 0).unit, x + i * s->height, 1, 0);
        else groups[i] = collect(s, scale_of(rows, s->first_block + row, i).unit, x + i * s->cols, s->height, s->block_cols);
    }
    return n;
}

void quanterr_measure_sample(Sample *s, const Rows *rows, double x_max) {
    Group *groups = s->room;
    Rows arranged;
    int64_t n = 0;
    describe_scales(s, rows);
    if (s->transposed || rows->columns) {
        if (s->transposed) transpose(s, rows, &arranged);
        else if (!put_in_order(s, rows, &arranged)) return;
        rows = &arranged;
    }
    int found = scan_codes(s, rows, groups, &n);
    if (!found) return;
    if (n && !s->per_row && !s->whole) groups->needed = (float)(x_max / fabs(groups->unit) / s->highest);
    if (!s->block_rows && !(n && add_losses(s, groups, n))) return;
    for (int64_t row = 0; row < s->block_rows; row += s->height) {
        int64_t across = scan_blocks(s, rows, row, groups + n);
        if (!add_losses(s, groups + n, across)) return;
        n += across;
    }
    double *ratios = (double *)(groups + n);
    for (int64_t i = 0; i < n; i++) {
        float size = fabsf(groups[i].unit);
        ratios[i] = (double)size / (double)(groups[i].needed * size);
        if (!isfinite(ratios[i])) return;
    }
    s->good_sq[0] = fmax(s->good_sq[0], s->good_sq[1]);
    if (isfinite(s->group_x_sq) && isfinite(s->stored_sq) && isfinite(s->good_sq[0]) && isfinite(s->worst_sq))
        s->plain = found;
    s->scale_ratio = median_of(ratios, n);
}
