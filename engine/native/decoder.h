// A Llama-family decoder: its packed weights and one forward pass over a flattened batch.
#pragma once
#include <memory>
#include <vector>

#include "arena.h"
#include "kernel_table.h"
#include "large_pages.h"
#include "packing.h"
#include "tandem_native.h"
#include "thread_pool.h"

namespace tandem {

struct Layer {
    PackedMatrix qkv, output, down;
    PackedMatrix gate_up;  // panels of gates and of ups take turns
    std::vector<float> attention_norm, mlp_norm;
    std::vector<float> qkv_bias;            // empty: none
    std::vector<float> query_norm, key_norm;  // empty: none
};

// The largest logit of a row so far.

// Gates and ups that are computed before they are multiplied: a pair of panels of so many rows, or more pairs of fewer rows.
constexpr int kGatedRows = 256;

// Buffers of one step, float32, grown to the largest step seen. `rows` are tokens.
struct Workspace {
    int rows = 0;
    LargeVector<float> residual, qkv, attended, activated, cos, sin;
    std::vector<LargeVector<float>> normed;      // of each thread: rows that are packed together
    std::vector<LargeVector<float>> gate_up;     // of each thread: some panels of gates and of ups
    LargeVector<uint8_t> packed;                 // activations as the kernels read them
    LargeVector<uint8_t> packed_gated;           // those of the second product of an MLP, where the first one packs them
    std::vector<LargeVector<uint8_t>> expanded;   // weights of each thread, where kernels decode them into memory
    std::vector<LargeVector<uint8_t>> attention;  // scratch of each thread
    std::vector<AttentionTask> tasks;             // of one layer
    std::vector<int32_t> kept;          // the step's rows that go on after the last layer's keys and values, ascending
    std::vector<int32_t> logit_places;  // of each row whose logits are wanted: its place among the kept ones

    std::vector<LargeVector<float>> seen_logits;  // of each thread: of some panels, where nobody wants them all
    std::vector<Peak> peaks;            // of each thread's part of the vocabulary, row after row

    size_t num_bytes() const;
};

// Neighbouring query tokens of one sequence that attend in the same layer.
struct QueryRun {
    int sequence;
    int first_query;  // among the sequence's new tokens
    int count;
    int row;  // of the first one, in the buffers of queries and of what was attended
};

class Decoder {
  public:
    // Throws std::invalid_argument for sizes that the kernels do not take.
    Decoder(const TandemModelSpec& spec, const float* inverse_frequencies, const KernelTable& kernels);

    void load(TandemTensor tensor, int layer, int rows, int columns, NumberFormat source, NumberFormat format,
              const void* data);
    void attach_pool(const TandemKvPool& pool);

    // Throws std::invalid_argument for arrays that point outside the model or the pool: nothing was written then.
    void forward(const TandemStep& step, float* logits, size_t logits_stride, float* hidden,
                 TandemLayerCallback layer_done);

    const char* isa() const { return kernels_.name; }
    int hidden_size() const { return spec_.hidden_size; }
    int vocab_size() const { return spec_.vocab_size; }
    // Whether matrices can be kept in this format.
    bool takes(NumberFormat format) const { return kernels_.linear[(int)format].multiply != nullptr; }
    const Arena& arena() const { return arena_; }
    void status(TandemModelStatus* status) const;

  private:
    struct Part {  // where a tensor goes
        PackedMatrix* matrix;
        int matrix_rows, first_row, columns;
        int panel_step = 1;  // 2: every other panel
    };
    Part matrix_part(TandemTensor tensor, int layer);
    std::vector<float>* vector_part(TandemTensor tensor, int layer, size_t* offset, size_t* size);

    void check_loaded() const;
    void check_step(const TandemStep& step) const;
    std::vector<const PackedMatrix*> matrices() const;
    void reserve(int rows);
    void compute_rotations(const TandemStep& step);
    void embed(const TandemStep& step);
    void pack_normed(const PackedMatrix& matrix, const std::vector<float>& weight, int rows);
    void pack(const PackedMatrix& matrix, const float* x, size_t stride, int rows);
    void multiply_panels(const PackedMatrix& matrix, int first_panel, int last_panel, const uint8_t* packed, int rows,
                         float* out, size_t out_stride, bool add);
    void add_to_residual(const PackedMatrix& matrix, const uint8_t* packed, int rows);
    bool packs_gates(const Layer& layer) const;
    void run_mlp(const Layer& layer, int rows);
    void activate_gates(const PackedMatrix& matrix, int rows);
    void rotate_heads(const std::vector<float>& norm, int first_head, int num_heads, int row, float* rows);
    void finish_queries(const Layer& layer, const int32_t* step_rows, int count);
    void write_kv(const TandemStep& step, const Layer& layer, const KvLayer& kv);
    void attend();
    int queries_of_task(int count) const;
    void add_attention_tasks(const TandemStep& step, const KvLayer& kv, const QueryRun& run);
    void add_kept_runs(const TandemStep& step, const KvLayer& kv);
    void choose_kept_rows(const TandemStep& step);
    void keep_rows(LargeVector<float>& buffer, size_t stride) const;
    void run_layer(const TandemStep& step, int index);
    void run_last_layer(const TandemStep& step);
    void finish_layer(const Layer& layer, int rows);
    void copy_taps(const TandemStep& step, int layer, const int32_t* rows) const;
    void compute_logits(const TandemStep& step, float* logits, size_t logits_stride, float* hidden);
    KvLayer kv_layer(int index) const;

    int heads_width() const { return spec_.num_heads * spec_.head_dim; }
    int kv_width() const { return spec_.num_kv_heads * spec_.head_dim; }
    size_t qkv_stride() const { return (size_t)padded(heads_width() + 2 * kv_width()); }

    const TandemModelSpec spec_;
    const KernelTable kernels_;
    const std::vector<float> inverse_frequencies_;
    Arena arena_;
    ThreadPool threads_;
    PackedMatrix embedding_, output_;  // output_ empty: tied to the embedding
    std::vector<float> final_norm_;
    std::vector<Layer> layers_;
    TandemKvPool pool_{};
    Workspace work_;
};

}  // namespace tandem
