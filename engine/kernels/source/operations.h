/* What a step is made of: operations on rows, each a struct that begins with its kind. Mirrored in operations.py. */
#pragma once
#include <stdint.h>

/* form: of weights, of the inputs beside them and of K/V pages */
enum { FLOAT32, BFLOAT16, INT8, INT4 };
enum { GROUP = 32, WIDE_GROUP = 64, BAND = 16 };
enum { EMBED, NORM, LINEAR, ROTATE, ATTEND, CAP, GREATEST, NUM_KINDS }; /* kind */
enum { STORE, ADD, GATE };                                           /* epilogue of a product */
enum { SILU, GELU_TANH };                                            /* activation */

/* The rows of a step: consecutive rows of one request are consecutive positions. */
typedef struct {
    int64_t num_rows, num_requests, max_blocks, num_groups;
    int64_t head;                       /* index of the first operation that scores rows */
    const int64_t *token_ids;           /* [num_rows] */
    const int64_t *positions;           /* [num_rows] */
    const int32_t *requests;            /* [num_rows], index of each row's request */
    const int32_t *block_tables;        /* [num_groups][num_requests][max_blocks] */
    int64_t *times;                     /* [NUM_KINDS + 1], to add nanoseconds to, by kind and last of the head; or NULL */
} step;

/* out = scale * the weights of output `token id`, packed as a product takes them */
typedef struct {
    int32_t kind, form, size, num_inputs;
    float scale;
    const void *weight;
    const float *scales;                /* [vocabulary] of INT8 */
    float *out;                         /* [rows][size] */
} embed_operation;

/* Bring rows into the form a product takes, each of `num_parts` parts of `size` numbers divided by its root mean
 * square and multiplied by `weight`; without a weight only the form changes. With `adds`, float32 rows are added to. */
typedef struct {
    int32_t kind, form, size, num_parts, adds;
    float epsilon, multiplier;
    const float *weight;                /* [size] or NULL */
    const float *in;
    int64_t in_stride;
    void *out;
    int64_t out_stride;
} norm_operation;

/* Rows times a weight, plus bias, then stored, added times a multiplier, or gated: activation(gate) * up, which is written
 * in `out_form`, FLOAT32 or BFLOAT16. Weights are
 * packed in panels of 32 outputs, gate and up interleaved by 16; what is missing to whole panels is zero.
 *
 *     FLOAT32   [panels][inputs][32]
 *     BFLOAT16  [panels][inputs / 2][32][2]
 *     INT8      [panels][inputs / 4][32][4], the number plus 128; times scales[output]
 *     INT4      [panels][inputs / 32] of bytes [4][32][4], inputs 0 to 15 of the group in their low halves and 16 to 31
 *               in their high ones, then float16 factor[32] and least[32]: number times factor plus least
 *
 * Inputs beside INT8 and INT4 are bytes, with a scale for each group of 64 or of 32 of a row, in bands of 16 rows:
 *
 *     INT8      [groups][16][64] bytes, float32 scales[groups][16], and [16]: the scale times the sum of each group, added
 *     INT4      [groups][16][32] bytes, float32 scales[groups][16], and [groups][16]: the scale times the sum of the group
 *
 * Products are summed exactly within a group, and groups in order. */
typedef struct {
    int32_t kind, form, num_outputs, num_inputs, epilogue, activation, out_form;
    float multiplier;
    const void *weight;
    const float *scales;                /* [panels * 32] of INT8 */
    const float *bias;                  /* [panels * 32] or NULL */
    const void *in;                     /* [rows][num_inputs], or bands */
    void *out;
    int64_t out_stride;
} linear_operation;

/* Where a layer's pages lie: that of a block so many bytes after that of the block before it; see attention.h. */
typedef struct {
    char *first;
    int64_t block_bytes;
    int32_t block_size;
} page_places;

/* Rotate queries and keys; put keys and values into the pages, queries aside in the pages' form. */
typedef struct {
    int32_t kind, form, num_heads, num_kv_heads, head_size, rotary_size, group;
    page_places places;
    const float *cosines, *sines;       /* [positions][rotary_size / 2] or NULL */
    const float *qkv;                   /* [rows][heads + 2 * K/V heads][head_size] */
    void *queries;                      /* [rows][heads] of what query_bytes in attention.h says */
} rotate_operation;

/* Each row attends to the keys up to its own position, at most `window` of them; `out_form` is FLOAT32 or BFLOAT16. */
typedef struct {
    int32_t kind, form, num_heads, num_kv_heads, head_size, window, group, out_form;
    page_places places;
    float scale, cap;                   /* cap 0: none */
    const float *sinks;                 /* [heads] or NULL */
    const void *queries;
    void *out;                          /* rows of [heads][head_size] */
    int64_t out_stride;
} attend_operation;

/* rows = cap * tanh(rows / divisor / cap); cap 0: only divided */
typedef struct {
    int32_t kind, size;
    float divisor, cap;
    float *rows;
} cap_operation;

/* Of each row the greatest number, none if one is none, and the first place that has it. */
typedef struct {
    int32_t kind, size;
    const float *rows;
    float *values;
    int64_t *places;
} greatest_operation;

/* One row of a band. The next group's bytes are BAND groups on, its scale and sum BAND numbers. */
typedef struct {
    int8_t *bytes;
    float *scales, *sums;
} quantized_row;

static inline int group_size(int form) { return form == INT8 ? WIDE_GROUP : GROUP; }

static inline quantized_row quantized(int form, const void *in, int64_t row, int num_inputs)
{
    const int size = group_size(form), num_groups = num_inputs / size;
    const int64_t num_floats = form == INT8 ? num_groups + 1 : 2 * num_groups;
    int8_t *band = (int8_t *)in + row / BAND * BAND * (num_inputs + num_floats * 4);
    float *scales = (float *)(band + BAND * num_inputs) + row % BAND;
    return (quantized_row){band + row % BAND * size, scales, scales + BAND * num_groups};
}
