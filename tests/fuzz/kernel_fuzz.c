/* Random weights through the compiled kernel, each buffer exactly as large as it has to be, for sanitizers to watch.
 *
 *     fuzz N [SEED]
 *
 * What is checked besides: all sums are those of every cut into single rows, and no count is larger than the weight.
 */
#include "compare.c"
#include <stdio.h>
#include <stdlib.h>

static uint64_t state;
static uint64_t next(void) { /* xorshift64* */
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * 2685821657736338717ull;
}
static int64_t below(int64_t n) { return (int64_t)(next() % (uint64_t)n); }

static void *filled(size_t n) { /* any bytes, or few kinds of them */
    uint8_t *bytes = malloc(n ? n : 1), mask = below(3) ? 0xFF : (uint8_t)next();
    for (size_t i = 0; i < n; i++) bytes[i] = (uint8_t)(next() >> 33) & mask;
    return bytes;
}

static float *factors(int64_t n) {
    float *values = filled(4 * (size_t)n);
    for (int64_t i = 0; i < n && below(4); i++) values[i] = (float)(below(2000) - 1000) / 512;
    return values;
}

typedef struct { void *owned[32]; int n; } Owner;
static void *own(Owner *owner, void *memory) { return owner->owned[owner->n++] = memory; }

/* The description of a type of ggml's blocks; NULL for other elements. */
static const Blocks *blocks_of(int element) {
#define DESCRIBE(name) case name: return &name##_BLOCKS;
    switch (element) { EACH_BLOCKS(DESCRIBE) }
#undef DESCRIBE
    return 0;
}

static Side random_side(int64_t rows, int64_t cols, int64_t at_once, int order, Owner *owner) {
    static const int bytes[] = {[F32] = 4, [BF16] = 2, [F16] = 2, [I8] = 1, [E4M3] = 1, [TABLE] = 1, [BLOCKS] = 1};
    Side side = {.element = (int32_t)below(IQ3_S + 1), .order = order, .file = -1, .per_byte = 1};
    if (order == WORDS_DOWN) side.element = TABLE, side.per_byte = cols % 8 ? 1 : 2;
    const Blocks *blocks = blocks_of(side.element);
    if (order == AWQ_WORDS || order == SHARED_BYTES || side.element == BLOCKS || (blocks && cols % blocks->elements))
        side.element = order ? TABLE : I8, blocks = 0;
    if (side.element == TABLE && !order && cols % 8 == 0) side.per_byte = 1 << below(4);
    side.row_bytes = blocks ? cols / blocks->elements * blocks->n_bytes : cols * bytes[side.element];
    if (side.element == TABLE) {
        side.row_bytes = cols / side.per_byte;
        side.table = own(owner, factors(256 * side.per_byte));
    }
    if (side.element >= IQ1_S) { /* the entries that its indices can name */
        static const size_t entries[] = {8 * 4096, 8 * 4096, 8 * 256, 8 * 512, 8 * 1024, 4 * 256, 4 * 512};
        side.table = own(owner, filled(entries[side.element - IQ1_S]));
    }
    if (blocks && !below(4)) side.element = BLOCKS, side.blocks = blocks; /* as described by data */
    if (order == ROWS) side.stored = own(owner, filled((size_t)(rows * side.row_bytes)));
    if (order == WORDS_DOWN) {
        side.words = rows;
        side.stored = own(owner, filled((size_t)(rows * side.row_bytes)));
    }
    if (order == AWQ_WORDS) {
        side.words = rows / 8;
        side.stored = own(owner, filled((size_t)(cols * rows / 2)));
    }
    if (order == SHARED_BYTES) {
        static const uint8_t shifts[] = {6, 4, 2, 0};
        memcpy(side.shifts, shifts, sizeof shifts);
        side.first_row = below(50), side.largest_code = 3, side.shared_rows = 1 + below(4), side.shared_step = 1 + below(rows);
        const int64_t last = side.first_row + rows, period = side.shared_rows * side.shared_step;
        side.stored = own(owner, filled((size_t)((last / period + 1) * side.shared_step * cols)));
    }
    if (order) side.tile = own(owner, malloc((size_t)(at_once * side.row_bytes)));
    side.group = below(8) ? 1 + below(cols) : 1, side.scale_height = 1;
    int64_t groups = (cols + side.group - 1) / side.group;
    if (below(3)) {
        int64_t of_rows = below(2) ? rows : 1;
        side.scale = own(owner, factors(of_rows * groups));
        side.scale_step = of_rows > 1 ? groups : 0;
        if (!below(3)) side.zero = own(owner, factors(of_rows * groups)), side.zero_step = side.scale_step;
        else if (!below(3)) side.shift = own(owner, factors(of_rows * groups)), side.shift_step = side.scale_step;
    }
    if (side.scale && !below(3)) { /* groups of any columns, perhaps of different sizes */
        int32_t *columns = own(owner, malloc((size_t)(4 * cols)));
        const int same = below(4) > 0;
        for (int64_t i = 0; i < cols; i++) columns[i] = same ? (int32_t)(i / side.group) : (int32_t)below(groups);
        for (int64_t i = cols - 1; i > 0; i--) {
            int64_t other = below(i + 1);
            int32_t kept = columns[i];
            columns[i] = columns[other], columns[other] = kept;
        }
        side.columns = columns;
    }
    if (cols % 256 == 0 && !below(3)) side.rotation = 2 << below(8), side.unit = 0.25;
    if (side.row_bytes == cols && !below(3)) side.has_ends = 1, side.ends[0] = 0x7E, side.ends[1] = 0xFE;
    if (!below(3)) side.values = own(owner, malloc((size_t)(4 * rows * cols)));
    return side;
}

