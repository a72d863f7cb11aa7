/* Paged attention: rotation into the pages, and rows over the keys up to their own.
 *
 * A page holds, for each K/V head and each 16 consecutive tokens of a block, one record: keys, then values.
 *
 *     BFLOAT16  keys [head size / 2][16][2]   values [8][head size][2]
 *     FLOAT32   keys [head size][16]          values [16][head size]
 *     INT8      keys [head size / 4][16][4], scales [16] of keys and [16] of values, float32, then values: with AMX
 *               [16][head size], else [4][head size][4]
 *
 * INT8 keys are stored plus 128, and so are values but with AMX. Queries beside them are whole numbers too, with a scale
 * and a sum for each 32.
 *
 * Keys are taken KEYS at a time from absolute positions, softmax goes on from one KEYS to the next, and every 512 it
 * begins anew and is folded into what came before. So a row's bits depend on its query, its position and the K/V before
 * it alone: keys of which a row sees none change nothing in it.
 */
#pragma once
#include "linear.h"
#include "operations.h"
#include "simd.h"
#include "team.h"

#if defined(__AMX_BF16__)
enum { RECORDS = 16, MAX_QUERIES = AMX_ROWS };
#else
enum { RECORDS = 8, MAX_QUERIES = TILE_ROWS };
#endif
enum { MAX_BANDS = 4, QUERY_LANES = (MAX_QUERIES + LANES - 1) / LANES * LANES };
enum { TOKENS = 16, KEYS = RECORDS * TOKENS, SPLIT = 512, MAX_HEAD = 256 };

enum { SCALES_BYTES = 2 * TOKENS * 4 };

INLINE int64_t keys_bytes(int form, int head_size)
{
    return (int64_t)TOKENS * head_size * (form == FLOAT32 ? 4 : form == BFLOAT16 ? 2 : 1);
}

INLINE int64_t record_bytes(int form, int head_size)
{
    return 2 * keys_bytes(form, head_size) + (form == INT8 ? SCALES_BYTES : 0);
}

INLINE int whole_groups(int head_size) { return (head_size + GROUP - 1) / GROUP; }

/* The bytes of one query: of a row's heads each has so many. */
INLINE int64_t query_bytes(int form, int head_size)
{
    return form == INT8 ? whole_groups(head_size) * (GROUP + 8) : head_size * (form == FLOAT32 ? 4 : 2);
}

/* The record of one K/V head with the token at `position` of a request. */
INLINE char *record_at(int form, int head_size, page_places places, const int32_t *block_table, int64_t position, int head)
{
    const int size = places.block_size;
    const uint32_t block = (uint32_t)position / (uint32_t)size, within = (uint32_t)position - block * (uint32_t)size;
    const int64_t record = head * (size / TOKENS) + within / TOKENS;
    return places.first + block_table[block] * places.block_bytes + record * record_bytes(form, head_size);
}

INLINE const int32_t *block_table_of(const step *s, int group, int64_t row)
{
    return s->block_tables + ((int64_t)group * s->num_requests + s->requests[row]) * s->max_blocks;
}

/* -- rotation ------------------------------------------------------------------------------------------------------ */

/* Rotate one head into `out`; what follows the rotated numbers is copied. */
INLINE void rotate_head(const rotate_operation *op, int64_t position, const float *in, float *out)
{
    int half = op->cosines ? op->rotary_size / 2 : 0;
    const float *cosines = op->cosines + position * half, *sines = op->sines + position * half;
    const int whole = half / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) {
        const floats a = load(in + i), b = load(in + i + half), cosine = load(cosines + i), sine = load(sines + i);
        store(out + i, a * cosine - b * sine);
        store(out + i + half, a * sine + b * cosine);
    }
    for (int i = whole; i < half; i++) {
        const float a = in[i], b = in[i + half];
        out[i] = a * cosines[i] - b * sines[i];
        out[i + half] = a * sines[i] + b * cosines[i];
    }
    for (int i = 2 * half; i < op->head_size; i++) out[i] = in[i];
}

INLINE void store_query(int form, int size, const float *head, char *to)
{
    if (form == FLOAT32) memcpy(to, head, size * sizeof(float));
    else if (form == BFLOAT16) for (int i = 0; i < size; i += LANES) narrow_to((uint16_t *)to + i, load(head + i));
    else {
        const int num_groups = whole_groups(size);
        float *scales = (float *)(to + num_groups * GROUP);
        for (int first = 0; first < size; first += GROUP, scales++) {
            floats v[GROUP / LANES];
            int count = (size - first < GROUP ? size - first : GROUP) / LANES;
            for (int i = 0; i < count; i++) v[i] = load(head + first + i * LANES);
            quantize_group(v, count, (int8_t *)to + first, scales, scales + num_groups);
        }
    }
}

/* Bring a whole head into numbers of -127 to 127; returns the scale, no number if one of `head` is none. */
INLINE float quantize_head(int size, const float *head, int8_t *out)
{
    floats v[MAX_HEAD / LANES];
    float scale, sum;
    for (int i = 0; i < size / LANES; i++) v[i] = load(head + i * LANES);
    quantize_group(v, size / LANES, out, &scale, &sum);
    return scale + (sum - sum);
}

/* Whether some number is none, or infinite, once it is in a page's form. */
INLINE int is_poisoned(int form, int size, const float *numbers)
{
    floats sum = all(0.f);
    uint16_t narrow[LANES];
    for (int i = 0; i < size; i += LANES) {
        floats v = load(numbers + i);
        if (form == BFLOAT16) {
            narrow_to(narrow, v);
            v = widen(narrow);
        }
        sum += v - v;
    }
    return sum_of(sum) != 0.f;
}

/* Put one token's key and value at `lane` of a record.
 *
 * A value with a number that is none becomes zero, and its key none: so it reaches through its score all who see it, and
 * not, times a weight of zero, those who do not. */
