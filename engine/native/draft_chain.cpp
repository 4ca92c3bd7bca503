#include "draft_chain.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "packing.h"

namespace tandem {

namespace {

constexpr int kScanned = 128;  // logits that are passed by together where none of them is among the largest

float largest(const float* values, int n) {
    float lanes[16];
    std::fill(lanes, lanes + 16, values[0]);
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; ++j) lanes[j] = values[i + j] > lanes[j] ? values[i + j] : lanes[j];
    for (; i < n; ++i) lanes[0] = std::max(lanes[0], values[i]);
    return *std::max_element(lanes, lanes + 16);
}

}  // namespace

DraftChain::DraftChain(Decoder& layer, const TandemDraftSpec& spec, const KernelTable& kernels)
    : layer_(layer),
      kernels_(kernels),
      spec_(spec),
      hidden_((size_t)spec.hidden_size),
      logits_stride_((size_t)padded(spec.draft_vocab_size)),
      ones_((size_t)spec.hidden_size, 1.0f) {
    if (spec.hidden_size != layer.hidden_size() || spec.draft_vocab_size != layer.vocab_size())
        throw std::invalid_argument("the drafter's sizes are not its layer's");
    if (spec.num_taps < 1 || spec.width < 1 || spec.width > spec.draft_vocab_size || spec.block_tokens < 1)
        throw std::invalid_argument("a drafter needs taps, and a width within its vocabulary");
    vocabulary_.assign(spec.vocabulary, spec.vocabulary + spec.draft_vocab_size);
    for (int32_t token_id : vocabulary_)
        if (token_id < 0 || token_id >= spec.target_vocab_size)
            throw std::invalid_argument("the drafter's vocabulary has a token that the target does not");
    if (spec.tap_norm != nullptr) tap_norm_.assign(spec.tap_norm, spec.tap_norm + hidden_);
    if (spec.state_norm != nullptr) state_norm_.assign(spec.state_norm, spec.state_norm + hidden_);
    fuse_first_ = packed(spec.fuse_first, (spec.num_taps + 1) * spec.hidden_size);
    fuse_next_ = packed(spec.fuse_next, 2 * spec.hidden_size);
}

PackedMatrix DraftChain::packed(const float* data, int inputs) {
    const NumberFormat format = (NumberFormat)spec_.format;
    PackedMatrix matrix = allocate_matrix(arena_, format, spec_.hidden_size, inputs, kernels_.in_half(format));
    pack_matrix(arena_, matrix, 0, 1, spec_.hidden_size, NumberFormat::kF32, data);
    return matrix;
}

void DraftChain::propose(const TandemDraftBatch& batch, const TandemDraftLaws& laws) {
    check(batch);
    const size_t level_size = (size_t)spec_.width, sequence_size = level_size * (size_t)batch.max_levels;
    active_.clear();
    reach_.assign((size_t)batch.num_sequences, 1.0f);
    for (int b = 0; b < batch.num_sequences; ++b) {
        laws.num_levels[b] = 0;
        if (batch.num_guesses[b] > 0) active_.push_back(b);
    }
    for (int level = 0; level < batch.max_levels && !active_.empty(); ++level) {
        if (level == 0)
            read_rows(batch);
        else
            read_guesses(batch, laws, level);
        forward(batch);
        std::vector<int> going_on;
        size_t kept = 0;
        for (size_t i = 0; i < active_.size(); ++i) {
            const int b = active_[i];
            const size_t place = (size_t)b * sequence_size + (size_t)level * level_size;
            reach_[(size_t)b] *= write_law(logits_.data() + i * logits_stride_, laws.token_ids + place, laws.probabilities + place);
            laws.num_levels[b] = level + 1;
            if (level + 1 >= batch.num_guesses[b] || reach_[(size_t)b] < batch.min_reach) continue;
            std::copy_n(states_.data() + i * hidden_, hidden_, states_.data() + kept++ * hidden_);
            going_on.push_back(b);
        }
        active_ = going_on;
    }
}

