/* Operations on one row at a time. */
#pragma once
#include "operations.h"
#include "simd.h"

INLINE floats normalized(const norm_operation *op, const float *in, int i, floats factor)
{
    floats v = load(in + i);
    return op->weight ? v * factor * load(op->weight + i) : v;
}

/* Bring one row into whole numbers times a scale for each group; see linear_operation. */
INLINE void quantize(const int form, const norm_operation *op, int64_t row, const float *in, floats factor)
{
    const int group = form == INT8 ? WIDE_GROUP : GROUP;
    quantized_row out = quantized(form, op->out, row, op->out_stride);
    float total = 0.f, sum;
    for (int first = 0; first < op->out_stride; first += group, out.bytes += BAND * group, out.scales += BAND) {
        floats v[WIDE_GROUP / LANES];
        for (int part = 0; part < group / LANES; part++) {
            int i = first + part * LANES;
            v[part] = i < op->size ? normalized(op, in, i, factor) : all(0.f);
        }
        quantize_group(v, group / LANES, out.bytes, out.scales, &sum);
        total += sum * *out.scales;
        if (form == INT4) out.sums[first / GROUP * BAND] = sum * *out.scales;
    }
    if (form == INT8) *out.sums = total;
}

static void norm(const norm_operation *op, int64_t row)
{
    for (int part = 0; part < op->num_parts; part++) {
        const float *in = op->in + row * op->in_stride + (int64_t)part * op->size;
        int64_t first = row * op->out_stride + (int64_t)part * op->size;
        floats factor = all(1.f);
        if (op->weight) {
            floats squares = all(0.f);
            for (int i = 0; i < op->size; i += LANES) squares = fused(load(in + i), load(in + i), squares);
            factor = all(1.f / sqrtf(sum_of(squares) / (float)op->size + op->epsilon));
        }
        if (op->form >= INT8) {
            if (op->form == INT8) quantize(INT8, op, row, in, factor);
            else quantize(INT4, op, row, in, factor);
            continue;
        }
        for (int i = 0; i < op->size; i += LANES) {
            floats v = normalized(op, in, i, factor);
            float *out = (float *)op->out + first + i;
            if (op->adds) store(out, fused(v, all(op->multiplier), load(out)));
            else if (op->form == FLOAT32) store(out, v);
            else narrow_to((uint16_t *)op->out + first + i, v);
        }
    }
}

static void cap(const cap_operation *op, int64_t row)
{
    float *rows = op->rows + row * op->size;
    float tail[LANES];
    for (int i = 0; i < op->size; i += LANES) {
        int count = op->size - i < LANES ? op->size - i : LANES;
        memset(tail, 0, sizeof tail);
        memcpy(tail, rows + i, count * sizeof(float));
        floats v = load(tail) / op->divisor;
        if (op->cap != 0.f) v = hyperbolic_tangent(v / op->cap) * op->cap;
        store(tail, v);
        memcpy(rows + i, tail, count * sizeof(float));
    }
}

static void greatest(const greatest_operation *op, int64_t row)
{
    const float *in = op->rows + row * op->size;
    const int whole = op->size / LANES * LANES;
    floats most = all(-INFINITY);
    ints is_none = {}, place, most_places;
    for (int lane = 0; lane < LANES; lane++) place[lane] = lane;
    most_places = place;
    for (int i = 0; i < whole; i += LANES, place += LANES) {
        floats v = load(in + i);
        ints is_more = v > most;
        is_none |= v != v;
        most = choose(is_more, v, most);
        most_places = (is_more & place) | (~is_more & most_places);
    }
    float value = most[0];
    int32_t at = most_places[0], some_none = 0;
    for (int lane = 0; lane < LANES; lane++) {
        if (most[lane] > value || (most[lane] == value && most_places[lane] < at)) {
            value = most[lane];
            at = most_places[lane];
        }
        some_none |= is_none[lane];
    }
    for (int i = whole; i < op->size; i++) {
        some_none |= in[i] != in[i];
        if (in[i] > value) {
            value = in[i];
            at = i;
        }
    }
    op->values[row] = some_none ? NAN : value;
    op->places[row] = at;
}
