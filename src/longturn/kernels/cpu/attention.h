// Causal attention over the paged cache, computed page by page.
//
// For a query and a page of 128 tokens: scores in fp32 (one fused chain over the head dimension), m = largest,
// p = 2^(score - m), l = sum p, o = sum p v (one fused chain over the page's tokens). Pages are merged in their order.
// Which thread does which page, and which queries share a page's read, changes no bit; so decode, prefill and any
// chunking of a prompt agree exactly.
//
// Cache: [page][layer] then, for each KV head, keys as [8 tiles][head_dim][16 tokens] (so that a vector holds one
// dimension of 16 tokens); then, for each KV head, values as [128 tokens][head_dim]. Elements are fp16 or fp32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "simd.h"

namespace lt {

constexpr int PAGE = 128;

#if defined(LT_AVX512)
constexpr int QUERY_BLOCK = 6;  // 6 queries x 4 vectors of accumulators fill 24 of 32 registers
constexpr int VECTOR_BLOCK = 4;
#else
constexpr int QUERY_BLOCK = 3;
constexpr int VECTOR_BLOCK = 2;
#endif

struct Cache {
    void* data;
    bool half;
    int layers, kv_heads, head_dim;

    size_t head_elements() const { return static_cast<size_t>(PAGE) * head_dim; }
    size_t layer_elements() const { return 2 * kv_heads * head_elements(); }
    size_t keys(int page, int layer, int kv) const {
        return (static_cast<size_t>(page) * layers + layer) * layer_elements() + kv * head_elements();
    }
    size_t values(int page, int layer, int kv) const { return keys(page, layer, kv + kv_heads); }
};

inline void put(float* p, float x) { *p = x; }
inline void put(uint16_t* p, float x) {
    uint16_t lanes[LANES];
    store(lanes, splat(x));
    *p = lanes[0];
}

/// Write one token's key and value of one KV head. slot is the token's place in its page.
template <class T>
inline void write_kv(const Cache& c, int page, int layer, int kv, int slot, const float* key, const float* value) {
    T* k = static_cast<T*>(c.data) + c.keys(page, layer, kv) + static_cast<size_t>(slot / LANES) * c.head_dim * LANES +
           slot % LANES;
    T* v = static_cast<T*>(c.data) + c.values(page, layer, kv) + static_cast<size_t>(slot) * c.head_dim;
    for (int d = 0; d < c.head_dim; d += LANES) {
        T lanes[LANES];
        store(lanes, load(key + d));
        for (int i = 0; i < LANES; ++i) k[static_cast<size_t>(d + i) * LANES] = lanes[i];
        store(v + d, load(value + d));
    }
}

/// Memory that will be read soon, asked for line by line from within a loop: a page is short and lies anywhere, so the
/// hardware notices a stream only when half of it is over.
struct Ahead {
    const char* next;
    const char* end;

