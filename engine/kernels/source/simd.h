/* Vectors as wide as the target's registers, in GCC's and Clang's own vector types, for AVX-512, AVX2, SSE2 or NEON.
 * Only what the types cannot say, and the target has an instruction for, is spelled out.
 *
 * Sums over lanes are added in one fixed order, and a product is fused into a sum where `fused` says so and nowhere else
 * (-ffp-contract=off): so bits do not depend on how rows are grouped, nor on how a compiler sees the code around.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

/* GCC converts vectors of small numbers one number at a time. */
INLINE ints ints_of_bytes(bytes v)
{
#if defined(__AVX512F__)
    return (ints)_mm512_cvtepi8_epi32((__m128i)v);
#elif defined(__AVX2__)
    __m128i low = {};
    memcpy(&low, &v, sizeof v);
    return (ints)_mm256_cvtepi8_epi32(low);
#else
    return __builtin_convertvector(v, ints);
#endif
}

INLINE bytes bytes_of_ints(ints v)
{
#if defined(__AVX512F__)
    return (bytes)_mm512_cvtepi32_epi8((__m512i)v);
#else
    return __builtin_convertvector(v, bytes);
#endif
}

INLINE words words_of_halves(halves v)
{
#if defined(__AVX512F__)
    return (words)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
    return (words)_mm256_cvtepu16_epi32((__m128i)v);
#else
    return __builtin_convertvector(v, words);
#endif
}

INLINE floats load(const float *from) { floats v; memcpy(&v, from, sizeof v); return v; }
INLINE void store(float *to, floats v) { memcpy(to, &v, sizeof v); }
INLINE words load_words(const void *from) { words v; memcpy(&v, from, sizeof v); return v; }
INLINE floats all(float x) { return x - (floats){}; } /* adding zero would change -0, and cost an addition */
INLINE floats choose(ints mask, floats yes, floats no) { return (floats)((mask & (ints)yes) | (~mask & (ints)no)); }

/* The larger one, or the smaller; `b` where one of them is no number. */
INLINE floats larger(floats a, floats b)
{
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE floats smaller(floats a, floats b)
{
#if defined(__AVX512F__)
    return (floats)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return choose(a < b, a, b);
#endif
}

/* a * b + c, rounded once where the target can. */
INLINE floats fused(floats a, floats b, floats c)
{
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* Lane i of the result is lane i + width, for those below width: 8, 4, 2 or 1. */
INLINE floats upper(floats v, const int width)
{
#if defined(__AVX512F__)
    __m512 of = (__m512)v;
    return (floats)(width == 8   ? _mm512_shuffle_f32x4(of, of, 0x4e)
                    : width == 4 ? _mm512_shuffle_f32x4(of, of, 0xb1)
                    : width == 2 ? _mm512_permute_ps(of, 0x4e)
                                 : _mm512_permute_ps(of, 0xb1));
#else
    floats moved = v;
    for (int i = 0; i < width; i++) moved[i] = v[i + width];
    return moved;
#endif
}

INLINE float sum_of(floats v)
{
    UNROLL for (int width = LANES / 2; width; width /= 2) v += upper(v, width);
    return v[0];
}

INLINE float largest_of(floats v)
{
    UNROLL for (int width = LANES / 2; width; width /= 2) v = larger(v, upper(v, width));
    return v[0];
}

/* e to an x between -87 and 88, relative error 2e-7; none where x is none. */
INLINE floats exponential_within(floats x)
{
    const floats shift = all(12582912.f); /* 1.5 * 2^23: adding it rounds to a whole number */
    floats whole = fused(x, all(1.44269504f), shift) - shift;
    floats rest = fused(whole, all(-0.693359375f), x);
    rest = fused(whole, all(2.12194440e-4f), rest);
    floats p = all(1.9875691500e-4f);
    p = fused(p, rest, all(1.3981999507e-3f));
    p = fused(p, rest, all(8.3334519073e-3f));
    p = fused(p, rest, all(4.1665795894e-2f));
    p = fused(p, rest, all(1.6666665459e-1f));
    p = fused(p, rest, all(5.0000001201e-1f));
    p = fused(p, rest * rest, rest + 1.f);
#if defined(__AVX512F__)
    return (floats)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    ints power = __builtin_convertvector(whole, ints);
    return p * (floats)((power + 127) << 23);
#endif
}

/* 2 to an x of at least -126, relative error 1.1e-4; none where x is none. */
INLINE floats power_of_two(floats x)
{
#if defined(__AVX512DQ__)
    const floats rest = (floats)_mm512_reduce_ps((__m512)x, 1); /* less the whole number below */
#else
    const floats shift = all(12582912.f), whole = x - all(0.5f) + shift - shift, rest = x - whole;
#endif
    floats p = fused(all(0.07826797f), rest, all(0.22630768f));
    p = fused(p, rest, all(0.69542435f));
    p = fused(p, rest, all(1.f));
#if defined(__AVX512DQ__)
    return (floats)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return p * (floats)((__builtin_convertvector(whole, ints) + 127) << 23);
#endif
}

/* e to the x, which is held between -87 and 88; what is no number counts as -87. */
INLINE floats exponential(floats x) { return exponential_within(smaller(larger(x, all(-87.f)), all(88.f))); }

INLINE floats sigmoid(floats x) { return 1.f / (1.f + exponential(-x)); }

/* The same with a relative error of 2e-4. */
INLINE floats rough_sigmoid(floats x)
{
    const floats below = 1.f + power_of_two(smaller(all(126.f), larger(all(-126.f), x * -1.44269504f)));
#if defined(__AVX512F__)
    return (floats)_mm512_rcp14_ps((__m512)below);
#else
    return 1.f / below;
#endif
}


INLINE floats hyperbolic_tangent(floats x)
{
    const floats square = x * x, found = 1.f - 2.f / (exponential(x * 2.f) + 1.f);
    floats small = fused(all(-17.f / 315.f), square, all(2.f / 15.f)); /* where a difference from 1 has few digits left */
    small = fused(fused(small, square, all(-1.f / 3.f)), square * x, x);
    return choose((ints)(square < 0.0625f), small, choose((ints)(x == x), found, x)); /* what is no number stays none */
}

/* -- bfloat16 ------------------------------------------------------------------------------------------------------ */

INLINE floats widen(const uint16_t *from)
{
    halves narrow;
    memcpy(&narrow, from, sizeof narrow);
    return (floats)(words_of_halves(narrow) << 16);
}

INLINE void narrow_to(uint16_t *to, floats v)
{
#if defined(__AVX512BF16__)
    __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
#else
    words bits = (words)v;
    words rounded = bits + 0x7fff + ((bits >> 16) & 1);
    words no_number = (words)(v != v);
    halves narrow = __builtin_convertvector(((no_number & (bits | 0x400000)) | (~no_number & rounded)) >> 16, halves);
#endif
    memcpy(to, &narrow, sizeof narrow);
}

/* Write numbers as float32, or as bfloat16. */
INLINE void store_as(const int is_narrow, void *out, int64_t at, floats v)
{
    if (is_narrow) narrow_to((uint16_t *)out + at, v);
    else store((float *)out + at, v);
}

INLINE float as_float(uint32_t bits) { float x; memcpy(&x, &bits, sizeof x); return x; }
INLINE uint32_t load_word(const void *from) { uint32_t x; memcpy(&x, from, sizeof x); return x; }

/* sum + a.low * b.low + a.high * b.high, for pairs of bfloat16: one a lane, and one that all lanes share. */
INLINE floats dot_pairs(floats sum, words a, uint32_t b)
{
#if defined(__AVX512BF16__)
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)_mm512_set1_epi32((int)b));
#else
    sum = fused((floats)(a << 16), all(as_float(b << 16)), sum);
    return fused((floats)(a & 0xffff0000), all(as_float(b & 0xffff0000)), sum);
#endif
}

