// The plain C interface that native.py calls. All structs hold pointers that the caller keeps alive.
#pragma once

#include <cstdint>

extern "C" {

struct LtMatrix {
    const uint8_t* data;  // packed as gemm.h says; null where a model has no such matrix
    int32_t kind;
    int32_t rows;
    int32_t cols;
};

struct LtLayer {
    LtMatrix q, k, v, o, gate, up, down;
    const float* attention_norm;
    const float* mlp_norm;
    const float* q_bias;  // biases and head norms: null if the model has none
    const float* k_bias;
    const float* v_bias;
    const float* o_bias;
    const float* q_norm;
    const float* k_norm;
};

struct LtModel {
    int32_t layers, hidden, heads, kv_heads, head_dim, rotary_dim, ffn, vocab;
    int32_t positions;   // rows of the rotary tables
    int32_t half_cache;  // 1: fp16 keys and values, 0: fp32
    int32_t threads;
    int32_t use_amx;
    float eps;
    float attention_scale;
    LtMatrix embedding, head;
    const float* final_norm;
    const float* cosine;  // [positions][rotary_dim / 2]
    const float* sine;
    const LtLayer* layer;
};

struct LtStep {
    int32_t tokens, rows, max_pages, pages, outputs;
    const int32_t* token;        // [tokens]
    const int32_t* position;     // [tokens]
    const int32_t* row;          // [tokens], index into page_table
    const int32_t* page_table;   // [rows][max_pages]
    const int32_t* output;       // [outputs], index of a token of the step
    void* cache;
    float* logits;    // [outputs][vocab] or null
    int32_t* argmax;  // [outputs] or null
};

/// Name of the compiled instruction set.
const char* lt_isa();
/// Whether AMX was compiled in and the system lets this process use it.
int32_t lt_amx();
/// A decoder, or null if memory or threads are short.
void* lt_decoder_create(const LtModel* model);
void lt_decoder_destroy(void* decoder);
/// Compute a step. 0, or the number of the first bad token plus 1 (id, position, row or page out of range), or -1 if
/// memory is short. One call at a time for a decoder.
int64_t lt_decoder_forward(void* decoder, const LtStep* step);
/// y[tokens][rows] = x[tokens][cols] times the packed matrix. 0, or -1 if memory is short.
int32_t lt_linear(const LtMatrix* matrix, const float* x, int32_t tokens, float* y, int32_t threads, int32_t use_amx);
/// out[cols] of one row, dequantised.
void lt_dequantise(const LtMatrix* matrix, int32_t row, float* out);
/// Attention alone: q [tokens][heads][dim] unscaled, of one row whose positions begin at first_position; the cache
/// holds their keys and values. split: 1 computes page sums apart and merges them, 0 runs along the pages.
int32_t lt_attention(void* cache, int32_t half_cache, int32_t layers, int32_t kv_heads, int32_t head_dim, int32_t layer,
                     const int32_t* pages, const float* q, int32_t tokens, int32_t heads, int32_t first_position,
                     float scale, int32_t split, float* out);
/// Write keys and values [tokens][kv_heads][dim] of one row at positions from first_position.
void lt_write_kv(void* cache, int32_t half_cache, int32_t layers, int32_t kv_heads, int32_t head_dim, int32_t layer,
                 const int32_t* pages, const float* k, const float* v, int32_t tokens, int32_t first_position);
}