void DraftChain::check(const TandemDraftBatch& batch) const {
    auto need = [](bool holds, const char* what) {
        if (!holds) throw std::invalid_argument(what);
    };
    need(batch.num_sequences >= 0 && batch.max_levels >= 0 && batch.table_width > 0, "negative sizes");
    for (int b = 0; b < batch.num_sequences; ++b) {
        const int rows = batch.row_starts[b + 1] - batch.row_starts[b];
        need(rows > 0, "a sequence has no rows to read");
        need(batch.num_cached[b] >= 0 && batch.first_positions[b] >= 0, "a position is negative");
        need(batch.num_guesses[b] <= batch.max_levels, "more guesses than there is room for");
        const int last = batch.num_cached[b] + rows + std::max(0, batch.num_guesses[b] - 1) - 1;
        need(last / spec_.block_tokens < batch.table_width, "a context is longer than its block table");
    }
    for (int i = 0; i < batch.row_starts[batch.num_sequences]; ++i)
        need(batch.token_ids[i] >= 0 && batch.token_ids[i] < spec_.target_vocab_size, "a token id is outside the vocabulary");
}

// The rows of the target: every one is read, the last one's logits are wanted.
void DraftChain::read_rows(const TandemDraftBatch& batch) {
    const size_t width = ((size_t)spec_.num_taps + 1) * hidden_;
    query_starts_.assign(1, 0);
    context_lens_.clear(), positions_.clear(), logit_rows_.clear(), slots_.clear(), block_tables_.clear(), joined_.clear();
    for (int b : active_) {
        const int first = batch.row_starts[b], rows = batch.row_starts[b + 1] - first;
        const int32_t* table = batch.block_tables + (size_t)b * (size_t)batch.table_width;
        block_tables_.insert(block_tables_.end(), table, table + batch.table_width);
        for (int i = 0; i < rows; ++i) {
            const size_t row = joined_.size();
            joined_.resize(row + width);
            scale(batch.taps + (size_t)(first + i) * (width - hidden_), spec_.num_taps, tap_norm_, joined_.data() + row, hidden_);
            embed(batch.token_ids[first + i], joined_.data() + row + width - hidden_);
            const int place = batch.num_cached[b] + i;
            positions_.push_back(batch.first_positions[b] + i);
            slots_.push_back((int64_t)table[place / spec_.block_tokens] * spec_.block_tokens + place % spec_.block_tokens);
        }
        query_starts_.push_back((int32_t)positions_.size());
        logit_rows_.push_back((int32_t)positions_.size() - 1);
        context_lens_.push_back(batch.num_cached[b] + rows);
    }
    multiply(fuse_first_, (int)positions_.size());
}

// One row for each sequence: goes on behind its likeliest guess of the level before.
void DraftChain::read_guesses(const TandemDraftBatch& batch, const TandemDraftLaws& laws, int level) {
    const size_t count = active_.size();
    query_starts_.assign(1, 0);
    context_lens_.clear(), positions_.clear(), logit_rows_.clear(), slots_.clear(), block_tables_.clear();
    joined_.resize(count * 2 * hidden_);
    scale(states_.data(), (int)count, state_norm_, joined_.data(), 2 * hidden_);
    for (size_t i = 0; i < count; ++i) {
        const int b = active_[i];
        const int32_t* table = batch.block_tables + (size_t)b * (size_t)batch.table_width;
        block_tables_.insert(block_tables_.end(), table, table + batch.table_width);
        const size_t guess = ((size_t)b * (size_t)batch.max_levels + (size_t)level - 1) * (size_t)spec_.width;
        embed(laws.token_ids[guess], joined_.data() + (2 * i + 1) * hidden_);
        const int ahead = batch.row_starts[b + 1] - batch.row_starts[b] + level - 1, place = batch.num_cached[b] + ahead;
        positions_.push_back(batch.first_positions[b] + ahead);
        slots_.push_back((int64_t)table[place / spec_.block_tokens] * spec_.block_tokens + place % spec_.block_tokens);
        query_starts_.push_back((int32_t)i + 1);
        logit_rows_.push_back((int32_t)i);
        context_lens_.push_back(place + 1);
    }
    multiply(fuse_next_, (int)count);
}

// The target's embedding over its root mean square.
void DraftChain::embed(int32_t token_id, float* out) {
    const uint16_t* bits = spec_.embedding + (size_t)token_id * hidden_;
    embedded_.resize(hidden_);
    for (size_t i = 0; i < hidden_; ++i) {
        const uint32_t word = (uint32_t)bits[i] << 16;
        std::memcpy(&embedded_[i], &word, sizeof word);
    }
    kernels_.rms_norm(embedded_.data(), hidden_, 1, spec_.hidden_size, ones_.data(), spec_.rms_norm_eps, out, hidden_);
}

