// The decoder: one call computes every layer of a step of mixed prefill chunks and decodes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "api.h"
#include "attention.h"
#include "gemm.h"
#include "pool.h"

namespace lt {

/// Growing storage, aligned to cache lines, which is zero again whenever it has grown.
template <class T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { release(); }

    void reserve(size_t count) {
        if (count <= size_) return;
        release();
        data_ = static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64)));
        std::memset(static_cast<void*>(data_), 0, count * sizeof(T));  // lanes past a batch's end are computed and dropped
        size_ = count;
    }
    T* get() const { return data_; }

  private:
    void release() {
        if (data_ != nullptr) ::operator delete(data_, std::align_val_t(64));
        data_ = nullptr;
        size_ = 0;
    }
    T* data_ = nullptr;
    size_t size_ = 0;
};

class ActivationBuffer {
  public:
    Activations reserve(size_t tokens, int width) {
        const int blocks = width / BLOCK;
        data_.reserve((tokens + 15) / 16 * blocks);
        return {data_.get(), blocks};
    }

  private:
    Buffer<TokenBlock> data_;
};

/// y = x / sqrt(mean(x^2) + eps) * weight over n values (a multiple of 16).
inline void rms_norm(const float* x, const float* weight, int n, float eps, float* y) {
    f32x16 squares = zero();
    for (int i = 0; i < n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    const f32x16 factor = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps));
    for (int i = 0; i < n; i += LANES) store(y + i, load(x + i) * factor * load(weight + i));
}

/// gate * sigmoid(gate) * up.
inline f32x16 swiglu(f32x16 gate, f32x16 up) {
    const f32x16 e = exp2(gate * splat(-1.4426950408889634f));
    return gate / (splat(1.0f) + e) * up;
}

struct Best {
    float value;
    int32_t index;
};

struct ThreadScratch {
    Amx amx;
    AttentionScratch attention;
    Buffer<float> norm, gate, up, logits;
    std::vector<Best> best;
};

class Decoder {
  public:
    explicit Decoder(const LtModel& model);
    int64_t forward(const LtStep& step);

  private:
    struct Segment {
        int first, tokens, position;
        const int32_t* pages;
        float* partial;  // null: computed along the pages
        int partial_pages;
    };

    int64_t check(const LtStep& step) const;
    void plan_attention(const LtStep& step);
    void run(int thread);
    void embed(int token);
    void quantise_row(const float* x, int n, const Activations& a, int token);
    void norm_and_quantise(const float* x, const float* weight, int token, ThreadScratch& s);
    void qkv(const LtLayer& layer, ThreadScratch& s);
    void place(const LtLayer& layer, int index, int token);
    void collect(const LtLayer& layer, int token);
    void residual_product(const Matrix& m, const Activations& a, ThreadScratch& s);
    void mlp_in(const LtLayer& layer, ThreadScratch& s);
    void head(ThreadScratch& s);
    template <class Fn>
    void each(int64_t count, int64_t chunk, Fn&& fn);
    int64_t group_chunk(int64_t groups) const;
    int64_t token_chunk(int64_t tokens) const;

    LtModel model_;
    std::vector<LtLayer> layers_;
    Pool pool_;
    std::vector<std::unique_ptr<ThreadScratch>> scratch_;
    int qkv_width_, q_width_, kv_width_;
    const LtStep* step_ = nullptr;
    Cache cache_{};
    std::vector<Segment> segments_;
    std::vector<int> segment_of_;
    std::vector<AttentionItem> items_;
    Buffer<float> x_, qkv_, attended_, partials_;
    ActivationBuffer hidden_in_, attended_in_, ffn_in_;
    Activations hidden_{}, attended_q_{}, ffn_{};
};

}  // namespace lt
