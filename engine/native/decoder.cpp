#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace tandem {

namespace {

const TandemModelSpec& checked(const TandemModelSpec& spec) {
    if (spec.head_dim % 32 != 0 || spec.head_dim < 32 || spec.head_dim > 256)
        throw std::invalid_argument("head size " + std::to_string(spec.head_dim) + ": need a multiple of 32, at most 256");
    if (spec.num_kv_heads < 1 || spec.num_heads % spec.num_kv_heads != 0)
        throw std::invalid_argument("query heads must be a multiple of KV heads");
    if (spec.num_threads < 1) throw std::invalid_argument("num_threads must be at least 1");
    if (spec.vocab_size < 1 || spec.hidden_size < 1 || spec.intermediate_size < 1 || spec.num_layers < 1)
        throw std::invalid_argument("sizes must be positive");
    return spec;
}

// The first address of a buffer (64 bytes longer than needed) where a cache line starts.
uint8_t* aligned(std::vector<uint8_t>& buffer) { return (uint8_t*)(((size_t)buffer.data() + 63) / 64 * 64); }

}  // namespace

size_t Workspace::num_bytes() const {
    size_t bytes = packed.size();
    for (const auto* part : {&residual, &normed, &qkv, &attended, &activated, &cos, &sin})
        bytes += part->size() * sizeof(float);
    for (const auto& part : gate_up) bytes += part.size() * sizeof(float);
    for (const auto& scratch : attention) bytes += scratch.size();
    for (const auto& panels : expanded) bytes += panels.size();
    return bytes;
}

Decoder::Decoder(const TandemModelSpec& spec, const float* inverse_frequencies, const KernelTable& kernels)
    : spec_(checked(spec)),
      kernels_(kernels),
      inverse_frequencies_(inverse_frequencies, inverse_frequencies + spec.head_dim / 2),
      threads_(spec.num_threads),
      layers_((size_t)spec.num_layers) {}

void Decoder::attach_pool(const TandemKvPool& pool) {
    if (!pool.address || pool.num_blocks < 1 || pool.block_tokens < 1)
        throw std::invalid_argument("the KV pool is empty");
    check_loaded();
    pool_ = pool;
}

void Decoder::forward(const TandemStep& step, float* logits, size_t logits_stride, float* hidden,
                      TandemLayerCallback layer_done) {
    check_step(step);
    if (logits_stride < (size_t)padded(spec_.vocab_size)) throw std::invalid_argument("logits_stride is too small");
    if (step.num_tokens == 0) return;
    reserve(step.num_tokens);
    compute_rotations(step);
    embed(step);
    for (int i = 0; i < spec_.num_layers; ++i) {
        run_layer(step, i);
        copy_taps(step, i);
        if (layer_done) layer_done(i);
    }
    compute_logits(step, logits, logits_stride, hidden);
}

void Decoder::check_step(const TandemStep& step) const {
    auto need = [](bool holds, const char* what) {
        if (!holds) throw std::invalid_argument(what);
    };
    need(pool_.address, "no KV pool is attached");
    need(step.num_tokens >= 0 && step.num_sequences >= 0 && step.num_logit_rows >= 0, "negative sizes");
    const int64_t num_slots = pool_.num_blocks * pool_.block_tokens;
    for (int i = 0; i < step.num_tokens; ++i) {
        need(step.inputs || (step.token_ids[i] >= 0 && step.token_ids[i] < spec_.vocab_size),
             "a token id is outside the vocabulary");
        need(step.positions[i] >= 0, "a position is negative");
        need(step.slots[i] >= 0 && step.slots[i] < num_slots, "a slot is outside the KV pool");
    }
    need(step.query_starts[0] == 0 && step.query_starts[step.num_sequences] == step.num_tokens,
         "query_starts do not cover the tokens");
    for (int b = 0; b < step.num_sequences; ++b) {
        const int queries = step.query_starts[b + 1] - step.query_starts[b], context = step.context_lens[b];
        need(queries >= 0 && context >= queries, "a context is shorter than its new tokens");
        if (step.tree_masks && queries > 0 && step.tree_masks[step.query_starts[b]] != 0)
            need(queries <= 31, "a tree has more than 31 rows");
        const int blocks = (context + pool_.block_tokens - 1) / pool_.block_tokens;
        need(blocks <= step.table_width, "a context is longer than its block table");
        const int32_t* table = step.block_tables + (size_t)b * step.table_width;
        for (int i = 0; i < blocks; ++i)
            need(table[i] >= 0 && table[i] < pool_.num_blocks, "a block id is outside the KV pool");
    }
    for (int i = 0; i < step.num_logit_rows; ++i)
        need(step.logit_rows[i] >= 0 && step.logit_rows[i] < step.num_tokens, "a logit row is outside the batch");
    for (int i = 0; i < step.num_tap_layers; ++i)
        need(step.tap_layers[i] >= 0 && step.tap_layers[i] < spec_.num_layers, "a tapped layer is outside the model");
}