// Rows over their root mean square, `hidden` apart, behind `norm` where there is one.
void DraftChain::scale(const float* x, int rows, const std::vector<float>& norm, float* out, size_t out_stride) {
    size_t stride = hidden_;
    if (!norm.empty()) {
        kernels_.rms_norm(x, stride, rows, spec_.hidden_size, norm.data(), spec_.rms_norm_eps, out, out_stride);
        x = out, stride = out_stride;
    }
    kernels_.rms_norm(x, stride, rows, spec_.hidden_size, ones_.data(), spec_.rms_norm_eps, out, out_stride);
}

// inputs_ [rows, hidden] = joined_ * W^T. The product's rows are whole panels; the layer's inputs are `hidden` apart.
void DraftChain::multiply(const PackedMatrix& matrix, int rows) {
    const LinearKernels& linear = kernels_.linear_of(matrix);
    const size_t stride = (size_t)padded(spec_.hidden_size);
    scratch_.resize(std::max(scratch_.size(), linear.packed_bytes(rows, matrix.k_padded) + 64));
    void* activations = (void*)(((size_t)scratch_.data() + 63) / 64 * 64);
    linear.pack(joined_.data(), (size_t)matrix.k, 0, rows, rows, matrix.k, matrix.k_padded, activations);
    inputs_.resize((size_t)rows * stride);
    expanded_.resize(std::max(expanded_.size(), linear.scratch_bytes(rows, matrix.k_padded) + 64));
    void* expanded = (void*)(((size_t)expanded_.data() + 63) / 64 * 64);
    linear.multiply(activations, rows, matrix, 0, matrix.panels, inputs_.data(), stride, false, expanded);
    for (int row = 1; stride != hidden_ && row < rows; ++row)
        std::copy_n(inputs_.data() + (size_t)row * stride, hidden_, inputs_.data() + (size_t)row * hidden_);
}

void DraftChain::forward(const TandemDraftBatch& batch) {
    static const int32_t kTapped[1] = {0};
    const size_t count = active_.size();
    states_.resize(std::max(states_.size(), count * hidden_));
    normed_.resize(count * hidden_);
    logits_.resize(count * logits_stride_);
    TandemStep step{};
    step.positions = positions_.data();
    step.slots = slots_.data();
    step.query_starts = query_starts_.data();
    step.context_lens = context_lens_.data();
    step.block_tables = block_tables_.data();
    step.logit_rows = logit_rows_.data();
    step.num_tokens = (int32_t)positions_.size();
    step.num_sequences = (int32_t)count;
    step.table_width = batch.table_width;
    step.num_logit_rows = (int32_t)count;
    step.inputs = inputs_.data();
    step.tap_layers = kTapped;
    step.taps = states_.data();
    step.num_tap_layers = 1;
    layer_.forward(step, logits_.data(), logits_stride_, normed_.data(), nullptr);
}

// The `width` likeliest tokens with their probabilities, the likeliest first; gives the first one's.
float DraftChain::write_law(float* logits, int32_t* token_ids, float* probabilities) {
    const int size = spec_.draft_vocab_size, width = spec_.width;
    std::vector<int> best;
    for (int first = 0; first < size; first += kScanned) {
        const int end = std::min(size, first + kScanned);
        if ((int)best.size() == width && largest(logits + first, end - first) <= logits[best.back()]) continue;
        for (int i = first; i < end; ++i) {
            if ((int)best.size() == width && logits[i] <= logits[best.back()]) continue;
            if ((int)best.size() == width) best.pop_back();
            auto place = std::upper_bound(best.begin(), best.end(), i, [&](int a, int b) { return logits[a] > logits[b]; });
            best.insert(place, i);
        }
    }
    kernels_.filter.scale_row(logits, size, logits[best[0]], 1.0f);
    int count = 0;
    const double total = kernels_.filter.mass_at_least(logits, size, -std::numeric_limits<float>::infinity(), &count);
    for (int rank = 0; rank < width; ++rank) {
        token_ids[rank] = vocabulary_[(size_t)best[(size_t)rank]];
        probabilities[rank] = (float)(std::exp((double)logits[best[(size_t)rank]]) / total);
    }
    return probabilities[0];
}

}  // namespace tandem