/* -- float16 ------------------------------------------------------------------------------------------------------- */

INLINE floats widen_float16(const uint16_t *from)
{
    halves narrow;
    memcpy(&narrow, from, sizeof narrow);
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps((__m256i)narrow);
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps((__m128i)narrow);
#else
    words bits = words_of_halves(narrow); /* finite numbers alone */
    floats size = (floats)((bits & 0x7fff) << 13) * 0x1p112f;
    return (floats)((words)size | (bits & 0x8000) << 16);
#endif
}

/* -- int8 ---------------------------------------------------------------------------------------------------------- */

INLINE floats rounded(floats x)
{
    const floats shift = all(12582912.f); /* see exponential */
    return x + shift - shift;
}

#define SMALLEST 1e-30f /* below it numbers count as zero, for 127 divided by one of them might be infinite */

/* Bring numbers into whole ones of -127 to 127 times a scale; the sum of the whole ones is no number if one of them was
 * none or was infinite. */
INLINE void quantize_group(const floats *v, int num_vectors, int8_t *out, float *scale, float *sum)
{
    floats largest = all(0.f), total = all(0.f);
    UNROLL for (int i = 0; i < num_vectors; i++) largest = larger(larger(v[i], -v[i]), largest);
    float most = largest_of(largest);
    floats inverse = all(most > SMALLEST ? 127.f / most : 0.f);
    UNROLL for (int i = 0; i < num_vectors; i++) {
        floats whole = rounded(v[i] * inverse);
        bytes narrow = bytes_of_ints(__builtin_convertvector(whole, ints));
        memcpy(out + i * LANES, &narrow, sizeof narrow);
        total += whole;
    }
    *scale = most / 127.f;
    *sum = sum_of(total);
}

INLINE floats widen_bytes(const int8_t *from)
{
    bytes narrow;
    memcpy(&narrow, from, sizeof narrow);
    return __builtin_convertvector(ints_of_bytes(narrow), floats);
}

/* sum + a . b, for four unsigned bytes a lane and four signed ones that all lanes share; exact. */
INLINE ints dot_bytes(ints sum, words a, uint32_t b)
{
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, _mm512_set1_epi32((int)b));
#elif defined(__SSE2__)
    uint32_t even = (uint16_t)(int8_t)b | (uint32_t)(int8_t)(b >> 16) << 16;
    uint32_t odd = (uint16_t)(int8_t)(b >> 8) | (uint32_t)(int8_t)(b >> 24) << 16;
    words even_bytes = a & 0x00ff00ff, odd_bytes = a >> 8 & 0x00ff00ff;
#if defined(__AVX2__)
    sum += (ints)_mm256_madd_epi16((__m256i)even_bytes, _mm256_set1_epi32((int)even));
    return sum + (ints)_mm256_madd_epi16((__m256i)odd_bytes, _mm256_set1_epi32((int)odd));
#else
    sum += (ints)_mm_madd_epi16((__m128i)even_bytes, _mm_set1_epi32((int)even));
    return sum + (ints)_mm_madd_epi16((__m128i)odd_bytes, _mm_set1_epi32((int)odd));
#endif
#else
    for (int shift = 0; shift < 32; shift += 8) sum += (ints)(a >> shift & 255) * (int8_t)(b >> shift);
    return sum;
#endif
}
