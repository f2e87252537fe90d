/* The functions of the kernel, and the structs and sizes that they share with Python: the only declaration.
 *
 * structs.py reads this file. So a struct's field is a line here and its use, and a declaration is a scalar, a pointer,
 * an array or one of these structs. A kernel that was compiled with another version of this file is not used.
 */
#include <stdint.h>

#include "enums.h"

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define KERNEL_VERSION 31 /* raise it when results change, though no declaration does */
#define ROOM 32768        /* bins in a table of counts */
#define LIMBS 68          /* 32-bit limbs of an exact sum of float64 numbers, in units of 2^-1074 */
#define KEPT_ROWS 5       /* rows with the lowest SNR */
#define RANKS 6           /* percentiles of |e| */
#define PLACES 3          /* runs of bytes that a fingerprint covers */
#define TILE 64           /* columns of a tile, in one row of a sample */
#define WINDOW 64         /* columns whose largest |x| and |e| are kept */
#define MAX_PARTS 64      /* maximum number of parts of a sample whose cells are compared with others */
#define MAX_PART_ELEMENTS 64 /* maximum number of elements of a part whose scale can be searched for */
#define MAX_FACTORS 16    /* maximum number of scales to try for a group of a sample */
#define DONE 1            /* status: files were read to the end */

enum Sum {
    SUM_X,
    SUM_Y,
    SUM_E,
    SUM_X_ABS,
    SUM_E_ABS,
    SUM_X_SQ,
    SUM_Y_SQ,
    SUM_E_SQ,
    SUM_XY,
    SUM_RELATIVE,
    SUM_WEIGHTED_X_SQ,
    SUM_WEIGHTED_E_SQ,
    N_SUMS
};

typedef struct { /* some bits of a number, for each run of codes, entry or part of a block in each interleaved row */
    const uint16_t *at;   /* byte in the block; NULL: none */
    const uint8_t *shift; /* the lowest bit, from this byte on */
    int32_t mask, up;     /* the bits, and their place in the number */
    int32_t spacing;      /* bits from one code of a run to the next: 8, in bytes next to each other, or any in a word; 0: no run */
} Bits;

typedef struct { /* ggml's blocks as data; formats/shared/ggml_fields.py specifies them */
    int32_t elements, n_bytes; /* size of a block of one row */
    int32_t head;        /* bytes before the blocks of each row: their d, float16 if there are two, else float32 */
    int32_t rows;        /* number of rows that a block interleaves */
    int32_t run;         /* 4, 8, 16 or 32 codes that are read together; 0: codes stand for several elements */
    int32_t part;        /* elements that share a scale */
    int32_t width;       /* elements of a code: 1, 2, 4 or 8 */
    int32_t factor, offset; /* a scale is its stored number · factor + offset */
    int32_t are_signed;  /* scales are signed bytes */
    int32_t are_bytes;   /* codes are signed bytes, */
    int32_t first;       /* or else the level of code 0; each further code is one more, */
    const float *levels; /* or else the levels of all codes, 16 or more; of several elements: in the table of a Side */
    float shift;         /* added to the levels of a part whose flag is set */
    float step;          /* factor of all scales, a power of two */
    const float *scale_levels; /* values of scales, or NULL */
    const uint8_t *patterns;   /* the signs of eight elements by their number, or NULL */
    Bits codes[4], minus[8], d[4], scales[4], flags[1], signs[1], minima[2], d_minima[1];
} Blocks;

