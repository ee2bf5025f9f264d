// Products of quantised weights and quantised activations.
//
// Arithmetic, the same for every batch size, thread count and instruction set:
//   activation block of 32 values:  d = max|x| / 2032,  q = round(x * (2032 / max|x|)),  s = d * sum(q)
//   y = 0;  for each block b in order:  y = fma(float(dot(qw, q)), dw * d, y);  if Q4_1:  y = fma(mw, s, y)
// with exact integer dots. A row of a batch therefore has the same bits alone and in any company.
//
// q has twelve bits, held as two signed bytes, q = 16 h + l with -8 <= l <= 7, because eight cost too much: on
// SmolLM2-135M they put the mean KL divergence from fp32 at 0.0035, with no matrix to blame in particular. A 4-bit
// weight times 16 still fits a byte, so dot(16 w, h) + dot(w, l) runs in one accumulator.
//
// Packed weights ("lt16"): rows in groups of 16, all blocks of a group together:
//   quants  [block][vector of 64 bytes]: lane r holds four consecutive k of row r; Q4_1 has 4 vectors (low nibbles
//           k = 4j.., high nibbles k = 16 + 4j..), Q8_0 has 8 vectors (k = 4j..)
//   scales  [block][16] fp16 d, and for Q4_1 [16] fp16 m after each d
//   padding to 64 bytes. Missing rows of the last group are zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd.h"

namespace lt {

constexpr int BLOCK = 32;
constexpr int GROUP = 16;

enum Kind : int32_t { Q4_1 = 0, Q8_0 = 1 };

struct Matrix {
    const uint8_t* data;
    int32_t kind;
    int32_t rows;
    int32_t cols;

    int groups() const { return (rows + GROUP - 1) / GROUP; }
    int blocks() const { return cols / BLOCK; }
    size_t quant_bytes() const { return kind == Q4_1 ? 256 : 512; }
    size_t scale_bytes() const { return kind == Q4_1 ? 64 : 32; }
    size_t group_bytes() const { return (blocks() * (quant_bytes() + scale_bytes()) + 63) / 64 * 64; }
    const uint8_t* quants(int group) const { return data + group * group_bytes(); }
    const uint16_t* scales(int group) const {
        return reinterpret_cast<const uint16_t*>(quants(group) + blocks() * quant_bytes());
    }
};

/// One block of 32 values of 16 tokens, quantised. All the kernels need of it lies at constant offsets from one pointer.
struct alignas(64) TokenBlock {
    int8_t q[16][2 * BLOCK];  // of each token h, then l
    float d[16];
    float s[16];        // d * sum of q
    int32_t total[16];  // sum of q
};

/// Quantised activations, [tokens / 16, rounded up][blocks].
struct Activations {
    TokenBlock* data;
    int blocks;

    TokenBlock* tile(int token) const { return data + static_cast<size_t>(token / 16) * blocks; }
};

/// Ask for the lines that a stream of weights will reach some microseconds from now; may point past the matrix.
inline void prefetch_ahead(const uint8_t* p, int lines) {
    constexpr int distance = 12288;
    for (int i = 0; i < lines; ++i) __builtin_prefetch(p + distance + 64 * i);
}

/// Quantise one block of 32 floats into block `b` of token `token`. A NaN or infinity makes the block's scale NaN, so
/// that it reaches the logits instead of turning into a plausible integer.
inline void quantise_block(const float* x, const Activations& a, int token, int b) {
    constexpr float steps = 2032.0f;
    const f32x16 value[2] = {load(x), load(x + LANES)};
    const float largest = max_lane(max(abs(value[0]), abs(value[1])));
    const f32x16 inverse = splat(largest > 0.0f ? steps / largest : 0.0f);
    TokenBlock& to = a.tile(token)[b];
    const int t = token % 16;
    i32x16 total = splat_int(0);
    for (int i = 0; i < 2; ++i) {
        const i32x16 q = to_int(value[i] * inverse);
        const i32x16 high = shift_right_4(q + splat_int(8));
        store_i8(to.q[t] + i * LANES, high);
        store_i8(to.q[t] + BLOCK + i * LANES, q - shift_left_4(high));
        total = total + q;
    }
    const float d = largest / steps + sum(fma(value[0], zero(), value[1] * zero()));
    to.d[t] = d;
    to.total[t] = sum_int(total);
    to.s[t] = d * static_cast<float>(to.total[t]);
}

#if defined(LT_AVX512)

/// sum + dot of each lane's four unsigned weights with the same four activations. Written out because compilers load
/// the broadcast apart, and the front end, shared with a busy sibling thread, is what this loop waits for.
inline __m512i dot4(__m512i sum, __m512i w, const int8_t* a) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const int32_t*>(a)));
    return sum;
}