std::vector<const PackedMatrix*> Decoder::matrices() const {
    std::vector<const PackedMatrix*> all = {&embedding_};
    if (output_.data) all.push_back(&output_);
    for (const Layer& layer : layers_) all.insert(all.end(), {&layer.qkv, &layer.output, &layer.gate_up, &layer.down});
    return all;
}

void Decoder::reserve(int rows) {
    if (rows <= work_.rows) return;
    const size_t n = (size_t)rows, hidden = (size_t)spec_.hidden_size;
    size_t packed = 0, expanded = 0;
    for (const PackedMatrix* matrix : matrices()) {
        const LinearKernels& kernel = kernels_.linear[(int)matrix->format];
        packed = std::max(packed, kernel.packed_bytes(rows, matrix->k_padded));
        expanded = std::max(expanded, kernel.scratch_bytes(rows, matrix->k_padded));
    }
    work_.residual.resize(n * (size_t)padded(spec_.hidden_size));
    work_.normed.resize(n * hidden);
    work_.qkv.resize(n * (size_t)padded(heads_width() + 2 * kv_width()));
    work_.attended.resize(n * (size_t)heads_width());
    work_.activated.resize(n * (size_t)padded(spec_.intermediate_size));
    work_.gate_up.resize((size_t)threads_.size());
    for (auto& part : work_.gate_up) part.resize(n * 2 * kPanelOutputs);
    work_.cos.resize(n * inverse_frequencies_.size());
    work_.sin.resize(n * inverse_frequencies_.size());
    work_.packed.resize(packed + 64);
    work_.expanded.resize((size_t)threads_.size());
    for (auto& part : work_.expanded) part.resize(expanded + 64);
    const int group = spec_.num_heads / spec_.num_kv_heads;
    const size_t scratch =
        std::max(kernels_.attention_scratch_bytes(std::max(group, kMaxAttentionRows), 1, spec_.head_dim),
                 kernels_.attention_scratch_bytes(group * kMaxSharedQueries, spec_.num_kv_heads, spec_.head_dim));
    work_.attention.resize((size_t)threads_.size());
    for (auto& part : work_.attention) part.resize(scratch + 64);
    work_.rows = rows;
}

void Decoder::compute_rotations(const TandemStep& step) {
    const size_t half = inverse_frequencies_.size();
    threads_.split(step.num_tokens, [&](int first, int last, int) {
        for (int row = first; row < last; ++row)
            for (size_t i = 0; i < half; ++i) {
                const float angle = (float)step.positions[row] * inverse_frequencies_[i];
                work_.cos[(size_t)row * half + i] = std::cos(angle);
                work_.sin[(size_t)row * half + i] = std::sin(angle);
            }
    });
}

void Decoder::embed(const TandemStep& step) {
    const size_t stride = (size_t)padded(spec_.hidden_size);
    threads_.split(step.num_tokens, [&](int first, int last, int) {
        for (int row = first; row < last; ++row) {
            float* out = work_.residual.data() + (size_t)row * stride;
            if (step.inputs)
                std::copy_n(step.inputs + (size_t)row * spec_.hidden_size, spec_.hidden_size, out);
            else
                kernels_.embed(embedding_, step.token_ids[row], out);
        }
    });
}

void Decoder::normalise(const std::vector<float>& weight, int rows, const float* x, float* out) {
    const size_t stride = (size_t)padded(spec_.hidden_size), hidden = (size_t)spec_.hidden_size;
    threads_.split(rows, [&](int first, int last, int) {
        kernels_.rms_norm(x + (size_t)first * stride, stride, last - first, spec_.hidden_size, weight.data(),
                          spec_.rms_norm_eps, out + (size_t)first * hidden, hidden);
    });
}

void Decoder::multiply(const PackedMatrix& matrix, const float* x, size_t stride, int rows, float* out,
                       size_t out_stride, bool add) {
    const LinearKernels& kernel = kernels_.linear[(int)matrix.format];
    uint8_t* packed = aligned(work_.packed);
    kernel.pack(x, stride, rows, matrix.k, matrix.k_padded, packed);
    threads_.split(matrix.panels, [&](int first, int last, int thread) {
        kernel.multiply(packed, rows, matrix, first, last, out + (size_t)first * kPanelOutputs, out_stride, add,
                        aligned(work_.expanded[(size_t)thread]));
    });
}

