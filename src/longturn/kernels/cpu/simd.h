// Sixteen-lane vectors of float and int32 on three targets: AVX-512 (with VNNI), AVX2 (with FMA, F16C) and plain C++.
//
// Every operation rounds the same way on every target that has fused multiply-add, so that a kernel written with
// these types gives the same bits on all of them. Horizontal sums use one fixed tree. Define LONGTURN_GENERIC to
// force the plain path.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if !defined(LONGTURN_GENERIC) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define LT_AVX512 1
#elif !defined(LONGTURN_GENERIC) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LT_AVX2 1
#else
#define LT_PLAIN 1
#endif

#if defined(LT_AVX512) || defined(LT_AVX2)
#include <immintrin.h>
#endif

// Short loops over template constants are unrolled so that their arrays live in registers.
#define LT_UNROLL _Pragma("GCC unroll 16")
#define LT_INLINE __attribute__((always_inline)) inline

namespace lt {

constexpr int LANES = 16;

#if defined(LT_AVX512)

struct f32x16 {
    __m512 v;
};
struct i32x16 {
    __m512i v;
};

inline f32x16 zero() { return {_mm512_setzero_ps()}; }
inline f32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
inline f32x16 load(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store(uint16_t* p, f32x16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
inline f32x16 round_even(f32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline i32x16 to_int(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline i32x16 operator+(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline i32x16 operator-(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline i32x16 shift_left_4(i32x16 a) { return {_mm512_slli_epi32(a.v, 4)}; }
inline i32x16 shift_right_4(i32x16 a) { return {_mm512_srai_epi32(a.v, 4)}; }
inline i32x16 splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
/// a * 2^n for whole n, by adding n to the exponent field; the caller keeps the result normal.
inline f32x16 scale_exponent(f32x16 a, f32x16 n) {
    const __m512i shift = _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), shift))};
}
/// value where x >= limit, else 0.
inline f32x16 keep_if_ge(f32x16 x, f32x16 limit, f32x16 value) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_GE_OQ), value.v)};
}
/// The first n lanes of a, the rest from b (0 <= n <= 16).
inline f32x16 first_lanes(int n, f32x16 a, f32x16 b) {
    return {_mm512_mask_mov_ps(b.v, static_cast<__mmask16>((1u << n) - 1u), a.v)};
}
inline void store_i8(int8_t* p, i32x16 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v));
}
inline int32_t sum_int(i32x16 a) { return _mm512_reduce_add_epi32(a.v); }
inline void halves(f32x16 a, __m256& lo, __m256& hi) {
    lo = _mm512_castps512_ps256(a.v);
    hi = _mm512_extractf32x8_ps(a.v, 1);
}

#elif defined(LT_AVX2)

struct f32x16 {
    __m256 lo, hi;
};
struct i32x16 {
    __m256i lo, hi;
};

inline f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline f32x16 splat(float x) {
    const __m256 v = _mm256_set1_ps(x);
    return {v, v};
}
inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, f32x16 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline f32x16 load(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void store(uint16_t* p, f32x16 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline f32x16 abs(f32x16 a) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
inline f32x16 round_even(f32x16 a) {
    return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline f32x16 to_float(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline i32x16 to_int(f32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline i32x16 operator+(i32x16 a, i32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline i32x16 operator-(i32x16 a, i32x16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline i32x16 shift_left_4(i32x16 a) { return {_mm256_slli_epi32(a.lo, 4), _mm256_slli_epi32(a.hi, 4)}; }
inline i32x16 shift_right_4(i32x16 a) { return {_mm256_srai_epi32(a.lo, 4), _mm256_srai_epi32(a.hi, 4)}; }
inline i32x16 splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline f32x16 scale_exponent(f32x16 a, f32x16 n) {
    return {_mm256_castsi256_ps(
                _mm256_add_epi32(_mm256_castps_si256(a.lo), _mm256_slli_epi32(_mm256_cvtps_epi32(n.lo), 23))),
            _mm256_castsi256_ps(
                _mm256_add_epi32(_mm256_castps_si256(a.hi), _mm256_slli_epi32(_mm256_cvtps_epi32(n.hi), 23)))};
}
inline f32x16 keep_if_ge(f32x16 x, f32x16 limit, f32x16 value) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.lo, limit.lo, _CMP_GE_OQ), value.lo),
            _mm256_and_ps(_mm256_cmp_ps(x.hi, limit.hi, _CMP_GE_OQ), value.hi)};
}
inline f32x16 first_lanes(int n, f32x16 a, f32x16 b) {
    const __m256i count = _mm256_set1_epi32(n);
    const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
    return {_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, low))),
            _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, high)))};
}
inline void store_i8(int8_t* p, i32x16 a) {
    __m256i words = _mm256_packs_epi32(a.lo, a.hi);  // 64-bit pieces: lo0 hi0 lo1 hi1
    words = _mm256_permute4x64_epi64(words, 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline int32_t sum_int(i32x16 a) {
    const __m256i s = _mm256_add_epi32(a.lo, a.hi);
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1));
    return _mm_cvtsi128_si32(x);
}
inline void halves(f32x16 a, __m256& lo, __m256& hi) {
    lo = a.lo;
    hi = a.hi;
}