typedef struct { /* the rows of one weight, and how they are decoded */
    int32_t element; /* an ElementType */
    int32_t order;   /* an Order */
    int32_t file;         /* descriptor (Windows: handle), or -1 if `stored` holds the rows */
    int32_t per_byte;     /* codes per byte, for TABLE */
    int64_t offset;       /* place of the first row in the file */
    int64_t row_bytes;    /* bytes from one row to the next */
    int64_t words;        /* WORDS_DOWN and AWQ_WORDS: step from one word of a row to the next */
    const Blocks *blocks; /* BLOCKS: the layout of the blocks */
    int64_t lead;         /* rows of the first group before the first row */
    int64_t first_row;    /* SHARED_BYTES: number in the weight of the first row; `offset` or `stored` is the place of row 0 */
    int64_t shared_step;  /* step between rows that share bytes, and the number of such rows */
    int64_t shared_rows;
    uint8_t shifts[8];    /* the lowest bit of each row's codes, and the largest code */
    int32_t largest_code;
    void *stored;         /* the rows, or a buffer to read them into */
    void *tile;           /* buffer for rows in order */
    const void *table;    /* float (256, per_byte): values of the codes in each byte; of blocks: int8 (codes, width) */
    const float *scale;   /* (1 or rows / scale_height, groups), or NULL */
    const float *zero;    /* shaped like `scale`: subtracted from the codes first; or NULL */
    const float *shift;   /* shaped like `scale`: added last; or NULL */
    int64_t scale_step;   /* step from the scales of one row to the next; 0 if all rows share one */
    int64_t scale_height; /* rows that share their scales */
    int64_t scale_n;      /* number of scales that are read into `scale` first; 0: `scale` is filled already */
    int64_t scale_offset; /* place of the scales in their file */
    int64_t scale_rows;   /* rows of scales, if those of a group are stored together, with room for twice as many; else 0 */
    int32_t scale_file;   /* as `file` */
    int32_t scale_type;   /* F32, BF16, F16; or I8: a byte whose value is in `scale_table` */
    const float *scale_table;
    const float *nested;  /* factor of each nested_n scales of the weight, to which nested_offset is added then; or NULL */
    int64_t nested_n;
    int64_t nested_first; /* number of the first scale in the weight */
    float nested_offset;
    float factor;         /* multiplies scaled codes; 0: none */
    int64_t zero_step;
    int64_t shift_step;
    int64_t group;        /* columns that share a scale, next to each other, */
    const int32_t *columns; /* or else the group of each column */
    int64_t rotation;     /* columns of a rotated group, a power of two up to SEGMENT; 0: not rotated */
    double unit;          /* factor of rotated values */
    float *values;        /* buffer for decoded rows, or NULL */
    int32_t ends[3];      /* bytes of saturated codes; fewer than three are repeated */
    int32_t has_ends;
    int64_t saturated;    /* out: number of saturated codes */
    uint8_t *sampled;     /* out: sampled_n bytes from each of these places behind `offset`, or NULL */
    int64_t sampled_n;
    int64_t sampled_at[PLACES];
} Side;

typedef struct { /* rows that were decoded: x and y, (places, cols) */
    const float *x, *y;
    const int64_t *places; /* place of each of n rows, or -1; NULL: row i is at place i */
    int64_t n, cols;
    const float *scale, *zero, *shift; /* those of y, as in a Side */
    int64_t scale_step, scale_height, zero_step, shift_step;
    float factor;          /* multiplies all scales; 0: none */
    const int32_t *columns; /* group of each column; NULL: groups are next to each other */
    const int32_t *order;  /* column from which each was taken, or NULL */
    int64_t n_scales;      /* number of scales in the whole weight; 0: unknown */
    const float *near;     /* (places, groups): what a scale may differ from a good one without loss; NULL: nothing */
} Rows;

typedef struct { /* thresholds of samples; samples/native.py fills them in */
    double half_step;    /* largest rounding error, in steps */
    double near;         /* a code with at most this multiple of the nearest code's error counts as nearest */
    double above_normal; /* floats lose nothing if a good scale brings the largest this far above their smallest normal number */
    double some, far;    /* ratios of losses with stored and good scales: to be examined; and far too large */
    double group_db, clipped_db; /* losses from which a group stands out, and from which clipping is wrong */
    double wide, fits;   /* range of stored / good scale that is never wrong */
    double moved, fixed; /* maximum distance of zero points from whole codes, and between equal ones */
    double floor;        /* share of x² below which an error is no damage */
    double like;         /* share of an error that a factor explains */
    double part, compensated, better, worse, apart; /* ratios of energies from which regions stand out */
    double unlike;       /* squared cosine of x and y below which a column may hold other values */
    int64_t min_elements, min_regions; /* minimum numbers: elements of a region, and regions that are compared */
} Limits;