/// Dots of one block of 16 rows with M tokens from `a` on; `total` is their sums of q, used by signed weights.
template <int K, int M>
LT_INLINE void dot_block(const uint8_t* w, const int8_t* a, const int32_t* total, i32x16* out) {
    // Tokens inside, k outside: M independent chains hide the instruction's latency; few tokens get several.
    constexpr int CHAINS = K == Q8_0 ? 2 : (M <= 4 ? 4 : (M <= 7 ? 2 : 1));
    __m512i sum[M][CHAINS];
    LT_UNROLL
    for (int t = 0; t < M; ++t) {
        LT_UNROLL
        for (int c = 0; c < CHAINS; ++c) sum[t][c] = _mm512_setzero_si512();
    }
    if constexpr (K == Q4_1) {
        const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(-16);
        LT_UNROLL
        for (int j = 0; j < 4; ++j) {
            const __m512i raw = _mm512_loadu_si512(w + 64 * j);
            const __m512i first = _mm512_and_si512(raw, low);
            const __m512i first16 = _mm512_and_si512(_mm512_slli_epi16(raw, 4), high);
            const __m512i second = _mm512_and_si512(_mm512_srli_epi16(raw, 4), low);
            const __m512i second16 = _mm512_and_si512(raw, high);
            LT_UNROLL
            for (int t = 0; t < M; ++t) {
                const int8_t* h = a + t * 2 * BLOCK + 4 * j;
                sum[t][0] = dot4(sum[t][0], first16, h);
                sum[t][1 % CHAINS] = dot4(sum[t][1 % CHAINS], first, h + BLOCK);
                sum[t][2 % CHAINS] = dot4(sum[t][2 % CHAINS], second16, h + 16);
                sum[t][3 % CHAINS] = dot4(sum[t][3 % CHAINS], second, h + BLOCK + 16);
            }
        }
        LT_UNROLL
        for (int t = 0; t < M; ++t) {
            out[t].v = sum[t][0];
            LT_UNROLL
            for (int c = 1; c < CHAINS; ++c) out[t].v = _mm512_add_epi32(out[t].v, sum[t][c]);
        }
    } else {  // signed weights become unsigned by adding 128, which the sums of q take back
        const __m512i flip = _mm512_set1_epi8(-128);
        LT_UNROLL
        for (int j = 0; j < 8; ++j) {
            const __m512i v = _mm512_xor_si512(_mm512_loadu_si512(w + 64 * j), flip);
            LT_UNROLL
            for (int t = 0; t < M; ++t) {
                const int8_t* h = a + t * 2 * BLOCK + 4 * j;
                sum[t][0] = dot4(sum[t][0], v, h);
                sum[t][1] = dot4(sum[t][1], v, h + BLOCK);
            }
        }
        LT_UNROLL
        for (int t = 0; t < M; ++t)
            out[t].v = _mm512_sub_epi32(_mm512_add_epi32(_mm512_slli_epi32(sum[t][0], 4), sum[t][1]),
                                        _mm512_set1_epi32(128 * total[t]));
    }
}

#elif defined(LT_AVX2)

