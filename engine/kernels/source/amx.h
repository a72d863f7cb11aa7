/* Products in the tile registers of AMX: 16 rows times 16 outputs at a time, rows that do not count included.
 *
 * Inputs have room for whole tiles. Whole numbers are exact, so few rows may go through vectors and many through tiles:
 * the bits are the same. Included by linear.h.
 */
#if defined(__AMX_BF16__)
enum { AMX_ROWS = 16, AMX_FEW_ROWS = 8, AMX_BFLOAT16_ROWS = 32, AMX_QUANTIZED_ROWS = 64 };
enum { MOST_GROUPS = 3 };         /* multiplied before they are scaled: more would not stay in the first cache */

typedef struct { uint8_t palette, start_row, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } tile_config;

/* Tiles 0 to 3 are sums of `num_rows`, 4 and 5 inputs, 6 and 7 weights. */
static void amx_begin(int form, int num_rows)
{
    const int input_bytes = form == INT4 ? GROUP : 64;
    tile_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = tile == 4 || tile == 5 ? input_bytes : 64;
        config.rows[tile] = tile >= 6 ? input_bytes / 4 : num_rows;
    }
    _tile_loadconfig(&config);
}

static void amx_bfloat16(const linear_operation *op, int64_t row, int n, const uint16_t *w, int fetches, float *out)
{
    const int num_inputs = op->num_inputs;
    const int64_t x_bytes = (int64_t)num_inputs * 2, w_bytes = PANEL * 4;
    const uint16_t *x = (const uint16_t *)op->in + row * num_inputs;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int k = 0; k < num_inputs; k += 32, w += 32 * PANEL) {
        for (int line = 0; fetches && line < 32; line++) _mm_prefetch((const char *)w + PREFETCHED_BYTES + 64 * line, _MM_HINT_T0);
        _tile_loadd(4, x + k, x_bytes);
        _tile_loadd(6, w, w_bytes);
        _tile_loadd(7, w + PANEL, w_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (n <= AMX_ROWS) continue;
        _tile_loadd(5, x + k + (int64_t)AMX_ROWS * num_inputs, x_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, PANEL * 4);
    _tile_stored(1, out + 16, PANEL * 4);
    if (n <= AMX_ROWS) return;
    _tile_stored(2, out + AMX_ROWS * PANEL, PANEL * 4);
    _tile_stored(3, out + AMX_ROWS * PANEL + 16, PANEL * 4);
}

/* Products of groups of two bands with a panel: [groups][band, half of the panel][16][16]. */
typedef int32_t group_dots[4][AMX_ROWS][16];

/* Multiply groups of one band or two; `w` are their bytes, [groups][inputs / 4][PANEL][4]. */
INLINE void amx_dots(const int form, int num_groups, const int8_t *band, const int8_t *next_band, const uint8_t *w,
                     group_dots *dots)
{
    const int size = form == INT8 ? WIDE_GROUP : GROUP;
    for (int i = 0; i < num_groups; i++, w += size * PANEL) {
        _tile_loadd(6, w, PANEL * 4);
        _tile_loadd(7, w + 64, PANEL * 4);
        _tile_loadd(4, band + i * BAND * size, size);
        _tile_zero(0);
        _tile_zero(1);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        _tile_stored(0, dots[i][0], 64);
        _tile_stored(1, dots[i][1], 64);
        if (!next_band) continue;
        _tile_loadd(5, next_band + i * BAND * size, size);
        _tile_zero(2);
        _tile_zero(3);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
        _tile_stored(2, dots[i][2], 64);
        _tile_stored(3, dots[i][3], 64);
    }
}

/* Scale groups and add them to the sums of a band and half a panel, as tile_int8 and tile_int4 do for one after another.
 * `factors` are those of INT4's first group; beside each group some lines of what comes next are fetched. */
INLINE void amx_scale(const int form, const int num_rows, int num_groups, int which, const group_dots *dots,
                      const float *scales, const float *products, const uint8_t *factors, const char *ahead, int num_lines,
                      float *sums)
{
    floats all_sums[AMX_ROWS];
    UNROLL for (int m = 0; m < num_rows; m++) all_sums[m] = load(sums + m * PANEL);
    for (int i = 0; i < num_groups; i++, scales += BAND, products += BAND, factors += INT4_BYTES) {
        floats factor = all(0.f), least = all(0.f);
        for (int line = 0; line < num_lines; line++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T0);
        if (form == INT4) {
            factor = widen_float16((const uint16_t *)factors);
            least = widen_float16((const uint16_t *)factors + PANEL);
        }
        UNROLL for (int m = 0; m < num_rows; m++) {
            ints whole;
            memcpy(&whole, dots[i][which][m], sizeof whole);
            floats dot = __builtin_convertvector(whole, floats);
            if (form == INT8) {
                all_sums[m] = fused(dot, all(scales[m]), all_sums[m]);
            } else {
                all_sums[m] = fused(dot * all(scales[m]), factor, all_sums[m]);
                all_sums[m] = fused(least, all(products[m]), all_sums[m]);
            }
        }
    }
    UNROLL for (int m = 0; m < num_rows; m++) store(sums + m * PANEL, all_sums[m]);
}

/* Spread the numbers of `num_groups` groups of a panel to bytes [groups][GROUP / 4][PANEL][4]. */
INLINE void spread_int4(const uint8_t *w, int num_groups, uint8_t *out)
{
    for (int i = 0; i < num_groups; i++, w += INT4_BYTES, out += GROUP * PANEL) {
        for (int at = 0; at < GROUP / 2 * PANEL; at += 64) {
            words both = load_words(w + at), low = both & 0x0f0f0f0f, high = both >> 4 & 0x0f0f0f0f;
            memcpy(out + at, &low, sizeof low);
            memcpy(out + GROUP / 2 * PANEL + at, &high, sizeof high);
        }
    }
}

INLINE void amx_panel(const int form, const linear_operation *op, int64_t row, int n, const uint8_t *panel, int fetches,
                      float *sums)
{
    const int size = form == INT8 ? WIDE_GROUP : GROUP, group_bytes = form == INT8 ? size * PANEL : INT4_BYTES;
    const int num_groups = op->num_inputs / size, num_chunks = (num_groups + MOST_GROUPS - 1) / MOST_GROUPS;
    _Alignas(64) group_dots dots[MOST_GROUPS];
    _Alignas(64) uint8_t spread[MOST_GROUPS * GROUP * PANEL];
    for (int chunk = 0, first = 0, end; chunk < num_chunks; chunk++, first = end) {
        end = num_groups * (chunk + 1) / num_chunks;
        const uint8_t *w = panel + (int64_t)first * group_bytes, *factors = w + GROUP / 2 * PANEL;
        const char *ahead = (const char *)w + PREFETCHED_BYTES;
        if (form == INT4) {
            spread_int4(w, end - first, spread);
            w = spread;
        }
        for (int from = 0; from < n; from += 2 * BAND) {
            quantized_row x[2];
            const int num_bands = n - from > BAND ? 2 : 1, num_lines = from || !fetches ? 0 : group_bytes / 64 / (2 * num_bands);
            for (int band = 0; band < num_bands; band++)
                x[band] = quantized(form, op->in, row + from + band * BAND, op->num_inputs);
            const int64_t offset = (int64_t)first * BAND * size;
            amx_dots(form, end - first, x[0].bytes + offset, num_bands > 1 ? x[1].bytes + offset : NULL, w, dots);
            for (int which = 0; which < 2 * num_bands; which++) {
                const int begin = from + which / 2 * BAND, half = which % 2;
                const float *scales = x[which / 2].scales + first * BAND, *of_groups = x[which / 2].sums + first * BAND;
                float *of_band = sums + begin * PANEL + half * 16;
                const uint8_t *of_half = factors + half * 32;
                if (n - begin <= AMX_FEW_ROWS)
                    amx_scale(form, AMX_FEW_ROWS, end - first, which, dots, scales, of_groups, of_half, ahead, num_lines, of_band);
                else
                    amx_scale(form, AMX_ROWS, end - first, which, dots, scales, of_groups, of_half, ahead, num_lines, of_band);
                ahead += (int64_t)(end - first) * num_lines * 64;
            }
        }
    }
}

/* Multiply n rows with a panel. */
static void amx_quantized(const linear_operation *op, int64_t row, int n, const uint8_t *w, int fetches, float *sums)
{
    for (int m = 0; m < (n + BAND - 1) / BAND * BAND; m++) {
        floats first = all(op->form == INT8 ? *quantized(INT8, op->in, row + m, op->num_inputs).sums * -128.f : 0.f);
        for (int i = 0; i < PANEL; i += LANES) store(sums + m * PANEL + i, first);
    }
    if (op->form == INT8) amx_panel(INT8, op, row, n, w, fetches, sums);
    else amx_panel(INT4, op, row, n, w, fetches, sums);
}
#endif