INLINE void store_pair(int form, int size, float *key, const float *value, char *record, int lane)
{
    static const float zeros[MAX_HEAD];
    if (is_poisoned(form, size, value)) {
        for (int i = 0; i < size; i++) key[i] = NAN;
        value = zeros;
    }
    if (form == FLOAT32) {
        float *keys = (float *)record;
        for (int i = 0; i < size; i++) keys[i * TOKENS + lane] = key[i];
        memcpy(keys + (TOKENS + lane) * size, value, size * sizeof(float));
    } else if (form == BFLOAT16) {
        uint16_t narrow[MAX_HEAD], *keys = (uint16_t *)record, *to = keys + TOKENS * size + lane / 2 * size * 2 + lane % 2;
        for (int i = 0; i < size; i += LANES) narrow_to(narrow + i, load(key + i));
        for (int i = 0; i < size; i += 2) memcpy(keys + i * TOKENS + lane * 2, narrow + i, 4);
        for (int i = 0; i < size; i += LANES) narrow_to(narrow + i, load(value + i));
        for (int i = 0; i < size; i++) to[i * 2] = narrow[i];
    } else {
        int8_t whole[MAX_HEAD];
        float *scales = (float *)(record + TOKENS * size);
        scales[lane] = quantize_head(size, key, whole);
        for (int i = 0; i < size; i += 4) {
            uint32_t four = load_word(whole + i) ^ 0x80808080; /* plus 128 */
            memcpy(record + i * TOKENS + lane * 4, &four, 4);
        }
        char *values = (char *)scales + SCALES_BYTES;
#if defined(__AMX_BF16__)
        scales[TOKENS + lane] = quantize_head(size, value, (int8_t *)values + lane * size);
#else
        scales[TOKENS + lane] = quantize_head(size, value, whole);
        values += lane / 4 * size * 4 + lane % 4;
        for (int i = 0; i < size; i++) values[i * 4] = (char)(whole[i] ^ 0x80); /* plus 128 */
#endif
    }
}

static void rotate(const rotate_operation *op, const step *s, int64_t row)
{
    const int size = op->head_size;
    const int64_t position = s->positions[row], one_query = query_bytes(op->form, size);
    const int32_t *block_table = block_table_of(s, op->group, row);
    const float *in = op->qkv + row * (op->num_heads + 2 * op->num_kv_heads) * size;
    float head[MAX_HEAD];
    for (int h = 0; h < op->num_heads; h++, in += size) {
        rotate_head(op, position, in, head);
        store_query(op->form, size, head, (char *)op->queries + (row * op->num_heads + h) * one_query);
    }
    for (int h = 0; h < op->num_kv_heads; h++, in += size) {
        char *record = record_at(op->form, size, op->places, block_table, position, h);
        rotate_head(op, position, in, head);
        store_pair(op->form, size, head, in + op->num_kv_heads * size, record, position % TOKENS);
    }
}

/* -- rows over keys ------------------------------------------------------------------------------------------------ */

/* Softmax so far of a band of queries: the largest score, the lanes' sums, and the values' weighted sums. */
typedef struct {
    float largest[QUERY_LANES];
    floats sums[MAX_QUERIES];
    _Alignas(64) float values[MAX_QUERIES][MAX_HEAD];
} partial;

/* Queries that are computed together, where what comes out of each begins, and how far each sees: positions [from, until);
 * `first` and `last` of any. */
typedef struct {
    int num_queries;
    const void *queries[MAX_QUERIES];
    int64_t out[MAX_QUERIES];
    int head[MAX_QUERIES];
    int64_t from[MAX_QUERIES], until[MAX_QUERIES], first, last;
} band;

/* Bands that share a K/V head and a request. */
typedef struct {
    int num_bands, kv_head;
    int64_t first, last;
    const int32_t *block_table;
    band bands[MAX_BANDS];
} unit;

/* Scores of a band and KEYS keys, then weights: as they are, narrow beside values in bfloat16, or beside those in whole
 * numbers whole ones of 14 bits times a unit, 7 of them a byte. What was summed before is multiplied by `factors`. */
typedef struct {
    _Alignas(64) float scores[MAX_QUERIES][KEYS];
    float factors[QUERY_LANES], units[QUERY_LANES];
    int32_t totals[QUERY_LANES]; /* of whole weights */
    _Alignas(64) uint16_t narrow[MAX_QUERIES][KEYS];
    _Alignas(64) int8_t high[MAX_QUERIES][KEYS], low[MAX_QUERIES][KEYS];
} block_scores;

enum { WHOLE_BITS = 7, WHOLE_MOST = (1 << 2 * WHOLE_BITS) - 1 }; /* KEYS times that times 255 is below 2^31 */

/* Both products of attention go through tiles of a few queries times some vectors: as many sums as registers hold. */
enum { FEW_QUERIES = TILE_ROWS < 4 ? TILE_ROWS : 4, WIDE = 4, RECORD_VECTORS = TOKENS / LANES };

INLINE void score_int8(const int n, const int num_vectors, int head_size, const void *const *queries,
                       const char *const *records, floats sums[FEW_QUERIES][WIDE])
{
    const int num_groups = whole_groups(head_size);
    for (int group = 0; group < num_groups; group++) {
        const int end = (group + 1) * GROUP < head_size ? (group + 1) * GROUP : head_size;
        ints dots[FEW_QUERIES][WIDE];
        UNROLL for (int i = 0; i < n; i++) UNROLL for (int v = 0; v < num_vectors; v++) dots[i][v] = (ints){};
        for (int d = group * GROUP; d < end; d += 4) {
            words keys[WIDE];
            UNROLL for (int v = 0; v < num_vectors; v++)
                keys[v] = load_words(records[v / RECORD_VECTORS] + d * TOKENS + v % RECORD_VECTORS * LANES * 4);
            UNROLL for (int i = 0; i < n; i++) {
                const uint32_t four = load_word((const char *)queries[i] + d);
                UNROLL for (int v = 0; v < num_vectors; v++) dots[i][v] = dot_bytes(dots[i][v], keys[v], four);
            }
        }
        UNROLL for (int i = 0; i < n; i++) {
            const float *of_query = (const float *)((const char *)queries[i] + num_groups * GROUP) + group;
            UNROLL for (int v = 0; v < num_vectors; v++) {
                const floats whole = __builtin_convertvector(dots[i][v], floats) - 128.f * of_query[num_groups];
                sums[i][v] = fused(whole, all(*of_query), sums[i][v]);
            }
        }
    }
    UNROLL for (int v = 0; v < num_vectors; v++) {
        const float *scales = (const float *)(records[v / RECORD_VECTORS] + TOKENS * head_size);
        UNROLL for (int i = 0; i < n; i++) sums[i][v] *= load(scales + v % RECORD_VECTORS * LANES);
    }
}