#else

struct f32x16 {
    float v[LANES];
};
struct i32x16 {
    int32_t v[LANES];
};

inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 0x1fu, fraction = h & 0x3ffu;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | (fraction << 13);
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
/// Round to nearest even, as the F16C instructions do.
inline uint16_t float_to_half(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (bits < 0x38800000u) {  // subnormal half: let the float adder round
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        std::memcpy(&bits, &magnitude, 4);
        return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
    }
    const uint32_t odd = (bits >> 13) & 1u;
    return static_cast<uint16_t>(sign | ((bits - 0x38000000u + 0xfffu + odd) >> 13));
}

#define LT_EACH(out, expr)                       \
    for (int i = 0; i < LANES; ++i) out[i] = expr

inline f32x16 zero() {
    f32x16 r;
    LT_EACH(r.v, 0.0f);
    return r;
}
inline f32x16 splat(float x) {
    f32x16 r;
    LT_EACH(r.v, x);
    return r;
}
inline f32x16 load(const float* p) {
    f32x16 r;
    LT_EACH(r.v, p[i]);
    return r;
}
inline void store(float* p, f32x16 a) { LT_EACH(p, a.v[i]); }
inline f32x16 load(const uint16_t* p) {
    f32x16 r;
    LT_EACH(r.v, half_to_float(p[i]));
    return r;
}
inline void store(uint16_t* p, f32x16 a) { LT_EACH(p, float_to_half(a.v[i])); }
inline f32x16 operator+(f32x16 a, f32x16 b) {
    LT_EACH(a.v, a.v[i] + b.v[i]);
    return a;
}
inline f32x16 operator-(f32x16 a, f32x16 b) {
    LT_EACH(a.v, a.v[i] - b.v[i]);
    return a;
}
inline f32x16 operator*(f32x16 a, f32x16 b) {
    LT_EACH(a.v, a.v[i] * b.v[i]);
    return a;
}
inline f32x16 operator/(f32x16 a, f32x16 b) {
    LT_EACH(a.v, a.v[i] / b.v[i]);
    return a;
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__FMA__) || defined(__aarch64__) || defined(__riscv)
    LT_EACH(c.v, __builtin_fmaf(a.v[i], b.v[i], c.v[i]));
#else  // a fused multiply-add in software would cost a library call a lane
    LT_EACH(c.v, a.v[i] * b.v[i] + c.v[i]);
