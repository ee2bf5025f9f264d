#include "decoder.h"

#include <algorithm>

namespace lt {

namespace {

Matrix matrix(const LtMatrix& m) { return {m.data, m.kind, m.rows, m.cols}; }

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int SPLIT_TOKENS = 4;      // segments up to this long have their pages computed apart
constexpr int ITEM_PAGES = 4;        // pages of one such work item
constexpr int TILE_QUERY_TOKENS = 64;
constexpr int MLP_TOKENS = 256;      // tokens whose gate and up values stay in the second-level cache

}  // namespace

Decoder::Decoder(const LtModel& model)
    : model_(model), layers_(model.layer, model.layer + model.layers), pool_(model.threads) {
    model_.layer = nullptr;
    q_width_ = model.heads * model.head_dim;
    kv_width_ = model.kv_heads * model.head_dim;
    qkv_width_ = q_width_ + 2 * kv_width_;
    const bool amx = model.use_amx != 0 && amx_permitted();
    for (int i = 0; i < pool_.threads(); ++i) {
        scratch_.push_back(std::make_unique<ThreadScratch>());
        scratch_.back()->amx.set_enabled(amx);
    }
}

/// Run fn(i) for all i < count; threads take `chunk` of them at a time. Ends with a barrier.
template <class Fn>
void Decoder::each(int64_t count, int64_t chunk, Fn&& fn) {
    for (int64_t begin = pool_.take() * chunk; begin < count; begin = pool_.take() * chunk) {
        const int64_t end = std::min(begin + chunk, count);
        for (int64_t i = begin; i < end; ++i) fn(static_cast<int>(i));
    }
    pool_.barrier();
}

int64_t Decoder::group_chunk(int64_t groups) const {
    return std::max<int64_t>(1, groups / (static_cast<int64_t>(pool_.threads()) * 4));
}

int64_t Decoder::token_chunk(int64_t tokens) const {
    return std::max<int64_t>(1, tokens / (static_cast<int64_t>(pool_.threads()) * 8));
}

int64_t Decoder::check(const LtStep& step) const {
    for (int i = 0; i < step.tokens; ++i) {
        const int p = step.position[i], r = step.row[i];
        if (step.token[i] < 0 || step.token[i] >= model_.vocab || p < 0 || p >= model_.positions || r < 0 ||
            r >= step.rows || p / PAGE >= step.max_pages)
            return i + 1;
        const int32_t* table = step.page_table + static_cast<size_t>(r) * step.max_pages;
        const bool continues = i > 0 && step.row[i - 1] == r && step.position[i - 1] + 1 == p;
        for (int page = continues ? p / PAGE : 0; page <= p / PAGE; ++page)
            if (table[page] < 0 || table[page] >= step.pages) return i + 1;
    }
    return 0;
}

void Decoder::plan_attention(const LtStep& step) {
    segments_.clear();
    segment_of_.resize(step.tokens);
    for (int i = 0; i < step.tokens; ++i) {
        const bool continues =
            i > 0 && step.row[i - 1] == step.row[i] && step.position[i - 1] + 1 == step.position[i];
        if (!continues) {
            const int32_t* pages = step.page_table + static_cast<size_t>(step.row[i]) * step.max_pages;
            segments_.push_back({i, 0, step.position[i], pages, nullptr, 0});
        }
        ++segments_.back().tokens;
        segment_of_[i] = static_cast<int>(segments_.size()) - 1;
    }
    const int threads = pool_.threads();
    const int64_t enough = static_cast<int64_t>(threads) * 8;
    const bool split = threads > 1 && static_cast<int64_t>(segments_.size()) * model_.kv_heads < enough;
    const size_t entry = model_.head_dim + 2;
    size_t floats = 0;
    for (Segment& s : segments_) {
        s.partial_pages = (s.position + s.tokens - 1) / PAGE + 1;
        if (split && s.tokens <= SPLIT_TOKENS && s.partial_pages > 1)
            floats += entry * s.tokens * model_.heads * s.partial_pages;
    }
    partials_.reserve(floats);
    floats = 0;
    items_.clear();
    for (Segment& s : segments_) {
        const int pages = s.partial_pages;
        const bool apart = split && s.tokens <= SPLIT_TOKENS && pages > 1;
        int tokens = s.tokens;
        if (apart) {
            s.partial = partials_.get() + floats;
            floats += entry * s.tokens * model_.heads * pages;
        } else {
            const int64_t share = static_cast<int64_t>(s.tokens) * model_.kv_heads / (threads * 4);
            tokens = static_cast<int>(std::clamp<int64_t>(share, 2, TILE_QUERY_TOKENS));
        }
        const int step_pages = apart ? ITEM_PAGES : pages;
        for (int first = 0; first < s.tokens; first += tokens) {
            const int count = std::min(tokens, s.tokens - first);
            const int position = s.position + first;
            const int end = (position + count - 1) / PAGE + 1;
            for (int page = 0; page < end; page += step_pages)
                for (int kv = 0; kv < model_.kv_heads; ++kv)
                    items_.push_back({s.pages, page, std::min(page + step_pages, end), kv, s.first + first, count,
                                      position, s.partial, pages, first});
        }
    }
    // Longest first, so that the last tasks taken are short and the threads end together.
    std::stable_sort(items_.begin(), items_.end(), [](const AttentionItem& a, const AttentionItem& b) {
        return static_cast<int64_t>(a.last_page - a.first_page) * a.tokens >
               static_cast<int64_t>(b.last_page - b.first_page) * b.tokens;
    });
}

int64_t Decoder::forward(const LtStep& step) {
    if (step.tokens == 0) return 0;
    const int64_t bad = check(step);
    if (bad != 0) return bad;
    plan_attention(step);
    step_ = &step;
    cache_ = {step.cache, model_.half_cache != 0, model_.layers, model_.kv_heads, model_.head_dim};
    const size_t tokens = step.tokens;
    x_.reserve(tokens * model_.hidden);
    qkv_.reserve(tokens * qkv_width_);
    attended_.reserve(tokens * q_width_);
    hidden_ = hidden_in_.reserve(std::max<size_t>(tokens, step.outputs), model_.hidden);
    attended_q_ = attended_in_.reserve(tokens, q_width_);
    ffn_ = ffn_in_.reserve(tokens, model_.ffn);
    for (auto& s : scratch_) {
        s->norm.reserve(model_.hidden);
        s->gate.reserve(MLP_TOKENS * BLOCK);
        s->up.reserve(MLP_TOKENS * BLOCK);
        s->logits.reserve(static_cast<size_t>(step.outputs) * GROUP);
        s->best.assign(step.outputs, Best{-std::numeric_limits<float>::infinity(), -1});
    }
    pool_.run([](void* self, int thread) { static_cast<Decoder*>(self)->run(thread); }, this);
    if (step.argmax != nullptr) {
        for (int i = 0; i < step.outputs; ++i) {
            Best best = scratch_[0]->best[i];
            for (const auto& s : scratch_) {
                const Best& other = s->best[i];
                const bool better = other.value > best.value || (other.value == best.value && other.index < best.index);
                if (other.index >= 0 && (best.index < 0 || better)) best = other;
            }
            step.argmax[i] = best.index;
        }
    }
    return 0;
}

void Decoder::run(int thread) {
    ThreadScratch& s = *scratch_[thread];
    const LtStep& step = *step_;
    const int64_t tokens = step.tokens;
    for (int i = 0; i < model_.layers; ++i) {
        const LtLayer& layer = layers_[i];
        each(tokens, token_chunk(tokens), [&](int t) {
            if (i == 0) embed(t);
            norm_and_quantise(x_.get() + static_cast<size_t>(t) * model_.hidden, layer.attention_norm, t, s);
        });
        qkv(layer, s);
        each(tokens, token_chunk(tokens), [&](int t) { place(layer, i, t); });
        const AttentionInputs in{qkv_.get(), static_cast<size_t>(qkv_width_), attended_.get(), model_.heads};
        each(static_cast<int64_t>(items_.size()), 1, [&](int n) {
            if (cache_.half)
                attend<uint16_t>(cache_, i, items_[n], in, s.attention);
            else
                attend<float>(cache_, i, items_[n], in, s.attention);
        });
        each(tokens, token_chunk(tokens), [&](int t) { collect(layer, t); });
        residual_product(matrix(layer.o), attended_q_, s);
        each(tokens, token_chunk(tokens), [&](int t) {
            norm_and_quantise(x_.get() + static_cast<size_t>(t) * model_.hidden, layer.mlp_norm, t, s);
        });
        mlp_in(layer, s);
        residual_product(matrix(layer.down), ffn_, s);
    }
    if (step.outputs > 0) head(s);
    s.amx.end();
}

void Decoder::embed(int token) {
    dequantise_row(matrix(model_.embedding), step_->token[token], x_.get() + static_cast<size_t>(token) * model_.hidden);
}

void Decoder::quantise_row(const float* x, int n, const Activations& a, int token) {
    for (int b = 0; b < n / BLOCK; ++b) quantise_block(x + b * BLOCK, a, token, b);
}

void Decoder::norm_and_quantise(const float* x, const float* weight, int token, ThreadScratch& s) {
    rms_norm(x, weight, model_.hidden, model_.eps, s.norm.get());
    quantise_row(s.norm.get(), model_.hidden, hidden_, token);
}

void Decoder::qkv(const LtLayer& layer, ThreadScratch& s) {
    const Matrix q = matrix(layer.q), k = matrix(layer.k), v = matrix(layer.v);
    const int q_groups = q.groups(), kv_groups = k.groups();
    const int64_t groups = q_groups + 2 * kv_groups;
    each(groups, group_chunk(groups), [&](int g) {
        const bool is_q = g < q_groups, is_k = g < q_groups + kv_groups;
        const Matrix& m = is_q ? q : (is_k ? k : v);
        const int local = is_q ? g : (is_k ? g - q_groups : g - q_groups - kv_groups);
        group_product(m, local, hidden_, 0, step_->tokens, &s.amx,
                      {qkv_.get() + static_cast<size_t>(g) * GROUP, static_cast<size_t>(qkv_width_)});
    });
}

/// Bias, head norms and rotary embedding of a token's query and key; key and value go to the cache.
void Decoder::place(const LtLayer& layer, int index, int token) {
    const int dim = model_.head_dim, half = model_.rotary_dim / 2, position = step_->position[token];
    float* row = qkv_.get() + static_cast<size_t>(token) * qkv_width_;
    const auto add = [](float* x, const float* bias, int n) {
        if (bias != nullptr)
            for (int i = 0; i < n; i += LANES) store(x + i, load(x + i) + load(bias + i));
    };
    add(row, layer.q_bias, q_width_);
    add(row + q_width_, layer.k_bias, kv_width_);
    add(row + q_width_ + kv_width_, layer.v_bias, kv_width_);
    const float* cosine = model_.cosine + static_cast<size_t>(position) * half;
    const float* sine = model_.sine + static_cast<size_t>(position) * half;
    const float scale = model_.attention_scale * LOG2_E;
    for (int h = 0; h < model_.heads + model_.kv_heads; ++h) {
        float* x = row + static_cast<size_t>(h) * dim;
        const bool is_query = h < model_.heads;
        const float* norm = is_query ? layer.q_norm : layer.k_norm;
        if (norm != nullptr) rms_norm(x, norm, dim, model_.eps, x);
        for (int i = 0; i < half; ++i) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cosine[i] - b * sine[i];
            x[i + half] = b * cosine[i] + a * sine[i];
        }
        if (is_query)
            for (int i = 0; i < dim; i += LANES) store(x + i, load(x + i) * splat(scale));
    }
    const int page = segments_[segment_of_[token]].pages[position / PAGE];
    for (int kv = 0; kv < model_.kv_heads; ++kv) {
        const float* key = row + q_width_ + static_cast<size_t>(kv) * dim;
        if (cache_.half)
            write_kv<uint16_t>(cache_, page, index, kv, position % PAGE, key, key + kv_width_);
        else
            write_kv<float>(cache_, page, index, kv, position % PAGE, key, key + kv_width_);
    }
}