INLINE void score_floats(const int n, const int num_vectors, const int form, int head_size, const void *const *queries,
                         const char *const *records, floats sums[FEW_QUERIES][WIDE])
{
    const int numbers = form == FLOAT32 ? 1 : 2; /* a lane */
    for (int d = 0; d < head_size; d += numbers) {
        words keys[WIDE];
        UNROLL for (int v = 0; v < num_vectors; v++)
            keys[v] = load_words(records[v / RECORD_VECTORS] + (d / numbers * TOKENS + v % RECORD_VECTORS * LANES) * 4);
        UNROLL for (int i = 0; i < n; i++) {
            const uint32_t query = load_word((const char *)queries[i] + d / numbers * 4);
            UNROLL for (int v = 0; v < num_vectors; v++)
                sums[i][v] = form == FLOAT32 ? fused((floats)keys[v], all(as_float(query)), sums[i][v])
                                             : dot_pairs(sums[i][v], keys[v], query);
        }
    }
}

INLINE void score_tile(const int n, const int num_vectors, const int form, int head_size, const void *const *queries,
                       const char *const *records, float scores[][KEYS])
{
    floats sums[FEW_QUERIES][WIDE];
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int v = 0; v < num_vectors; v++) sums[i][v] = all(0.f);
    if (form == INT8) score_int8(n, num_vectors, head_size, queries, records, sums);
    else score_floats(n, num_vectors, form, head_size, queries, records, sums);
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int v = 0; v < num_vectors; v++) store(scores[i] + v * LANES, sums[i][v]);
}

INLINE void score(const int n, const int form, int head_size, const void *const *queries, const char *const *records,
                  int num_records, float scores[][KEYS])
{
    enum { AT_ONCE = WIDE / RECORD_VECTORS };
    int r = 0;
    for (; r + AT_ONCE <= num_records; r += AT_ONCE)
        score_tile(n, WIDE, form, head_size, queries, records + r, (float (*)[KEYS])(scores[0] + r * TOKENS));
    for (; r < num_records; r++)
        score_tile(n, RECORD_VECTORS, form, head_size, queries, records + r, (float (*)[KEYS])(scores[0] + r * TOKENS));
}

/* Sums of the numbers of `num_vectors` vectors from `d` on over all keys, times whole weights. */
INLINE void add_whole(const int n, const int num_vectors, int head_size, const int8_t weights[][KEYS],
                      const char *const *records, int num_records, int d, ints dots[FEW_QUERIES][WIDE])
{
    for (int k = 0; k < num_records * TOKENS; k += 4) {
        const char *four_keys = records[k / TOKENS] + (k % TOKENS * head_size + 4 * d);
        words values[WIDE];
        UNROLL for (int v = 0; v < num_vectors; v++) values[v] = load_words(four_keys + 4 * v * LANES);
        UNROLL for (int i = 0; i < n; i++) {
            const uint32_t four = load_word(weights[i] + k);
            UNROLL for (int v = 0; v < num_vectors; v++) dots[i][v] = dot_bytes(dots[i][v], values[v], four);
        }
    }
}

INLINE void add_values_tile(const int n, const int num_vectors, const int form, int head_size, int query,
                            const block_scores *b, const char *const *records, int num_records, int d, partial *p)
{
    floats sums[FEW_QUERIES][WIDE];
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int v = 0; v < num_vectors; v++)
        sums[i][v] = load(p->values[query + i] + d + v * LANES) * b->factors[query + i];
    if (form == INT8) {
        ints dots[FEW_QUERIES][WIDE];
        UNROLL for (int i = 0; i < n; i++) UNROLL for (int v = 0; v < num_vectors; v++) dots[i][v] = (ints){};
        add_whole(n, num_vectors, head_size, b->high + query, records, num_records, d, dots);
        UNROLL for (int i = 0; i < n; i++) UNROLL for (int v = 0; v < num_vectors; v++)
            dots[i][v] = (dots[i][v] << WHOLE_BITS) - 128 * b->totals[query + i];
        add_whole(n, num_vectors, head_size, b->low + query, records, num_records, d, dots);
        UNROLL for (int i = 0; i < n; i++) UNROLL for (int v = 0; v < num_vectors; v++)
            sums[i][v] = fused(__builtin_convertvector(dots[i][v], floats), all(b->units[query + i]), sums[i][v]);
    } else {
        const int keys = form == FLOAT32 ? 1 : 2; /* a lane */
        for (int k = 0; k < num_records * TOKENS; k += keys) {
            const char *some_keys = records[k / TOKENS] + (k % TOKENS / keys * head_size + d) * 4;
            words values[WIDE];
            UNROLL for (int v = 0; v < num_vectors; v++) values[v] = load_words(some_keys + 4 * v * LANES);
            UNROLL for (int i = 0; i < n; i++) {
                const float weight = form == FLOAT32 ? b->scores[query + i][k] : 0.f;
                const uint32_t weights = form == FLOAT32 ? 0 : load_word(b->narrow[query + i] + k);
                UNROLL for (int v = 0; v < num_vectors; v++)
                    sums[i][v] = form == FLOAT32 ? fused((floats)values[v], all(weight), sums[i][v])
                                                 : dot_pairs(sums[i][v], values[v], weights);
            }
        }
    }
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int v = 0; v < num_vectors; v++)
        store(p->values[query + i] + d + v * LANES, sums[i][v]);
}

INLINE void add_values(const int n, const int form, int head_size, int query, const block_scores *b,
                       const char *const *records, int num_records, partial *p)
{
    int d = 0;
    for (; d + WIDE * LANES <= head_size; d += WIDE * LANES)
        add_values_tile(n, WIDE, form, head_size, query, b, records, num_records, d, p);
    for (; d < head_size; d += LANES) add_values_tile(n, 1, form, head_size, query, b, records, num_records, d, p);
}