// activated = silu(gate) * up, panel by panel, so that gates and ups never leave the cache.
void Decoder::multiply_gated(const PackedMatrix& matrix, int rows) {
    const LinearKernels& kernel = kernels_.linear[(int)matrix.format];
    const size_t inner_stride = (size_t)padded(spec_.intermediate_size);
    uint8_t* packed = aligned(work_.packed);
    kernel.pack(work_.normed.data(), (size_t)spec_.hidden_size, rows, matrix.k, matrix.k_padded, packed);
    threads_.split(matrix.panels / 2, [&](int first, int last, int thread) {
        float* pair = work_.gate_up[(size_t)thread].data();
        for (int i = first; i < last; ++i) {
            kernel.multiply(packed, rows, matrix, 2 * i, 2 * i + 2, pair, 2 * kPanelOutputs, false,
                            aligned(work_.expanded[(size_t)thread]));
            kernels_.silu_multiply(pair, 2 * kPanelOutputs, rows,
                                   work_.activated.data() + (size_t)i * kPanelOutputs, inner_stride);
        }
    });
}

KvLayer Decoder::kv_layer(int index) const {
    KvLayer kv;
    kv.type = pool_.is_bfloat16 ? KvType::kBf16 : KvType::kF32;
    kv.block_tokens = pool_.block_tokens;
    kv.head_dim = spec_.head_dim;
    kv.head_stride = (size_t)pool_.block_tokens * spec_.head_dim;
    kv.value_offset = kv.head_stride * spec_.num_kv_heads;
    kv.block_stride = 2 * kv.value_offset * spec_.num_layers;
    kv.base = (uint8_t*)pool_.address + 2 * kv.value_offset * index * (pool_.is_bfloat16 ? 2 : 4);
    return kv;
}

void Decoder::write_kv(const TandemStep& step, const Layer& layer, const KvLayer& kv) {
    const int head_dim = spec_.head_dim, heads = spec_.num_heads, kv_heads = spec_.num_kv_heads;
    const size_t stride = (size_t)padded(heads_width() + 2 * kv_width()), half = inverse_frequencies_.size();
    const size_t element = kv.type == KvType::kBf16 ? 2 : 4;
    threads_.split(step.num_tokens, [&](int first, int last, int) {
        float* rows = work_.qkv.data() + (size_t)first * stride;
        if (!layer.qkv_bias.empty())
            kernels_.add_bias(rows, stride, last - first, heads_width() + 2 * kv_width(), layer.qkv_bias.data());
        for (int row = first; row < last; ++row, rows += stride) {
            const int64_t slot = step.slots[row];
            const size_t token = (size_t)(slot / kv.block_tokens) * kv.block_stride + (size_t)(slot % kv.block_tokens) * head_dim;
            for (int head = 0; head < heads + kv_heads; ++head) {
                float* part = rows + (size_t)head * head_dim;
                const std::vector<float>& norm = head < heads ? layer.query_norm : layer.key_norm;
                if (!norm.empty())
                    kernels_.rms_norm(part, 0, 1, head_dim, norm.data(), spec_.rms_norm_eps, part, 0);
                kernels_.rotate(part, head_dim, work_.cos.data() + (size_t)row * half, work_.sin.data() + (size_t)row * half);
            }
            for (int head = 0; head < kv_heads; ++head) {
                uint8_t* key = kv.base + (token + (size_t)head * kv.head_stride) * element;
                const float* key_row = rows + heads_width() + (size_t)head * head_dim;
                kernels_.store_kv(key_row, head_dim, kv.type, key);
                kernels_.store_kv(key_row + kv_width(), head_dim, kv.type, key + kv.value_offset * element);
            }
        }
    });
}

void Decoder::attend(const TandemStep& step, const KvLayer& kv) {
    work_.tasks.clear();
    for (int b = 0; b < step.num_sequences; ++b) add_attention_tasks(step, kv, b);
    threads_.take_turns((int)work_.tasks.size(), [&](int index, int thread) {
        const size_t after = (size_t)index + (size_t)threads_.size();
        const AttentionTask* next = after < work_.tasks.size() ? &work_.tasks[after] : nullptr;
        kernels_.attention(work_.tasks[(size_t)index], next,
                           aligned(work_.attention[(size_t)thread]));
    });
}