/// Merge a token's page sums where they were computed apart, and quantise the attention's output. The bias of the
/// product that follows goes to the residual stream here.
void Decoder::collect(const LtLayer& layer, int token) {
    const Segment& seg = segments_[segment_of_[token]];
    float* out = attended_.get() + static_cast<size_t>(token) * q_width_;
    if (seg.partial != nullptr) {
        const int dim = model_.head_dim, local = token - seg.first;
        const int pages = (seg.position + local) / PAGE + 1;
        for (int h = 0; h < model_.heads; ++h) {
            const size_t entry = (static_cast<size_t>(local) * model_.heads + h) * seg.partial_pages;
            merge_partials(seg.partial + entry * (dim + 2), pages, dim, out + h * dim);
        }
    }
    quantise_row(out, q_width_, attended_q_, token);
    if (layer.o_bias != nullptr) {
        float* x = x_.get() + static_cast<size_t>(token) * model_.hidden;
        for (int i = 0; i < model_.hidden; i += LANES) store(x + i, load(x + i) + load(layer.o_bias + i));
    }
}

/// x += m * a.
void Decoder::residual_product(const Matrix& m, const Activations& a, ThreadScratch& s) {
    const int64_t groups = m.groups();
    each(groups, group_chunk(groups), [&](int g) {
        group_product(m, g, a, 0, step_->tokens, &s.amx,
                      {x_.get() + static_cast<size_t>(g) * GROUP, static_cast<size_t>(model_.hidden), true});
    });
}