#if defined(__AMX_BF16__)
enum { FEW_RECORDS = 4, MAX_GROUPS = MAX_HEAD / GROUP };

/* What a unit has in the order of tiles. */
typedef struct {
    _Alignas(64) char queries[MAX_BANDS][MAX_QUERIES * MAX_HEAD * 2]; /* [head size / 32][MAX_QUERIES][32] */
    float scales[MAX_BANDS][MAX_QUERIES][MAX_GROUPS], offsets[MAX_BANDS][MAX_QUERIES][MAX_GROUPS]; /* of INT8 queries */
    _Alignas(64) uint16_t values[KEYS * MAX_HEAD];                    /* widened, [KEYS / 2][head size][2] */
    _Alignas(64) int32_t dots[MAX_GROUPS][FEW_RECORDS][MAX_QUERIES][TOKENS];
} amx_room;

/* Tiles 0 to 3 are sums of a band, 4 its queries, 5 its weights, 6 keys and 7 values. Those of INT8 are of 32 bytes, and
 * its values of 32 keys, for they were widened side by side. What is missing in the last 32 numbers of a head is zero in
 * queries of INT8; of bfloat16 tiles 5 and 7 have the size that is left. */
static void amx_attention_begin(const unit *u, int form, int head_size, amx_room *room)
{
    const int most = u->bands[0].num_queries, num_groups = whole_groups(head_size);
    const int chunk_bytes = form == INT8 ? 32 : 64, size_bytes = head_size * chunk_bytes / 32;
    tile_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = tile == 4 ? chunk_bytes : tile == 5 ? 96 - chunk_bytes : 64;
        config.rows[tile] = tile == 6 ? chunk_bytes / 4 : tile == 7 ? 24 - chunk_bytes / 4 : most;
    }
    _tile_loadconfig(&config);
    for (int b = 0; b < u->num_bands; b++) {
        for (int i = 0; i < u->bands[b].num_queries; i++) {
            const char *query = u->bands[b].queries[i];
            for (int first = 0; first < size_bytes; first += chunk_bytes) {
                const int count = size_bytes - first < chunk_bytes ? size_bytes - first : chunk_bytes;
                char *to = room->queries[b] + first * MAX_QUERIES + i * chunk_bytes;
                if (count < chunk_bytes) memset(to, 0, chunk_bytes);
                for (int at = 0; at < count; at += 16) memcpy(to + at, query + first + at, 16);
            }
            if (form != INT8) continue;
            const float *scales = (const float *)(query + num_groups * GROUP);
            for (int group = 0; group < num_groups; group++) {
                room->scales[b][i][group] = scales[group];
                room->offsets[b][i][group] = 128.f * scales[num_groups + group];
            }
        }
    }
}

#define FOR_TILES(DO) DO(0) if (num_tiles > 1) DO(1) if (num_tiles > 2) DO(2) if (num_tiles > 3) DO(3)
#define ZERO(t) _tile_zero(t);
#define ADD_SCORES(t) { _tile_loadd(6, of[t] + chunk * 16 * 64, 64); _tile_dpbf16ps(t, 4, 6); }
#define ADD_LAST_SCORES(t) { _tile_loadd(7, of[t] + head_size / 32 * 16 * 64, 64); _tile_dpbf16ps(t, 5, 7); }
#define STORE_SCORES(t) _tile_stored(t, b->scores[0] + (first + t) * TOKENS, sizeof b->scores[0]);

static void amx_score_bfloat16(int head_size, const char *queries, const char *const *records, int num_records,
                               block_scores *b)
{
    for (int first = 0; first < num_records; first += 4) {
        const char *const *of = records + first;
        const int num_tiles = num_records - first; /* or 4 */
        FOR_TILES(ZERO)
        for (int chunk = 0; chunk < head_size / 32; chunk++) {
            _tile_loadd(4, queries + chunk * MAX_QUERIES * 64, 64);
            FOR_TILES(ADD_SCORES)
        }
        if (head_size % 32) {
            _tile_loadd(5, queries + head_size / 32 * MAX_QUERIES * 64, 64);
            FOR_TILES(ADD_LAST_SCORES)
        }
        FOR_TILES(STORE_SCORES)
    }
}

static void amx_score_int8(int head_size, int n, int band, const char *const *records, int num_records, amx_room *room,
                           block_scores *b)
{
    const int num_groups = whole_groups(head_size);
    for (int first = 0, count; first < num_records; first += count) {
        count = num_records - first < FEW_RECORDS ? num_records - first : FEW_RECORDS;
        for (int group = 0; group < num_groups; group++) {
            _tile_loadd(4, room->queries[band] + group * MAX_QUERIES * GROUP, GROUP);
            for (int r = 0; r < count; r++) {
                _tile_zero(0);
                _tile_loadd(6, records[first + r] + group * GROUP * TOKENS, 64);
                _tile_dpbsud(0, 4, 6);
                _tile_stored(0, room->dots[group][r], 64);
            }
        }
        for (int r = 0; r < count; r++) {
            const floats key_scales = load((const float *)(records[first + r] + TOKENS * head_size));
            for (int i = 0; i < n; i++) {
                floats sum = all(0.f);
                for (int group = 0; group < num_groups; group++) {
                    ints whole;
                    memcpy(&whole, room->dots[group][r][i], sizeof whole);
                    const floats dot = __builtin_convertvector(whole, floats) - room->offsets[band][i][group];
                    sum = fused(dot, all(room->scales[band][i][group]), sum);
                }
                store(b->scores[i] + (first + r) * TOKENS, sum * key_scales);
            }
        }
    }
}

