/* Made by tests/make_c_headers.py from kernel/enums.py, which describes the members. */

enum CodeKind { INTEGERS, TRUNCATED, AWAY, FLOATS, LISTED, SHIFTED };
enum ElementType { F32, BF16, F16, I8, E4M3, TABLE, BLOCKS, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K,
    Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S };
enum Order { ROWS, WORDS_DOWN, AWQ_WORDS, SHARED_BYTES };
enum Packing { BYTES, LOW_FIRST, HIGH_FIRST, HALVES };
enum SampleState { UNSURE, ROUNDED, NEAREST };
enum Zeros { FRACTIONS, WHOLE, ONE };