/// ffn_ = quantised silu(gate) * up, 32 columns at a time so that a block is quantised where it is made.
void Decoder::mlp_in(const LtLayer& layer, ThreadScratch& s) {
    const Matrix gate = matrix(layer.gate), up = matrix(layer.up);
    const int64_t blocks = model_.ffn / BLOCK;
    each(blocks, group_chunk(blocks), [&](int b) {
        for (int first = 0; first < step_->tokens; first += MLP_TOKENS) {
            const int last = std::min(first + MLP_TOKENS, step_->tokens);
            // Scratch holds tokens from `first` on, outputs are addressed from token 0.
            const ptrdiff_t shift = static_cast<ptrdiff_t>(first) * BLOCK;
            for (int half = 0; half < 2; ++half) {
                float* g = s.gate.get() + half * GROUP - shift;
                float* u = s.up.get() + half * GROUP - shift;
                group_product(gate, 2 * b + half, hidden_, first, last, &s.amx, {g, BLOCK});
                group_product(up, 2 * b + half, hidden_, first, last, &s.amx, {u, BLOCK});
            }
            for (int t = first; t < last; ++t) {
                float* g = s.gate.get() + static_cast<size_t>(t - first) * BLOCK;
                const float* u = s.up.get() + static_cast<size_t>(t - first) * BLOCK;
                store(g, swiglu(load(g), load(u)));
                store(g + LANES, swiglu(load(g + LANES), load(u + LANES)));
                quantise_block(g, ffn_, t, b);
            }
        }
    });
}