/* What to measure of the rows that are kept; NULL if that is not possible. */
static Sample *random_sample(const Side *x, const Side *y, Run *run, Owner *owner) {
    static const float MULTIPLES[] = {1, 0.7f, 1.3f};
    static const Limits LIMITS = {
        .half_step = 0.5001, .near = 1.0001, .above_normal = 64, .some = 1.2, .far = 3, .group_db = 5, .clipped_db = 12,
        .wide = 2.2, .fits = 0.6, .moved = 0.01, .fixed = 0.05, .floor = 1e-6, .like = 0.49, .part = 2.5,
        .compensated = 1.123, .better = 0.5, .worse = 1.99, .apart = 39.8, .fewest = 32, .fewest_rows = 4,
    };
    if (!x->values || !y->values || !y->scale) return 0;
    Sample *s = own(owner, calloc(1, sizeof *s));
    static const int32_t KINDS[] = {INTEGERS, FLOATS, LISTED};
    s->limits = &LIMITS, s->kind = y->zero || y->shift ? SHIFTED : KINDS[below(3)];
    int is_float = s->kind == FLOATS;
    s->mantissa = is_float ? 3 : 0, s->normal = 0x1p-6f, s->highest = is_float ? 448 : 127, s->lowest = is_float ? -448 : -128;
    if (s->kind == LISTED) s->lowest = -1, s->highest = 1;
    s->below = s->lowest - 0.5f, s->above = s->highest + 0.5f, s->lucky = 0.08, s->most = 1.4;
    const int64_t last = 1 + below(30);
    const size_t bytes = (size_t)(last + LANES) * sizeof(float);
    float *levels = own(owner, malloc(bytes + sizeof(float))), *bounds = own(owner, malloc(bytes)), *halves = own(owner, malloc(bytes));
    float *numbers = own(owner, malloc(bytes + sizeof(float)));
    for (int64_t i = 0; i < last + LANES; i++) {
        levels[i] = i < last ? 2 * (float)i / (float)last - 1 : 1;
        bounds[i] = i < last ? levels[i] + 1 / (float)last : INFINITY;
        halves[i] = 1 / (float)last;
        numbers[i] = (float)i;
    }
    levels[last + LANES] = 1, numbers[last + LANES] = INFINITY;
    s->levels = levels, s->bounds = bounds, s->halves = halves, s->numbers = numbers, s->n_levels = last + 1;
    s->multiples = MULTIPLES, s->n_multiples = 1 + below(3);
    s->cols = y->group < run->cols ? y->group : run->cols;
    s->per_row = (int32_t)below(2), s->whole = (int32_t)below(2), s->every = 1 + below(4), s->every_closely = below(3);
    int64_t groups = run->rows * (run->cols / s->cols);
    if (s->cols == 1 && !y->columns && (is_float || s->kind == INTEGERS)) {
        s->transposed = 1, s->per_row = 0, s->cols = s->height = s->block_rows = run->rows, s->block_cols = 1 + below(run->cols);
        groups = s->block_cols;
    } else if (!s->per_row && below(2)) {
        s->height = 1 + below(run->rows);
        s->first_block = below(run->rows - s->height + 1);
        s->block_rows = (1 + below((run->rows - s->first_block) / s->height)) * s->height;
        s->block_cols = (1 + below(run->cols / s->cols)) * s->cols;
        groups = s->block_rows / s->height * (s->block_cols / s->cols);
    }
    if (!s->block_rows && s->cols < run->cols) s->per_row = 1; /* only the scale of a whole matrix is one for all rows */
    if (s->block_rows) {
        s->block_values = run->block_values = own(owner, malloc((size_t)(4 * s->block_rows * s->block_cols)));
        run->first_block = s->first_block, run->block_rows = s->block_rows, run->block_cols = s->block_cols;
        run->transposed = s->transposed;
    }
    s->room = own(owner, malloc((size_t)(72 * groups)));
    s->most_cols = run->cols + below(2) * 1024;
    s->ordered = own(owner, malloc((size_t)(4 * (2 * run->rows + 3) * run->cols)));
    s->columns = own(owner, malloc((size_t)(72 * s->most_cols)));
    return s;
}