    void step() {
        if (next >= end) return;
        __builtin_prefetch(next);
        next += 64;
    }
};

/// Scores of Q queries with N tiles of 16 tokens. keys: [tile][dim][16]; out: [query][128] from the first tile.
template <class T, int Q, int N>
inline void score_tiles(const T* keys, int dim, const float* const* query, float* out, Ahead& ahead) {
    f32x16 acc[Q][N];
    LT_UNROLL
    for (int q = 0; q < Q; ++q)
        LT_UNROLL
        for (int n = 0; n < N; ++n) acc[q][n] = zero();
    for (int d = 0; d < dim; ++d) {
        ahead.step();
        ahead.step();
        f32x16 k[N];
        LT_UNROLL
        for (int n = 0; n < N; ++n) k[n] = load(keys + (static_cast<size_t>(n) * dim + d) * LANES);
        LT_UNROLL
        for (int q = 0; q < Q; ++q) {
            const f32x16 x = splat(query[q][d]);
            LT_UNROLL
            for (int n = 0; n < N; ++n) acc[q][n] = fma(x, k[n], acc[q][n]);
        }
    }
    LT_UNROLL
    for (int q = 0; q < Q; ++q)
        LT_UNROLL
        for (int n = 0; n < N; ++n) store(out + q * PAGE + n * LANES, acc[q][n]);
}

/// out[query][dim..] = sum over tokens of p * v, for N vectors of dimensions.
template <class T, int Q, int N>
inline void weigh_values(const T* values, int dim, int tokens, const float* p, float* out, Ahead& ahead) {
    f32x16 acc[Q][N];
    LT_UNROLL
    for (int q = 0; q < Q; ++q)
        LT_UNROLL
        for (int n = 0; n < N; ++n) acc[q][n] = zero();
    for (int j = 0; j < tokens; ++j) {
        ahead.step();
        ahead.step();
        f32x16 v[N];
        LT_UNROLL
        for (int n = 0; n < N; ++n) v[n] = load(values + static_cast<size_t>(j) * dim + n * LANES);
        LT_UNROLL
        for (int q = 0; q < Q; ++q) {
            const f32x16 x = splat(p[q * PAGE + j]);
            LT_UNROLL
            for (int n = 0; n < N; ++n) acc[q][n] = fma(x, v[n], acc[q][n]);
        }
    }
    LT_UNROLL
    for (int q = 0; q < Q; ++q)
        LT_UNROLL
        for (int n = 0; n < N; ++n) store(out + static_cast<size_t>(q) * dim + n * LANES, acc[q][n]);
}

struct PageSums {
    float largest[QUERY_BLOCK];
    float total[QUERY_BLOCK];
};

/// Softmax sums of one page for Q queries. valid[q] is how many of the page's tokens query q may see (at least one
/// of them sees `most`); the entries of a query that sees none are meaningless. p: scratch [Q][128]; out: [Q][dim].
/// `soon` is fetched while scores are computed, `later` while values are summed.
template <class T, int Q>
inline void attend_page(const T* keys, const T* values, int dim, const float* const* query, const int* valid, int most,
                        float* p, float* out, PageSums& sums, Ahead soon, Ahead later) {
    const int tiles = (most + LANES - 1) / LANES;
    int tile = 0;
    for (; tile + VECTOR_BLOCK <= tiles; tile += VECTOR_BLOCK)
        score_tiles<T, Q, VECTOR_BLOCK>(keys + static_cast<size_t>(tile) * dim * LANES, dim, query, p + tile * LANES, soon);
    for (; tile < tiles; ++tile)
        score_tiles<T, Q, 1>(keys + static_cast<size_t>(tile) * dim * LANES, dim, query, p + tile * LANES, soon);
    const f32x16 never = splat(-std::numeric_limits<float>::infinity());
    LT_UNROLL
    for (int q = 0; q < Q; ++q) {
        float* row = p + q * PAGE;
        f32x16 top = never;
        for (int i = 0; i < tiles; ++i) {
            const int n = valid[q] - i * LANES;
            f32x16 s = load(row + i * LANES);
            if (n < LANES) {  // tokens beyond the query: another request's leftovers, perhaps NaN
                s = first_lanes(n < 0 ? 0 : n, s, never);
                store(row + i * LANES, s);
            }
            top = max(top, s);
        }
        const float largest = max_lane(top);
        // A query that sees nothing has largest = -inf; 0 keeps the differences from being NaN.
        const f32x16 shift = splat(valid[q] > 0 ? largest : 0.0f);
        f32x16 total = zero();
        for (int i = 0; i < tiles; ++i) {
            const f32x16 e = exp2(load(row + i * LANES) - shift);
            store(row + i * LANES, e);
            total = total + e;
        }
        sums.largest[q] = largest;
        sums.total[q] = sum(total);
    }
    const int vectors = dim / LANES;
    int n = 0;
    for (; n + VECTOR_BLOCK <= vectors; n += VECTOR_BLOCK)
        weigh_values<T, Q, VECTOR_BLOCK>(values + n * LANES, dim, most, p, out + n * LANES, later);
    for (; n < vectors; ++n) weigh_values<T, Q, 1>(values + n * LANES, dim, most, p, out + n * LANES, later);
}

template <class T>
inline void attend_page(int queries, const T* keys, const T* values, int dim, const float* const* query,
                        const int* valid, int most, float* p, float* out, PageSums& sums, Ahead soon, Ahead later) {
    switch (queries) {
#if defined(LT_AVX512)
        case 6: attend_page<T, 6>(keys, values, dim, query, valid, most, p, out, sums, soon, later); break;
        case 5: attend_page<T, 5>(keys, values, dim, query, valid, most, p, out, sums, soon, later); break;
        case 4: attend_page<T, 4>(keys, values, dim, query, valid, most, p, out, sums, soon, later); break;
#endif
        case 3: attend_page<T, 3>(keys, values, dim, query, valid, most, p, out, sums, soon, later); break;
        case 2: attend_page<T, 2>(keys, values, dim, query, valid, most, p, out, sums, soon, later); break;
        default: attend_page<T, 1>(keys, values, dim, query, valid, most, p, out, sums, soon, later); break;
    }
}

/// The running result of one query: begins as {-inf, 0, 0...}.
struct Running {
    float largest = -std::numeric_limits<float>::infinity();
    float total = 0.0f;
};

/// What a running value and a page's value are multiplied by when they are merged, for up to 8 queries at once.
struct MergeFactors {
    float lanes[LANES];