/* Bring whole numbers of records into pairs of bfloat16, which hold them exactly; what is missing to 32 keys is zero. */
static void amx_widen_values(int head_size, const char *const *values, int num_records, amx_room *room)
{
    uint16_t *to = room->values;
    for (int r = 0; r < num_records; r++) {
        const int8_t *from = (const int8_t *)values[r];
        for (int pair = 0; pair < TOKENS / 2; pair++, from += 2 * head_size, to += 2 * head_size) {
            for (int d = 0; d < head_size; d += LANES) {
                words low = (words)widen_bytes(from + d), high = (words)widen_bytes(from + head_size + d);
                words both = low >> 16 | (high & 0xffff0000);
                memcpy(to + 2 * d, &both, sizeof both);
            }
        }
    }
    if (num_records % 2) memset(to, 0, TOKENS * head_size * sizeof *to);
}

#define ADD_PRODUCTS(t) { _tile_loadd(7, of + 2 * (d + 16 * t), values_stride); _tile_dpbf16ps(t, 5, 7); }
#define STORE_SUMS(t) _tile_stored(t, b->scores[0] + d + 16 * t, sizeof b->scores[0]);

/* Scores, which are weights by now, give their place to the sums of these keys. */
static void amx_add_values(int form, int head_size, int n, const char *const *values, int num_records,
                           const amx_room *room, block_scores *b, partial *p)
{
    const int records_at_once = form == INT8 ? 2 : 1;
    const int64_t values_stride = head_size * 4;
    if (num_records % records_at_once)
        for (int i = 0; i < n; i++) memset(b->narrow[i] + num_records * TOKENS, 0, TOKENS * sizeof *b->narrow[i]);
    for (int d = 0; d < head_size; d += 64) {
        const int num_tiles = (head_size - d) / 16; /* or 4 */
        FOR_TILES(ZERO)
        for (int r = 0; r < num_records; r += records_at_once) {
            const uint16_t *of = form == INT8 ? room->values + r * TOKENS * head_size : (const uint16_t *)values[r];
            _tile_loadd(5, b->narrow[0] + r * TOKENS, sizeof b->narrow[0]);
            FOR_TILES(ADD_PRODUCTS)
        }
        FOR_TILES(STORE_SUMS)
    }
    for (int i = 0; i < n; i++) {
        float *sums = p->values[i];
        for (int d = 0; d < head_size; d += LANES)
            store(sums + d, fused(load(sums + d), all(b->factors[i]), load(b->scores[i] + d)));
    }
}
#endif

#if defined(__AMX_BF16__)
#define FOR_EACH_FORM(X, n) X(FLOAT32, n)
#else
#define FOR_EACH_FORM(X, n) X(FLOAT32, n) X(BFLOAT16, n) X(INT8, n)
#endif
#if defined(__AVX512F__)
#define FOR_EACH_FEW(X) X(1) X(2) X(3) X(4)
#else
#define FOR_EACH_FEW(X) X(1) X(2) X(3)
#endif
#define DEFINE_ATTENTION(form, n)                                                                                     \
    static __attribute__((noinline)) void score_##form##_##n(int size, const void *const *q, const char *const *k,    \
                                                             int num_records, float scores[][KEYS])                   \
    { score(n, form, size, q, k, num_records, scores); }                                                              \
    static __attribute__((noinline)) void add_values_##form##_##n(int size, int query, const block_scores *b,         \
                                                                  const char *const *v, int num_records, partial *p)  \
    { add_values(n, form, size, query, b, v, num_records, p); }
#define DEFINE_FEW(n) FOR_EACH_FORM(DEFINE_ATTENTION, n)
#define FEW_CASE(form, n) ((form) * (FEW_QUERIES + 1) + ((n) < FEW_QUERIES ? (n) : FEW_QUERIES))
#define SCORE_CASE(form, n)                                                                                           \
    case FEW_CASE(form, n): score_##form##_##n(size, q->queries + i, records, num_records, b.scores + i); break;
#define VALUES_CASE(form, n)                                                                                          \
    case FEW_CASE(form, n): add_values_##form##_##n(size, i, &b, values, num_records, &p[of]); break;
#define SCORE_CASES(n) FOR_EACH_FORM(SCORE_CASE, n)
#define VALUES_CASES(n) FOR_EACH_FORM(VALUES_CASE, n)
FOR_EACH_FEW(DEFINE_FEW)
INLINE int32_t clamp(int64_t count) { return count < 0 ? 0 : count < KEYS ? (int32_t)count : KEYS; }

/* Which of KEYS keys a query sees: [from, until). */
typedef struct { int32_t from, until; } sight;

INLINE sight sight_of(const band *q, int i, int64_t position)
{
    return (sight){clamp(q->from[i] - position), clamp(q->until[i] - position)};
}

INLINE int sees_keys(sight s, int num_keys) { return s.from == 0 && s.until >= num_keys; }

/* `v`, of the keys from `first` on, where the query sees them. */
INLINE floats seen_or(const int sees_all, sight s, int first, floats v, floats other)
{
    ints key;
    if (sees_all) return v;
    UNROLL for (int lane = 0; lane < LANES; lane++) key[lane] = lane;
    key += first;
    return choose((key >= s.from) & (key < s.until), v, other);
}

/* The largest of what `vectors` hold for keys that are seen: a vector of TOKENS, or less, each. */
#define LARGEST_SEEN(vector, least)                                                                                    \
    floats most = all(least);                                                                                          \
    for (int k = 0; k < num_keys; k += LANES) most = larger(most, seen_or(sees_all, s, k, vector, all(least)));          \
    return largest_of(most);

INLINE float largest_score(const int sees_all, sight s, int num_keys, const float *scores)
{
    LARGEST_SEEN(load(scores + k), -INFINITY)
}

INLINE float largest_scale(const int sees_all, sight s, int num_keys, const float *const *value_scales)
{
    LARGEST_SEEN(load(value_scales[k / TOKENS] + k % TOKENS), 0.f)
}

/* How weights of keys are written: as float32; as bfloat16, and as exact as that asks for; or as whole numbers, see
 * block_scores, relative to the largest score of the block. */
enum { EXACT, NARROW, WHOLE };

/* Turn the scores of query i into weights relative to `largest`, zero where it sees no key, and return `sum` with them
 * added. `value_scales` are multiplied into those that are written, if there are any, and `factor` into whole ones. */