void Decoder::add_attention_tasks(const TandemStep& step, const KvLayer& kv, int sequence) {
    const int group = spec_.num_heads / spec_.num_kv_heads, start = step.query_starts[sequence];
    const int queries = step.query_starts[sequence + 1] - start;
    const bool shared = queries <= kMaxSharedQueries;
    const int most_queries = shared ? kMaxSharedQueries : std::max(1, kMaxAttentionRows / group);
    const int threads = threads_.size();
    const int most_heads = shared ? (spec_.num_kv_heads + threads - 1) / threads : 1;
    const size_t stride = (size_t)padded(heads_width() + 2 * kv_width()), out_stride = (size_t)heads_width();
    for (int offset = 0; offset < queries; offset += most_queries)
        for (int head = 0; head < spec_.num_kv_heads; head += most_heads) {
            const size_t row = (size_t)(start + offset), column = (size_t)(head * group * spec_.head_dim);
            AttentionTask task;
            task.kv = kv;
            task.block_table = step.block_tables + (size_t)sequence * step.table_width;
            task.first_kv_head = head;
            task.num_kv_heads = std::min(most_heads, spec_.num_kv_heads - head);
            task.group = group;
            task.num_queries = std::min(most_queries, queries - offset);
            task.first_position = step.context_lens[sequence] - queries + offset;
            task.window = spec_.sliding_window;
            const bool is_tree = step.tree_masks && queries > 1 && step.tree_masks[start] != 0;
            task.tree_masks = is_tree ? step.tree_masks + start : nullptr;
            task.tree_positions = is_tree ? step.positions + start : nullptr;
            task.first_row = offset;
            task.scale = spec_.attention_scale;
            task.q = work_.qkv.data() + row * stride + column;
            task.q_stride = stride;
            task.out = work_.attended.data() + row * out_stride + column;
            task.out_stride = out_stride;
            work_.tasks.push_back(task);
        }
}

void Decoder::run_layer(const TandemStep& step, int index) {
    const Layer& layer = layers_[(size_t)index];
    const int rows = step.num_tokens;
    const size_t residual_stride = (size_t)padded(spec_.hidden_size), hidden = (size_t)spec_.hidden_size;
    const size_t qkv_stride = (size_t)padded(heads_width() + 2 * kv_width());
    const KvLayer kv = kv_layer(index);

    normalise(layer.attention_norm, rows, work_.residual.data(), work_.normed.data());
    multiply(layer.qkv, work_.normed.data(), hidden, rows, work_.qkv.data(), qkv_stride, false);
    write_kv(step, layer, kv);
    attend(step, kv);
    multiply(layer.output, work_.attended.data(), (size_t)heads_width(), rows, work_.residual.data(), residual_stride, true);

    normalise(layer.mlp_norm, rows, work_.residual.data(), work_.normed.data());
    multiply_gated(layer.gate_up, rows);
    multiply(layer.down, work_.activated.data(), (size_t)padded(spec_.intermediate_size), rows, work_.residual.data(),
             residual_stride, true);
}

void Decoder::copy_taps(const TandemStep& step, int layer) const {
    const size_t stride = (size_t)padded(spec_.hidden_size), hidden = (size_t)spec_.hidden_size;
    for (int tap = 0; tap < step.num_tap_layers; ++tap)
        if (step.tap_layers[tap] == layer)
            for (int i = 0; i < step.num_logit_rows; ++i)
                std::copy_n(work_.residual.data() + (size_t)step.logit_rows[i] * stride, hidden,
                            step.taps + ((size_t)i * step.num_tap_layers + tap) * hidden);
}

void Decoder::compute_logits(const TandemStep& step, float* logits, size_t logits_stride, float* hidden) {
    if (step.num_logit_rows == 0) return;
    const size_t stride = (size_t)padded(spec_.hidden_size);
    for (int i = 0; i < step.num_logit_rows; ++i)
        normalise(final_norm_, 1, work_.residual.data() + (size_t)step.logit_rows[i] * stride,
                  hidden + (size_t)i * spec_.hidden_size);
    const PackedMatrix& head = output_.data ? output_ : embedding_;
    multiply(head, hidden, (size_t)spec_.hidden_size, step.num_logit_rows, logits, logits_stride, false);
}

void Decoder::status(TandemModelStatus* status) const {
    *status = {};
    status->packed_bytes = (int64_t)arena_.used_bytes();
    for (const Arena::Range& range : arena_.ranges()) {
        status->reserved_bytes += (int64_t)range.num_bytes;
        if (range.huge_pages) status->huge_page_bytes += (int64_t)range.num_bytes;
    }
    status->workspace_bytes = (int64_t)work_.num_bytes();
    status->num_threads = threads_.size();
    for (const PackedMatrix* matrix : matrices()) {
        status->compressed_exceptions += matrix->exceptions;
        status->compressed_plain_panels += matrix->plain_panels;
    }
}

}  // namespace tandem