inline __m256i spread(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

template <int K, int M>
LT_INLINE void dot_block(const uint8_t* w, const int8_t* a, const int32_t*, i32x16* out) {
    const __m256i ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
    if constexpr (K == Q4_1) {
        // 16-bit sums hold: 8 products of pairs, each at most 2 * 15 * 127, stay under 32,768. Half the rows at a time,
        // or the sums would not fit the registers.
        const __m256i low = _mm256_set1_epi8(15);
        LT_UNROLL
        for (int half = 0; half < 2; ++half) {
            __m256i high_sum[M], low_sum[M];
            LT_UNROLL
            for (int t = 0; t < M; ++t) high_sum[t] = low_sum[t] = _mm256_setzero_si256();
            LT_UNROLL
            for (int j = 0; j < 4; ++j) {
                const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 64 * j + 32 * half));
                const __m256i first = _mm256_and_si256(raw, low);
                const __m256i second = _mm256_and_si256(_mm256_srli_epi16(raw, 4), low);
                LT_UNROLL
                for (int t = 0; t < M; ++t) {
                    const int8_t* h = a + t * 2 * BLOCK + 4 * j;
                    high_sum[t] = _mm256_add_epi16(high_sum[t], _mm256_maddubs_epi16(first, spread(h)));
                    high_sum[t] = _mm256_add_epi16(high_sum[t], _mm256_maddubs_epi16(second, spread(h + 16)));
                    low_sum[t] = _mm256_add_epi16(low_sum[t], _mm256_maddubs_epi16(first, spread(h + BLOCK)));
                    low_sum[t] = _mm256_add_epi16(low_sum[t], _mm256_maddubs_epi16(second, spread(h + BLOCK + 16)));
                }
            }
            LT_UNROLL
            for (int t = 0; t < M; ++t)
                (half == 0 ? out[t].lo : out[t].hi) =
                    _mm256_add_epi32(_mm256_madd_epi16(high_sum[t], sixteens), _mm256_madd_epi16(low_sum[t], ones));
        }
    } else {
        LT_UNROLL
        for (int t = 0; t < M; ++t) out[t] = splat_int(0);
        LT_UNROLL
        for (int j = 0; j < 8; ++j) {
            LT_UNROLL
            for (int half = 0; half < 2; ++half) {
                const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 64 * j + 32 * half));
                const __m256i magnitude = _mm256_abs_epi8(raw);  // -128 becomes 128 unsigned, as it should
                LT_UNROLL
                for (int t = 0; t < M; ++t) {
                    const int8_t* h = a + t * 2 * BLOCK + 4 * j;
                    // A pair is at most 2 * 128 * 127 in size.
                    const __m256i high_pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(spread(h), raw));
                    const __m256i low_pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(spread(h + BLOCK), raw));
                    __m256i& to = half == 0 ? out[t].lo : out[t].hi;
                    to = _mm256_add_epi32(to, _mm256_add_epi32(_mm256_madd_epi16(high_pairs, sixteens),
                                                               _mm256_madd_epi16(low_pairs, ones)));
                }
            }
        }
    }
}

#else

template <int K, int M>
inline void dot_block(const uint8_t* w, const int8_t* a, const int32_t*, i32x16* out) {
    for (int t = 0; t < M; ++t) out[t] = splat_int(0);
    for (int j = 0; j < 8; ++j) {
        for (int r = 0; r < GROUP; ++r) {
            for (int i = 0; i < 4; ++i) {
                int32_t value;
                if (K == Q4_1)
                    value = j < 4 ? w[64 * j + 4 * r + i] & 15 : w[64 * (j - 4) + 4 * r + i] >> 4;
                else
                    value = static_cast<int8_t>(w[64 * j + 4 * r + i]);
                for (int t = 0; t < M; ++t) {
                    const int8_t* h = a + t * 2 * BLOCK + 4 * j + i;
                    out[t].v[r] += value * (16 * h[0] + h[BLOCK]);
                }
            }
        }
    }
}

#endif

/// Where the 16 values of a group go: out[token * pitch ..], or added to what is there.
struct Output {
    float* out;  // of token 0
    size_t pitch;
    bool add = false;

    void put(int token, f32x16 y) const {
        float* to = out + static_cast<size_t>(token) * pitch;
        store(to, add ? load(to) + y : y);
    }
};