INLINE floats weigh_keys(const int sees_all, const int kind, sight s, int num_keys, int i, float scale, float largest,
                         const float *const *value_scales, float factor, block_scores *b, floats sum)
{
    const float log2_e = 1.44269504f, unit = kind == EXACT ? 1.f : log2_e;
    const floats slope = all(scale * unit), offset = all(-largest * unit);
    float *scores = b->scores[i];
    words total = {};
    for (int k = 0; k < num_keys; k += LANES) {
        const floats below = fused(load(scores + k), slope, offset);
        /* rounded, the largest score may lie above itself, and a whole weight has no room for more than one */
        const floats at_most = kind == WHOLE ? smaller(all(0.f), below) : below;
        floats weight = kind == EXACT ? exponential_within(larger(all(-87.f), below)) : power_of_two(larger(all(-126.f), at_most));
        weight = seen_or(sees_all, s, k, weight, all(0.f)); /* none where the score is none */
        sum += weight;
        if (kind == EXACT) store(scores + k, weight);
        if (kind == EXACT) continue;
        if (value_scales) /* once more, for that of a key which is not seen may be anything */
            weight = seen_or(sees_all, s, k, weight * load(value_scales[k / TOKENS] + k % TOKENS), all(0.f));
        if (kind == NARROW) {
            narrow_to(b->narrow[i] + k, weight);
            continue;
        }
        const words whole = (words)__builtin_convertvector(rounded(weight * factor), ints) & WHOLE_MOST; /* no number: zero */
        const bytes high = bytes_of_ints((ints)(whole >> WHOLE_BITS)), low = bytes_of_ints((ints)(whole & ((1 << WHOLE_BITS) - 1)));
        memcpy(b->high[i] + k, &high, sizeof high);
        memcpy(b->low[i] + k, &low, sizeof low);
        total += whole;
    }
    if (kind == WHOLE) b->totals[i] = (int32_t)sum_of(__builtin_convertvector((ints)total, floats)); /* below 2^24: exact */
    return sum;
}

/* Turn the scores of a band and the keys from `position` on into weights relative to each query's largest score so far. */
INLINE void weigh(const int kind, const attend_operation *op, const band *q, int64_t position, int num_keys,
                  const float *const *value_scales, block_scores *b, partial *p)
{
    const float scale = op->cap != 0.f ? 1.f : op->scale;
    float largest[QUERY_LANES], further[QUERY_LANES];
    for (int i = 0; i < q->num_queries; i++) {
        const sight s = sight_of(q, i, position);
        float *scores = b->scores[i];
        for (int k = 0; op->cap != 0.f && k < num_keys; k += LANES)
            store(scores + k, hyperbolic_tangent(load(scores + k) * op->scale / op->cap) * op->cap);
        largest[i] = sees_keys(s, num_keys) ? largest_score(1, s, num_keys, scores) : largest_score(0, s, num_keys, scores);
    }
    for (int i = 0; i < q->num_queries; i += LANES) {
        const floats here = load(largest + i) * scale, before = load(p->largest + i), now = choose(before > here, before, here);
        store(p->largest + i, now);
        store(b->factors + i, exponential(before - now));
        if (kind != WHOLE) continue;
        store(largest + i, here);
        store(further + i, exponential(here - now));
    }
    const sight whole_block = {0, num_keys};
    const float most_of_all = kind == WHOLE ? largest_scale(1, whole_block, num_keys, value_scales) : 0.f;
    for (int i = 0; i < q->num_queries; i++) {
        const sight s = sight_of(q, i, position);
        const int sees_all = sees_keys(s, num_keys);
        const floats sum = p->sums[i] * b->factors[i];
        float relative_to = p->largest[i], factor = 1.f;
        if (kind == WHOLE) {
            const float most = sees_all ? most_of_all : largest_scale(0, s, num_keys, value_scales);
            factor = most > SMALLEST ? WHOLE_MOST / most : 0.f;
            b->units[i] = most / WHOLE_MOST * further[i];
            relative_to = largest[i];
        }
        const floats begin = kind == WHOLE ? all(0.f) : sum;
#define WEIGH(sees_all) weigh_keys(sees_all, kind, s, num_keys, i, scale, relative_to, value_scales, factor, b, begin)
        const floats added = sees_all ? WEIGH(1) : WEIGH(0);
#undef WEIGH
        p->sums[i] = kind == WHOLE ? fused(added, all(further[i]), sum) : added;
    }
}

#define DEFINE_WEIGH(kind)                                                                                             \
    static __attribute__((noinline, unused)) void weigh_##kind(const attend_operation *op, const band *q, int64_t position, \
                                                               int num_keys, const float *const *value_scales,         \
                                                               block_scores *b, partial *p)                            \
    { weigh(kind, op, q, position, num_keys, value_scales, b, p); }
DEFINE_WEIGH(EXACT)
DEFINE_WEIGH(NARROW)
#if !defined(__AMX_BF16__)
DEFINE_WEIGH(WHOLE)
#endif

/* Copy a record's values without the tokens from `count` on, which may hold anything. */
INLINE const char *without_tail(int form, int head_size, const char *values, int count, char *room)
{
    if (form == INT8) return values; /* whole numbers are harmless, and their weights are zero */
    memset(room, 0, keys_bytes(form, head_size));
    if (form == FLOAT32) {
        memcpy(room, values, (int64_t)count * head_size * sizeof(float));
        return room;
    }
    const int64_t pair_bytes = (int64_t)head_size * 4;
    memcpy(room, values, count / 2 * pair_bytes);
    if (count % 2 == 0) return room;
    for (int64_t at = count / 2 * pair_bytes; at < (count / 2 + 1) * pair_bytes; at += sizeof(words)) {
        words first = load_words(values + at) & 0xffff;
        memcpy(room + at, &first, sizeof first);
    }
    return room;
}

#if defined(__AMX_BF16__)
enum { FETCH_TO = 3 }; /* the first cache */
#else
enum { FETCH_TO = 2 }; /* the second: the first has too few places for lines that are on their way */
#endif

