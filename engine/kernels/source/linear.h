/* Products of rows and packed weights.
 *
 * A task is some panels, of 32 outputs each, and goes through all rows for each. Over the inputs every
 * output is summed in one order, whatever the number of rows: so a row's bits do not depend on its neighbours.
 */
#pragma once
#include "operations.h"
#include "simd.h"

enum { PANEL = 32, VECTORS = PANEL / LANES, MOST_ROWS = 64 };
#if defined(__AMX_BF16__)
enum { TILE_ROWS = 8, QUANTIZED_ROWS = 4 }; /* of float32, and of whole numbers that are too few for tiles */
#elif defined(__AVX512F__)
enum { TILE_ROWS = 12, QUANTIZED_ROWS = 8 }; /* as many sums as registers hold, of whole numbers those
                                              * of a group; these divide BAND */
#else
enum { TILE_ROWS = 3, QUANTIZED_ROWS = 2 };
#endif

/* How far ahead weights are fetched. Cores with AMX read memory twice as fast so; those without that were measured see
 * the streams by themselves, but for 4 bits beside more than a few rows, and are slower where they are told. */
enum { PREFETCHED_BYTES = 8192 };
#if defined(__AMX_BF16__)
enum { FETCHES = 1 };
#else
enum { FETCHES = 0 };
#endif

INLINE void fetch_ahead_of(const uint8_t *w, int num_bytes)
{
    UNROLL for (int at = 0; at < num_bytes; at += 64) __builtin_prefetch(w + PREFETCHED_BYTES + at);
}

INLINE void tile_float32(const int n, const float *x, int num_inputs, const float *w, float *out)
{
    floats sums[TILE_ROWS][VECTORS];
    UNROLL for (int m = 0; m < n; m++) UNROLL for (int v = 0; v < VECTORS; v++) sums[m][v] = all(0.f);
    for (int k = 0; k < num_inputs; k++, w += PANEL) {
        UNROLL for (int v = 0; v < VECTORS; v++) {
            floats weights = load(w + v * LANES);
            UNROLL for (int m = 0; m < n; m++)
                sums[m][v] = fused(weights, all(x[(int64_t)m * num_inputs + k]), sums[m][v]);
        }
    }
    UNROLL for (int m = 0; m < n; m++) UNROLL for (int v = 0; v < VECTORS; v++) store(out + m * PANEL + v * LANES, sums[m][v]);
}

INLINE void tile_bfloat16(const int n, const uint16_t *x, int num_inputs, const uint16_t *w, float *out)
{
    floats sums[TILE_ROWS][VECTORS];
    UNROLL for (int m = 0; m < n; m++) UNROLL for (int v = 0; v < VECTORS; v++) sums[m][v] = all(0.f);
    for (int k = 0; k < num_inputs; k += 2, w += 2 * PANEL) {
        UNROLL for (int v = 0; v < VECTORS; v++) {
            words weights = load_words(w + 2 * v * LANES);
            UNROLL for (int m = 0; m < n; m++)
                sums[m][v] = dot_pairs(sums[m][v], weights, load_word(x + (int64_t)m * num_inputs + k));
        }
    }
    UNROLL for (int m = 0; m < n; m++) UNROLL for (int v = 0; v < VECTORS; v++) store(out + m * PANEL + v * LANES, sums[m][v]);
}