/// 16 rows times M tokens, which lie in one tile of 16.
template <int K, int M>
inline void tile(const Matrix& m, int group, const Activations& a, int first, const Output& output) {
    const int blocks = m.blocks(), t0 = first % 16;
    const uint8_t* const start = m.quants(group);
    const uint8_t* w = start;
    const uint16_t* scale = m.scales(group);
    const TokenBlock* x = a.tile(first);
    f32x16 y[M];
    LT_UNROLL
    for (int t = 0; t < M; ++t) y[t] = zero();
    for (int b = 0; b < blocks; ++b, ++x) {
        i32x16 dot[M];
        prefetch_ahead(start + b * (K == Q4_1 ? 320 : 544), K == Q4_1 ? 5 : 9);
        dot_block<K, M>(w, x->q[t0], x->total + t0, dot);
        const f32x16 d = load(scale);
        LT_UNROLL
        for (int t = 0; t < M; ++t) y[t] = fma(to_float(dot[t]), d * splat(x->d[t0 + t]), y[t]);
        if constexpr (K == Q4_1) {
            const f32x16 low = load(scale + LANES);
            LT_UNROLL
            for (int t = 0; t < M; ++t) y[t] = fma(low, splat(x->s[t0 + t]), y[t]);
        }
        w += K == Q4_1 ? 256 : 512;
        scale += K == Q4_1 ? 32 : 16;
    }
    LT_UNROLL
    for (int t = 0; t < M; ++t) output.put(first + t, y[t]);
}

#if defined(LT_AVX512)
constexpr int TILE_TOKENS = 8;
#else
constexpr int TILE_TOKENS = 4;
#endif

template <int K>
inline void rows_times_tokens(const Matrix& m, int group, const Activations& a, int first, int last, const Output& output) {
    int t = first;
    for (; t + TILE_TOKENS <= last; t += TILE_TOKENS) tile<K, TILE_TOKENS>(m, group, a, t, output);
    switch (last - t) {
#if defined(LT_AVX512)
        case 7: tile<K, 7>(m, group, a, t, output); break;
        case 6: tile<K, 6>(m, group, a, t, output); break;
        case 5: tile<K, 5>(m, group, a, t, output); break;
        case 4: tile<K, 4>(m, group, a, t, output); break;
#endif
        case 3: tile<K, 3>(m, group, a, t, output); break;
        case 2: tile<K, 2>(m, group, a, t, output); break;
        case 1: tile<K, 1>(m, group, a, t, output); break;
        default: break;
    }
}

}  // namespace lt

#include "amx.h"

namespace lt {

/// Rows of one group times tokens first..last-1 (first is a multiple of 16).
inline void group_product(const Matrix& m, int group, const Activations& a, int first, int last, Amx* amx,
                          const Output& output) {
    if (amx != nullptr && amx->use(last - first)) {
        amx->product(m, group, a, first, last, output);
    } else if (m.kind == Q4_1) {
        rows_times_tokens<Q4_1>(m, group, a, first, last, output);
    } else {
        rows_times_tokens<Q8_0>(m, group, a, first, last, output);
    }
}

/// Dequantised row of a packed matrix, for the embedding: out[cols], w = fma(q, d, m) for Q4_1, q * d for Q8_0.
inline void dequantise_row(const Matrix& m, int row, float* out) {
    const int group = row / GROUP, lane = row % GROUP;
    const uint8_t* w = m.quants(group);
    const uint16_t* scale = m.scales(group);
    for (int b = 0; b < m.blocks(); ++b) {
        float d[LANES], low[LANES];
        const uint16_t* sc = scale + b * (m.kind == Q4_1 ? 32 : 16);
        store(d, load(sc));
        if (m.kind == Q4_1) store(low, load(sc + LANES));
        for (int k = 0; k < BLOCK; ++k) {
            if (m.kind == Q4_1) {
                const uint8_t byte = w[b * 256 + 64 * (k % 16 / 4) + 4 * lane + k % 4];
                out[b * BLOCK + k] = static_cast<float>(k < 16 ? byte & 15 : byte >> 4) * d[lane] + low[lane];
            } else {
                const int8_t q = static_cast<int8_t>(w[b * 512 + 64 * (k / 4) + 4 * lane + k % 4]);
                out[b * BLOCK + k] = static_cast<float>(q) * d[lane];
            }
        }
    }
}

}  // namespace lt