/* Have the records of the KEYS keys from `position` on brought near. */
INLINE void fetch_ahead(const attend_operation *op, const unit *u, int64_t position)
{
    const int64_t size = record_bytes(op->form, op->head_size);
    for (int64_t at = position; at < position + KEYS && at < u->last; at += TOKENS) {
        const char *record = record_at(op->form, op->head_size, op->places, u->block_table, at, u->kv_head);
        for (int64_t byte = 0; byte < size; byte += 64) __builtin_prefetch(record + byte, 0, FETCH_TO);
    }
}

/* Attend to the keys in [begin, end), which begin at a multiple of KEYS, from nothing; `p` is of each band. */
static void attend_keys(const attend_operation *op, const unit *u, int64_t begin, int64_t end, partial *p)
{
    const int form = op->form, size = op->head_size;
    const int64_t values_at = keys_bytes(form, size) + (form == INT8 ? SCALES_BYTES : 0);
    _Alignas(64) char tail[TOKENS * MAX_HEAD * sizeof(float)];
    block_scores b;
#if defined(__AMX_BF16__)
    amx_room room;
    const int tiled = form != FLOAT32;
    if (tiled) amx_attention_begin(u, form, size, &room);
#endif
    for (int of = 0; of < u->num_bands; of++) {
        for (int i = 0; i < u->bands[of].num_queries; i++) {
            p[of].largest[i] = -INFINITY;
            p[of].sums[i] = all(0.f);
            memset(p[of].values[i], 0, size * sizeof(float));
        }
    }
    for (int64_t position = begin; position < end; position += KEYS) {
        const int64_t num_keys = u->last - position;
        const int num_records = num_keys < KEYS ? (int)(num_keys + TOKENS - 1) / TOKENS : RECORDS;
        const char *records[RECORDS], *values[RECORDS];
        const float *value_scales[RECORDS];
        for (int r = 0; r < num_records; r++) {
            int64_t at = position + r * TOKENS, count = u->last - at;
            records[r] = record_at(form, size, op->places, u->block_table, at, u->kv_head);
            values[r] = records[r] + values_at;
            value_scales[r] = (const float *)values[r] - TOKENS;
            if (count < TOKENS) values[r] = without_tail(form, size, values[r], (int)count, tail);
        }
        fetch_ahead(op, u, position + KEYS);
#if defined(__AMX_BF16__)
        if (tiled && form == INT8) amx_widen_values(size, values, num_records, &room);
#endif
        for (int of = 0; of < u->num_bands; of++) {
            const band *q = &u->bands[of];
            const int n = q->num_queries, num_keys_here = num_records * TOKENS;
            if (q->last <= position || q->first >= position + KEYS) continue;
#if defined(__AMX_BF16__)
            if (tiled && form == INT8) amx_score_int8(size, n, of, records, num_records, &room, &b);
            else if (tiled) amx_score_bfloat16(size, room.queries[of], records, num_records, &b);
            else
#endif
            for (int i = 0; i < n; i += FEW_QUERIES) switch (FEW_CASE(form, n - i)) { FOR_EACH_FEW(SCORE_CASES) }
            if (form == FLOAT32) weigh_EXACT(op, q, position, num_keys_here, NULL, &b, &p[of]);
#if defined(__AMX_BF16__)
            else weigh_NARROW(op, q, position, num_keys_here, form == INT8 ? value_scales : NULL, &b, &p[of]);
            if (tiled) amx_add_values(form, size, n, values, num_records, &room, &b, &p[of]);
            else
#else
            else if (form == BFLOAT16) weigh_NARROW(op, q, position, num_keys_here, NULL, &b, &p[of]);
            else weigh_WHOLE(op, q, position, num_keys_here, value_scales, &b, &p[of]);
#endif
            for (int i = 0; i < n; i += FEW_QUERIES) switch (FEW_CASE(form, n - i)) { FOR_EACH_FEW(VALUES_CASES) }
        }
    }
}

/* Bring query i of both to one largest score and add `further` to `all_keys`. */
INLINE void fold(partial *all_keys, const partial *further, int i, int head_size)
{
    float a = all_keys->largest[i], b = further->largest[i], largest = a > b ? a : b;
    floats of_a = exponential(all(a - largest)), of_b = exponential(all(b - largest));
    all_keys->largest[i] = largest;
    all_keys->sums[i] = all_keys->sums[i] * of_a + further->sums[i] * of_b;
    for (int d = 0; d < head_size; d += LANES)
        store(all_keys->values[i] + d, load(all_keys->values[i] + d) * of_a + load(further->values[i] + d) * of_b);
}

/* Divide what was summed over all keys. */
static void finish_unit(const attend_operation *op, const unit *u, const partial *all_keys)
{
    for (int of = 0; of < u->num_bands; of++, all_keys++) {
        const band *q = &u->bands[of];
        for (int i = 0; i < q->num_queries; i++) {
            float sum = sum_of(all_keys->sums[i]), factor = 1.f;
            if (op->sinks) {
                float sink = op->sinks[q->head[i]], largest = all_keys->largest[i] > sink ? all_keys->largest[i] : sink;
                factor = exponential(all(all_keys->largest[i] - largest))[0];
                sum = sum * factor + exponential(all(sink - largest))[0];
            }
            for (int d = 0; d < op->head_size; d += LANES)
                store_as(op->out_form == BFLOAT16, op->out, q->out[i] + d, load(all_keys->values[i] + d) * (factor / sum));
        }
    }
}

/* Attend to those keys of the split-th 512 positions that any query sees. */
INLINE void attend_split(const attend_operation *op, const unit *u, int64_t split, partial *p)
{
    int64_t begin = split * SPLIT, end = begin + SPLIT;
    attend_keys(op, u, begin < u->first ? u->first / KEYS * KEYS : begin, end < u->last ? end : u->last, p);
}

INLINE void fold_unit(const unit *u, partial *all_keys, const partial *further, int head_size)
{
    for (int of = 0; of < u->num_bands; of++)
        for (int i = 0; i < u->bands[of].num_queries; i++) fold(&all_keys[of], &further[of], i, head_size);
}