#endif
    return c;
}
inline f32x16 max(f32x16 a, f32x16 b) {
    LT_EACH(a.v, a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
    return a;
}
inline f32x16 min(f32x16 a, f32x16 b) {
    LT_EACH(a.v, a.v[i] < b.v[i] ? a.v[i] : b.v[i]);
    return a;
}
inline f32x16 abs(f32x16 a) {
    LT_EACH(a.v, __builtin_fabsf(a.v[i]));
    return a;
}
inline f32x16 round_even(f32x16 a) {
    LT_EACH(a.v, __builtin_rintf(a.v[i]));
    return a;
}
inline f32x16 to_float(i32x16 a) {
    f32x16 r;
    LT_EACH(r.v, static_cast<float>(a.v[i]));
    return r;
}
inline i32x16 to_int(f32x16 a) {
    i32x16 r;
    for (int i = 0; i < LANES; ++i) {  // out of range (and NaN) give INT_MIN, as on x86
        const float x = __builtin_rintf(a.v[i]);
        r.v[i] = x >= -2147483648.0f && x < 2147483648.0f ? static_cast<int32_t>(x) : INT32_MIN;
    }
    return r;
}
inline i32x16 operator+(i32x16 a, i32x16 b) {
    LT_EACH(a.v, a.v[i] + b.v[i]);
    return a;
}
inline i32x16 operator-(i32x16 a, i32x16 b) {
    LT_EACH(a.v, a.v[i] - b.v[i]);
    return a;
}
inline i32x16 shift_left_4(i32x16 a) {
    LT_EACH(a.v, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << 4));
    return a;
}
inline i32x16 shift_right_4(i32x16 a) {
    LT_EACH(a.v, a.v[i] >> 4);
    return a;
}
inline i32x16 splat_int(int32_t x) {
    i32x16 r;
    LT_EACH(r.v, x);
    return r;
}
inline f32x16 scale_exponent(f32x16 a, f32x16 n) {
    const i32x16 shift = to_int(n);
    uint32_t bits[LANES];
    std::memcpy(bits, a.v, sizeof bits);
    LT_EACH(bits, bits[i] + (static_cast<uint32_t>(shift.v[i]) << 23));
    std::memcpy(a.v, bits, sizeof bits);
    return a;
}
inline f32x16 keep_if_ge(f32x16 x, f32x16 limit, f32x16 value) {
    LT_EACH(value.v, x.v[i] >= limit.v[i] ? value.v[i] : 0.0f);
    return value;
}
inline f32x16 first_lanes(int n, f32x16 a, f32x16 b) {
    LT_EACH(b.v, i < n ? a.v[i] : b.v[i]);
    return b;
}
inline void store_i8(int8_t* p, i32x16 a) {
    LT_EACH(p, static_cast<int8_t>(a.v[i] > 127 ? 127 : (a.v[i] < -128 ? -128 : a.v[i])));
}
inline int32_t sum_int(i32x16 a) {
    int32_t s = 0;
    for (int i = 0; i < LANES; ++i) s += a.v[i];
    return s;
}

#endif

/// Sum of the lanes in one fixed order: halves are added until one lane is left.
inline float sum(f32x16 a) {
#if defined(LT_PLAIN)
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
    return a.v[0];
#else
    __m256 lo, hi;
    halves(a, lo, hi);
    const __m256 eight = _mm256_add_ps(lo, hi);
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    x = _mm_add_ss(x, _mm_shuffle_ps(x, x, 1));
    return _mm_cvtss_f32(x);
#endif
}

/// Largest lane.
inline float max_lane(f32x16 a) {
#if defined(LT_PLAIN)
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
    return a.v[0];
#else
    __m256 lo, hi;
    halves(a, lo, hi);
    const __m256 eight = _mm256_max_ps(lo, hi);
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    x = _mm_max_ss(x, _mm_shuffle_ps(x, x, 1));
    return _mm_cvtss_f32(x);
#endif
}

/// 2^x with a relative error under 2e-7; exactly 0 below -125 (also for -inf), clamped above 126. NaN is not kept.
inline f32x16 exp2(f32x16 x) {
    const f32x16 clamped = min(max(x, splat(-125.0f)), splat(126.0f));
    const f32x16 n = round_even(clamped);
    const f32x16 f = clamped - n;
    // Taylor series of 2^f = exp(f ln 2) on [-0.5, 0.5], to the seventh power: the rest is below 6e-9.
    f32x16 p = splat(1.5252734e-5f);
    p = fma(p, f, splat(1.5403530e-4f));
    p = fma(p, f, splat(1.3333558e-3f));
    p = fma(p, f, splat(9.6181291e-3f));
    p = fma(p, f, splat(5.5504109e-2f));
    p = fma(p, f, splat(2.4022651e-1f));
    p = fma(p, f, splat(6.9314718e-1f));
    p = fma(p, f, splat(1.0f));
    return keep_if_ge(x, splat(-125.0f), scale_exponent(p, n));
}

}  // namespace lt
