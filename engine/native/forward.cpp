// One step through the layers: norms, products, keys and values into the pool, attention; logits are `logits.cpp`'s.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "decoder.h"

namespace tandem {

void Decoder::forward(const TandemStep& step, float* logits, size_t logits_stride, float* hidden,
                      TandemLayerCallback layer_done) {
    check_step(step);
    if (!step.only_most_likely && logits_stride < (size_t)padded(spec_.vocab_size)) throw std::invalid_argument("logits_stride is too small");
    if (step.num_tokens == 0) return;
    reserve(step.num_tokens);
    compute_rotations(step);
    embed(step);
    choose_kept_rows(step);
    const int last = spec_.num_layers - 1;
    for (int i = 0; i < last; ++i) {
        run_layer(step, i);
        copy_taps(step, i, step.logit_rows);
        if (layer_done) layer_done(i);
    }
    run_last_layer(step);
    copy_taps(step, last, work_.logit_places.data());
    if (layer_done) layer_done(last);
    compute_logits(step, logits, logits_stride, hidden);
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

// Norms of the residual stream as the matrix's kernels read them, run after run of rows: floats of more would leave the caches.
void Decoder::pack_normed(const PackedMatrix& matrix, const std::vector<float>& weight, int rows) {
    const LinearKernels& kernel = kernels_.linear_of(matrix);
    const size_t stride = (size_t)padded(spec_.hidden_size), hidden = (size_t)spec_.hidden_size;
    const int run = kernel.run_rows(rows);
    threads_.split((rows + run - 1) / run, [&](int first_run, int last_run, int thread) {
        float* normed = work_.normed[(size_t)thread].data();
        for (int first = first_run * run; first < std::min(rows, last_run * run); first += run) {
            const int last = std::min(rows, first + run);
            kernels_.rms_norm(work_.residual.data() + (size_t)first * stride, stride, last - first, spec_.hidden_size,
                              weight.data(), spec_.rms_norm_eps, normed, hidden);
            kernel.pack(normed, hidden, first, last, rows, matrix.k, matrix.k_padded, work_.packed.data());
        }
    });
}

void Decoder::pack(const PackedMatrix& matrix, const float* x, size_t stride, int rows) {
    const LinearKernels& kernel = kernels_.linear_of(matrix);
    const int run = kernel.run_rows(rows);
    threads_.split((rows + run - 1) / run, [&](int first_run, int last_run, int) {
        const int first = first_run * run, last = std::min(rows, last_run * run);
        if (first < last)
            kernel.pack(x + (size_t)first * stride, stride, first, last, rows, matrix.k, matrix.k_padded, work_.packed.data());
    });
}

// out (+)= W x of activations that are packed, for the outputs of panels [first_panel, last_panel); `out` is where panel 0's
// would go.
void Decoder::multiply_panels(const PackedMatrix& matrix, int first_panel, int last_panel, const uint8_t* packed, int rows,
                              float* out, size_t out_stride, bool add) {
    const LinearKernels& kernel = kernels_.linear_of(matrix);
    threads_.split(last_panel - first_panel, [&](int first, int last, int thread) {
        const int panel = first_panel + first;
        kernel.multiply(packed, rows, matrix, panel, first_panel + last, out + (size_t)panel * kPanelOutputs, out_stride,
                        add, work_.expanded[(size_t)thread].data());
    });
}

void Decoder::add_to_residual(const PackedMatrix& matrix, const uint8_t* packed, int rows) {
    multiply_panels(matrix, 0, matrix.panels, packed, rows, work_.residual.data(), (size_t)padded(spec_.hidden_size), true);
}

bool Decoder::packs_gates(const Layer& layer) const {
    const LinearKernels &gates = kernels_.linear_of(layer.gate_up), &down = kernels_.linear_of(layer.down);
    return gates.multiply_gated && gates.pack == down.pack;
}

// residual += down(silu(gate) * up)
void Decoder::run_mlp(const Layer& layer, int rows) {
    const PackedMatrix &gates = layer.gate_up, &down = layer.down;
    pack_normed(gates, layer.mlp_norm, rows);
    if (!packs_gates(layer)) {
        activate_gates(gates, rows);
        pack(down, work_.activated.data(), (size_t)padded(spec_.intermediate_size), rows);
        return add_to_residual(down, work_.packed.data(), rows);
    }
    threads_.split(gates.panels / 2, [&](int first, int last, int thread) {
        kernels_.linear_of(gates).multiply_gated(work_.packed.data(), rows, gates, first, last, down.k_padded,
                                                 work_.packed_gated.data(), work_.expanded[(size_t)thread].data());
    });
    add_to_residual(down, work_.packed_gated.data(), rows);
}

// activated = silu(gate) * up, some panels at a time, so that gates and ups never leave the cache. Of few rows many: weights
// are then read in one run.
void Decoder::activate_gates(const PackedMatrix& matrix, int rows) {
    const LinearKernels& kernel = kernels_.linear_of(matrix);
    const size_t inner_stride = (size_t)padded(spec_.intermediate_size);
    const int pairs_at_once = std::max(1, kGatedRows / rows);
    const uint8_t* packed = work_.packed.data();
    threads_.split(matrix.panels / 2, [&](int first, int last, int thread) {
        float* gates = work_.gate_up[(size_t)thread].data();
        for (int i = first; i < last; i += pairs_at_once) {
            const int end = std::min(last, i + pairs_at_once);
            const size_t stride = (size_t)(end - i) * 2 * kPanelOutputs;
            kernel.multiply(packed, rows, matrix, 2 * i, 2 * end, gates, stride, false, work_.expanded[(size_t)thread].data());
            for (int pair = i; pair < end; ++pair)
                kernels_.silu_multiply(gates + (size_t)(pair - i) * 2 * kPanelOutputs, stride, rows,
                                       work_.activated.data() + (size_t)pair * kPanelOutputs, inner_stride);
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

void Decoder::rotate_heads(const std::vector<float>& norm, int first_head, int num_heads, int row, float* rows) {
    const size_t half = inverse_frequencies_.size();
    for (int head = first_head; head < first_head + num_heads; ++head) {
        float* part = rows + (size_t)head * spec_.head_dim;
        if (!norm.empty())
            kernels_.rms_norm(part, 0, 1, spec_.head_dim, norm.data(), spec_.rms_norm_eps, part, 0);
        kernels_.rotate(part, spec_.head_dim, work_.cos.data() + (size_t)row * half, work_.sin.data() + (size_t)row * half);
    }
}

// Queries of `count` rows; the i-th stands in the step's row step_rows[i], without `step_rows` in row i.
void Decoder::finish_queries(const Layer& layer, const int32_t* step_rows, int count) {
    const size_t stride = qkv_stride();
    threads_.split(count, [&](int first, int last, int) {
        float* rows = work_.qkv.data() + (size_t)first * stride;
        if (!layer.qkv_bias.empty())
            kernels_.add_bias(rows, stride, last - first, heads_width(), layer.qkv_bias.data());
        for (int i = first; i < last; ++i, rows += stride)
            rotate_heads(layer.query_norm, 0, spec_.num_heads, step_rows ? step_rows[i] : i, rows);
    });
}

void Decoder::write_kv(const TandemStep& step, const Layer& layer, const KvLayer& kv) {
    const int head_dim = spec_.head_dim, kv_heads = spec_.num_kv_heads, width = heads_width();
    const size_t stride = qkv_stride(), element = kv.type == KvType::kBf16 ? 2 : 4;
    threads_.split(step.num_tokens, [&](int first, int last, int) {
        float* rows = work_.qkv.data() + (size_t)first * stride;
        if (!layer.qkv_bias.empty())
            kernels_.add_bias(rows + width, stride, last - first, 2 * kv_width(), layer.qkv_bias.data() + width);
        for (int row = first; row < last; ++row, rows += stride) {
            rotate_heads(layer.key_norm, spec_.num_heads, kv_heads, row, rows);
            const int64_t slot = step.slots[row];
            const size_t token = (size_t)(slot / kv.block_tokens) * kv.block_stride + (size_t)(slot % kv.block_tokens) * head_dim;
            for (int head = 0; head < kv_heads; ++head) {
                uint8_t* key = kv.base + (token + (size_t)head * kv.head_stride) * element;
                const float* key_row = rows + width + (size_t)head * head_dim;
                kernels_.store_kv(key_row, head_dim, kv.type, key);
                kernels_.store_kv(key_row + kv_width(), head_dim, kv.type, key + kv.value_offset * element);
            }
        }
    });
}

// Attends with the tasks that were added.
void Decoder::attend() {
    threads_.take_turns((int)work_.tasks.size(), [&](int index, int thread) {
        const size_t after = (size_t)index + (size_t)threads_.size();
        const AttentionTask* next = after < work_.tasks.size() ? &work_.tasks[after] : nullptr;
        kernels_.attention(work_.tasks[(size_t)index], next,
                           work_.attention[(size_t)thread].data());
    });
    work_.tasks.clear();
}

// Of a long run: as many as the kernels take, or fewer, so that the threads end at about the same time.
int Decoder::queries_of_task(int count) const {
    constexpr int kTasksOfThread = 4;
    const int group = spec_.num_heads / spec_.num_kv_heads, most = std::max(1, kernels_.most_attention_rows / group);
    if (threads_.size() == 1) return most;
    const int parts = (kTasksOfThread * threads_.size() + spec_.num_kv_heads - 1) / spec_.num_kv_heads;
    return std::min(most, std::max((count + parts - 1) / parts, kMaxSharedQueries));
}

void Decoder::add_attention_tasks(const TandemStep& step, const KvLayer& kv, const QueryRun& run) {
    const int group = spec_.num_heads / spec_.num_kv_heads, start = step.query_starts[run.sequence];
    const int queries = step.query_starts[run.sequence + 1] - start;
    const bool shared = run.count <= kMaxSharedQueries;
    const int threads = threads_.size();
    const int most_queries = shared ? kMaxSharedQueries : queries_of_task(run.count);
    const int most_heads = shared ? (spec_.num_kv_heads + threads - 1) / threads : 1;
    const size_t stride = qkv_stride(), out_stride = (size_t)heads_width();
    for (int offset = 0; offset < run.count; offset += most_queries)
        for (int head = 0; head < spec_.num_kv_heads; head += most_heads) {
            const size_t row = (size_t)(run.row + offset), column = (size_t)(head * group * spec_.head_dim);
            AttentionTask task;
            task.kv = kv;
            task.block_table = step.block_tables + (size_t)run.sequence * step.table_width;
            task.first_kv_head = head;
            task.num_kv_heads = std::min(most_heads, spec_.num_kv_heads - head);
            task.group = group;
            task.num_queries = std::min(most_queries, run.count - offset);
            task.first_row = run.first_query + offset;
            task.first_position = step.context_lens[run.sequence] - queries + task.first_row;
            task.window = spec_.sliding_window;
            const bool is_tree = step.tree_masks && queries > 1 && step.tree_masks[start] != 0;
            task.tree_masks = is_tree ? step.tree_masks + start : nullptr;
            task.tree_positions = is_tree ? step.positions + start : nullptr;
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
    const KvLayer kv = kv_layer(index);
    pack_normed(layer.qkv, layer.attention_norm, rows);
    multiply_panels(layer.qkv, 0, layer.qkv.panels, work_.packed.data(), rows, work_.qkv.data(), qkv_stride(), false);
    finish_queries(layer, nullptr, rows);
    write_kv(step, layer, kv);
    for (int b = 0; b < step.num_sequences; ++b) {
        const int first = step.query_starts[b];
        add_attention_tasks(step, kv, {b, 0, step.query_starts[b + 1] - first, first});
    }
    attend();
    finish_layer(layer, rows);
}

// Keys and values of all rows, everything else of the kept ones alone: nobody reads the others any more. These move to
// the front of each buffer, where the i-th of them is row i. A sum does not depend on the rows beside it, so no bit changes.
void Decoder::run_last_layer(const TandemStep& step) {
    const Layer& layer = layers_.back();
    const int rows = step.num_tokens, count = (int)work_.kept.size();
    const int query_panels = heads_width() / kPanelOutputs;
    const KvLayer kv = kv_layer(spec_.num_layers - 1);
    pack_normed(layer.qkv, layer.attention_norm, rows);
    multiply_panels(layer.qkv, query_panels, layer.qkv.panels, work_.packed.data(), rows, work_.qkv.data(), qkv_stride(), false);
    write_kv(step, layer, kv);
    if (count == 0) return;
    keep_rows(work_.residual, (size_t)padded(spec_.hidden_size));
    pack_normed(layer.qkv, layer.attention_norm, count);
    multiply_panels(layer.qkv, 0, query_panels, work_.packed.data(), count, work_.qkv.data(), qkv_stride(), false);
    finish_queries(layer, work_.kept.data(), count);
    add_kept_runs(step, kv);
    attend();
    finish_layer(layer, count);
}

// What follows attention: the rows are added to the residual stream.
void Decoder::finish_layer(const Layer& layer, int rows) {
    pack(layer.output, work_.attended.data(), (size_t)heads_width(), rows);
    add_to_residual(layer.output, work_.packed.data(), rows);
    run_mlp(layer, rows);
}

void Decoder::choose_kept_rows(const TandemStep& step) {
    std::vector<int32_t>& kept = work_.kept;
    kept.assign(step.logit_rows, step.logit_rows + step.num_logit_rows);
    std::sort(kept.begin(), kept.end());
    kept.erase(std::unique(kept.begin(), kept.end()), kept.end());
    work_.logit_places.clear();
    for (int i = 0; i < step.num_logit_rows; ++i)
        work_.logit_places.push_back(
            (int32_t)(std::lower_bound(kept.begin(), kept.end(), step.logit_rows[i]) - kept.begin()));
}

void Decoder::keep_rows(LargeVector<float>& buffer, size_t stride) const {
    for (size_t i = 0; i < work_.kept.size(); ++i)
        if ((size_t)work_.kept[i] != i)
            std::copy_n(buffer.data() + (size_t)work_.kept[i] * stride, stride, buffer.data() + i * stride);
}

// Neighbouring kept rows of a sequence attend together.
void Decoder::add_kept_runs(const TandemStep& step, const KvLayer& kv) {
    const std::vector<int32_t>& kept = work_.kept;
    const int count = (int)kept.size();
    int sequence = 0;
    for (int first = 0, after; first < count; first = after) {
        while (kept[(size_t)first] >= step.query_starts[sequence + 1]) ++sequence;
        after = first + 1;
        while (after < count && kept[(size_t)after] == kept[(size_t)after - 1] + 1 &&
               kept[(size_t)after] < step.query_starts[sequence + 1])
            ++after;
        const int first_query = kept[(size_t)first] - step.query_starts[sequence];
        add_attention_tasks(step, kv, {sequence, first_query, after - first, first});
    }
}

// `rows`: where the rows of the logits are now.
void Decoder::copy_taps(const TandemStep& step, int layer, const int32_t* rows) const {
    const size_t stride = (size_t)padded(spec_.hidden_size), hidden = (size_t)spec_.hidden_size;
    for (int tap = 0; tap < step.num_tap_layers; ++tap)
        if (step.tap_layers[tap] == layer)
            for (int i = 0; i < step.num_logit_rows; ++i)
                std::copy_n(work_.residual.data() + (size_t)rows[i] * stride, hidden,
                            step.taps + ((size_t)i * step.num_tap_layers + tap) * hidden);
}

}  // namespace tandem