static void attend_unit(const attend_operation *op, const unit *u)
{
    partial all_keys[MAX_BANDS], further[MAX_BANDS];
    attend_split(op, u, u->first / SPLIT, all_keys);
    for (int64_t split = u->first / SPLIT + 1; split * SPLIT < u->last; split++) {
        attend_split(op, u, split, further);
        fold_unit(u, all_keys, further, op->head_size);
    }
    finish_unit(op, u, all_keys);
}

/* A unit of one band whose splits several threads compute: each folds its own in when all before it have been. */
typedef struct {
    counter num_folded;
    partial all_keys;
} shared_unit;

static void attend_shared(const attend_operation *op, const unit *u, int64_t split, shared_unit *shared, int64_t spin_ns)
{
    partial own;
    const int64_t turn = split - u->first / SPLIT;
    attend_split(op, u, split, &own);
    counter_wait(&shared->num_folded, (int)turn, spin_ns);
    if (turn) {
        fold_unit(u, &shared->all_keys, &own, op->head_size);
    } else {
        for (int i = 0; i < u->bands[0].num_queries; i++) {
            shared->all_keys.largest[i] = own.largest[i];
            shared->all_keys.sums[i] = own.sums[i];
            memcpy(shared->all_keys.values[i], own.values[i], op->head_size * sizeof(float));
        }
    }
    if ((split + 1) * SPLIT < u->last) {
        counter_add(&shared->num_folded, 1, (int)turn + 1);
    } else {
        finish_unit(op, u, &shared->all_keys);
        atomic_store(&shared->num_folded.value, 0); /* for the next operation; nobody waits any more */
    }
}

enum { UNITS_A_THREAD = 4 }; /* with fewer, threads share units */

INLINE int most_shared(const team *t) { return t->num_threads > 1 ? UNITS_A_THREAD * t->num_threads : 0; }

/* Fill `u` with the queries of rows [row, end) and heads [first, end_head) that share a K/V head, some rows a band. */
static void take_unit(const attend_operation *op, const step *s, int64_t row, int64_t end, int rows_a_band, int kv_head,
                      int first, int end_head, unit *u)
{
    u->num_bands = 0;
    u->kv_head = kv_head;
    u->block_table = block_table_of(s, op->group, row);
    u->first = INT64_MAX;
    for (int64_t r = row, end_row; r < end; r = end_row) {
        band *q = &u->bands[u->num_bands++];
        q->num_queries = 0;
        q->first = INT64_MAX;
        for (end_row = r; end_row < end && end_row - r < rows_a_band; end_row++) {
            const int64_t until = s->positions[end_row] + 1, from = op->window && until > op->window ? until - op->window : 0;
            for (int h = first; h < end_head; h++) {
                const int i = q->num_queries++;
                const int64_t at = end_row * op->num_heads + h;
                q->head[i] = h;
                q->queries[i] = (const char *)op->queries + at * query_bytes(op->form, op->head_size);
                q->out[i] = end_row * op->out_stride + h * op->head_size;
                q->from[i] = from;
                q->until[i] = until;
            }
            q->first = from < q->first ? from : q->first;
            q->last = until;
        }
        u->first = q->first < u->first ? q->first : u->first;
        u->last = q->last;
    }
}

INLINE int most_queries(const attend_operation *op)
{
#if defined(__AMX_BF16__)
    if (op->form != FLOAT32) return MAX_QUERIES;
#endif
    (void)op;
    return TILE_ROWS;
}

enum { BANDS_A_THREAD = 32 }; /* with fewer, units are of less than MAX_BANDS */

/* Units are (rows of one request) x (heads of one K/V head), tasks units or splits of them. Returns the number of tasks,
 * and in `num_done` how many were done here. */
static int attend(const attend_operation *op, const step *s, const team *team, tasks *t, shared_unit *shared, int *num_done)
{
    const int heads_a_group = op->num_heads / op->num_kv_heads, most = most_queries(op);
    const int heads_a_unit = heads_a_group < most ? heads_a_group : most, rows_a_band = most / heads_a_unit;
    const int units_a_head = (heads_a_group + heads_a_unit - 1) / heads_a_unit;
    const int64_t units_a_row = (int64_t)op->num_kv_heads * units_a_head;
    const int are_shared = s->num_rows * units_a_row <= most_shared(team);
    const int64_t num_bands = s->num_rows * units_a_row / rows_a_band / (BANDS_A_THREAD / MAX_BANDS * team->num_threads);
    const int64_t rows_a_unit = rows_a_band * (are_shared || num_bands < 1 ? 1 : num_bands < MAX_BANDS ? num_bands : MAX_BANDS);
    int mine = take_task(t, INT_MAX), task = 0, number = 0;
    unit units[2], *u = &units[0], *before = NULL; /* the one before is computed once this one's keys are on their way */
    for (int64_t row = 0, end; row < s->num_rows; row = end) {
        for (end = row + 1; end < s->num_rows && end - row < rows_a_unit && s->requests[end] == s->requests[row]; end++);
        for (int kv_head = 0; kv_head < op->num_kv_heads; kv_head++) {
            for (int part = 0; part < units_a_head; part++, number++) {
                int first = kv_head * heads_a_group + part * heads_a_unit, end_head = first + heads_a_unit;
                if (end_head > (kv_head + 1) * heads_a_group) end_head = (kv_head + 1) * heads_a_group;
                if (!are_shared) {
                    if (task++ != mine) continue;
                    take_unit(op, s, row, end, rows_a_band, kv_head, first, end_head, u);
                    fetch_ahead(op, u, u->first / KEYS * KEYS);
                    if (before) attend_unit(op, before);
                    before = u;
                    u = &units[u == units];
                    ++*num_done;
                    mine = take_task(t, INT_MAX);
                    continue;
                }
                take_unit(op, s, row, end, rows_a_band, kv_head, first, end_head, u);
                for (int64_t split = u->first / SPLIT; split * SPLIT < u->last; split++) {
                    if (task++ != mine) continue;
                    attend_shared(op, u, split, &shared[number], team->spin_ns);
                    ++*num_done;
                    mine = take_task(t, INT_MAX);
                }
            }
        }
    }
    if (before) attend_unit(op, before);
    return task;
}
