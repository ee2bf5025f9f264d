// The AMX path of the product: integer dots of 16 tokens x 16 rows x 32 values in one instruction (4-bit weights; two
// for 8-bit ones), then the same floating-point chain as the vector path, so the bits are the same.
//
// Linux gives tile state to a process on request; where that fails (older kernels, some sandboxes) the vector path runs.
#pragma once

#include <cstdint>
#include <vector>

#include "simd.h"

#if defined(LT_AVX512) && defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__linux__)
#define LT_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lt {

#if defined(LT_AMX)

inline bool amx_permitted() {
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

/// One thread's tile state and scratch. Tiles are always full: what the last one holds beyond the tokens is dropped.
class Amx {
  public:
    static constexpr int MIN_TOKENS = 9;

    void set_enabled(bool enabled) { enabled_ = enabled; }

    bool use(int tokens) const { return enabled_ && tokens >= MIN_TOKENS; }

    /// Give the tiles back: a thread that holds them costs more to switch.
    void end() {
        if (configured_) _tile_release();
        configured_ = false;
    }

    void product(const Matrix& m, int group, const Activations& a, int first, int last, const Output& output) {
        if (!configured_) configure();
        unpack(m, group);
        for (int t = first; t < last; t += 16) {
            const int count = last - t < 16 ? last - t : 16;
            if (m.kind == Q4_1)
                count <= 8 ? tokens<Q4_1, 8>(m, a, t, count, output) : tokens<Q4_1, 16>(m, a, t, count, output);
            else
                count <= 8 ? tokens<Q8_0, 8>(m, a, t, count, output) : tokens<Q8_0, 16>(m, a, t, count, output);
        }
    }

  private:
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    };

    /// Tiles 0 .. 3: results (16 tokens x 16 int32). 4-bit weights: 4 holds 16 tokens x (32 h, 32 l), 5 the weights of
    /// 32 columns times 16 and then times 1. 8-bit weights: 6 holds 16 tokens x 32 h or l, 7 the weights of 32 columns.
    void configure() {
        Config c{};
        c.palette = 1;
        for (int i = 0; i < 8; ++i) {
            c.rows[i] = i == 7 ? 8 : 16;
            c.bytes_per_row[i] = i == 6 ? 32 : 64;
        }
        publish(&c);
        _tile_loadconfig(&c);
        configured_ = true;
    }

    /// The compilers' tile intrinsics do not say that they read the memory behind their pointer: without this, a store
    /// that only they read may be moved behind them or dropped.
    static void publish(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

    void unpack(const Matrix& m, int group) {
        const int blocks = m.blocks();
        bytes_.resize(static_cast<size_t>(blocks) * 1024 + 64);
        scales_.resize(static_cast<size_t>(blocks) * 32);
        uint8_t* out = base();
        const uint8_t* w = m.quants(group);
        const uint16_t* sc = m.scales(group);
        const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(-16);
        for (int b = 0; b < blocks; ++b) {
            if (m.kind == Q4_1) {
                prefetch_ahead(w + b * 320, 5);
                uint8_t* to = out + b * 1024;
                for (int j = 0; j < 4; ++j, to += 64) {
                    const __m512i raw = _mm512_loadu_si512(w + b * 256 + 64 * j);
                    _mm512_store_si512(to, _mm512_and_si512(_mm512_slli_epi16(raw, 4), high));
                    _mm512_store_si512(to + 256, _mm512_and_si512(raw, high));
                    _mm512_store_si512(to + 512, _mm512_and_si512(raw, low));
                    _mm512_store_si512(to + 768, _mm512_and_si512(_mm512_srli_epi16(raw, 4), low));
                }
                store(&scales_[b * 32], load(sc + b * 32));
                store(&scales_[b * 32 + 16], load(sc + b * 32 + 16));
            } else {
                prefetch_ahead(w + b * 544, 9);
                store(&scales_[b * 32], load(sc + b * 16));
            }
        }
        weights_ = m.kind == Q4_1 ? out : w;
        publish(weights_);
    }

    uint8_t* base() {
        const uintptr_t p = reinterpret_cast<uintptr_t>(bytes_.data());
        return reinterpret_cast<uint8_t*>((p + 63) & ~static_cast<uintptr_t>(63));
    }

    /// Two integer results into results_[Slot]: of two blocks from block b on for 4-bit weights, of the h and the l
    /// digits of block b for 8-bit ones.
    template <int K, int Slot>
    LT_INLINE void dots(const TokenBlock* x, int b, int blocks) {
        // Tile numbers are part of the instruction, hence one statement each.
#define LT_DOT_4(c, i)                               \
    _tile_loadd(4, x[b + i].q, 2 * BLOCK);           \
    _tile_loadd(5, weights_ + (b + i) * 1024, 64);   \
    _tile_zero(c);                                   \
    _tile_dpbsud(c, 4, 5);                           \
    _tile_stored(c, results_[Slot][i], 64);
#define LT_DOT_8(c, i)                               \
    _tile_loadd(6, x[b].q[0] + i * BLOCK, 2 * BLOCK); \
    _tile_zero(c);                                   \
    _tile_dpbssd(c, 6, 7);                           \
    _tile_stored(c, results_[Slot][i], 64);
        if constexpr (K == Q4_1) {
            if constexpr (Slot == 0) {
                LT_DOT_4(0, 0)
                if (b + 1 < blocks) { LT_DOT_4(1, 1) }
            } else {
                LT_DOT_4(2, 0)
                if (b + 1 < blocks) { LT_DOT_4(3, 1) }
            }
        } else {
            _tile_loadd(7, weights_ + b * 512, 64);
            if constexpr (Slot == 0) {
                LT_DOT_8(0, 0)
                LT_DOT_8(1, 1)
            } else {
                LT_DOT_8(2, 0)
                LT_DOT_8(3, 1)
            }
        }
#undef LT_DOT_4
#undef LT_DOT_8
    }

    template <int K, int N>
    LT_INLINE void accumulate(int slot, const TokenBlock* x, int b, int blocks, f32x16* y) {
        for (int i = 0; i < (K == Q4_1 ? 2 : 1) && b + i < blocks; ++i) {
            const f32x16 d = load(&scales_[(b + i) * 32]);
            const f32x16 low = K == Q4_1 ? load(&scales_[(b + i) * 32 + 16]) : zero();
            LT_UNROLL
            for (int t = 0; t < N; ++t) {
                i32x16 dot{_mm512_load_si512(results_[slot][i] + 16 * t)};
                if constexpr (K == Q8_0) dot = shift_left_4(dot) + i32x16{_mm512_load_si512(results_[slot][1] + 16 * t)};
                y[t] = fma(to_float(dot), d * splat(x[b + i].d[t]), y[t]);
                if constexpr (K == Q4_1) y[t] = fma(low, splat(x[b + i].s[t]), y[t]);
            }
        }
    }

    /// N (8 or 16) tokens, of which `count` are wanted. The tile unit works one slot ahead of the floating-point
    /// chain: reading a tile's store at once would wait for it to leave the store buffer. All results together take
    /// 4 KiB: more, and loads would wait for stores that share their low address bits.
    template <int K, int N>
    void tokens(const Matrix& m, const Activations& a, int first, int count, const Output& output) {
        constexpr int STEP = K == Q4_1 ? 2 : 1;  // blocks in a slot
        const int blocks = m.blocks();
        const TokenBlock* x = a.tile(first);
        f32x16 y[N];
        LT_UNROLL
        for (int t = 0; t < N; ++t) y[t] = zero();
        dots<K, 0>(x, 0, blocks);
        for (int b = 0; b < blocks; b += 2 * STEP) {
            if (b + STEP < blocks) dots<K, 1>(x, b + STEP, blocks);
            accumulate<K, N>(0, x, b, blocks, y);
            if (b + STEP >= blocks) break;
            if (b + 2 * STEP < blocks) dots<K, 0>(x, b + 2 * STEP, blocks);
            accumulate<K, N>(1, x, b + STEP, blocks, y);
        }
        LT_UNROLL
        for (int t = 0; t < N; ++t)
            if (t < count) output.put(first + t, y[t]);
    }

    bool enabled_ = false;
    bool configured_ = false;
    const uint8_t* weights_ = nullptr;
    std::vector<uint8_t> bytes_;
    std::vector<float> scales_;
    alignas(4096) int32_t results_[2][2][256];
};

#else

inline bool amx_permitted() { return false; }

class Amx {
  public:
    void set_enabled(bool) {}
    bool use(int) const { return false; }
    void end() {}
    void product(const Matrix&, int, const Activations&, int, int, const Output&) {}
};

#endif

}  // namespace lt
