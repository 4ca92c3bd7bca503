// What one instruction set offers: a table of functions that the decoder calls. Each variant file fills one.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>

#include "packed_matrix.h"

namespace tandem {

constexpr int kMostRunRows = 16;

// A product out[m, :] (+)= x[m, :] * W^T in two steps, so that matrices with the same input share the first.
struct LinearKernels {
    // Bytes that `pack` writes for `rows` activations of k_padded inputs.
    size_t (*packed_bytes)(int rows, int k_padded);
    // Rows that lie together in the form that `multiply` reads, at most kMostRunRows.
    int (*run_rows)(int rows);
    // Brings rows [first, last) of `rows` into that form: whole runs. x [last - first, k] is float32, rows `stride` apart.
    void (*pack)(const float* x, size_t stride, int first, int last, int rows, int k, int k_padded, void* packed);
    // Bytes of scratch memory, aligned to 64, that one thread's `multiply` needs.
    size_t (*scratch_bytes)(int rows, int k_padded);
    // Computes outputs of panels [first, last) for all rows; `out` is where the first panel's go. A row's sums do not
    // depend on `rows`. Null: this instruction set has no kernel for the format.
    void (*multiply)(const void* packed, int rows, const PackedMatrix& w, int first_panel, int last_panel, float* out,
                     size_t out_stride, bool add, void* scratch);
    // Computes pairs [first, last) of panels of gates and ups, and puts silu(gate) * up at its place among activations of
    // `gated_k_padded` inputs, packed as `pack` does. Null: sums go by way of floats.
    void (*multiply_gated)(const void* packed, int rows, const PackedMatrix& w, int first_pair, int last_pair,
                           int gated_k_padded, void* gated, void* scratch) = nullptr;
};

enum class KvType : int32_t { kF32 = 0, kBf16 = 1 };

// The paged pool [blocks, layers, 2, kv_heads, block_tokens, head_dim] seen from one layer. Strides in elements.
struct KvLayer {
    uint8_t* base = nullptr;  // key of block 0, this layer
    KvType type = KvType::kF32;
    size_t block_stride = 0;
    size_t value_offset = 0;
    size_t head_stride = 0;
    int block_tokens = 0;
    int head_dim = 0;
};

// Attention of some consecutive query tokens of one sequence with some neighbouring KV heads.
struct AttentionTask {
    KvLayer kv;
    const int32_t* block_table;
    int first_kv_head;
    int num_kv_heads;
    int group;           // query heads per KV head
    int num_queries;     // query tokens of this task
    int first_position;  // of the first query token
    int window;          // 0: every earlier key is seen
    // Of a sequence that verifies a tree, else null: for each of its rows in this step, bit j says that it sees the j-th
    // of them, and where it stands on its branch. `first_row` is the task's first, so row 0's key is at
    // first_position - first_row.
    const int32_t* tree_masks;
    const int32_t* tree_positions;
    int first_row;
    float scale;
    const float* q;  // first query token, first query head of the first KV head; heads are head_dim apart
    size_t q_stride;
    float* out;
    size_t out_stride;
};

// Up to this many query tokens a task takes all KV heads, so that a block's bytes are read in one run.
constexpr int kMaxSharedQueries = 16;

// Whose noise a sampled row uses (engine/noise.py).
struct NoiseKey {
    uint64_t seed;
    uint32_t choice_index;
    uint32_t position;
};

// The largest of the logits that were looked at; of equal ones the first.
struct Peak {
    float value = -std::numeric_limits<float>::infinity();
    int32_t token = -1;
    bool has_nan = false;
};

// The passes of top-k, top-p and min-p over one row of a vocabulary (kernels/filtering.h).
struct FilterKernels {
    void (*scale_row)(float* row, int n, float peak, float temperature);
    void (*exponentials)(const float* values, int n, float* weights);
    double (*mass_at_least)(const float* row, int n, float least, int* count);
    int (*collect_at_least)(const float* row, int n, float least, float* found);
    void (*drop_below)(float* row, int n, float least);
};

struct KernelTable {
    const char* name;
    LinearKernels linear[kNumFormats];
    // The same for matrices that half precision does not fit; without kernels: `linear` is not in half precision.
    LinearKernels beyond_half[kNumFormats];
    void (*rms_norm)(const float* x, size_t stride, int rows, int n, const float* weight, float epsilon, float* out,
                     size_t out_stride);
    void (*add_bias)(float* x, size_t stride, int rows, int n, const float* bias);
    // out[:, i] = silu(x[:, i]) * x[:, 16 + i] for 16 columns: a panel of gates and one of ups.
    void (*silu_multiply)(const float* x, size_t stride, int rows, float* out, size_t out_stride);
    // Rotates one head in place: halves (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).
    void (*rotate)(float* head, int head_dim, const float* cos, const float* sin);
    void (*store_kv)(const float* row, int head_dim, KvType type, void* destination);
    int most_attention_rows;  // query tokens * group of one task, unless one token alone has more
    size_t (*attention_scratch_bytes)(int rows, int num_kv_heads, int head_dim);
    // `next` (or null) is the task that this thread does after this one: its first bytes are fetched.
    void (*attention)(const AttentionTask& task, const AttentionTask* next, void* scratch);
    void (*embed)(const PackedMatrix& table, int token, float* out);
    // Looks at the logits of `count` tokens from `token` on, later ones than before.
    void (*look_at)(const float* logits, int token, int count, Peak* peak);
    // The token with the largest scaled logit + noise; scaled[peak] is the largest scaled logit, 0.
    int64_t (*gumbel_argmax)(const float* scaled, int vocab_size, int64_t peak, const NoiseKey& key);
    FilterKernels filter;
    // For benchmarks: reads bytes (a multiple of 128) once; multiplies in registers and returns the operations done.
    int32_t (*read_once)(const uint8_t* data, size_t num_bytes);
    double (*multiply_in_registers)(NumberFormat format, int iterations);

    bool in_half(NumberFormat format) const { return beyond_half[(int)format].multiply != nullptr; }
    const LinearKernels& linear_of(const PackedMatrix& matrix) const {
        return in_half(matrix.format) && !matrix.takes_half() ? beyond_half[(int)matrix.format] : linear[(int)matrix.format];
    }
};

}  // namespace tandem