typedef struct { /* what the stored scales of a sample of rows allow */
    int32_t kind;             /* a CodeKind */
    int32_t mantissa;         /* bits of codes that are floats, else 0 */
    float lowest, highest, normal;
    float below, above;       /* codes beyond are out of range */
    const float *levels, *bounds, *halves; /* a table's values, ascending; the bounds between them; half the distances; */
    const float *numbers;     /* and the index of each value, from 0 on */
    int64_t n_levels;         /* LANES numbers follow those of each array, so that whole vectors can be loaded */
    const float *multiples;   /* scales to try, as multiples of the scale that clips nothing */
    int64_t n_multiples;      /* at most MAX_FACTORS */
    const Limits *limits;
    double lucky;             /* share of the worst error below which the error with a good scale is small by accident */
    double max_ratio;         /* largest ratio of good to stored scale that is not reported as wrong */
    int64_t never_clips;      /* a larger one is wrong whatever its group loses */
    int64_t cols;             /* columns of a group */
    int32_t per_row;          /* each row has scales of its own; else one for all, or blocks */
    int32_t whole;            /* the sample is the whole weight */
    int32_t transposed;       /* each column has a scale of its own: columns are measured as rows, and a block is a column */
    int64_t every;            /* one of so many rows is used to measure the losses of scales; if codes are looked at closely, */
    int64_t every_closely;    /* one of these; 0: not possible */
    int64_t height;           /* rows of a block */
    int64_t first_block;      /* first row of the blocks that are used instead, their rows and columns; 0: none */
    int64_t block_rows, block_cols;
    const float *block_values; /* x in these rows and columns, or if `transposed` in these columns and rows */
    float *ordered;           /* room for (2 · rows + 3) · columns of the sample, if it is transposed or columns of groups */
                              /* are not next to each other */
    void *room;               /* 72 bytes for each group */
    double *columns;          /* room for 9 numbers for each of max_cols columns */
    int64_t max_cols;
    int32_t zeros;            /* out: a Zeros, what zero points have in common */
    int32_t plain;            /* out: a SampleState; UNSURE unless all codes and scales are as they should be */
    double x_sq, e_sq;        /* out: sums over all rows; all sums are 0 on entry */
    double steps_sq;          /* ROUNDED codes: Σ of e² in steps */
    double best_sq;           /* if NEAREST: Σe² of the nearest codes of all rows; and Σe², Σx² of numbers out of range */
    double clipped_sq, clipped_x_sq;
    double beyond_sq;         /* Σe² of codes in range that are neither of the two nearest */
    int64_t clipped, off;     /* numbers out of range; and in range but two or more steps from the nearest */
    double group_x_sq;        /* Σx² of the groups whose losses are measured */
    double stored_sq, good_sq[2], worst_sq; /* losses of the nearest codes: with the stored scales, good ones, the worst */
    double scale_ratio;       /* median of stored / good scale */
    int64_t scale_n;          /* number of the weight's scales; out: 0 if their range and sum are unknown */
    double scale_low, scale_high, scale_sum;
} Sample;

