// The C interface: the decoder's life, and the operations that tests call one by one.
#include "api.h"

#include <exception>
#include <vector>

#include "decoder.h"

extern "C" {

const char* lt_isa() {
#if defined(LT_AVX512)
    return "avx512-vnni";
#elif defined(LT_AVX2)
    return "avx2";
#else
    return "generic";
#endif
}

int32_t lt_amx() { return lt::amx_permitted() ? 1 : 0; }

void* lt_decoder_create(const LtModel* model) {
    try {
        return new lt::Decoder(*model);
    } catch (const std::exception&) {
        return nullptr;
    }
}

void lt_decoder_destroy(void* decoder) { delete static_cast<lt::Decoder*>(decoder); }

int64_t lt_decoder_forward(void* decoder, const LtStep* step) {
    try {
        return static_cast<lt::Decoder*>(decoder)->forward(*step);
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

int32_t lt_linear(const LtMatrix* matrix, const float* x, int32_t tokens, float* y, int32_t threads, int32_t use_amx) {
    struct Job {
        lt::Matrix m;
        lt::Activations a;
        float* y;
        int tokens;
        bool amx;
        lt::Pool* pool;
    };
    try {
        lt::ActivationBuffer buffer;
        lt::Matrix m{matrix->data, matrix->kind, matrix->rows, matrix->cols};
        const lt::Activations a = buffer.reserve(tokens, m.cols);
        for (int t = 0; t < tokens; ++t)
            for (int b = 0; b < m.blocks(); ++b)
                lt::quantise_block(x + static_cast<size_t>(t) * m.cols + b * lt::BLOCK, a, t, b);
        lt::Pool pool(threads);
        Job job{m, a, y, tokens, use_amx != 0 && lt::amx_permitted(), &pool};
        pool.run(
            [](void* context, int) {
                const Job& j = *static_cast<Job*>(context);
                lt::Amx amx;
                amx.set_enabled(j.amx);
                std::vector<float> out(static_cast<size_t>(j.tokens) * lt::GROUP);
                for (int64_t g = j.pool->take(); g < j.m.groups(); g = j.pool->take()) {
                    lt::group_product(j.m, static_cast<int>(g), j.a, 0, j.tokens, &amx, {out.data(), lt::GROUP});
                    const int begin = static_cast<int>(g) * lt::GROUP;
                    const int count = std::min(lt::GROUP, j.m.rows - begin);
                    for (int t = 0; t < j.tokens; ++t)
                        std::memcpy(j.y + static_cast<size_t>(t) * j.m.rows + begin, &out[t * lt::GROUP],
                                    sizeof(float) * count);
                }
                amx.end();
            },
            &job);
        return 0;
    } catch (const std::exception&) {
        return -1;
    }
}

void lt_dequantise(const LtMatrix* matrix, int32_t row, float* out) {
    lt::dequantise_row({matrix->data, matrix->kind, matrix->rows, matrix->cols}, row, out);
}

int32_t lt_attention(void* cache, int32_t half_cache, int32_t layers, int32_t kv_heads, int32_t head_dim, int32_t layer,
                     const int32_t* pages, const float* q, int32_t tokens, int32_t heads, int32_t first_position,
                     float scale, int32_t split, float* out) {
    try {
        const lt::Cache c{cache, half_cache != 0, layers, kv_heads, head_dim};
        const int count = (first_position + tokens - 1) / lt::PAGE + 1;
        const size_t width = static_cast<size_t>(heads) * head_dim;
        std::vector<float> scaled(tokens * width), partial;
        for (size_t i = 0; i < scaled.size(); ++i) scaled[i] = q[i] * (scale * 1.4426950408889634f);
        if (split != 0) partial.resize(static_cast<size_t>(tokens) * heads * count * (head_dim + 2));
        const lt::AttentionInputs in{scaled.data(), width, out, heads};
        lt::AttentionScratch scratch;
        for (int kv = 0; kv < kv_heads; ++kv) {
            for (int page = 0; page < count; page += split != 0 ? 1 : count) {
                const lt::AttentionItem item{pages, page, split != 0 ? page + 1 : count, kv, 0, tokens, first_position,
                                             split != 0 ? partial.data() : nullptr, count, 0};
                if (c.half)
                    lt::attend<uint16_t>(c, layer, item, in, scratch);
                else
                    lt::attend<float>(c, layer, item, in, scratch);
            }
        }
        for (int t = 0; split != 0 && t < tokens; ++t)
            for (int h = 0; h < heads; ++h)
                lt::merge_partials(&partial[(static_cast<size_t>(t) * heads + h) * count * (head_dim + 2)],
                                   (first_position + t) / lt::PAGE + 1, head_dim,
                                   out + (static_cast<size_t>(t) * heads + h) * head_dim);
        return 0;
    } catch (const std::exception&) {
        return -1;
    }
}

void lt_write_kv(void* cache, int32_t half_cache, int32_t layers, int32_t kv_heads, int32_t head_dim, int32_t layer,
                 const int32_t* pages, const float* k, const float* v, int32_t tokens, int32_t first_position) {
    const lt::Cache c{cache, half_cache != 0, layers, kv_heads, head_dim};
    for (int t = 0; t < tokens; ++t) {
        const int position = first_position + t, page = pages[position / lt::PAGE], slot = position % lt::PAGE;
        for (int kv = 0; kv < kv_heads; ++kv) {
            const size_t at = (static_cast<size_t>(t) * kv_heads + kv) * head_dim;
            if (c.half)
                lt::write_kv<uint16_t>(c, page, layer, kv, slot, k + at, v + at);
            else
                lt::write_kv<float>(c, page, layer, kv, slot, k + at, v + at);
        }
    }
}
}
