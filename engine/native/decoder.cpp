// What a decoder is made of and may be asked: sizes, checks, memory. Its steps are in forward.cpp, loading in weights.cpp.
#include "decoder.h"

#include <algorithm>
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

}  // namespace

size_t Workspace::num_bytes() const {
    size_t bytes = packed.size() + packed_gated.size();
    for (const auto* part : {&residual, &qkv, &attended, &activated, &cos, &sin})
        bytes += part->size() * sizeof(float);
    for (const auto& part : seen_logits) bytes += part.size() * sizeof(float);
    for (const auto& part : normed) bytes += part.size() * sizeof(float);
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

void Decoder::check_step(const TandemStep& step) const {
    auto need = [](bool holds, const char* what) {
        if (!holds) throw std::invalid_argument(what);
    };
    need(pool_.address, "no KV pool is attached");
    need(step.most_likely || !step.only_most_likely, "only the most likely tokens are wanted, and there is no room for them");
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
    const size_t n = (size_t)rows;
    size_t packed = 0, expanded = 0;
    for (const PackedMatrix* matrix : matrices()) {
        const LinearKernels& kernel = kernels_.linear_of(*matrix);
        packed = std::max(packed, kernel.packed_bytes(rows, matrix->k_padded));
        expanded = std::max(expanded, kernel.scratch_bytes(rows, matrix->k_padded));
    }
    work_.residual.resize(n * (size_t)padded(spec_.hidden_size));
    work_.normed.resize((size_t)threads_.size());
    for (auto& part : work_.normed) part.resize((size_t)kMostRunRows * (size_t)spec_.hidden_size);
    work_.qkv.resize(n * qkv_stride());
    work_.attended.resize(n * (size_t)heads_width());
    size_t packed_gated = 0, activated = 0, gates = 0;
    for (const Layer& layer : layers_)
        if (packs_gates(layer))
            packed_gated = std::max(packed_gated, kernels_.linear_of(layer.down).packed_bytes(rows, layer.down.k_padded));
        else
            activated = n * (size_t)padded(spec_.intermediate_size), gates = std::max(n, (size_t)kGatedRows) * 2 * kPanelOutputs;
    work_.packed_gated.resize(packed_gated);
    work_.activated.resize(activated);
    work_.gate_up.resize((size_t)threads_.size());
    for (auto& part : work_.gate_up) part.resize(gates);
    work_.cos.resize(n * inverse_frequencies_.size());
    work_.sin.resize(n * inverse_frequencies_.size());
    work_.packed.resize(packed);
    work_.expanded.resize((size_t)threads_.size());
    for (auto& part : work_.expanded) part.resize(expanded);
    const int group = spec_.num_heads / spec_.num_kv_heads;
    const size_t scratch =
        std::max(kernels_.attention_scratch_bytes(std::max(group, kernels_.most_attention_rows), 1, spec_.head_dim),
                 kernels_.attention_scratch_bytes(group * kMaxSharedQueries, spec_.num_kv_heads, spec_.head_dim));
    work_.attention.resize((size_t)threads_.size());
    for (auto& part : work_.attention) part.resize(scratch);
    work_.rows = rows;
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
        status->matrices_beyond_half += kernels_.in_half(matrix->format) && !matrix->takes_half();
    }
}

}  // namespace tandem