typedef struct { /* a comparison: its settings, buffers and results */
    int64_t rows, cols;
    int64_t rows_at_once;
    int64_t precise;           /* add everything up in float64 */
    double outlier;
    double normal;             /* smallest normal number of a cast, or 0 */
    const float *importance;   /* (1 or rows, cols), or NULL */
    int64_t importance_step;
    uint32_t *counts;          /* (2, ROOM), zero on entry and on return */
    double *row_sums;          /* out: (3, rows): x², e², max |e|; or NULL */
    float *peaks;              /* out: (2, down, across): max |x| and max |e| of each cell; or NULL */
    float *windows;            /* (2, windows): room for those of each window in a row of cells */
    int64_t cell_rows, cell_windows;
    int64_t rows_above;        /* rows of the first cells that are above the first row */
    int64_t *histogram;        /* out: room for ROOM counts; in the first run: for those of all runs */
    uint32_t *sums;            /* out: (N_SUMS, LIMBS), two's complement in units of 2^-1074; in the first run: of all */
    int64_t first_bin, n_bins; /* out: bins in use, without bin 0 */
    int64_t zero_errors;       /* out: bin 0 */
    int64_t n, nonfinite_x, nonfinite_y, x_zero, y_zero, zero_reference, outliers, relative_outliers;
    double e_max, e_min, relative_max, x_max;
    double cast_max;           /* max |e| / max(|x|, normal), if normal is not 0 */
    const int64_t *places;     /* place of each row in the buffers for decoded rows, or -1; NULL: row i is at place i */
    int64_t worst_row;         /* the first row with e_max */
    int64_t worst_col;         /* its first column with the largest |e|, and the values there */
    double worst_x, worst_y;
    int64_t dead_rows;         /* rows that are zero in y but not in x */
    int64_t n_kept;            /* rows kept, with the largest e² / x², the worst first */
    int64_t kept_rows[KEPT_ROWS];
    double kept_x_sq[KEPT_ROWS], kept_e_sq[KEPT_ROWS], kept_e_max[KEPT_ROWS];
    int64_t kept_zeroed[KEPT_ROWS];
    int64_t ranks[RANKS];      /* in: ranks of |e|, ascending from 1 */
    int64_t rank_bins[RANKS];  /* the bins that hold them */
    float *block_values;       /* out: x in these rows and columns, from first_block and from the first column on; or NULL */
    int64_t first_block, block_rows, block_cols;
    int32_t transposed;        /* column by column */
} Run;

typedef struct { /* numbers to round, and the units of their groups */
    const float *x; /* (rows, cols) */
    int64_t rows, cols;
    int64_t group;        /* columns that share a unit; the last group of a row may have fewer */
    const float *units;   /* units of each row's groups, `step` apart; step 0: all rows share them */
    const float *before;  /* subtracted from x before it is divided by its unit, or NULL; as `units` */
    const float *after;   /* added after, or NULL */
    int64_t step;
    int32_t multiply;     /* units are multiplied by */
    int32_t packing;      /* how bytes hold codes, a Packing */
    uint8_t *codes;       /* out */
    int64_t row_bytes;    /* bytes from the codes of one row to the next */
} Numbers;

typedef struct { /* the codes that numbers are rounded to */
    int32_t kind;         /* a CodeKind */
    int32_t first;        /* INTEGERS: added to the number; LISTED: the code up to the first bound */
    float low, high;      /* the range of INTEGERS and FLOATS */
    int32_t mantissa;     /* FLOATS: bits of the mantissa */
    int32_t min_exponent; /* FLOATS: exponent of the smallest normal number */
    int32_t sign;         /* FLOATS: bit of the sign */
    int32_t one_zero;     /* FLOATS: zero has no sign */
    const float *bounds;  /* LISTED: for each bound below a number, its `changes` are applied to the code by XOR */
    const int32_t *changes;
    int64_t n_bounds;
} Codes;

typedef struct { /* the words that hold a code, and the bits below it */
    int32_t low, high, shift;
} Code;