void Decoder::head(ThreadScratch& s) {
    const LtStep& step = *step_;
    each(step.outputs, 1, [&](int n) {
        const float* x = x_.get() + static_cast<size_t>(step.output[n]) * model_.hidden;
        norm_and_quantise(x, model_.final_norm, n, s);
    });
    const Matrix m = matrix(model_.head);
    const int64_t groups = m.groups();
    each(groups, std::max<int64_t>(1, group_chunk(groups) / 4), [&](int g) {
        group_product(m, g, hidden_, 0, step.outputs, &s.amx, {s.logits.get(), GROUP});
        const int begin = g * GROUP, count = std::min(GROUP, model_.vocab - begin);
        for (int n = 0; n < step.outputs; ++n) {
            const float* y = s.logits.get() + static_cast<size_t>(n) * GROUP;
            if (step.logits != nullptr)
                std::memcpy(step.logits + static_cast<size_t>(n) * model_.vocab + begin, y, sizeof(float) * count);
            if (step.argmax == nullptr) continue;
            Best& best = s.best[n];
            const f32x16 never = splat(-std::numeric_limits<float>::infinity());
            if (!(max_lane(first_lanes(count, load(y), never)) >= best.value)) continue;
            for (int i = 0; i < count; ++i) {
                // Tasks come in any order to a thread: of equal values the lowest index wins.
                if (y[i] > best.value || (y[i] == best.value && (best.index < 0 || begin + i < best.index)))
                    best = {y[i], begin + i};
            }
        }
    });
}

}  // namespace lt
