/* Products in the tile registers of AMX: 16 rows times 16 outputs at a time, rows that do not count included.
 *
 * Inputs have room for whole tiles. Whole numbers are exact, so few rows may go through vectors and many through tiles:
 * the bits are the same. Included by linear.h.
 */
#if defined(__AMX_BF16__)
enum { AMX_ROWS = 16, AMX_BFLOAT16_ROWS = 32, AMX_QUANTIZED_ROWS = 64, FEW_ROWS = 4, CHUNK = 32 };
enum { PREFETCHED_BYTES = 8192 }; /* how far ahead */
enum { AHEAD = 1 };                /* groups that are multiplied before one is scaled: stores take their time */

typedef struct { uint8_t palette, start_row, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } tile_config;

/* Tiles 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights. */
static void amx_begin(int form)
{
    tile_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = form >= INT8 && (tile == 4 || tile == 5) ? GROUP : 64;
        config.rows[tile] = form >= INT8 && tile >= 6 ? GROUP / 4 : AMX_ROWS;
    }
    _tile_loadconfig(&config);
}

static void amx_bfloat16(const linear_operation *op, int64_t row, int n, const uint16_t *w, float *out)
{
    const int num_inputs = op->num_inputs;
    const int64_t x_bytes = (int64_t)num_inputs * 2, w_bytes = PANEL * 4;
    const uint16_t *x = (const uint16_t *)op->in + row * num_inputs;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int k = 0; k < num_inputs; k += 32, w += 32 * PANEL) {
        for (int line = 0; line < 32; line++) _mm_prefetch((const char *)w + PREFETCHED_BYTES + 64 * line, _MM_HINT_T0);
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

/* Add some groups of 16 rows times 16 outputs to their sums, as tile_int8 and tile_int4 do for one group after another.
 * `w` are bytes [groups][GROUP / 4][PANEL][4] of which 16 outputs count, `scales` of INT4 the group's factors. */
INLINE void amx_groups(const int form, const linear_operation *op, int64_t row, int first_group, int num_groups,
                       const uint8_t *w, const uint8_t *scales, float *sums)
{
    const int num_inputs = op->num_inputs;
    const int64_t x_bytes = quantized_bytes(num_inputs);
    _Alignas(64) int32_t dots[AHEAD + 1][AMX_ROWS][16];
    floats all_sums[AMX_ROWS];
    UNROLL for (int m = 0; m < AMX_ROWS; m++) all_sums[m] = load(sums + m * PANEL);
    quantized_row x = quantized(op->in, row, num_inputs);
    for (int i = 0; i < num_groups + AHEAD; i++) {
        if (i < num_groups) {
            _tile_loadd(4, x.bytes + (first_group + i) * GROUP, x_bytes);
            _tile_loadd(6, w + i * GROUP * PANEL, PANEL * 4);
            _tile_zero(0);
            _tile_dpbsud(0, 4, 6);
            _tile_stored(0, dots[i % (AHEAD + 1)], 64);
        }
        if (i < AHEAD) continue;
        const int group = first_group + i - AHEAD;
        const int32_t(*of_group)[16] = dots[(i - AHEAD) % (AHEAD + 1)];
        floats factor = all(0.f), least = all(0.f);
        if (form == INT4) {
            factor = widen_float16((const uint16_t *)(scales + (i - AHEAD) * INT4_BYTES));
            least = widen_float16((const uint16_t *)(scales + (i - AHEAD) * INT4_BYTES) + PANEL);
        }
        UNROLL for (int m = 0; m < AMX_ROWS; m++) {
            const float *of_row = (const float *)((const char *)x.scales + m * x_bytes) + group;
            ints whole;
            memcpy(&whole, of_group[m], sizeof whole);
            floats dot = __builtin_convertvector(whole, floats);
            if (form == INT8) {
                all_sums[m] = fused(dot - all(of_row[num_inputs / GROUP]), all(*of_row), all_sums[m]);
            } else {
                all_sums[m] = fused(dot * all(*of_row), factor, all_sums[m]);
                all_sums[m] = fused(least, all(of_row[num_inputs / GROUP * 2]), all_sums[m]);
            }
        }
    }
    UNROLL for (int m = 0; m < AMX_ROWS; m++) store(sums + m * PANEL, all_sums[m]);
}

/* Spread the numbers of `num_groups` groups of a panel to bytes [groups][GROUP / 4][PANEL][4]. */
static void spread_int4(const uint8_t *w, int num_groups, uint8_t *out)
{
    for (int i = 0; i < num_groups; i++, w += INT4_BYTES, out += GROUP * PANEL) {
        for (int at = 0; at < GROUP / 2 * PANEL; at += 64) {
            words both = load_words(w + at), low = both & 0x0f0f0f0f, high = both >> 4 & 0x0f0f0f0f;
            memcpy(out + at, &low, sizeof low);
            memcpy(out + GROUP / 2 * PANEL + at, &high, sizeof high);
        }
    }
}

static void amx_quantized(const linear_operation *op, int64_t row, int n, const uint8_t *w, int64_t panel, float *sums)
{
    const int num_groups = op->num_inputs / GROUP, num_tiles = (n + AMX_ROWS - 1) / AMX_ROWS;
    _Alignas(64) uint8_t spread[CHUNK * GROUP * PANEL];
    memset(sums, 0, (int64_t)num_tiles * AMX_ROWS * PANEL * sizeof(float));
    for (int first = 0; first < num_groups; first += CHUNK) {
        const int count = num_groups - first < CHUNK ? num_groups - first : CHUNK;
        const uint8_t *chunk = w + (int64_t)first * (op->form == INT8 ? GROUP * PANEL : INT4_BYTES), *bytes = chunk;
        if (op->form == INT4) {
            spread_int4(chunk, count, spread);
            bytes = spread;
        }
        for (int tile = 0; tile < num_tiles; tile++) {
            for (int half = 0; half < 2; half++) {
                float *of_tile = sums + tile * AMX_ROWS * PANEL + half * 16;
                const uint8_t *scales = chunk + GROUP / 2 * PANEL + half * 32;
                int64_t from = row + tile * AMX_ROWS;
                if (op->form == INT8) amx_groups(INT8, op, from, first, count, bytes + half * 64, scales, of_tile);
                else amx_groups(INT4, op, from, first, count, bytes + half * 64, scales, of_tile);
            }
        }
    }
    if (op->form != INT8) return;
    for (int m = 0; m < n; m++)
        for (int i = 0; i < PANEL; i += LANES)
            store(sums + m * PANEL + i, load(sums + m * PANEL + i) * load(op->scales + panel * PANEL + i));
}
#endif