typedef struct { /* the levels and scales of codes, and the rounding error of the bounds between levels */
    const float *unit;    /* the scale of each code */
    const float *shift;   /* the offset of each code; NULL: no offsets */
    int64_t unit_row, unit_col, shift_row, shift_col; /* from one row, and column, to the next; 0 if all share one */
    int32_t n_bounds;     /* size of `bounds`; 0 if levels are not in a table */
    const float *bounds, *levels; /* the numbers halfway between levels, and the levels, in ascending order */
    const float *rooms;   /* half the distance of each level to the nearest other level */
    float normal;         /* the smallest normal number, if levels are small floats; 0: they are integers */
    float half_step;      /* half the distance between neighbours from 1 to 2, of small floats */
    float half_range;     /* half the distance of the first and the last level; 0 without offsets */
    float margin;         /* maximum rounding error, relative to |x| + |offset| + half_range · scale */
    float absolute;       /* the same for scales of 1, divided by the scale of each code */
} Doubts;

/* Returns the hash of this file as it was when the kernel was compiled. */
EXPORT uint64_t quanterr_header(void);

/* Returns the widest instruction set of this machine for which a kernel is built: 0, 1 (AVX2, FMA) or 2 (AVX-512). Asks the
 * machine itself: the compilers' own check is a stub in some runtimes. Bits as in Intel's manual, vol. 1, chapter 14. */
EXPORT int quanterr_instructions(void);

/* Carries out n runs. The buffers of the first run hold the histograms and sums of all runs, one after another. */
EXPORT int quanterr_compare(Side *x, Side *y, Run *runs, int64_t n);

/* Decodes rows into side->values and does nothing else. */
EXPORT int quanterr_decode(Side *side, int64_t all_rows, int64_t cols, int64_t rows_at_once);

/* Finds Σx² and Σe² of a few rows, and nothing else. */
EXPORT int quanterr_measure(Side *x, Side *y, int64_t all_rows, int64_t cols, int64_t rows_at_once, double *energies);

/* Adds histograms of n bins each to another one, from bin `at` of it on. */
EXPORT void quanterr_add_counts(int64_t *to, const int64_t *const *from, const int64_t *at, const int64_t *n,
                                int64_t many);

/* Returns whether the share of a cell, max |e| / max |x|, may exceed `ratio` times the usual one: the median over n parts of
 * the sample of the largest in each, but at least `min_usual`. A part is the first and the stop row of cells, and the first
 * and the stop column; peaks are (2, down, across). samples/conspicuous_rows.py specifies it. */
EXPORT int quanterr_stands_out(const float *peaks, int64_t down, int64_t across, const int64_t (*parts)[4], int64_t n,
                               double min_usual, double ratio);

/* Measures what the stored scales of a sample allow; x_max is the largest |x| of the whole weight, or 0 if unknown. */
EXPORT void quanterr_measure_sample(Sample *sample, const Rows *rows, double x_max);

/* Sums the products of a sample's elements, (rows, cols): the original, stored and nearest values, steps between the last
 * two, and whether they are outside. Results are (N_PRODUCTS, rows), (N_PRODUCTS, cols), (N_PRODUCTS, rows, whole tiles) and
 * (N_TOTALS). Returns 0 if an element is not finite. */
EXPORT int quanterr_sum_regions(const float *x, const float *y, const float *best, const float *steps,
                                const uint8_t *outside, int64_t rows, int64_t cols, double *of_rows, double *of_cols,
                                double *of_tiles, double *totals);

/* Lists the places in (rows, cols) of elements whose value y may not be the level that is nearest to x alone, and returns
 * how many there are: those that are farther apart than half the distance to the nearest other level, less the margin. */
EXPORT int64_t quanterr_list_doubtful(const Doubts *of, const float *x, const float *y, int64_t rows, int64_t cols,
                                      int64_t *places);

/* Finds the codes of numbers, each in units of its group. */
EXPORT void quanterr_round(const Numbers *n, const Codes *c);

/* Finds the largest magnitude of each k of n numbers, of which the last k may be fewer; NaN is above infinity. */
EXPORT void quanterr_find_magnitudes(const float *x, int64_t n, int64_t k, float *found);

/* Finds the number with the largest magnitude of each of n groups of k, the first on a tie. */
EXPORT void quanterr_find_largest(const float *x, int64_t n, int64_t k, float *found);