    float before(int i) const { return lanes[i]; }
    float now(int i) const { return lanes[i + 8]; }
};

/// Merge the sums of `count` queries (at most 8) into their running results. A query with `valid` 0 keeps its own.
inline MergeFactors merge_sums(int count, Running* run, const float* largest, const float* total, const int* valid) {
    float shift[LANES] = {};
    for (int i = 0; i < count; ++i) {
        if (valid[i] == 0) continue;
        const float top = run[i].largest > largest[i] ? run[i].largest : largest[i];
        shift[i] = run[i].largest - top;
        shift[i + 8] = largest[i] - top;
        run[i].largest = top;
    }
    MergeFactors f;
    store(f.lanes, exp2(load(shift)));
    for (int i = 0; i < count; ++i)
        if (valid[i] != 0) run[i].total = __builtin_fmaf(total[i], f.now(i), run[i].total * f.before(i));
    return f;
}

/// value [dim] = value * before + page_value * now.
inline void merge_value(float* value, const float* page_value, float before, float now, int dim) {
    for (int d = 0; d < dim; d += LANES)
        store(value + d, fma(load(page_value + d), splat(now), load(value + d) * splat(before)));
}

/// Scratch of one thread.
struct AttentionScratch {
    std::vector<float> keys, values, scores, page_out, state;
    std::vector<Running> running;
    std::vector<const float*> query;
    std::vector<int> position;
};

/// Where a work item reads and writes. Queries are (token, head of the KV group), token-major.
struct AttentionItem {
    const int32_t* pages;  // the row's page table
    int first_page, last_page;
    int kv;
    int first_token, tokens;   // of the step
    int first_position;        // of first_token
    float* partial;            // null: the item covers all pages and writes `out`; else page sums go here
    int partial_pages;         // pages in the row of a partial: [token][head][page][2 + dim]
    int partial_token;         // first_token's place in the partials
};

struct AttentionInputs {
    const float* q;  // [tokens][q_pitch], scaled by log2(e) / sqrt(dim)
    size_t q_pitch;
    float* out;  // [tokens][heads * dim]
    int heads;
};

template <class T>
void attend(const Cache& c, int layer, const AttentionItem& item, const AttentionInputs& in, AttentionScratch& s) {
    const int dim = c.head_dim, share = in.heads / c.kv_heads, queries = item.tokens * share;
    s.query.resize(queries);
    s.position.resize(queries);
    for (int i = 0; i < queries; ++i) {
        const int token = item.first_token + i / share;
        s.query[i] = in.q + token * in.q_pitch + static_cast<size_t>(item.kv * share + i % share) * dim;
        s.position[i] = item.first_position + i / share;
    }
    s.scores.resize(QUERY_BLOCK * PAGE);
    s.page_out.resize(static_cast<size_t>(QUERY_BLOCK) * dim);
    if (item.partial == nullptr) {
        s.state.assign(static_cast<size_t>(queries) * dim, 0.0f);
        s.running.assign(queries, Running{});
    }
    const bool convert = sizeof(T) == 2 && queries > 2 * QUERY_BLOCK;
    const int last_position = item.first_position + item.tokens - 1;
    for (int page = item.first_page; page < item.last_page; ++page) {
        const T* keys = static_cast<const T*>(c.data) + c.keys(item.pages[page], layer, item.kv);
        const T* values = static_cast<const T*>(c.data) + c.values(item.pages[page], layer, item.kv);
        const int held = last_position + 1 - page * PAGE < PAGE ? last_position + 1 - page * PAGE : PAGE;
        if (convert) {  // many queries: widen the page once for all of them
            s.keys.resize(c.head_elements());
            s.values.resize(c.head_elements());
            const int tiles = (held + LANES - 1) / LANES;
            for (int i = 0; i < tiles * dim; ++i) store(&s.keys[i * LANES], load(keys + i * LANES));
            for (int i = 0; i < held * dim / LANES; ++i) store(&s.values[i * LANES], load(values + i * LANES));
        }
        const auto span = [&](const T* data) {
            const char* begin = reinterpret_cast<const char*>(data);
            return Ahead{begin, begin + sizeof(T) * c.head_elements()};
        };
        const Ahead nothing{nullptr, nullptr};
        // The first block of queries reads the page from memory, the others from the cache. Meanwhile it asks for the
        // page's values, and then for the next page's keys.
        Ahead soon = convert ? nothing : span(values);
        Ahead later = nothing;
        if (page + 1 < item.last_page)
            later = span(static_cast<const T*>(c.data) + c.keys(item.pages[page + 1], layer, item.kv));
        for (int first = 0; first < queries; first += QUERY_BLOCK, soon = later = nothing) {
            const int count = queries - first < QUERY_BLOCK ? queries - first : QUERY_BLOCK;
            int valid[QUERY_BLOCK], most = 0;
            for (int i = 0; i < count; ++i) {
                const int n = s.position[first + i] + 1 - page * PAGE;
                valid[i] = n < 0 ? 0 : (n > PAGE ? PAGE : n);
                most = valid[i] > most ? valid[i] : most;
            }
            if (most == 0) continue;
            PageSums sums;
            if (convert)
                attend_page<float>(count, s.keys.data(), s.values.data(), dim, &s.query[first], valid, most,
                                   s.scores.data(), s.page_out.data(), sums, soon, later);
            else
                attend_page<T>(count, keys, values, dim, &s.query[first], valid, most, s.scores.data(),
                               s.page_out.data(), sums, soon, later);
            MergeFactors factors{};
            if (item.partial == nullptr)
                factors = merge_sums(count, &s.running[first], sums.largest, sums.total, valid);
            for (int i = 0; i < count; ++i) {
                if (valid[i] == 0) continue;
                const float* page_value = &s.page_out[static_cast<size_t>(i) * dim];
                const int n = first + i;
                if (item.partial == nullptr) {
                    merge_value(&s.state[static_cast<size_t>(n) * dim], page_value, factors.before(i), factors.now(i),
                                dim);
                } else {
                    const size_t head = item.kv * share + n % share;
                    const size_t token = item.partial_token + n / share;
                    float* to = item.partial +
                                ((token * in.heads + head) * item.partial_pages + page) * static_cast<size_t>(dim + 2);
                    to[0] = sums.largest[i];
                    to[1] = sums.total[i];
                    std::memcpy(to + 2, page_value, sizeof(float) * dim);
                }
            }
        }
    }
    if (item.partial != nullptr) return;
    for (int n = 0; n < queries; ++n) {
        float* to = in.out + (static_cast<size_t>(item.first_token + n / share) * in.heads + item.kv * share + n % share) * dim;
        const f32x16 total = splat(s.running[n].total);
        for (int d = 0; d < dim; d += LANES) store(to + d, load(&s.state[static_cast<size_t>(n) * dim + d]) / total);
    }
}

/// Merge the page sums of one (token, head), partial [pages][2 + dim], into out [dim].
inline void merge_partials(const float* partial, int pages, int dim, float* out) {
    Running run;
    for (int d = 0; d < dim; d += LANES) store(out + d, zero());
    constexpr int valid = 1;
    for (int page = 0; page < pages; ++page, partial += dim + 2) {
        const MergeFactors f = merge_sums(1, &run, partial, partial + 1, &valid);
        merge_value(out, partial + 2, f.before(0), f.now(0), dim);
    }
    for (int d = 0; d < dim; d += LANES) store(out + d, load(out + d) / splat(run.total));
}

}  // namespace lt