/* Measures a sample of the rows that a comparison has kept. */
static void measure(Sample *s, const Side *x, const Side *y, const Run *run, Owner *owner) {
    Rows rows = {
        .x = x->values, .y = y->values, .places = run->places, .n = run->rows, .cols = run->cols,
        .scale = y->scale, .scale_step = y->scale_step, .scale_height = y->scale_height, .n_scales = below(2),
        .zero = y->zero, .zero_step = y->zero_step, .shift = y->shift, .shift_step = y->shift_step,
        .factor = y->factor, .columns = y->columns,
    };
    if (!s->transposed && below(2)) rows.near = own(owner, factors(run->rows * (run->cols / s->cols)));
    quanterr_measure_sample(s, &rows, run->x_max);
}

int main(int argc, char **argv) {
    long n = argc > 1 ? atol(argv[1]) : 1000;
    state = argc > 2 ? strtoull(argv[2], 0, 0) : 88172645463325252ull;
    uint32_t *counts = calloc(2 * ROOM, 4), sums[2][N_SUMS * LIMBS];
    int64_t *histogram = malloc(ROOM * 8);
    for (long turn = 0; turn < n; turn++) {
        Owner owner = {.n = 0}, other = {.n = 0};
        int order = below(4) ? ROWS : (int)below(4);
        int64_t rows = 1 + below(below(8) ? 6 : 70), cols = 1 + below(below(8) ? 70 : 1300);
        if (!below(4)) cols = 256 * (1 + below(3));
        if (order == WORDS_DOWN) cols = 4 * (1 + cols / 4);
        if (order == AWQ_WORDS) rows = 8 * (1 + rows / 8);
        Run run = {.rows = rows, .cols = cols, .rows_at_once = order ? 32 : 1 + below(rows), .outlier = 0.01};
        Side x = random_side(rows, cols, run.rows_at_once, ROWS, &owner);
        Side y = random_side(rows, cols, run.rows_at_once, order, &other);
        run.precise = !below(8), run.counts = counts, run.histogram = histogram, run.sums = sums[0];
        if (!below(3)) run.importance = own(&owner, factors(cols));
        if (below(2)) run.row_sums = own(&owner, malloc((size_t)(24 * rows)));
        int64_t down = 0, across = 1;
        if (below(2)) {
            int64_t windows = (cols + WINDOW - 1) / WINDOW;
            run.cell_rows = 1 + below(rows), run.cell_windows = 1 + below(windows), run.rows_above = below(run.cell_rows);
            down = (run.rows_above + rows - 1) / run.cell_rows + 1, across = (windows - 1) / run.cell_windows + 1;
            run.peaks = own(&owner, malloc((size_t)(8 * down * across)));
            run.windows = own(&owner, malloc((size_t)(8 * windows)));
        }
        int64_t *places = below(3) ? 0 : own(&owner, malloc((size_t)(8 * rows))), kept = 0;
        for (int64_t row = 0; places && row < rows; row++) places[row] = below(2) ? kept++ : -1;
        run.places = places;
        Sample *sample = random_sample(&x, &y, &run, &owner);
        if (quanterr_compare(&x, &y, &run, 1) != DONE || run.n > rows * cols || run.n_kept > KEPT_ROWS) return 1;
        if (sample && !run.nonfinite_x && !run.nonfinite_y) measure(sample, &x, &y, &run, &owner);
        int64_t counted = run.zero_errors;
        for (int64_t bin = 0; bin < run.n_bins; bin++) counted += histogram[bin];
        if (run.n && counted != run.n) return 2;
        const int64_t all[1][4] = {{0, down, 0, across}};
        if (run.peaks && quanterr_stands_out(run.peaks, down, across, all, 1, 0, 1.00001)) return 10;
        Run again = run;
        again.n = again.nonfinite_x = again.nonfinite_y = again.n_kept = again.e_max = again.relative_max = 0;
        again.sums = sums[1], again.rows_at_once = order ? 32 : rows;
        if (quanterr_compare(&x, &y, &again, 1) != DONE || again.n != run.n) return 3;
        if (memcmp(sums[0], sums[1], sizeof sums[0])) return 4;
        if (run.e_max > 0 && (again.worst_row != run.worst_row || again.worst_col != run.worst_col)) return 7;
        if (run.e_max > 0 && !(fabs(run.worst_y - run.worst_x) >= 0.999999 * run.e_max)) return 8;
        if (x.values && quanterr_decode(&x, rows, cols, rows) != DONE) return 5;
        double energies[2];
        if (quanterr_measure(&x, &y, rows, cols, run.rows_at_once, energies) != DONE) return 9;
        while (owner.n) free(owner.owned[--owner.n]);
        while (other.n) free(other.owned[--other.n]);
    }
    for (int bin = 0; bin < 2 * ROOM; bin++)
        if (counts[bin]) return 6;
    free(counts), free(histogram);
    printf("%ld weights\n", n);
    return 0;
}