INLINE void tile_int8(const int n, const void *in, int64_t row, int num_inputs, const uint8_t *w, float *out)
{
    floats sums[QUANTIZED_ROWS][VECTORS];
    const quantized_row x = quantized(INT8, in, row, num_inputs);
    UNROLL for (int m = 0; m < n; m++) UNROLL for (int v = 0; v < VECTORS; v++) sums[m][v] = all(x.sums[m] * -128.f);
    for (int group = 0; group < num_inputs / WIDE_GROUP; group++) {
        const int8_t *bytes = x.bytes + group * BAND * WIDE_GROUP;
        if (FETCHES) fetch_ahead_of(w, WIDE_GROUP * PANEL);
        ints dots[QUANTIZED_ROWS][VECTORS];
        UNROLL for (int m = 0; m < n; m++) UNROLL for (int v = 0; v < VECTORS; v++) dots[m][v] = (ints){};
        _Pragma("GCC unroll 4") for (int k = 0; k < WIDE_GROUP; k += 4, w += 4 * PANEL) {
            words weights[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = load_words(w + 4 * v * LANES);
            UNROLL for (int m = 0; m < n; m++) {
                const uint32_t four = load_word(bytes + m * WIDE_GROUP + k);
                UNROLL for (int v = 0; v < VECTORS; v++) dots[m][v] = dot_bytes(dots[m][v], weights[v], four);
            }
        }
        UNROLL for (int m = 0; m < n; m++) UNROLL for (int v = 0; v < VECTORS; v++)
            sums[m][v] = fused(__builtin_convertvector(dots[m][v], floats), all(x.scales[group * BAND + m]), sums[m][v]);
    }
    UNROLL for (int m = 0; m < n; m++) UNROLL for (int v = 0; v < VECTORS; v++) store(out + m * PANEL + v * LANES, sums[m][v]);
}

enum { INT4_BYTES = GROUP / 2 * PANEL + 2 * PANEL * 2 }; /* of a group in a panel */

INLINE void tile_int4(const int n, const void *in, int64_t row, int num_inputs, const uint8_t *w, float *out)
{
    floats sums[QUANTIZED_ROWS][VECTORS];
    const quantized_row x = quantized(INT4, in, row, num_inputs);
    UNROLL for (int m = 0; m < n; m++) UNROLL for (int v = 0; v < VECTORS; v++) sums[m][v] = all(0.f);
    for (int group = 0; group < num_inputs / GROUP; group++, w += INT4_BYTES) {
        const int8_t *bytes = x.bytes + group * BAND * GROUP;
        if (FETCHES || n > 4) fetch_ahead_of(w, INT4_BYTES);
        const uint16_t *factors = (const uint16_t *)(w + GROUP / 2 * PANEL), *least = factors + PANEL;
        ints dots[QUANTIZED_ROWS][VECTORS];
        UNROLL for (int m = 0; m < n; m++) UNROLL for (int v = 0; v < VECTORS; v++) dots[m][v] = (ints){};
        _Pragma("GCC unroll 4") for (int k = 0; k < GROUP / 2; k += 4) {
            words low[VECTORS], high[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) {
                words both = load_words(w + k * PANEL + 4 * v * LANES);
                low[v] = both & 0x0f0f0f0f;
                high[v] = both >> 4 & 0x0f0f0f0f;
            }
            UNROLL for (int m = 0; m < n; m++) {
                const uint32_t first = load_word(bytes + m * GROUP + k), second = load_word(bytes + m * GROUP + GROUP / 2 + k);
                UNROLL for (int v = 0; v < VECTORS; v++)
                    dots[m][v] = dot_bytes(dot_bytes(dots[m][v], low[v], first), high[v], second);
            }
        }
        UNROLL for (int v = 0; v < VECTORS; v++) {
            floats factor = widen_float16(factors + v * LANES), offset = widen_float16(least + v * LANES);
            UNROLL for (int m = 0; m < n; m++) {
                floats dot = __builtin_convertvector(dots[m][v], floats) * x.scales[group * BAND + m];
                sums[m][v] = fused(dot, factor, sums[m][v]);
                sums[m][v] = fused(offset, all(x.sums[group * BAND + m]), sums[m][v]);
            }
        }
    }
    UNROLL for (int m = 0; m < n; m++) UNROLL for (int v = 0; v < VECTORS; v++) store(out + m * PANEL + v * LANES, sums[m][v]);
}

/* One function a number of rows, so that sums stay in registers: those that the variant's tiles have, for each compiles. */
#if defined(__AMX_BF16__)
#define FOR_EACH_COUNT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define FOR_EACH_QUANTIZED_COUNT(X) X(1) X(2) X(3) X(4)
#elif defined(__AVX512F__)
#define FOR_EACH_COUNT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#define FOR_EACH_QUANTIZED_COUNT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#else
#define FOR_EACH_COUNT(X) X(1) X(2) X(3)
#define FOR_EACH_QUANTIZED_COUNT(X) X(1) X(2)
#endif
#define DEFINE_TILES(n)                                                                                               \
    static __attribute__((noinline)) void float32_##n(const float *x, int k, const float *w, float *out)              \
    { tile_float32(n, x, k, w, out); }                                                                                \
    static __attribute__((noinline, unused)) void bfloat16_##n(const uint16_t *x, int k, const uint16_t *w, float *out) \
    { tile_bfloat16(n, x, k, w, out); }
#define DEFINE_QUANTIZED_TILES(n)                                                                                     \
    static __attribute__((noinline)) void int8_##n(const void *in, int64_t row, int k, const void *w, float *out)     \
    { tile_int8(n, in, row, k, w, out); }                                                                             \
    static __attribute__((noinline)) void int4_##n(const void *in, int64_t row, int k, const void *w, float *out)     \
    { tile_int4(n, in, row, k, w, out); }
#define FLOAT32_CASE(n) case n: float32_##n((const float *)op->in + row * k, k, (const float *)w, out); break;
#define BFLOAT16_CASE(n) case n: bfloat16_##n((const uint16_t *)op->in + row * k, k, (const uint16_t *)w, out); break;
#define INT8_CASE(n) case n: int8_##n(op->in, row, k, w, out); break;
#define INT4_CASE(n) case n: int4_##n(op->in, row, k, w, out); break;
FOR_EACH_COUNT(DEFINE_TILES)
FOR_EACH_QUANTIZED_COUNT(DEFINE_QUANTIZED_TILES)

/* Multiply n rows from `row` on with one panel into sums [n][PANEL]. */
static void tile(const linear_operation *op, int64_t row, int n, const char *w, float *out)
{
    const int k = op->num_inputs;
    switch (op->form) {
    case FLOAT32: switch (n) { FOR_EACH_COUNT(FLOAT32_CASE) } break;
#if !defined(__AMX_BF16__) /* there bfloat16 goes through tiles, whatever the number of rows */
    case BFLOAT16: switch (n) { FOR_EACH_COUNT(BFLOAT16_CASE) } break;
#endif
    case INT8: switch (n) { FOR_EACH_QUANTIZED_COUNT(INT8_CASE) } break;
    case INT4: switch (n) { FOR_EACH_QUANTIZED_COUNT(INT4_CASE) } break;
    }
}

INLINE int64_t panel_bytes(int form, int num_inputs)
{
    switch (form) {
    case FLOAT32: return (int64_t)num_inputs * PANEL * 4;
    case BFLOAT16: return (int64_t)num_inputs * PANEL * 2;
    case INT8: return (int64_t)num_inputs * PANEL;
    default: return (int64_t)num_inputs / GROUP * INT4_BYTES;
    }
}

#include "amx.h"

/* As exact as float32, or as bfloat16 and whole numbers ask for. */
INLINE floats activate(const int is_exact, int activation, floats x)
{
    const floats gate = activation == SILU ? x : (x + x * x * x * 0.044715f) * 1.5957691216f; /* 2 * sqrt(2 / pi) */
    return x * (is_exact ? sigmoid(gate) : rough_sigmoid(gate));
}

/* Do with one row's sums of a panel what the operation says. */
INLINE void finish(const linear_operation *op, int64_t row, int64_t panel, const float *sums)
{
    floats of[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        const int64_t output = panel * PANEL + v * LANES;
        of[v] = load(sums + v * LANES);
        if (op->scales) of[v] *= load(op->scales + output);
        if (op->bias) of[v] += load(op->bias + output);
    }
    if (op->epilogue == GATE) {
        const int64_t at = row * op->out_stride + panel * PANEL / 2;
        for (int v = 0; v < VECTORS / 2; v++) {
            const floats gated = activate(op->form == FLOAT32, op->activation, of[v]) * of[v + VECTORS / 2];
            store_as(op->out_form == BFLOAT16, op->out, at + v * LANES, gated);
        }
        return;
    }
    float *out = (float *)op->out + row * op->out_stride + panel * PANEL;
    int64_t count = op->num_outputs - panel * PANEL;
    if (count < PANEL) {
        float tail[PANEL];
        for (int v = 0; v < VECTORS; v++) store(tail + v * LANES, of[v]);
        for (int i = 0; i < count; i++) out[i] = op->epilogue == ADD ? tail[i] * op->multiplier + out[i] : tail[i];
    } else {
        for (int v = 0; v < VECTORS; v++, out += LANES)
            store(out, op->epilogue == ADD ? fused(of[v], all(op->multiplier), load(out)) : of[v]);
    }
}

/* How many rows are multiplied at once, at most. */
INLINE int rows_at_once(int form, int64_t num_rows)
{
#if defined(__AMX_BF16__)
    if (form == BFLOAT16) return AMX_BFLOAT16_ROWS;
    if (form >= INT8 && num_rows > QUANTIZED_ROWS) return AMX_QUANTIZED_ROWS;
#endif
    (void)num_rows;
    return form >= INT8 ? QUANTIZED_ROWS : TILE_ROWS;
}

INLINE int64_t num_panels(const linear_operation *op) { return (op->num_outputs + PANEL - 1) / PANEL; }

/* Multiply all rows with the panels [begin, end). */
static void linear(const linear_operation *op, int64_t num_rows, int64_t begin, int64_t end_panel)
{
    const int most = rows_at_once(op->form, num_rows);
    const int64_t num_tiles = (num_rows + most - 1) / most;
    _Alignas(64) float sums[MOST_ROWS * PANEL];
#if defined(__AMX_BF16__)
    if (most > TILE_ROWS) amx_begin(op->form, num_rows <= AMX_FEW_ROWS ? AMX_FEW_ROWS : AMX_ROWS);
#endif
    for (int64_t panel = begin; panel < end_panel; panel++) {
        const char *w = (const char *)op->weight + panel * panel_bytes(op->form, op->num_inputs);
        for (int64_t i = 0, row = 0, end; i < num_tiles; i++, row = end) {
#if defined(__AMX_BF16__)
            if (most > TILE_ROWS) {
                end = row + most < num_rows ? row + most : num_rows;
                const int fetches = row == 0 || end == num_rows; /* what follows of this panel, and of the next one */
                if (op->form == BFLOAT16) amx_bfloat16(op, row, end - row, (const uint16_t *)w, fetches, sums);
                else amx_quantized(op, row, end - row, (const uint8_t *)w, fetches, sums);
            } else
#endif
            {
                if (op->form < INT8) end = num_rows * (i + 1) / num_tiles; /* tiles of about one size */
                else end = row + most < num_rows ? row + most : num_rows;  /* none in two bands */
                tile(op, row, end - row, w, sums);
            }
            for (int64_t m = row; m < end; m++) finish(op, m, panel, sums + (m - row) * PANEL);
        }
    }
}

/* The weight of one output, `lane` of a panel, for input i. */
INLINE float weight_at(int form, const char *panel, int lane, int i)
{
    if (form == FLOAT32) return ((const float *)panel)[i * PANEL + lane];
    if (form == BFLOAT16) return as_float((uint32_t)((const uint16_t *)panel)[(i / 2 * PANEL + lane) * 2 + i % 2] << 16);
    if (form == INT8) return (float)(((const uint8_t *)panel)[(i / 4 * PANEL + lane) * 4 + i % 4] - 128);
    const int at = i % (GROUP / 2), is_high = i % GROUP >= GROUP / 2;
    const uint8_t *group = (const uint8_t *)panel + i / GROUP * INT4_BYTES;
    const uint16_t *factors = (const uint16_t *)(group + GROUP / 2 * PANEL);
    const floats factor = widen_float16(factors + lane / LANES * LANES);
    const floats least = widen_float16(factors + PANEL + lane / LANES * LANES);
    const int number = group[(at / 4 * PANEL + lane) * 4 + at % 4] >> 4 * is_high & 15;
    return (float)number * factor[lane % LANES] + least[lane % LANES];
}

static void embed(const embed_operation *op, const step *s, int64_t row)
{
    const int64_t token = s->token_ids[row];
    const char *panel = (const char *)op->weight + token / PANEL * panel_bytes(op->form, op->num_inputs);
    const float scale = op->form == INT8 ? op->scales[token] * op->scale : op->scale;
    float *out = op->out + row * op->size;
    for (int i = 0; i < op->size; i++) out[i] = weight_at(op->form, panel, (int)(token % PANEL), i) * scale;
}