/* Finds the mean square of each of n parts of k elements, a multiple of SIDE_BY_SIDE. */
EXPORT void quanterr_find_mean_squares(const float *x, int64_t n, int32_t k, float *found);

/* Searches scale and minimum of n parts of k elements, and codes from low, 0, to high, unless `codes` is NULL. Errors are
 * weighted by `w`, or if it is NULL by |x| plus `floors`; `numerators` are those of the inverse scales to try. */
EXPORT void quanterr_search_minimum(const float *x, const float *w, const float *floors, int64_t n, int32_t k,
                                    float low, float high, const float *numerators, int32_t n_numerators,
                                    int32_t absolute, float *scales, float *minima, float *codes);

/* Searches the scale of n parts of k elements, and codes from low to high, unless `codes` is NULL; `numerators` as
 * above. */
EXPORT void quanterr_search_symmetric(const float *x, const float *w, int64_t n, int32_t k, float low, float high,
                                      const float *numerators, int32_t n_numerators, float *scales, float *codes);

/* Refines the scales of n parts of k elements and their codes, from low to high, changing each code where the fit
 * gains. If `codes` is NULL, it starts with the codes that the largest element gives, and does not return any. */
EXPORT void quanterr_refine(const float *x, const float *w, int64_t n, int32_t k, float low, float high, float *codes,
                            float *scales);

/* Encodes n blocks of a K type, given scales and minima of their parts, of which the latter may be NULL. The integers that
 * stand for the largest scale and for the largest minimum are `highest`. */
EXPORT void quanterr_encode_superblocks(const float *x, const float *scales, const float *minima, int64_t n,
                                        const Blocks *type, int32_t highest, uint8_t *out);

/* Multiplies each group of `size` values, a power of two, by the matrix that kernel/rotation.py specifies, in
 * float64, and by `unit`; `room` holds a group. */
EXPORT void quanterr_rotate(float *values, int64_t groups, int64_t size, double unit, double *room);

/* Multiplies BLOCK rows by `unit` times Sylvester's matrix, first from the right, in blocks of columns, then from the
 * left, and each time by factors; formats/exl3.py specifies it. `room` holds BLOCK · BLOCK numbers. Missing where a
 * product and its sum would be rounded twice. */
EXPORT void quanterr_rotate_sides(const float *x, int64_t cols, float unit, const float *of_cols,
                                  const float *of_rows, float *to, int64_t to_stride, float *room);

/* Multiplies blocks of `size` rows (`down`) or columns of a matrix, size a power of two, by Sylvester's matrix, and each
 * value by the factors of its column and its row, in float64; formats/shared/hadamard.py specifies it. `from`, float64 if
 * `wide`, may be `to`; strides are elements from one row to the next; `room` holds a block, or
 * SIDE_BY_SIDE columns of it. */
EXPORT void quanterr_sylvester(const void *from, int32_t wide, int64_t from_stride, float *to, int64_t to_stride,
                               int64_t rows, int64_t cols, int64_t size, int32_t down, const double *of_rows,
                               const double *of_cols, double *room);

/* Looks up the codes of (rows, cols) tiles, stored at stored + row · row_words + col · col_words, in a table of mask + 1
 * values. A tile has (height, width) codes; `out` is (rows · height, cols · width). formats/shared/code_tiles.py
 * specifies it. */
EXPORT void quanterr_look_up_tiles(const uint32_t *stored, int64_t rows, int64_t cols, int64_t row_words,
                                   int64_t col_words, const Code *codes, int64_t height, int64_t width, uint32_t mask,
                                   const float *table, float *out);

/* As quanterr_look_up_tiles, for codes of 16 bits whose values are computed: a table of them would not stay in a core's
 * first cache. */
EXPORT void quanterr_generate_tiles(const uint32_t *stored, int64_t rows, int64_t cols, int64_t row_words,
                                    int64_t col_words, const Code *codes, int64_t height, int64_t width,
                                    uint32_t factor, uint32_t term, float *out);
